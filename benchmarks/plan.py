"""`paceline plan` beside measured steps: 2, 3 and 4 hosts, three links, three strategies.

    BENCHMARK_RESULTS=benchmarks/results python benchmarks/plan.py predict    # commit plan.json, then
    BENCHMARK_RESULTS=benchmarks/results python benchmarks/plan.py measure    # adds the measured steps

The hosts are network namespaces of this machine (root only) with one rank each. They train the workload
"comm", whose gradients have 16.8 MB, with 128 samples per rank (weak scaling).

**predict** makes the runs that `plan` reads, with ddp and with fsdp: for N hosts N trainings of one process
at once, without communication, so that each has the share of the cores that a rank will have. That is how
ranks that outnumber the cores are treated; the model knows nothing of it. Of each link `paceline doctor`
measures on N hosts what they reach. No point is left out.

**measure** trains over the hosts, and takes the median window of clock.jsonl. The winner among the strategies
on the same hosts and link is the one with the shortest step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from links import LinkedHosts, finish, hosts
from tables import publish
from workloads import WORKLOADS

import paceline
from paceline.clock.record import Record
from paceline.plan.model import Link, Way, estimate
from paceline.plan.read import read_link, read_step
from paceline.report.run import load

HOSTS = (2, 3, 4)
LINKS = {"100 Mbit": "100mbit", "1 Gbit": "1gbit", "unshaped": None}
STRATEGIES = {"ddp": "DDP", "ddp fp16": "fp16", "fsdp": "FSDP"}
_DEADLINE_S = 180.0
_ALONE_STEPS = 150
_MEASURE_S, _LEAST_STEPS = 5.0, 6
_NAME = "plan"


def work(steps: dict[str, int], folder: str) -> None:
    """One rank: a training with so many steps for each strategy."""
    workload = WORKLOADS["comm"]
    with paceline.join(device="cpu") as job:
        for side, until in steps.items():
            model: Any = workload.make()
            if side == "fsdp":
                # With a dtype it is sharded over one rank too, with the copies that this takes.
                model = paceline.fsdp(job, model, blocks="*", param_dtype=torch.float32)
            else:
                model = paceline.ddp(job, model, compress="fp16" if side.endswith("fp16") else None)
            batches = paceline.Batches(
                job,
                workload.data(job.world_size, 4),
                global_batch=workload.batch * job.world_size,
                sample_randomness=False,
            )
            optimizer = workload.optimizer(model)
            training = paceline.Training(job, model, optimizer, batches, desync_every=0)
            training.report(Path(folder, side))
            for step in training.steps(until=until):
                for x, y in step:
                    step.backward(F.mse_loss(model(x), y))
                step.update()


def train(made: LinkedHosts, steps: dict[str, int], *, alone: bool = False) -> dict[str, Record]:
    """The records of trainings over the hosts; alone: of one of as many trainings of one process."""
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for number in range(made.count):
            words = ["run", "--nproc-per-node=1"]
            if not alone:
                words += [f"--nnodes={made.count}", f"--host={made.address(0)}"]
            words += [__file__, "work", json.dumps(steps), f"{folder}/{number if alone else 0}"]
            running.append(made.start(number, words, Path.cwd(), OMP_NUM_THREADS="1"))
        for end in [finish(process, _DEADLINE_S) for process in running]:
            if end.code:
                raise SystemExit(end.err)
        return {side: load(f"{folder}/0/{side}").record for side in steps}


def link_of(made: LinkedHosts) -> Link:
    """The link that the doctor measures."""
    words = ["run", f"--nnodes={made.count}", "--nproc-per-node=1", f"--host={made.address(0)}"]
    words += ["-m", "paceline", "doctor", "--json"]
    running = [
        made.start(number, words, Path.cwd(), OMP_NUM_THREADS="1") for number in range(made.count)
    ]
    texts = [finish(process).out for process in running]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "doctor.json")
        path.write_text(next(text for text in texts if text))
        return read_link(str(path))


def predict(counts: list[int]) -> list[dict[str, Any]]:
    """A row for each point."""
    rows = []
    for count in counts:
        with hosts(count) as made:
            records = train(made, {"ddp": _ALONE_STEPS, "fsdp": _ALONE_STEPS}, alone=True)
        alone = {side: read_step(side, record) for side, record in records.items()}
        for name, rate in LINKS.items():
            with hosts(count, rate) as made:
                link = link_of(made)
            for side, kind in STRATEGIES.items():
                run = alone["fsdp" if side == "fsdp" else "ddp"]
                found = estimate(run, link, Way(kind=kind), count, weak=True)
                row = {
                    "hosts": count,
                    "link": name,
                    "strategy": side,
                    "alone_ms": 1e3 * run.step_s,
                    "link_mbit": 8e-6 * link.bytes_per_s,
                    "fp16_mbit": 8e-6 * link.fp16_bytes_per_s,
                    "latency_us": 1e6 * link.latency_s,
                    "predicted_ms": 1e3 * found.step_s,
                    "band_ms": [1e3 * each for each in found.band_s],
                }
                rows.append(row)
    return rows


def measure(rows: list[dict[str, Any]], counts: list[int]) -> None:
    """Add the measured steps on so many hosts to the rows."""
    for count in counts:
        for name, rate in LINKS.items():
            of_point = [row for row in rows if (row["hosts"], row["link"]) == (count, name)]
            steps = {
                row["strategy"]: max(_LEAST_STEPS, round(1e3 * _MEASURE_S / row["predicted_ms"]))
                for row in of_point
            }
            with hosts(count, rate) as made:
                records = train(made, steps)
            for row in of_point:
                windows = records[row["strategy"]].windows[1:]
                row["measured_ms"] = 1e3 * statistics.median(window.step_s for window in windows)
                row["error"] = row["predicted_ms"] / row["measured_ms"] - 1
                low, high = row["band_ms"]
                row["in_band"] = low <= row["measured_ms"] <= high
                print(row, file=sys.stderr, flush=True)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The errors of all points that were measured, and how often the winner was right."""
    done = [row for row in rows if "error" in row]
    if not done:
        return {}
    errors = [abs(row["error"]) for row in done]
    points = {(row["hosts"], row["link"]) for row in done}
    right = 0
    for point in points:
        of_point = [row for row in done if (row["hosts"], row["link"]) == point]
        winners = {
            min(of_point, key=lambda row: row[key])["strategy"]
            for key in ("predicted_ms", "measured_ms")
        }
        right += len(winners) == 1
    return {
        "mean_error": statistics.mean(errors),
        "worst_error": max(errors),
        "right_winners": f"{right} of {len(points)}",
        "in_band": f"{sum(row['in_band'] for row in done)} of {len(done)}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["predict", "measure"])
    parser.add_argument("--hosts", type=int, nargs="+", default=list(HOSTS))
    options = parser.parse_args()
    if options.what == "predict":
        rows = predict(options.hosts)
    else:
        rows = json.loads(Path(os.environ["BENCHMARK_RESULTS"], f"{_NAME}.json").read_text())[
            "rows"
        ]
        measure(rows, options.hosts)
    publish(_NAME, rows, **summary(rows))


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        work(json.loads(sys.argv[2]), sys.argv[3])
    else:
        main()
