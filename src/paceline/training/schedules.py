"""Learning-rate schedules of a training: by optimizer step, by epoch, or by a metric."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from paceline.errors import ConfigError, StepError


@dataclass(frozen=True)
class PerEpoch:
    """A schedule that counts epochs instead of optimizer steps.

    It advances with the update of the last step of an epoch.

    Args:
        schedule: A scheduler of torch, or a function from the number of epochs done to a factor of the
            learning rate.

    Collective: none.
    """

    schedule: LRScheduler | Callable[[int], float]


Schedule = LRScheduler | PerEpoch | Callable[[int], float]


class TrainedSchedule:
    """The schedule of one optimizer, with what makes it advance.

    Attributes:
        scheduler: torch's scheduler; None if the learning rate is constant.
        needs_metric: Whether it advances with `step_metric` only.

    Raises:
        ConfigError: it is no schedule, belongs to another optimizer, or never advances.
    """

    def __init__(self, optimizer: Optimizer, schedule: Schedule | None) -> None:
        self._by_epoch = isinstance(schedule, PerEpoch)
        inner: Any = schedule.schedule if isinstance(schedule, PerEpoch) else schedule
        self.needs_metric = isinstance(inner, ReduceLROnPlateau)
        if self.needs_metric and self._by_epoch:
            raise ConfigError(
                "PerEpoch has no effect on ReduceLROnPlateau, which advances with each metric.",
                fix="give ReduceLROnPlateau alone, and call training.step_schedule(metric).",
            )
        is_class = isinstance(inner, type)
        is_scheduler = hasattr(inner, "optimizer") and callable(getattr(inner, "step", None))
        if inner is not None and (is_class or not (callable(inner) or is_scheduler)):
            raise ConfigError(
                f"{inner.__name__ if is_class else repr(inner)} is no schedule.",
                fix="give a scheduler of torch, such as StepLR(optimizer, 10), or a function from the number "
                "of optimizer steps to a factor of the learning rate.",
            )
        if callable(inner) and not isinstance(inner, LRScheduler):
            inner = LambdaLR(optimizer, inner)
        if inner is not None and inner.optimizer is not optimizer:
            raise ConfigError(
                "the schedule belongs to another optimizer.",
                fix="create the schedule from the optimizer that you give to Training, in the same order.",
            )
        if inner is not None and not self.needs_metric:
            _refuse_arguments(inner)
        self.scheduler: Any = inner
        self._epochs_in_loop = 0

    @property
    def type(self) -> str:
        """The type of torch's scheduler; empty if the learning rate is constant."""
        return "" if self.scheduler is None else type(self.scheduler).__name__

    def begin(self) -> None:
        """A loop over steps begins."""
        self._epochs_in_loop = 0

    def end_step(self, *, was_updated: bool, ends_epoch: bool) -> None:
        """A step has ended.

        Args:
            was_updated: False if the update was left out because of NaN or infinity.
        """
        if self.needs_metric:
            self._epochs_in_loop += ends_epoch
        elif self.scheduler is not None and (ends_epoch if self._by_epoch else was_updated):
            self.scheduler.step()

    def step_metric(self, value: float) -> None:
        if not self.needs_metric:
            raise ConfigError(
                "the schedule of this optimizer takes no metric.",
                fix="leave `training.step_schedule` out, or use torch's ReduceLROnPlateau as schedule.",
            )
        self.scheduler.step(value)

    def refuse_no_metric(self) -> None:
        """Raise StepError if a loop of two epochs or more ended, and no metric ever came.

        The metrics before a resume count too.
        """
        if self._epochs_in_loop > 1 and not self.scheduler.last_epoch:
            raise StepError(
                f"ReduceLROnPlateau got no metric in {self._epochs_in_loop} epochs, so it never "
                "changed the learning rate.",
                why="it advances only with `training.step_schedule`.",
                fix="call training.step_schedule(result.loss) after each evaluation.",
            )

    def state_dict(self) -> dict[str, Any]:
        return {} if self.scheduler is None else dict(self.scheduler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state)


def _refuse_arguments(scheduler: Any) -> None:
    """Raise ConfigError if the `step` of a scheduler cannot be called without arguments."""
    for name, parameter in inspect.signature(scheduler.step).parameters.items():
        if parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            raise ConfigError(
                f"`step` of {type(scheduler).__name__} needs the argument {name!r}.",
                why="a training calls it without arguments.",
                fix="give a scheduler of torch, or a function from the number of optimizer steps to a factor "
                "of the learning rate.",
            )


def trained_schedules(
    schedule: Schedule | Sequence[Schedule | None] | None, optimizers: Sequence[Optimizer]
) -> list[TrainedSchedule]:
    """The schedule of each optimizer, in their order.

    Raises:
        ConfigError: the schedules do not fit the optimizers.
    """
    given: Any = schedule
    if isinstance(given, Sequence) and not isinstance(given, str):
        schedules: list[Any] = list(given)
    elif schedule is None:
        schedules = [None] * len(optimizers)
    else:
        schedules = [schedule]
    if len(schedules) != len(optimizers):
        raise ConfigError(
            f"got {len(schedules)} schedule{'s' * (len(schedules) != 1)} for {len(optimizers)} "
            f"optimizer{'s' * (len(optimizers) != 1)}.",
            fix="schedule=[...] with one schedule or None for each optimizer.",
        )
    return [
        TrainedSchedule(optimizer, each)
        for optimizer, each in zip(optimizers, schedules, strict=True)
    ]
