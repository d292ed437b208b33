"""The loss of a step as a number."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from paceline.metrics.step_loss import StepLoss


@pytest.mark.parametrize(("count", "value"), [(4, 1.5), (torch.tensor(0), math.nan)])
def test_the_mean_of_no_tokens_is_nan(count: Any, value: float) -> None:
    alone = cast(Any, SimpleNamespace(exchange=None, data=SimpleNamespace(reporters=(0,))))
    loss = StepLoss(alone, 1, torch.tensor(6.0), count)
    assert float(loss) == pytest.approx(value, nan_ok=True)
