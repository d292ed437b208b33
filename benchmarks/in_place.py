"""Measure the time from SIGKILL of a rank to its next completed step, and a step without a failure.

    python benchmarks/in_place.py [--count 7] [--large-count 5] [--ranks 3]

Trials in place and with a restart are interleaved. The state of the training is small, or 200 MB with the
optimizer. The process is killed in step 10, when the standby process has imported torch, and the time
includes what the script itself does before its loop. Without a failure: the median of 1000 steps of 2 ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tables import publish, ratio_row

SIZES = {"small": 64, "200 MB": 4080}  # width: AdamW keeps three copies of width * width floats
WAYS = {"restart": "restart", "in place": "in-place"}
KILLED_IN = 10
TIMED = 1000  # steps without a failure
STEP_RANKS = 2  # more than cores would be measured with their switches
STANDBY_S = 3.0  # for the standby process, which the ranks wait for in this measurement


def train() -> None:
    """The training, as one rank."""
    import torch
    from torch.utils.data import TensorDataset

    import paceline

    width, fails = int(os.environ["WIDTH"]), bool(os.environ.get("FAILS"))
    mark = Path("killed")
    times_s = []
    with paceline.join() as job:
        model = paceline.ddp(job, torch.nn.Linear(width, width, bias=False))
        optimizer = torch.optim.AdamW(model.parameters())
        data = TensorDataset(torch.randn(240, width))
        batches = paceline.Batches(job, data, global_batch=6)
        training = paceline.Training(
            job, model, optimizer, batches, checkpoints=paceline.Checkpoints("kept", keep=1)
        )
        for step in training.steps(until=KILLED_IN + (5 if fails else TIMED)):
            began = time.perf_counter()
            for (x,) in step:
                step.backward(model(x).square().mean())
            if step.number == KILLED_IN and not mark.exists():
                time.sleep(STANDBY_S)
                if fails and job.rank == 1:
                    mark.write_text(str(time.time()))
                    os.kill(os.getpid(), 9)
            step.update()
            times_s.append(time.perf_counter() - began)
            if fails:
                with open("steps", "a") as file:
                    row = {"rank": job.rank, "pid": os.getpid(), "time": time.time()}
                    file.write(json.dumps(row) + "\n")
        if job.rank == 0 and not fails:
            Path("median").write_text(str(statistics.median(times_s[KILLED_IN:])))


def run(folder: str, way: str, width: int, ranks: int, **variables: str) -> None:
    words = [f"--nproc-per-node={ranks}", "--max-restarts=1", f"--recover={way}"]
    command = [sys.executable, "-m", "paceline", "run", *words, __file__, "--train"]
    env = os.environ | {"WIDTH": str(width)} | variables
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)


def median_step_s(way: str, width: int, ranks: int) -> float:
    """The median time of a step without a failure."""
    with tempfile.TemporaryDirectory() as name:
        run(name, way, width, ranks)
        return float(Path(name, "median").read_text())


def trial(way: str, width: int, ranks: int) -> tuple[float, int]:
    """Seconds until the killed rank has done a step, and how many ranks have a new pid."""
    with tempfile.TemporaryDirectory() as name:
        run(name, way, width, ranks, FAILS="1")
        rows = [json.loads(line) for line in Path(name, "steps").read_text().splitlines()]
        killed = float(Path(name, "killed").read_text())
        pids = {(row["rank"], row["pid"]) for row in rows}
        after = [row["time"] for row in rows if row["rank"] == 1 and row["time"] > killed]
        return min(after) - killed, len(pids) - ranks


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--count", type=int, default=7)
    options.add_argument("--large-count", type=int, default=5, help="trials with 200 MB")
    options.add_argument("--ranks", type=int, default=3)
    options.add_argument("--json", action="store_true", help="print JSON and write nothing")
    options.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.train:
        train()
        return
    steps: dict[str, list[float]] = {name: [] for name in WAYS}
    for number in range(args.count):
        for name in list(WAYS)[:: 1 if number % 2 else -1]:  # the first of a pair differs
            steps[name].append(median_step_s(WAYS[name], SIZES["small"], STEP_RANKS))
    rows: list[dict[str, Any]] = []
    for size, width in SIZES.items():
        found: dict[str, list[tuple[float, int]]] = {name: [] for name in WAYS}
        for _ in range(args.count if size == "small" else args.large_count):
            for name, way in WAYS.items():
                found[name].append(trial(way, width, args.ranks))
        median = {n: statistics.median(s for s, _ in trials) for n, trials in found.items()}
        rows.append(
            {
                "state": size,
                "trials": len(found["in place"]),
                **{f"{name}_s": round(seconds, 2) for name, seconds in median.items()},
                "ratio": round(median["in place"] / median["restart"], 2),
                "slowest_in_place_s": round(max(s for s, _ in found["in place"]), 2),
                "new_pids_in_place": max(number for _, number in found["in place"]),
            }
        )
        if size == "small":
            for name, each in steps.items():
                rows[-1][f"step_{name}_us"] = round(1e6 * statistics.median(each), 1)
            rows[-1] |= ratio_row(steps["in place"], steps["restart"], "step_ratio")
    publish("in_place", rows, as_json=args.json, ranks=args.ranks)


if __name__ == "__main__":
    main()
