"""P2, N processes give the gradient of one: to rounding, for any cut of the data over ranks."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_trainings import Recording, make_data
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import StepError
from paceline.testing import run_ranks


@dataclass(frozen=True)
class Case:
    samples: int
    global_batch: int
    micro_batch: int
    count: str
    bucket_mb: float = 25.0  # any other has DDP sum what is small, too
    reduction: str = "sum"


def _random_cases(seed: int) -> list[Case]:
    draw = random.Random(seed)
    found = []
    for _ in range(16):
        global_batch = draw.randint(1, 13)
        micro_batch = draw.randint(1, global_batch)
        count, bucket_mb = draw.choice(["samples", "tokens"]), draw.choice([25.0, 1.0])
        sizes = draw.randint(1, 30), global_batch, micro_batch
        found.append(Case(*sizes, count, bucket_mb, draw.choice(["sum", "mean"])))
    return found


def _gradients(job: Any, todo: list[Case], dtype: torch.dtype) -> list[list[torch.Tensor]]:
    results = []
    for case in todo:
        generator = torch.Generator().manual_seed(case.samples)
        x = torch.randn(case.samples, 4, generator=generator, dtype=dtype)
        y = torch.randint(0, 3, (case.samples,), generator=generator)
        mask = torch.randint(0, 3, (case.samples,), generator=generator)
        mask[0] = 1
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)
        model = paceline.ddp(job, model, bucket_mb=case.bucket_mb)
        optimizer = Recording(model.parameters())
        batches = paceline.Batches(
            job,
            TensorDataset(x, y, mask),
            global_batch=case.global_batch,
            micro_batch=case.micro_batch,
        )
        training = paceline.Training(job, model, optimizer, batches, count=case.count)
        try:
            for step in training.steps(epochs=2):
                for inputs, targets, weights in step:
                    losses = F.cross_entropy(model(inputs), targets, reduction="none")
                    loss, tokens = losses.sum(), weights.sum()
                    if case.count == "tokens":  # each sample has 0, 1 or 2
                        loss = (losses * weights).sum()
                        given = int(tokens) if step.number % 2 else tokens
                        mean = loss / tokens.clamp(min=1)
                        if case.reduction == "mean":
                            step.backward(mean, count=given, reduction="mean")
                        else:
                            step.backward(loss, count=given, reduction="sum")
                    elif case.reduction == "mean":
                        step.backward(F.cross_entropy(model(inputs), targets), reduction="mean")
                    else:
                        step.backward(loss, count=len(targets), reduction="sum")
                step.update()
        except StepError:
            optimizer.seen.append([torch.full((1,), -1.0, dtype=dtype)])
        results.append([torch.cat([g.reshape(-1) for g in step]) for step in optimizer.seen])
        batches.close()
    return results


def _worst(got: list[list[torch.Tensor]], want: list[list[torch.Tensor]]) -> float:
    worst = 0.0
    for ours, reference in zip(got, want, strict=True):
        assert len(ours) == len(reference)
        for g, r in zip(ours, reference, strict=True):
            assert g.shape == r.shape
            worst = max(worst, float((g - r).norm() / r.norm().clamp(min=1e-30)))
    return worst


CASES = [
    Case(37, 10, 3, "samples"),
    Case(37, 10, 10, "tokens"),
    Case(2, 8, 8, "samples"),
    Case(29, 13, 1, "samples"),
    Case(37, 10, 3, "samples", 1.0),
    Case(37, 10, 10, "tokens", 1.0),
    Case(37, 10, 3, "samples", reduction="mean"),
    Case(37, 10, 3, "tokens", reduction="mean"),
]


def _both(job: Any, seed: int) -> list[Any]:
    wide = _gradients(job, _random_cases(seed), torch.float64)
    return [wide, _gradients(job, CASES, torch.float32)]


@pytest.mark.parametrize("seed", [0, *[pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3)]])
def test_gradients_of_n_ranks_are_those_of_one(seed: int) -> None:
    wide, single = run_ranks(_both, seed, nproc=1)[0]
    for nproc in (2, 3, 4):
        for got in run_ranks(_both, seed, nproc=nproc):
            # Rounding alone: sums of at most 13 terms in another order.
            assert _worst(got[0], wide) <= 1e-12
            # Two steps' rounding in float32, and the second step starts from weights that differ by it.
            assert _worst(got[1], single) <= 1e-6


@pytest.mark.ci
def test_the_micro_batch_changes_nothing() -> None:
    todo = [
        Case(23, 7, micro, "samples", reduction=reduction)
        for micro in range(1, 8)
        for reduction in ("sum", "mean")
    ]
    with paceline.join() as job:
        runs = _gradients(job, todo, torch.float64)
    assert max(_worst([run], [runs[0]]) for run in runs) <= 1e-12


def _masked_mean(out: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (F.cross_entropy(out, y, reduction="none") * mask).sum() / mask.sum()


def _masked(job: Any, wrap: str, masked: list[int], micro_batch: int) -> list[float]:
    """Weights and losses of two steps whose loss is a mean over a mask, 0/0 for a masked micro-batch."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    model = paceline.fsdp(job, net) if wrap == "fsdp" else paceline.ddp(job, net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mask = torch.ones(10, dtype=torch.float64)
    mask[masked] = 0
    data = TensorDataset(*make_data(10, torch.float64).tensors, mask)
    batches = paceline.Batches(job, data, global_batch=5, micro_batch=micro_batch, shuffle=False)
    training = paceline.Training(job, model, optimizer, batches, count="tokens")
    losses = []
    for step in training.steps(epochs=1):
        for x, y, own_mask in step:
            loss = _masked_mean(model(x), y, own_mask)
            step.backward(loss, count=int(own_mask.sum()), reduction="mean")
        step.update()
        losses.append(float(step.loss))
    state = training.state_dict()["models"][0].values()
    weights = [w.full_tensor() if hasattr(w, "full_tensor") else w for w in state]
    return losses + torch.cat([w.reshape(-1) for w in weights]).tolist()


_MASKED_CASES = [
    (wrap, masked, micro_batch)
    for wrap in ("ddp", "fsdp")
    for masked, micro_batch in (([0], 2), ([0, 1, 5, 6], 2), ([4, 5], 1))
]


def _all_masked(job: Any) -> list[list[float]]:
    return [_masked(job, *case) for case in _MASKED_CASES]


@pytest.mark.ci
def test_padding_and_micro_batches_without_tokens_add_nothing_to_the_gradient() -> None:
    """Their loss is NaN, and so is its gradient."""
    one = run_ranks(_all_masked, nproc=1)[0]
    for nproc in (2, 3, 4):
        for ranks in run_ranks(_all_masked, nproc=nproc):
            for case, expected, got in zip(_MASKED_CASES, one, ranks, strict=True):
                # The ranks add the same numbers in another order.
                assert got == pytest.approx(expected, rel=1e-12), (nproc, case)


FORMS: dict[str, Any] = {
    "mean": F.cross_entropy,
    "scaled": lambda out, y: 1.0 * F.cross_entropy(out, y),
    "of a list": lambda out, y: torch.stack([F.cross_entropy(out, y)]).sum(),
    "by hand": lambda out, y: F.cross_entropy(out, y, reduction="none").sum() / len(y),
    "sum": lambda out, y: F.cross_entropy(out, y, reduction="sum"),
    "sum by hand": lambda out, y: F.cross_entropy(out, y, reduction="none").sum(),
}


def _with_form(job: Any, form: str, options: dict[str, Any]) -> list[float]:
    """The gradient of a ragged step, without its micro-batches' counts."""
    torch.manual_seed(1)
    model = paceline.ddp(job, nn.Linear(4, 3).double())
    optimizer = Recording(model.parameters())
    batches = paceline.Batches(job, make_data(11, torch.float64), global_batch=11, micro_batch=2)
    training = paceline.Training(job, model, optimizer, batches)
    for step in training.steps(epochs=1):
        for x, y in step:
            step.backward(FORMS[form](model(x), y), **options)
        step.update()
    return torch.cat([g.reshape(-1) for g in optimizer.seen[0] if g is not None]).tolist()


def _with_each_form(job: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"told": _with_form(job, "sum", {"reduction": "sum"})}
    for form in FORMS:
        try:
            found[form] = _with_form(job, form, {})
        except StepError:
            found[form] = "refused"
            job.check_loop_exit()
    return found


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_a_loss_is_a_mean_unless_the_user_says_otherwise(nproc: int) -> None:
    x, y = make_data(11, torch.float64).tensors
    torch.manual_seed(1)
    net = nn.Linear(4, 3).double()
    F.cross_entropy(net(x), y).backward()
    want = torch.cat([p.grad.reshape(-1) for p in net.parameters() if p.grad is not None]).tolist()
    for found in run_ranks(_with_each_form, nproc=nproc):
        assert found.pop("sum") == found.pop("sum by hand") == "refused"
        for form, got in found.items():
            assert got == pytest.approx(want, rel=1e-12), form
