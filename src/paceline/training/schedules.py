"""The learning-rate schedulers of a training. They advance with each optimizer step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from paceline.errors import ConfigError

Schedule = LRScheduler | Callable[[int], float]


def schedulers_of(
    schedule: Schedule | Sequence[Schedule | None] | None, optimizers: Sequence[Optimizer]
) -> list[Any]:
    """The scheduler of each optimizer, in their order; None for a constant learning rate.

    Raises:
        ConfigError: the schedules do not fit the optimizers; one is no schedule, or needs arguments.
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
        None if each is None else _scheduler(optimizer, each)
        for optimizer, each in zip(optimizers, schedules, strict=True)
    ]


def _scheduler(optimizer: Optimizer, schedule: Any) -> Any:
    is_class = isinstance(schedule, type)
    is_scheduler = hasattr(schedule, "optimizer") and callable(getattr(schedule, "step", None))
    if is_class or not (callable(schedule) or is_scheduler):
        raise ConfigError(
            f"{schedule.__name__ if is_class else repr(schedule)} is no schedule.",
            fix="give a scheduler of torch, such as StepLR(optimizer, 10_000), or a function from the number "
            "of optimizer steps to a factor of the learning rate.",
        )
    if not is_scheduler:
        return LambdaLR(optimizer, schedule)
    if schedule.optimizer is not optimizer:
        raise ConfigError(
            "the schedule belongs to another optimizer.",
            fix="create the schedule from the optimizer that you give to Training, in the same order.",
        )
    for name, parameter in inspect.signature(schedule.step).parameters.items():
        is_variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not is_variadic:
            raise ConfigError(
                f"`step` of {type(schedule).__name__} needs the argument {name!r}.",
                why="a training steps its schedule after each optimizer step, without arguments.",
                fix="leave `schedule` out, call training.keep(scheduler=scheduler) before the loop, and step "
                f"it yourself in the loop: `if step.ends_epoch: scheduler.step({name})`.",
            )
    return schedule
