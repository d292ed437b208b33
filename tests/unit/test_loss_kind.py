"""Whether a loss is a mean or a sum over the samples, as its last operations show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from paceline.training.weight import _is_mean

COUNT = 8
OUT = torch.randn(COUNT, COUNT, requires_grad=True)
WEIGHTS = torch.randn(COUNT, 3, requires_grad=True)
TARGETS = torch.arange(COUNT) % 3


@pytest.mark.parametrize(
    ("loss", "is_mean"),
    [
        (lambda: F.cross_entropy(OUT, TARGETS), True),
        (lambda: F.cross_entropy(OUT, TARGETS) + WEIGHTS.pow(2).mean(), True),
        (lambda: (OUT**2).mean(), True),
        (lambda: (OUT**2).mean(1).mean(), True),
        (lambda: F.cross_entropy(OUT, TARGETS, reduction="sum"), False),
        (lambda: F.cross_entropy(OUT, TARGETS, reduction="sum") + WEIGHTS.pow(2).mean(), False),
        (lambda: (OUT**2).sum(0).mean(), False),  # a mean over as many features as samples
        (lambda: (OUT**2).sum(), False),
    ],
)
def test_the_kind_of_a_loss(loss: Any, is_mean: bool) -> None:
    assert _is_mean(loss().grad_fn, COUNT) == is_mean
