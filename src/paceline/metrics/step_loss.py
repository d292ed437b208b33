"""The loss of a step over all ranks, exchanged late with the control word or when it is asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from paceline.errors import StepError, name_ranks, place
from paceline.job.job import Job
from paceline.job.peers import Peers


@dataclass(frozen=True, kw_only=True)
class StepTotal:
    """The loss of one step over all ranks: sum and count."""

    step: int
    loss_sum: float
    count: float


class StepLoss:
    """The loss of a step: its sum over the samples (or tokens) of all ranks, over their count.

    `training.log` takes it as it is and writes the value once the ranks have exchanged it, which costs
    nothing. `float()` exchanges it now.

    Collective: none to hold it; `float()` is for all ranks, once, in the same place.
    """

    __slots__ = ("_count", "_job", "_scope", "_sum", "_value", "step")

    def __init__(
        self, job: Job, scope: int, step: int, loss: torch.Tensor | None, count: Any
    ) -> None:
        self._job = job
        self._scope = scope
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
            total, count = (math.fsum(column) for column in zip(*pairs, strict=True))
            self._value = total / count
        return self._value

    def _exchanged(self, peers: Peers, loss: float, count: float) -> list[tuple[float, float]]:
        """Through the store, apart from collectives: a rank that asks alone gets an answer."""
        columns = []
        for name, value in (("loss", loss), ("count", count)):
            numbers, missing = peers.exchange(
                f"{name}/{self._scope}/{self.step}",
                value,
                self.step,
                loop=self._scope,
                timeout_s=self._job.timeout_s,
            )
            if missing:
                raise StepError(
                    f"{name_ranks(missing)} did not ask for the loss of step {self.step}.",
                    where=place(self._job.rank, self._job.world_size, step=self.step),
                    why="`float(step.loss)` adds up what all ranks hold.",
                    fix="ask on every rank, then print on one; or training.log(loss=step.loss).",
                    step=self.step,
                )
            columns.append(numbers)
        return list(zip(*columns, strict=True))

    def __format__(self, spec: str) -> str:
        return format(float(self), spec)

    def __repr__(self) -> str:
        return f"StepLoss(step={self.step})"
