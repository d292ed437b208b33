"""The cost of `reproducible=True` on one and two ranks.

    python benchmarks/reproducible.py [--steps 20] [--rounds 7]

    comm  mostly communication: MLP 4 x 1024, batch 128 (16.8 MB of gradients)
    comp  mostly computation: transformer with d 256 and 4 layers, batch 8 x 128 tokens

Each rank has one micro-batch per step, one thread and AdamW. Normal and reproducible mode take turns in the
same processes. The table shows medians over rounds, and the ratio with the middle half of the rounds.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from typing import Any

import torch
from tables import publish, ratio_row
from workloads import WORKLOADS, Workload, paceline_loop, timed

import paceline
from paceline.testing import run_ranks

# The batch is that of the whole step, on one rank and on two.
WORK = {name: replace(WORKLOADS[name], adam=True) for name in ("comm", "comp")}


def run_side(job: Any, work: Workload, reproducible: bool, steps: int) -> float:
    """The median step time of one mode in ms."""
    torch.manual_seed(0)
    model = paceline.ddp(job, work.make())
    optimizer = work.optimizer(model)
    loop = paceline_loop(
        job,
        work.data(1, 2),
        work.batch,
        model,
        optimizer,
        steps,
        micro_batch=work.batch // job.world_size,
        reproducible=reproducible,
    )
    return 1e3 * statistics.median(timed(loop)[3:])


def measure(job: Any, steps: int, rounds: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    rows = []
    for name, work in WORK.items():
        times: dict[bool, list[float]] = {False: [], True: []}
        for number in range(rounds + 1):
            for reproducible, found in times.items():
                took = run_side(job, work, reproducible, steps)
                if number:  # the first round warms up
                    found.append(took)
        rows.append(
            {
                "workload": name,
                "ranks": job.world_size,
                "normal_ms": statistics.median(times[False]),
                "reproducible_ms": statistics.median(times[True]),
                **ratio_row(times[True], times[False]),
            }
        )
    return rows


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--rounds", type=int, default=7)
    args = options.parse_args()
    rows = []
    for nproc in (1, 2):
        rows += run_ranks(
            measure, args.steps, args.rounds, nproc=nproc, timeout_s=600, deadline_s=3600
        )[0]
    publish("reproducible", rows, rounds=args.rounds)


if __name__ == "__main__":
    main()
