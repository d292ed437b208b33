"""The loss of a step as a number."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from paceline.metrics.step_loss import StepLoss


@pytest.mark.parametrize(("count", "value"), [(4, 1.5), (torch.tensor(0), math.nan)])
def test_the_mean_of_no_tokens_is_nan(job: Any, count: Any, value: float) -> None:
    loss = StepLoss(job, 1, torch.tensor(6.0), count)
    assert float(loss) == pytest.approx(value, nan_ok=True)
