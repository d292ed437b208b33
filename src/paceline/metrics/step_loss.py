"""The loss of a step over all ranks: with the next control word, or at once when the program asks for it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from paceline.job import collectives
from paceline.job.job import Job


@dataclass(frozen=True, kw_only=True)
class StepTotal:
    """The sum of the losses of a step over all ranks, and the sum of their counts."""

    step: int
    loss_sum: float
    count: float


class StepLoss:
    """The mean loss of a step: the sum over the samples (or tokens) of all ranks, divided by their number.

    `training.log` takes it without waiting, and writes the value when the ranks have exchanged it, within
    about 0.2 s. `float()` exchanges it at once; `item()` and formatting it do the same.

    Attributes:
        step: the number of the step.

    Collective: `float()` must be called by all ranks, at the same point.
    """

    __slots__ = ("_count", "_job", "_sum", "_value", "step")

    def __init__(self, job: Job, step: int, loss: torch.Tensor | None, count: Any) -> None:
        self._job = job
        self._sum = loss
        self._count = count
        self._value: float | None = None
        self.step = step

    def __float__(self) -> float:
        if self._value is None:
            own = [0.0 if self._sum is None else float(self._sum), float(self._count)]
            everyone = collectives.gather(
                self._job,
                own,
                call="float(step.loss)",
                fix="call `float()` on every rank and print on one; or call `training.log(loss=step.loss)`.",
            )
            reported = [everyone[rank] for rank in self._job.data.reporters]
            loss, count = (collectives.exact_sum(column) for column in zip(*reported, strict=True))
            # On a GPU no step refuses counts of 0 by itself; the next control word does.
            self._value = loss / count if count else math.nan
        return self._value

    def item(self) -> float:
        """The value, as `float()`. Collective: all ranks, at the same point."""
        return float(self)

    def __format__(self, spec: str) -> str:
        return format(float(self), spec)

    def __repr__(self) -> str:
        return f"StepLoss(step={self.step}; float() on all ranks gives its value)"
