"""Schedules that cannot work are refused, or named while the training runs."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from paceline import log
from paceline.errors import ConfigError
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


@pytest.mark.parametrize("has_metric", [False, True])
def test_a_plateau_without_a_metric_is_named_after_two_epochs(
    has_metric: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "_shown", set())
    optimizer = _optimizer()
    schedule = TrainedSchedule(optimizer, ReduceLROnPlateau(optimizer))
    said = []
    with caplog.at_level(logging.WARNING, "paceline"):
        for epoch in range(3):
            for ends_epoch in (False, True):
                schedule.end_step(was_updated=True, ends_epoch=ends_epoch)
                said.append(len(caplog.records))
            if epoch == 1 and has_metric:  # evaluated every second epoch
                schedule.step_metric(1.0)
    assert said == [0, 0, 0, 0, 0, 0] if has_metric else [0, 0, 0, 0, 1, 1]
