"""A device whose queued work waits for a lost rank."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from paceline.job import devices

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("answers", "is_idle"),
    [
        ([True], True),
        ([False, False, True], True),
        ([False] * 1000, False),
        (torch.AcceleratorError("lost"), False),
    ],
)
def test_only_a_device_that_ends_its_work_in_time_is_idle(
    answers: Any, is_idle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Mock()
    stream.query.side_effect = answers
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: stream)
    monkeypatch.setattr(devices, "_IDLE_S", 0.05)
    assert devices.becomes_idle(GPU) is is_idle


def test_a_cpu_has_no_queue() -> None:
    assert devices.becomes_idle(torch.device("cpu"))
