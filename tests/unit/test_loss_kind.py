"""Whether a loss is a mean or a sum over the samples, as its last operations show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from paceline.parallel.loss_graph import discard_gradients
from paceline.training.weight import (
    _is_mean,
    as_sum,
    check_count,
    has_no_gradient,
    reported_count,
)

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


def test_a_loss_may_be_a_sum_of_thousands_of_terms() -> None:
    total = OUT.exp().max()
    for _ in range(5000):
        total = total + OUT.exp().max()
    assert not _is_mean(total.grad_fn, COUNT)


NAN = torch.tensor(float("nan"))


@pytest.mark.parametrize("count", [0, torch.tensor(0)])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_no_tokens_add_nothing_to_the_loss(count: Any, reduction: Any) -> None:
    assert as_sum(NAN, count, reduction).item() == 0
    assert has_no_gradient(NAN, count, reduction)
    assert not has_no_gradient(NAN, count + 1, reduction)
    assert as_sum(NAN, count + 1, reduction).isnan()


def test_a_sum_over_no_tokens_keeps_the_gradient_of_a_penalty() -> None:
    assert as_sum(torch.tensor(2.0), 0, "sum").item() == 2
    assert not has_no_gradient(torch.tensor(2.0), 0, "sum")


def test_a_count_on_a_device_is_not_read() -> None:
    count = torch.tensor(4, device="meta")  # whose value cannot be read
    assert not has_no_gradient(NAN, count, "mean")
    check_count(count, 3, "tokens", str)


def test_discarded_gradients_are_zeros_until_the_hooks_are_removed() -> None:
    p = torch.ones(2, requires_grad=True)
    loss = (p * 0 / 0).sum()
    hooks = discard_gradients(loss)
    loss.backward(retain_graph=True)
    assert p.grad is not None
    assert p.grad.tolist() == [0, 0]
    for hook in hooks:
        hook.remove()
    loss.backward()
    assert p.grad.isnan().all()


@pytest.mark.parametrize("count", [4, torch.tensor(4)])
def test_a_step_in_which_an_optimizer_has_no_tokens_reports_a_count_of_0(count: Any) -> None:
    for totals, want in (([8.0, 3.0], 4), ([8.0, 0.0], 0), ([0.0, 8.0], 0)):
        assert int(reported_count(count, torch.tensor(totals))) == want
