"""Speed of bf16 compared with fp32 on CPU: Paceline and a plain loop with autocast.

    python benchmarks/precision.py [--ranks 1 2] [--rounds 7] [--only tiny|amx|comp]

**tiny** and **comp** are the workloads of `steps.py`. **amx** is its workload comm with batches of 256. Each
rank uses one thread.

    plain fp32, plain bf16   a plain loop with `torch.autocast`; DDP over Gloo on several ranks
    fp32, bf16               `paceline.Training`
    bf16, tuned              the same with plain attention and `AdamW(fused=True)`

The cost of memory depends on
the history of a process, so each side runs in its own processes; the sides take turns in each round. A round
reports the median of its blocks on the slowest rank: CPU time for one process, wall-clock time for several,
because ranks wait for each other. The gain is the ratio to plain fp32 in the same round. The table shows the
median over rounds with the middle half.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from steps import WORKLOADS, Workload
from tables import publish
from torch.nn import attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import paceline
from paceline.testing import run_ranks

WORK = {
    "tiny": replace(WORKLOADS["tiny"], steps=100),
    "amx": replace(WORKLOADS["comm"], batch=256, steps=3),
    "comp": replace(WORKLOADS["comp"], steps=1),
}
SIDES = ["plain fp32", "plain bf16", "fp32", "bf16", "bf16, tuned"]
BLOCKS = 7
WARM_UP = 3  # steps


def loop(job: Any, work: Workload, side: str) -> Iterator[None]:
    torch.manual_seed(0)
    model = work.make()
    size = work.batch * job.world_size * min(WARM_UP + BLOCKS * work.steps, 64)
    data = TensorDataset(torch.randn(size, *work.x), torch.randn(size, *work.y))
    if side.startswith("plain"):
        return plain_loop(job, work, model, data, bf16=side.endswith("bf16"))
    return paceline_loop(job, work, model, data, side)


def plain_loop(
    job: Any, work: Workload, model: torch.nn.Module, data: TensorDataset, *, bf16: bool
) -> Iterator[None]:
    optimizer = work.optimizer(model)
    if job.world_size > 1:
        model = DistributedDataParallel(
            model,
            process_group=dist.new_group(backend="gloo"),
            gradient_as_bucket_view=True,
            static_graph=True,
        )
    x, y = (part[job.rank * work.batch :][: work.batch] for part in data.tensors)
    while True:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def paceline_loop(
    job: Any, work: Workload, model: torch.nn.Module, data: TensorDataset, side: str
) -> Iterator[None]:
    model = paceline.ddp(job, model)
    optimizer = work.optimizer(model)
    tuned = side == "bf16, tuned"
    if tuned and work.adam:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batches = paceline.Batches(
        job, data, global_batch=work.batch * job.world_size, sample_randomness=False
    )
    training = paceline.Training(
        job, model, optimizer, batches, precision=side.removesuffix(", tuned")
    )
    for step in training.steps(until=WARM_UP + BLOCKS * work.steps):
        for x, y in step:
            with (
                attention.sdpa_kernel(attention.SDPBackend.MATH)
                if tuned
                else contextlib.nullcontext()
            ):
                out = model(x)
            step.backward(
                F.mse_loss(out, y, reduction="sum") / y[0].numel(), count=len(y), reduction="sum"
            )
        step.update()
        yield


def measure(job: Any, name: str, side: str) -> float:
    """The median step time of one side in ms."""
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
    rows = []
    for side in rounds[0]:
        gains = sorted(times["plain fp32"] / times[side] for times in rounds)
        cut = len(gains) // 4
        row = {"workload": name, "ranks": ranks, "side": side}
        row["ms"] = statistics.median(times[side] for times in rounds)
        row["gain"] = statistics.median(gains)
        row["gain_spread"] = [gains[cut], gains[-1 - cut]]
        row["of_autocast"] = statistics.median(t["plain bf16"] / t[side] for t in rounds)
        rows.append(row)
    return rows


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
