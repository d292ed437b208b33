"""Measure the time from SIGKILL of a rank to its next completed step: in place, and with a restart.

    python benchmarks/in_place.py [--count 7] [--ranks 3]

Trials of both are interleaved. The state of the training is small, or 200 MB with the optimizer. The killed
process is killed in step 60, when the standby process has imported torch, and the time includes what the
script itself does before its loop.
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

from tables import publish

SIZES = {"small": 64, "200 MB": 4080}  # width: AdamW keeps three copies of width * width floats
WAYS = {"restart": "restart", "in place": "in-place"}
KILLED_IN = 60
STANDBY_S = 4.0  # for the standby process, which the ranks wait for in this measurement


def train() -> None:
    """The training, as one rank."""
    import torch
    from torch.utils.data import TensorDataset

    import paceline

    width = int(os.environ["WIDTH"])
    mark = Path("killed")
    with paceline.join() as job:
        model = paceline.ddp(job, torch.nn.Linear(width, width, bias=False))
        optimizer = torch.optim.AdamW(model.parameters())
        data = TensorDataset(torch.randn(240, width))
        batches = paceline.Batches(job, data, global_batch=6)
        training = paceline.Training(
            job, model, optimizer, batches, checkpoints=paceline.Checkpoints("kept", keep=1)
        )
        for step in training.steps(until=KILLED_IN + 5):
            for (x,) in step:
                step.backward(model(x).square().mean())
            if step.number == KILLED_IN - 1 and not mark.exists():
                time.sleep(STANDBY_S)
            if step.number == KILLED_IN and job.rank == 1 and not mark.exists():
                mark.write_text(str(time.time()))
                os.kill(os.getpid(), 9)
            step.update()
            with open("steps", "a") as file:
                row = {"rank": job.rank, "pid": os.getpid(), "time": time.time()}
                file.write(json.dumps(row) + "\n")


def trial(way: str, width: int, ranks: int) -> tuple[float, int]:
    """Seconds until the killed rank has done a step, and how many ranks have a new pid."""
    with tempfile.TemporaryDirectory() as name:
        words = [f"--nproc-per-node={ranks}", "--max-restarts=1", f"--recover={way}"]
        command = [sys.executable, "-m", "paceline", "run", *words, __file__, "--train"]
        env = os.environ | {"WIDTH": str(width)}
        done = subprocess.run(command, cwd=name, env=env, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr)
        rows = [json.loads(line) for line in Path(name, "steps").read_text().splitlines()]
        killed = float(Path(name, "killed").read_text())
        pids = {(row["rank"], row["pid"]) for row in rows}
        after = [row["time"] for row in rows if row["rank"] == 1 and row["time"] > killed]
        return min(after) - killed, len(pids) - ranks


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--count", type=int, default=7)
    options.add_argument("--ranks", type=int, default=3)
    options.add_argument("--json", action="store_true", help="print JSON and write nothing")
    options.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.train:
        train()
        return
    rows: list[dict[str, Any]] = []
    for size, width in SIZES.items():
        found: dict[str, list[tuple[float, int]]] = {name: [] for name in WAYS}
        for _ in range(args.count):
            for name, way in WAYS.items():
                found[name].append(trial(way, width, args.ranks))
        median = {n: statistics.median(s for s, _ in trials) for n, trials in found.items()}
        rows.append(
            {
                "state": size,
                **{f"{name}_s": round(seconds, 2) for name, seconds in median.items()},
                "ratio": round(median["in place"] / median["restart"], 2),
                "slowest_in_place_s": round(max(s for s, _ in found["in place"]), 2),
                "new_pids_in_place": max(number for _, number in found["in place"]),
            }
        )
    publish("in_place", rows, as_json=args.json, ranks=args.ranks)


if __name__ == "__main__":
    main()
