"""Schedules that cannot work are refused, or named while the training runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from paceline.errors import ConfigError, StepError
from paceline.training.schedules import TrainedSchedule, trained_schedules


def _optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(()))], lr=1.0)


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        ("cosine", "'cosine' is no schedule"),
        (3, "3 is no schedule"),
        (StepLR, "StepLR is no schedule"),
        ([None, None], "got 2 schedules for 1 optimizer."),
    ],
)
def test_what_is_no_schedule_is_named(schedule: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        trained_schedules(schedule, [_optimizer()])


class _ByEpochNumber:
    """As timm's schedulers: the caller counts."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, epoch: int, metric: float | None = None) -> None:
        raise AssertionError

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_a_scheduler_whose_step_needs_an_argument_is_refused() -> None:
    optimizer = _optimizer()
    with pytest.raises(ConfigError, match="`step` of _ByEpochNumber needs the argument 'epoch'"):
        TrainedSchedule(optimizer, _ByEpochNumber(optimizer))  # type: ignore[arg-type]

    class Nothing:
        pass

    nothing: Any = Nothing()
    nothing.optimizer = optimizer
    with pytest.raises(ConfigError, match="is no schedule"):
        TrainedSchedule(optimizer, nothing)


@pytest.mark.parametrize("has_metric", [False, True])
def test_a_plateau_without_a_metric_is_named_after_two_epochs(has_metric: bool) -> None:
    optimizer = _optimizer()
    schedule = TrainedSchedule(optimizer, ReduceLROnPlateau(optimizer))
    schedule.begin()
    for ends_epoch in (True, False, True):
        schedule.refuse_no_metric()
        schedule.end_step(was_updated=True, ends_epoch=ends_epoch)
    if has_metric:
        schedule.step_metric(1.0)
        schedule.refuse_no_metric()
    else:
        with pytest.raises(StepError, match="got no metric in 2 epochs"):
            schedule.refuse_no_metric()
