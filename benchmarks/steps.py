"""A training step on several ranks of one host: Paceline compared with plain DDP over Gloo.

    python benchmarks/steps.py [--ranks 2] [--rounds 7] [--only tiny|comm|comp]

Workloads; the batch size is per rank, and each rank uses one thread:

    tiny       MLP 32-32-8, batch 16, AdamW
    comm       MLP 4 x 1024, batch 128 (16.8 MB of gradients), SGD
    comp       transformer with d 256 and 4 layers, batch 8 x 128 tokens, AdamW

Sides:

    alone      each rank trains its own copy, all at the same time, without communication: the upper limit
    plain DDP  torch's DDP over Gloo with `gradient_as_bucket_view` and `static_graph`
    ddp        the same loop with `paceline.ddp`
    paceline   `paceline.ddp` and `paceline.Training`

All sides run in the same processes and take turns in each round. The memory addresses of a model affect its
speed for the whole run, so the measurement is repeated in four jobs, each of which creates and runs another
side first. A round reports the mean step time on the slowest rank. (The median would hide steps that other
programs interrupt, but only for the copies without communication.) The table shows medians over rounds, and
the ratios of each round with their middle half. The sides that communicate must end with the same weights.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from tables import publish, ratio_row
from workloads import WORKLOADS, order, paceline_loop, plain_ddp, plain_loop

import paceline
from paceline.testing import run_ranks

SIDES = ["alone", "plain DDP", "ddp", "paceline"]
_DATA_BYTES = 32 << 20  # largest data set of a rank; more steps repeat it in further epochs


def measure(job: Any, name: str, rounds: int, first: int) -> dict[str, list[float]]:
    """The step time of each round in us for each side. The side with index `first` is created first."""
    torch.set_num_threads(1)
    work = WORKLOADS[name]
    total = work.steps * (rounds + 1)
    global_batch = work.batch * job.world_size
    data = work.data(job.world_size, min(total, _DATA_BYTES // work.step_bytes()))
    mine = order(job, len(data), global_batch, total)
    start = work.make().state_dict()
    models, sides = {}, {}
    for side in SIDES[first:] + SIDES[:first]:
        models[side] = model = work.make()
        model.load_state_dict(start)
        if side == "plain DDP":
            model = plain_ddp(model)
        elif side != "alone":
            model = paceline.ddp(job, model)
        optimizer = work.optimizer(model)
        if side == "paceline":
            sides[side] = paceline_loop(job, data, global_batch, model, optimizer, total)
        else:
            sides[side] = plain_loop(data, mine, model, optimizer)
    found: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds + 1):
        for side, loop in sides.items():
            dist.barrier(group=job.control)
            began = time.perf_counter()
            for _ in range(work.steps):
                next(loop)
            slowest = torch.tensor((time.perf_counter() - began) / work.steps)
            dist.all_reduce(slowest, dist.ReduceOp.MAX, group=job.control)
            if number:  # the first round warms up
                found[side].append(1e6 * slowest.item())
    next(sides["paceline"], None)  # ends the loop normally
    expected = list(models["plain DDP"].parameters())
    for side in ("ddp", "paceline"):
        for p, q in zip(models[side].parameters(), expected, strict=True):
            assert torch.allclose(p, q, atol=1e-4), f"{side} ended with different weights"
    return found


def rows_of(name: str, ranks: int, found: dict[str, list[float]]) -> list[dict[str, Any]]:
    return [
        {
            "workload": name,
            "ranks": ranks,
            "side": side,
            "us": statistics.median(values),
            **ratio_row(values, found["plain DDP"], "of_plain_ddp"),
            **ratio_row(found["alone"], values, "efficiency"),
        }
        for side, values in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=list(WORKLOADS), nargs="+", default=list(WORKLOADS))
    options = parser.parse_args()
    rows = []
    for ranks in options.ranks:
        for name in options.only:
            found: dict[str, list[float]] = {}
            for first in range(4):
                with_first = run_ranks(
                    measure, name, options.rounds, first, nproc=ranks, timeout_s=300, deadline_s=600
                )
                for side in SIDES:
                    found.setdefault(side, []).extend(with_first[0][side])
            rows += rows_of(name, ranks, found)
    publish("steps", rows, rounds=options.rounds)


if __name__ == "__main__":
    main()
