"""Data, losses and checks that the tests of trainings share."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from paceline.errors import PacelineError


def make_data(n: int = 22, dtype: torch.dtype = torch.float32) -> TensorDataset:
    """`n` samples of 4 features and one of 3 classes."""
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(3)).to(dtype)
    return TensorDataset(x, x[:, :3].argmax(1))


def loss_sum(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def backwards(training: Any, step: Any) -> None:
    for batch in step:
        step.backward(loss_sum(training.models[0], batch), count=len(batch[1]), reduction="sum")


def weights_of(*models: nn.Module) -> list[float]:
    parameters = [p.detach().reshape(-1).double() for m in models for p in m.parameters()]
    return torch.cat(parameters).tolist()


class Recording(torch.optim.SGD):
    """Keeps the gradients of every step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.seen: list[list[torch.Tensor | None]] = []

    def step(self, closure: Any = None) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        self.seen.append([None if g is None else g.clone() for g in gradients])
        super().step(closure)


def refusals(
    job: Any, function: Callable[[Any, str], Any], kinds: Iterable[str]
) -> dict[str, tuple[str, str]]:
    """The name and the text of the error of `function(job, kind)`, for each kind that raises one."""
    found = {}
    for kind in kinds:
        try:
            function(job, kind)
        except PacelineError as error:
            found[kind] = type(error).__name__, str(error)
        gc.collect()  # closes the loop that the error has left
        job.check_loop_exit()
    return found
