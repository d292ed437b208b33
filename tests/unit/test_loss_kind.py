"""Whether a loss is a mean or a sum over the samples, as its last operation shows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from paceline.errors import StepError
from paceline.parallel.loss_graph import discard_gradients
from paceline.training.weight import (
    as_sum,
    check_loss,
    checked_count,
    has_no_gradient,
    reported_count,
)

COUNT = 8
OUT = torch.randn(COUNT, COUNT, requires_grad=True)
WEIGHTS = torch.randn(COUNT, 3, requires_grad=True)
TARGETS = torch.arange(COUNT) % 3


LOSSES: dict[str, Any] = {
    "mean": lambda: F.cross_entropy(OUT, TARGETS),
    "scaled mean": lambda: 1.0 * F.cross_entropy(OUT, TARGETS),
    "mean of one mean": lambda: torch.stack([F.cross_entropy(OUT, TARGETS)]).sum(),
    "mean and a penalty": lambda: F.cross_entropy(OUT, TARGETS) + WEIGHTS.pow(2).sum(),
    "sum divided by the count": lambda: (OUT**2).sum() / COUNT,
    "mean of squares": lambda: (OUT**2).mean(),
    "mean of means": lambda: (OUT**2).mean(1).mean(),
    "sum": lambda: F.cross_entropy(OUT, TARGETS, reduction="sum"),
    "sum of squares": lambda: F.mse_loss(OUT, OUT.detach() + 1, reduction="sum"),
    "sum of losses": lambda: F.cross_entropy(OUT, TARGETS, reduction="none").sum(),
    "sum of rows": lambda: (OUT**2).mean(1).sum(0),
    "sum of all": lambda: (OUT**2).sum(),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_a_sum_is_not_taken_for_a_mean(kind: str) -> None:
    loss = LOSSES[kind]()
    if kind == "sum" or (kind.startswith("sum ") and "divided" not in kind):
        with pytest.raises(StepError, match="the loss is a sum"):
            check_loss(loss, COUNT, None, str)
        check_loss(loss, COUNT, "sum", str)
    else:
        check_loss(loss, COUNT, None, str)


def test_a_mean_over_targets_needs_as_many_in_each_sample() -> None:
    out = torch.randn(2, 3, 4, requires_grad=True)
    targets = torch.tensor([[0, 1, 2, 0], [1, 2, 0, 1]])
    check_loss(F.cross_entropy(out, targets), 2, None, str)
    check_loss(F.cross_entropy(out, targets.fill_diagonal_(-100)), 2, None, str)
    targets = torch.tensor([[0, 1, 2, 0], [1, 2, -100, -100]])  # 6 targets, a multiple of 2
    with pytest.raises(StepError, match="a mean over a total weight of 6, but the count is 2"):
        check_loss(F.cross_entropy(out, targets), 2, None, str)


def test_a_mean_that_a_sum_has_computed_is_said() -> None:
    tasks = torch.stack([F.cross_entropy(OUT[:, i:], TARGETS) for i in range(4)]).sum()
    with pytest.raises(StepError, match='reduction="mean" if a sum has computed a mean'):
        check_loss(tasks, 4, None, str)
    check_loss(tasks, 4, "mean", str)


@pytest.mark.parametrize("kind", ["mean", "mean of squares", "mean of means"])
def test_a_mean_is_not_taken_for_a_sum(kind: str) -> None:
    with pytest.raises(StepError, match="the loss is a mean"):
        check_loss(LOSSES[kind](), COUNT, "sum", str)


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
    checked_count(count, 3, "tokens", str)


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
