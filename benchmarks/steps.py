"""A training step on several ranks of one host: Paceline against DDP by hand over Gloo, and the ceiling.

    python benchmarks/steps.py [--ranks 2] [--rounds 6] [--only tiny|comm|comp]

**tiny**: MLP 32-32-8, batch 16, AdamW. **comm**: MLP 4 x 1024, batch 128 (16.8 MB of gradients), SGD.
**comp**: transformer d 256, 4 layers, 8 x 128 tokens, AdamW. Batches are those of one rank; one thread
a rank. Sides:

    alone      a copy on every rank, all at once, that do not communicate: the ceiling
    by hand    torch's DDP over Gloo, with `gradient_as_bucket_view` and `static_graph`
    ddp        the same loop with `paceline.ddp`
    paceline   `paceline.ddp` and `paceline.Training`

All live in the same processes and take turns, round after round; four times, in new processes, with another
side made and run first, since where a model lies in memory makes it faster or slower for good. A round gives
the mean of its steps, of the slowest rank: where other programs take cores away, the median of single steps
would not show it for the
copies alone. The table has medians over rounds, and ratios of each round with their middle half. Those that
communicate must end with the same weights.
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
    steps: int  # in a round

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.adam:
            return torch.optim.AdamW(model.parameters(), lr=1e-4)
        return torch.optim.SGD(model.parameters(), lr=0.01)


WORKLOADS = {
    "tiny": Workload(tiny, 16, (32,), (8,), adam=True, steps=300),
    "comm": Workload(mlp, 128, (1024,), (1024,), adam=False, steps=20),
    "comp": Workload(Transformer, 8, (128, 256), (128, 256), adam=True, steps=5),
}
SIDES = ["alone", "by hand", "ddp", "paceline"]
Steps = Iterator[None]
_DATA_BYTES = 32 << 20  # a rank's, after which an epoch ends


def loop_by_hand(work: Workload, data: TensorDataset, mine: Any, model: nn.Module) -> Steps:
    x_all, y_all = data.tensors
    optimizer = work.optimizer(model)
    for ids in mine:
        x, y = x_all[ids], y_all[ids]
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def ddp_by_hand(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(
        model,
        process_group=dist.new_group(backend="gloo"),
        gradient_as_bucket_view=True,
        static_graph=True,
    )


def loop_of_paceline(
    job: Any, work: Workload, data: TensorDataset, model: nn.Module, steps: int
) -> Steps:
    batches = paceline.Batches(
        job, data, global_batch=work.batch * job.world_size, sample_randomness=False
    )
    training = paceline.Training(job, model, work.optimizer(model), batches)
    for step in training.steps(until=steps):
        for x, y in step:
            loss = F.mse_loss(model(x), y, reduction="sum") / y[0].numel()
            step.backward(loss, count=len(y))
        step.update()
        yield


def measure(job: Any, name: str, rounds: int, first: int) -> dict[str, list[float]]:
    """For each side, the step time of each round in us; the side `first` is made first."""
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
        if side == "by hand":
            model = ddp_by_hand(model)
        elif side != "alone":
            model = paceline.ddp(job, model)
        if side == "paceline":
            sides[side] = loop_of_paceline(job, work, data, model, total)
        else:
            sides[side] = loop_by_hand(work, data, mine, model)
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
    next(sides["paceline"], None)  # so that the loop ends well
    expected = list(models["by hand"].parameters())
    for side in ("ddp", "paceline"):
        for p, q in zip(models[side].parameters(), expected, strict=True):
            assert torch.allclose(p, q, atol=1e-4), f"{side} ended with other weights"
    return found


def rows_of(name: str, ranks: int, found: dict[str, list[float]]) -> list[dict[str, Any]]:
    rows = []
    for side, values in found.items():
        row = {"workload": name, "ranks": ranks, "side": side, "us": statistics.median(values)}
        for key, ratios in (
            ("of_by_hand", [v / b for v, b in zip(values, found["by hand"], strict=True)]),
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
