"""What bf16 gains over fp32: autocast by hand against Paceline, on CPU, by workload and number of ranks.

    python benchmarks/precision.py [--ranks 1 2] [--rounds 7] [--only tiny|amx|comp]

**tiny** and **comp** are those of `steps.py`; **amx** is its comm with batches of 256. One thread a rank.

    by hand, fp32 / bf16   torch's loop, `torch.autocast`, DDP over Gloo where there are several ranks
    fp32 / bf16            `paceline.Training`; "auto" takes the faster of the two
    bf16, tuned            and what torch offers users: plain attention, `AdamW(fused=True)`

By hand glibc is as it comes (`PACELINE_KEEP_MEMORY=0`). What memory costs is a matter of the process and of
what it did before, so each side has processes of its own, as a user's loop has; they take turns, round
after round. A round gives each side the median of its blocks, of the slowest rank: for one process in time
of its processor; for several by the clock, as they wait for each other. Gains are over fp32 by hand in the
same round: the median of the rounds, and their middle half.
"""

from __future__ import annotations

import argparse
import contextlib
import os
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
SIDES = ["by hand, fp32", "by hand, bf16", "fp32", "bf16", "bf16, tuned"]
BLOCKS = 7
WARM_UP = 3  # steps


def loop(job: Any, work: Workload, side: str) -> Iterator[None]:
    torch.manual_seed(0)
    model = work.make()
    size = work.batch * job.world_size * min(WARM_UP + BLOCKS * work.steps, 64)
    data = TensorDataset(torch.randn(size, *work.x), torch.randn(size, *work.y))
    if side.startswith("by hand"):
        return by_hand(job, work, model, data, bf16=side.endswith("bf16"))
    return ours(job, work, model, data, side)


def by_hand(
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


def ours(
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
            step.backward(F.mse_loss(out, y, reduction="sum") / y[0].numel(), count=len(y))
        step.update()
        yield


def measure(job: Any, name: str, side: str) -> float:
    """The time of a step in ms."""
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
    if not side.startswith("by hand"):
        next(steps, None)  # so that the loop ends well
    return statistics.median(found)


def rows_of(name: str, ranks: int, rounds: list[dict[str, float]]) -> list[dict[str, Any]]:
    rows = []
    for side in rounds[0]:
        gains = sorted(times["by hand, fp32"] / times[side] for times in rounds)
        cut = len(gains) // 4
        row = {"workload": name, "ranks": ranks, "side": side}
        row["ms"] = statistics.median(times[side] for times in rounds)
        row["gain"] = statistics.median(gains)
        row["gain_spread"] = [gains[cut], gains[-1 - cut]]
        row["of_autocast"] = statistics.median(t["by hand, bf16"] / t[side] for t in rounds)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=list(WORK), nargs="+", default=list(WORK))
    options = parser.parse_args()
    if not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()):
        print("precision: left out, as this processor has neither AVX512-bf16 nor AMX")
        return
    rows = []
    for name in options.only:
        for ranks in options.ranks:
            rounds: list[dict[str, float]] = []
            for _ in range(options.rounds):
                rounds.append({})
                for side in SIDES:
                    os.environ["PACELINE_KEEP_MEMORY"] = str(int("by hand" not in side))
                    found = run_ranks(measure, name, side, nproc=ranks, deadline_s=600)
                    rounds[-1][side] = found[0]
            rows += rows_of(name, ranks, rounds)
    publish("precision", rows, rounds=options.rounds)


if __name__ == "__main__":
    main()
