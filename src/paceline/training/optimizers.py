"""One optimizer with the models whose parameters it holds and its schedule: what a step updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from paceline.errors import ConfigError, NonFinite, place
from paceline.job.job import Job
from paceline.parallel import ddp as parallel

Schedule = LRScheduler | Callable[[int], float]


@dataclass(slots=True, eq=False)
class Track:
    """One optimizer with the models and the schedule that belong to it."""

    optimizer: Optimizer
    models: list[torch.nn.Module]
    schedule: LRScheduler | None
    divisor: float = 0.0
    shape: tuple[int, int] = (0, 0)

    def refuse_changes(self, check: Callable[[], None]) -> None:
        """Call `check` where parameters were added, frozen or unfrozen since the last call."""
        parameters = self.parameters
        shape = (len(parameters), sum(p.grad is not None for p in parameters))
        if shape != self.shape:
            check()
            self.shape = shape

    @property
    def parameters(self) -> list[torch.Tensor]:
        """What the optimizer updates; read each time, since groups may be added on the way."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def clear_gradients(self) -> None:
        """Forget the gradients, so that the next backward starts anew."""
        if type(self.optimizer).zero_grad is not Optimizer.zero_grad:
            self.optimizer.zero_grad()
            return
        # What torch's does, without the profiler's record, which costs several us a step.
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                p.grad = None


def check_models(job: Job, models: list[torch.nn.Module], optimizers: list[Optimizer]) -> None:
    """Raise where these cannot be trained together on this job.

    Raises:
        ConfigError: a model is not wrapped, or has nothing to train; no optimizer.
        GradientError: parameters whose gradients would not be summed over ranks.
    """
    for model in models:
        if not any(p.requires_grad for p in model.parameters()):
            raise ConfigError("the model has no trainable parameter.")
        if job.world_size > 1 and not parallel.is_ddp(model):
            raise ConfigError(
                "the model is not wrapped, so its gradients would not be summed over ranks.",
                fix="model = paceline.ddp(job, model)",
            )
        parallel.check_parameters(job, model, optimizers)
    if not optimizers:
        raise ConfigError("a training needs an optimizer.")


def make_tracks(
    models: list[torch.nn.Module],
    optimizers: list[Optimizer],
    schedule: Schedule | Sequence[Schedule | None] | None,
) -> dict[Optimizer, Track]:
    """Put each optimizer together with the models and the schedule that belong to it.

    Raises:
        ConfigError: the schedules do not fit the optimizers.
    """
    if schedule is None or callable(schedule) or not isinstance(schedule, Sequence):
        schedules: list[Any] = [schedule, *[None] * (len(optimizers) - 1)]
        if schedule is not None and len(optimizers) > 1:
            raise ConfigError("with several optimizers, give one schedule (or None) for each.")
    else:
        schedules = list(schedule)
        if len(schedules) != len(optimizers):
            raise ConfigError(f"{len(schedules)} schedules for {len(optimizers)} optimizers.")
    tracks = {}
    for optimizer, each in zip(optimizers, schedules, strict=True):
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if callable(each) and not isinstance(each, LRScheduler):
            each = LambdaLR(optimizer, each)
        if each is not None and each.optimizer is not optimizer:
            raise ConfigError("the schedule belongs to another optimizer.")
        own_models = [m for m in models if any(id(p) in owned for p in m.parameters())]
        tracks[optimizer] = Track(optimizer, own_models, each)
    return tracks


def refuse_non_finite_weights(job: Job, models: list[torch.nn.Module], step: int) -> None:
    """Raise NonFinite where a weight is NaN or infinite, before it is saved as that of `step`.

    Collective: none; weights are equal on all ranks.
    """
    for model in models:
        for name, p in parallel.unwrap(model).named_parameters():
            if not bool(torch.isfinite(p).all()):
                raise NonFinite(
                    f"{name} holds NaN or infinity; step {step} was not saved.",
                    where=place(job.rank, job.world_size, step=step),
                    fix="resume from the checkpoint before, with a lower learning rate.",
                    quantity="parameter",
                    parameters=[name],
                    step=step,
                )


def named_parameters(
    models: Sequence[torch.nn.Module], track: Track
) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters of one optimizer with their own names."""
    mine = {id(p) for p in track.parameters}
    return [
        (name, p)
        for model in models
        for name, p in parallel.unwrap(model).named_parameters()
        if id(p) in mine
    ]


def refuse_static_accumulation(
    job: Job, models: list[torch.nn.Module], global_batch: int, micro_batch: int
) -> None:
    """Raise ConfigError for a static graph with several micro-batches, which torch's DDP cannot do.

    It records the graph in its first backward, which must be one that is reduced.
    """
    most = math.ceil(math.ceil(global_batch / job.world_size) / micro_batch)
    if most > 1 and any(getattr(model, "static_graph", False) for model in models):
        raise ConfigError(
            f"static_graph=True with {most} micro-batches a rank: torch's DDP cannot accumulate then.",
            fix="leave static_graph out, or make micro_batch the rank's whole share.",
        )


def check_bounds(epochs: int | None, until: int | None) -> None:
    """Raise ConfigError where the end of a training is no number of at least 1."""
    for name, value in (("epochs", epochs), ("until", until)):
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or value < 1
        ):
            raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}.")
