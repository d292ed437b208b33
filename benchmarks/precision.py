"""Speed of bf16 compared with fp32 on CPU: Paceline and a plain loop with autocast.

    python benchmarks/precision.py [--ranks 1 2] [--rounds 7] [--only tiny|amx|comp]

**tiny** and **comp** are the workloads of `steps.py`. **amx** is its workload comm with batches of 256. Each
rank uses one thread.

    plain fp32, plain bf16   a plain loop with `torch.autocast`; DDP over Gloo on several ranks
    fp32, bf16               `paceline.Training`
    bf16, tuned              the same with plain attention and `AdamW(fused=True)`

The cost of memory depends on the history of a process, so each side runs in its own processes; the sides take
turns in each round. A round reports the median of its blocks on the slowest rank: CPU time for one process,
wall-clock time for several, because ranks wait for each other. The gain is the ratio to plain fp32 in the
same round. The table shows the median over rounds with the middle half.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from tables import publish, ratio_row
from torch.nn import attention
from workloads import WORKLOADS, Steps, Workload, paceline_loop, plain_ddp, plain_loop

import paceline
from paceline.testing import run_ranks

WORK = {
    "tiny": replace(WORKLOADS["tiny"], steps=100),
    "amx": replace(WORKLOADS["comm"], batch=256, steps=3),
    "comp": replace(WORKLOADS["comp"], steps=1),
}
TUNED = "bf16, tuned"
SIDES = ["plain fp32", "plain bf16", "fp32", "bf16", TUNED]
BLOCKS = 7
WARM_UP = 3  # steps


def loop(job: Any, work: Workload, side: str) -> Steps:
    torch.manual_seed(0)
    model = work.make()
    steps = WARM_UP + BLOCKS * work.steps
    data = work.data(job.world_size, min(steps, 64))
    if side.startswith("plain"):
        model = plain_ddp(model) if job.world_size > 1 else model
        same = itertools.repeat(slice(job.rank * work.batch, (job.rank + 1) * work.batch))
        bf16 = side.endswith("bf16")
        return plain_loop(data, same, model, work.optimizer(model), bf16=bf16)
    model = paceline.ddp(job, model)
    optimizer = work.optimizer(model, fused=side == TUNED)
    batch, precision = work.batch * job.world_size, side.removesuffix(", tuned")
    return paceline_loop(job, data, batch, model, optimizer, steps, precision=precision)


def measure(job: Any, name: str, side: str) -> float:
    """The median step time of one side in ms."""
    math = attention.SDPBackend.MATH
    with attention.sdpa_kernel(math) if side == TUNED else contextlib.nullcontext():
        return median_step_ms(job, name, side)


def median_step_ms(job: Any, name: str, side: str) -> float:
    torch.set_num_threads(1)
    work = WORK[name]
    steps = loop(job, work, side)
    for _ in range(WARM_UP):
        next(steps)
    clock = time.process_time if job.world_size == 1 else time.perf_counter
    found: list[float] = []
    for _ in range(BLOCKS):
        if job.control is not None:
            dist.barrier(group=job.control)
        began = clock()
        for _ in range(work.steps):
            next(steps)
        slowest = torch.tensor((clock() - began) / work.steps)
        if job.control is not None:
            dist.all_reduce(slowest, dist.ReduceOp.MAX, group=job.control)
        found.append(1e3 * slowest.item())
    if not side.startswith("plain"):
        next(steps, None)  # ends the loop normally
    return statistics.median(found)


def rows_of(name: str, ranks: int, rounds: list[dict[str, float]]) -> list[dict[str, Any]]:
    times = {side: [each[side] for each in rounds] for side in SIDES}
    return [
        {
            "workload": name,
            "ranks": ranks,
            "side": side,
            "ms": statistics.median(times[side]),
            **ratio_row(times["plain fp32"], times[side], "gain"),
            **ratio_row(times["plain bf16"], times[side], "of_autocast"),
        }
        for side in SIDES
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=list(WORK), nargs="+", default=list(WORK))
    options = parser.parse_args()
    if not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()):
        print("precision: skipped, because this processor has neither AVX512-bf16 nor AMX")
        return
    rows = []
    for name in options.only:
        for ranks in options.ranks:
            rounds: list[dict[str, float]] = []
            for _ in range(options.rounds):
                rounds.append({})
                for side in SIDES:
                    found = run_ranks(measure, name, side, nproc=ranks, deadline_s=600)
                    rounds[-1][side] = found[0]
            rows += rows_of(name, ranks, rounds)
    publish("precision", rows, rounds=options.rounds)


if __name__ == "__main__":
    main()
