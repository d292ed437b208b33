"""Schedules that cannot work are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from paceline.errors import ConfigError
from paceline.training.schedules import schedulers_of


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
        schedulers_of(schedule, [_optimizer()])


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
        schedulers_of(_ByEpochNumber(optimizer), [optimizer])  # type: ignore[arg-type]

    class Nothing:
        pass

    nothing: Any = Nothing()
    nothing.optimizer = optimizer
    with pytest.raises(ConfigError, match="is no schedule"):
        schedulers_of(nothing, [optimizer])
