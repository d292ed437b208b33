"""Schedules that cannot work are refused, or named while the training runs."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LinearLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from paceline import log
from paceline.errors import ConfigError, StepError
from paceline.training.schedules import PerEpoch, TrainedSchedule, trained_schedules


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


def _chained(optimizer: torch.optim.Optimizer) -> ChainedScheduler:
    return ChainedScheduler([LinearLR(optimizer), ExponentialLR(optimizer, 0.9)])


def _sequential(optimizer: torch.optim.Optimizer) -> SequentialLR:
    return SequentialLR(optimizer, [LinearLR(optimizer), ExponentialLR(optimizer, 0.9)], [2])


@pytest.mark.parametrize("by_epoch", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: StepLR(optimizer, 1),
        lambda optimizer: CosineAnnealingWarmRestarts(optimizer, 2),
        _chained,
        _sequential,
    ],
)
def test_a_schedule_that_the_script_also_steps_is_refused(make: Any, by_epoch: bool) -> None:
    optimizer = _optimizer()
    scheduler = make(optimizer)
    schedule = TrainedSchedule(optimizer, PerEpoch(scheduler) if by_epoch else scheduler)
    optimizer.step()
    scheduler.step()  # before the loop, to skip what was trained elsewhere
    schedule.begin()
    for was_updated in (True, True, False, True):
        schedule.end_step(was_updated=was_updated, ends_epoch=was_updated)
    other = TrainedSchedule(optimizer, make(optimizer))
    other.load_state_dict(schedule.state_dict())  # resumed
    other.end_step(was_updated=True, ends_epoch=True)
    scheduler.step()
    with pytest.raises(StepError, match=r"also stepped by the script(?s:.*)where: step 5") as error:
        schedule.end_step(was_updated=True, ends_epoch=False, where=lambda: "step 5")
    assert error.value.fix == "remove scheduler.step(); Training(schedule=) steps it."


def test_a_plateau_that_the_script_also_steps_is_refused() -> None:
    optimizer = _optimizer()
    plateau = ReduceLROnPlateau(optimizer)
    schedule = TrainedSchedule(optimizer, plateau)
    schedule.begin()
    for _ in range(3):
        schedule.end_step(was_updated=True, ends_epoch=True)
        schedule.step_metric(1.0)
    plateau.step(1.0)
    for again in (
        lambda: schedule.step_metric(1.0),
        lambda: schedule.end_step(was_updated=True, ends_epoch=False),
    ):
        with pytest.raises(StepError, match="also stepped by the script") as error:
            again()
        assert error.value.fix.startswith("call training.step_schedule(metric)")
