"""The loss of a step over all ranks: with the next control word, or at once when the program asks for it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from paceline.errors import StepError, name_ranks
from paceline.job import collectives
from paceline.job.failures import Peers
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

    __slots__ = ("_count", "_job", "_loop", "_sum", "_value", "step")

    def __init__(
        self, job: Job, loop: int, step: int, loss: torch.Tensor | None, count: Any
    ) -> None:
        self._job = job
        self._loop = loop
        self._sum = loss
        self._count = count
        self._value: float | None = None
        self.step = step

    def __float__(self) -> float:
        if self._value is None:
            local = 0.0 if self._sum is None else float(self._sum)
            pairs = [(local, float(self._count))]
            if self._job.peers is not None:
                pairs = self._exchanged(self._job.peers, *pairs[0])
            loss, count = (collectives.exact_sum(column) for column in zip(*pairs, strict=True))
            # On a GPU no step refuses counts of 0 by itself; the next control word does.
            self._value = loss / count if count else math.nan
        return self._value

    def _exchanged(self, peers: Peers, loss: float, count: float) -> list[tuple[float, float]]:
        """Sum and count of each data rank, through the store, so that a single caller gets an error."""
        everyone, missing = peers.exchange(
            peers.new_name("loss"),
            [loss, count],
            self.step,
            loop=self._loop,
            timeout_s=self._job.timeout_s,
        )
        if missing:
            raise StepError(
                f"{name_ranks(missing)} did not ask for the loss of step {self.step}.",
                where=self._job.where(step=self.step),
                why="`float(step.loss)` adds up what all ranks hold.",
                fix="call `float()` on every rank and print on one; or call `training.log(loss=step.loss)`.",
                step=self.step,
            )
        return [tuple(everyone[rank]) for rank in self._job.data.reporters]

    def item(self) -> float:
        """The value, as `float()`. Collective: all ranks, at the same point."""
        return float(self)

    def __format__(self, spec: str) -> str:
        return format(float(self), spec)

    def __repr__(self) -> str:
        return f"StepLoss(step={self.step}; float() on all ranks gives its value)"
