"""`TrainedOptimizer`: an optimizer with its models and its schedule; what `Training` checks of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from paceline.errors import ConfigError, NonFinite
from paceline.job.job import Job
from paceline.parallel.modules import owned_parameters, unwrap

Schedule = LRScheduler | Callable[[int], float]


@dataclass(slots=True, eq=False)
class TrainedOptimizer:
    """An optimizer of a training.

    Attributes:
        models: The models that hold parameters of the optimizer.
        token_divisor: With count="tokens", what losses of the current step are divided by; 0 before the
            first step.
    """

    optimizer: Optimizer
    models: list[torch.nn.Module]
    schedule: LRScheduler | None
    token_divisor: float = 0.0

    @property
    def parameters(self) -> list[torch.Tensor]:
        return owned_parameters(self.optimizer)

    def named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        owned = {id(p) for p in self.parameters}
        return [
            (name, p)
            for model in self.models
            for name, p in unwrap(model).named_parameters()
            if id(p) in owned
        ]

    def clear_gradients(self) -> None:
        if type(self.optimizer).zero_grad is not Optimizer.zero_grad:
            self.optimizer.zero_grad()
            return
        # As torch's, without its profiler record, which takes several microseconds a step.
        for p in self.parameters:
            p.grad = None


def with_schedules(
    models: list[torch.nn.Module],
    optimizers: list[Optimizer],
    schedule: Schedule | Sequence[Schedule | None] | None,
) -> list[TrainedOptimizer]:
    """Combine each optimizer with its models and its schedule.

    Raises:
        ConfigError: nothing to train; no optimizer; the schedules do not fit the optimizers.
    """
    for model in models:
        if not any(p.requires_grad for p in model.parameters()):
            raise ConfigError(
                "the model has no trainable parameter.",
                fix="unfreeze some with requires_grad_(True).",
            )
    if not optimizers:
        raise ConfigError(
            "a training needs an optimizer.", fix="Training(job, model, optimizer, batches)."
        )
    if schedule is None or callable(schedule) or not isinstance(schedule, Sequence):
        schedules: list[Any] = [schedule, *[None] * (len(optimizers) - 1)]
        if schedule is not None and len(optimizers) > 1:
            raise ConfigError(
                f"one schedule for {len(optimizers)} optimizers.",
                fix="schedule=[...] with one schedule or None for each optimizer.",
            )
    else:
        schedules = list(schedule)
        if len(schedules) != len(optimizers):
            raise ConfigError(
                f"{len(schedules)} schedules for {len(optimizers)} optimizers.",
                fix="give one schedule or None for each optimizer.",
            )
    trained = []
    for optimizer, each in zip(optimizers, schedules, strict=True):
        if isinstance(each, ReduceLROnPlateau):
            raise ConfigError(
                "ReduceLROnPlateau is not supported as a schedule.",
                why="it needs a metric in each step; a schedule counts optimizer steps only.",
                fix="leave it out of Training, and call scheduler.step(metric) after each evaluation.",
            )
        if callable(each) and not isinstance(each, LRScheduler):
            each = LambdaLR(optimizer, each)
        if each is not None and each.optimizer is not optimizer:
            raise ConfigError(
                "the schedule belongs to another optimizer.",
                fix="create the schedule from the optimizer that you give to Training, in the same order.",
            )
        owned = {id(p) for p in owned_parameters(optimizer)}
        own_models = [m for m in models if any(id(p) in owned for p in m.parameters())]
        trained.append(TrainedOptimizer(optimizer, own_models, each))
    return trained


def refuse_non_finite_weights(job: Job, models: list[torch.nn.Module], step: int) -> None:
    """Raise NonFinite if a weight is NaN or infinite, before it is saved as that of `step`."""
    for model in models:
        for name, p in unwrap(model).named_parameters():
            if not bool(torch.isfinite(p).all()):
                raise NonFinite(
                    f"{name} holds NaN or infinity; step {step} was not saved.",
                    where=job.where(),
                    fix="resume from the last checkpoint with a lower learning rate.",
                    quantity="parameter",
                    parameters=[name],
                    step=step,
                )
