"""Models that several benchmarks train, and the two loops that they compare: plain torch and Paceline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import paceline
from paceline.data.plan import Position

Steps = Iterator[None]  # each `next` runs one training step


def tiny() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))


def mlp() -> nn.Module:
    """16.8 MB of weights, little computation per weight."""
    return nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(1024, 1024), nn.GELU())])


class Transformer(nn.Module):
    """d 256 and 4 layers."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


@dataclass(frozen=True)
class Workload:
    """A model, its data, and its optimizer.

    Args:
        batch: Samples per rank and step.
        x, y: Shapes of one input and of one target.
        adam: AdamW instead of SGD.
        steps: Steps per round of `steps.py`; enough that a round takes a few hundred milliseconds.
    """

    make: Callable[[], nn.Module]
    batch: int
    x: tuple[int, ...]
    y: tuple[int, ...]
    adam: bool
    steps: int

    def optimizer(self, model: nn.Module, *, fused: bool = False) -> torch.optim.Optimizer:
        if self.adam:
            return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
        return torch.optim.SGD(model.parameters(), lr=0.01)

    def data(self, ranks: int, steps: int) -> TensorDataset:
        """Random samples of so many steps of all ranks, the same on each rank."""
        draw = torch.Generator().manual_seed(1)
        size = self.batch * ranks * steps
        return TensorDataset(
            torch.randn(size, *self.x, generator=draw), torch.randn(size, *self.y, generator=draw)
        )

    def step_bytes(self) -> int:
        """Bytes of the samples of one rank and step."""
        return 4 * self.batch * (prod(self.x) + prod(self.y))


WORKLOADS = {
    "tiny": Workload(tiny, 16, (32,), (8,), adam=True, steps=300),
    "comm": Workload(mlp, 128, (1024,), (1024,), adam=False, steps=20),
    "comp": Workload(Transformer, 8, (128, 256), (128, 256), adam=True, steps=5),
}


def order(job: Any, size: int, global_batch: int, steps: int) -> list[torch.Tensor]:
    """The samples that `paceline_loop` gives this rank in each step, so that all sides do the same work."""
    rows = TensorDataset(torch.arange(size))
    plan = paceline.Batches(job, rows, global_batch=global_batch)
    epochs = -(-steps * global_batch // size)
    planned = plan.iterate(Position(job.seed, 0, 0), epochs=epochs)
    return [micro.batch[0] for step in planned for micro in step][:steps]


def plain_loop(
    data: TensorDataset,
    order: Iterable[Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    bf16: bool = False,
) -> Steps:
    x_all, y_all = data.tensors
    for ids in order:
        x, y = x_all[ids], y_all[ids]
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def plain_ddp(model: nn.Module) -> nn.Module:
    """DDP over Gloo with its fastest settings."""
    return DistributedDataParallel(
        model,
        process_group=dist.new_group(backend="gloo"),
        gradient_as_bucket_view=True,
        static_graph=True,
    )


def paceline_loop(
    job: Any,
    data: TensorDataset,
    global_batch: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    *,
    micro_batch: int | None = None,
    **options: Any,
) -> Steps:
    """Train a model of `paceline.ddp`; a `next` after the last step ends the loop normally.

    Args:
        options: Options of `paceline.Training`.
    """
    batches = paceline.Batches(
        job, data, global_batch=global_batch, micro_batch=micro_batch, sample_randomness=False
    )
    training = paceline.Training(job, model, optimizer, batches, **options)
    for step in training.steps(until=steps):
        for x, y in step:
            loss = F.mse_loss(model(x), y, reduction="sum") / y[0].numel()
            step.backward(loss, count=len(y), reduction="sum")
        step.update()
        yield


def timed(steps: Steps) -> list[float]:
    """Run all steps. Return the time of each in seconds."""
    times, began = [], time.perf_counter()
    for _ in steps:
        times.append((now := time.perf_counter()) - began)
        began = now
    return times
