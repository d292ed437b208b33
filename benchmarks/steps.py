"""A training step on several ranks of one host: Paceline compared with plain DDP over Gloo.

    python benchmarks/steps.py [--ranks 2] [--rounds 6] [--only tiny|comm|comp]

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tables import publish
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset
from workloads import Transformer, mlp

import paceline
from paceline.data.plan import Position
from paceline.testing import run_ranks


def tiny() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))


@dataclass(frozen=True)
class Workload:
    make: Callable[[], nn.Module]
    batch: int
    x: tuple[int, ...]
    y: tuple[int, ...]
    adam: bool
    steps: int  # per round

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.adam:
            return torch.optim.AdamW(model.parameters(), lr=1e-4)
        return torch.optim.SGD(model.parameters(), lr=0.01)


WORKLOADS = {
    "tiny": Workload(tiny, 16, (32,), (8,), adam=True, steps=300),
    "comm": Workload(mlp, 128, (1024,), (1024,), adam=False, steps=20),
    "comp": Workload(Transformer, 8, (128, 256), (128, 256), adam=True, steps=5),
}
SIDES = ["alone", "plain DDP", "ddp", "paceline"]
Steps = Iterator[None]
_DATA_BYTES = 32 << 20  # largest data set of a rank; more steps repeat it in further epochs


def plain_loop(work: Workload, data: TensorDataset, mine: Any, model: nn.Module) -> Steps:
    x_all, y_all = data.tensors
    optimizer = work.optimizer(model)
    for ids in mine:
        x, y = x_all[ids], y_all[ids]
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def plain_ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(
        model,
        process_group=dist.new_group(backend="gloo"),
        gradient_as_bucket_view=True,
        static_graph=True,
    )


def paceline_loop(
    job: Any, work: Workload, data: TensorDataset, model: nn.Module, steps: int
) -> Steps:
    batches = paceline.Batches(
        job, data, global_batch=work.batch * job.world_size, sample_randomness=False
    )
    training = paceline.Training(job, model, work.optimizer(model), batches)
    for step in training.steps(until=steps):
        for x, y in step:
            loss = F.mse_loss(model(x), y, reduction="sum") / y[0].numel()
            step.backward(loss, count=len(y), reduction="sum")
        step.update()
        yield


def measure(job: Any, name: str, rounds: int, first: int) -> dict[str, list[float]]:
    """The step time of each round in us for each side. The side with index `first` is created first."""
    torch.set_num_threads(1)
    work = WORKLOADS[name]
    total = work.steps * (rounds + 1)
    distinct = min(total, _DATA_BYTES // (4 * work.batch * (prod(work.x) + prod(work.y))))
    size = work.batch * job.world_size * distinct
    data = TensorDataset(torch.randn(size, *work.x), torch.randn(size, *work.y))
    rows = TensorDataset(torch.arange(size))
    plan = paceline.Batches(job, rows, global_batch=work.batch * job.world_size)
    steps = plan.iterate(Position(job.seed, 0, 0), epochs=-(-total // distinct))
    mine = [micro.batch[0] for step in steps for micro in step][:total]
    start = work.make().state_dict()
    models, sides = {}, {}
    for side in SIDES[first:] + SIDES[:first]:
        models[side] = model = work.make()
        model.load_state_dict(start)
        if side == "plain DDP":
            model = plain_ddp(model)
        elif side != "alone":
            model = paceline.ddp(job, model)
        if side == "paceline":
            sides[side] = paceline_loop(job, work, data, model, total)
        else:
            sides[side] = plain_loop(work, data, mine, model)
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
    rows = []
    for side, values in found.items():
        row = {"workload": name, "ranks": ranks, "side": side, "us": statistics.median(values)}
        for key, ratios in (
            ("of_plain_ddp", [v / b for v, b in zip(values, found["plain DDP"], strict=True)]),
            ("efficiency", [a / v for v, a in zip(values, found["alone"], strict=True)]),
        ):
            ratios.sort()
            cut = len(ratios) // 4
            row[key] = statistics.median(ratios)
            row[f"{key}_spread"] = [ratios[cut], ratios[-1 - cut]]
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--rounds", type=int, default=6)
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
