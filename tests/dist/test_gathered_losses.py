"""Losses over the rows of all ranks, gathered with `job.all_gather`: any number of ranks agrees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_trainings import check_messages, refusals
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.testing import run_ranks

SAMPLES, GLOBAL_BATCH, STEPS = (
    22,
    7,
    8,
)  # the last step of an epoch has 1 sample: others get padding


def _net() -> nn.Module:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).double()
    net.register_buffer("center", torch.zeros(8, dtype=torch.float64))
    return net


def _data() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(SAMPLES, 8, generator=generator, dtype=torch.float64))


def _clip_loss(f: torch.Tensor, g: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over rows `f` of the contrastive loss against rows `g`."""
    (i, t), (gi, gt) = f.chunk(2, dim=1), g.chunk(2, dim=1)
    return (F.cross_entropy(9 * i @ gt.T, labels) + F.cross_entropy(9 * t @ gi.T, labels)) / 2


def _over_all_rows(job: Any, f: torch.Tensor) -> torch.Tensor:
    g = job.all_gather(f)
    return _clip_loss(g, g, torch.arange(len(g)))


def _one_way(job: Any, f: torch.Tensor) -> torch.Tensor:
    i, t = job.all_gather(f).chunk(2, dim=1)
    return F.cross_entropy(9 * i @ t.T, torch.arange(len(i)))


def _over_own_rows(job: Any, f: torch.Tensor) -> torch.Tensor:
    ranks = job.all_gather(torch.full((len(f),), job.data.rank))
    first = (ranks == job.data.rank).int().argmax()
    return _clip_loss(f, job.all_gather(f), first + torch.arange(len(f)))


FORMS = {"all rows": _over_all_rows, "one way": _one_way, "own rows": _over_own_rows}


def _centered(job: Any, f: torch.Tensor, net: Any) -> torch.Tensor:
    """As DINO: a loss of single samples, with a center that follows the mean of all samples."""
    loss = F.cross_entropy(f, F.softmax(f.detach() - net.center, dim=1))
    net.center.mul_(0.9).add_(job.all_gather(f.detach()).mean(0), alpha=0.1)
    return loss


def _trained(job: Any, wrap: str, form: str) -> list[float]:
    net = _net()
    model = paceline.ddp(job, net) if wrap == "ddp" else paceline.fsdp(job, net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batches = paceline.Batches(job, _data(), global_batch=GLOBAL_BATCH)
    training = paceline.Training(job, model, optimizer, batches)
    found = []
    for step in training.steps(until=STEPS):
        for (x,) in step:
            f = F.normalize(model(x))
            if form == "center":
                loss = _centered(job, f, net)
            else:
                loss = FORMS[form](job, f)
            step.backward(loss)
        step.update()
        found.append(float(step.loss))
    for _, value in training._context.strategy.whole_state(model):
        found += value.reshape(-1).tolist()
    return found


def _every_form(job: Any) -> dict[str, list[float]]:
    found = {form: _trained(job, "ddp", form) for form in [*FORMS, "center"]}
    if job.world_size > 1:
        found["fsdp"] = _trained(job, "fsdp", "own rows")
    return found


def test_one_two_and_three_ranks_agree() -> None:
    one, *others = [run_ranks(_every_form, nproc=nproc) for nproc in (1, 2, 3)]
    want = {**one[0], "fsdp": one[0]["own rows"]}
    assert want["own rows"] == pytest.approx(want["all rows"], rel=1e-12)
    for ranks in others:
        for found in ranks:
            for form, values in found.items():
                assert values == pytest.approx(want[form], rel=1e-10, abs=1e-12), form


def _nan_on_padding(job: Any) -> None:
    """A padding micro-batch whose loss is NaN gives the other ranks no gradient."""
    model = paceline.ddp(job, _net())
    batches = paceline.Batches(job, _data(), global_batch=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in paceline.Training(job, model, optimizer, batches).steps(until=2):
        for (x,) in step:
            g = job.all_gather(model(x))
            assert len(g) == (2 if step.is_padding else 1)
            step.backward(g.square().mean() * (torch.nan if step.is_padding else 1.0))
        assert all(bool(p.grad.isfinite().all()) for p in model.parameters())
        step.update()


def test_padding_gives_other_ranks_no_nan() -> None:
    run_ranks(_nan_on_padding, nproc=2)


def _kinds(job: Any) -> None:
    """Outside of a training, tensors of other dtypes and dimensions, and ranks without a row."""
    rows = [0, 2, 1][: job.world_size]
    own = rows[job.rank]
    for dtype in (torch.int64, torch.float32, torch.bfloat16, torch.bool):
        found = job.all_gather(torch.full((own, 2, 3), job.rank, dtype=dtype))
        assert found.shape == (sum(rows), 2, 3)
        assert found.dtype == dtype
        assert found[:, 0, 0].int().tolist() == [
            min(r, 1) if dtype is torch.bool else r for r, n in enumerate(rows) for _ in range(n)
        ]
    assert job.all_gather(torch.ones(0, 4)).shape == (0, 4)
    x = torch.ones(own, requires_grad=True)
    ((job.rank + 1) * job.all_gather(x)).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [float(sum(range(1, job.world_size + 1)))] * own


def test_dtypes_dimensions_and_ranks_without_rows() -> None:
    run_ranks(_kinds, nproc=3)


def _wrong(job: Any, kind: str) -> None:
    if kind == "several micro-batches":
        model = paceline.ddp(job, _net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = paceline.Batches(job, _data(), global_batch=8, micro_batch=2)
        for step in paceline.Training(job, model, optimizer, batches).steps(until=1):
            for (x,) in step:
                step.backward(_over_all_rows(job, model(x)))
    tensors = {
        "other row": torch.ones(2, 3 + job.rank),
        "other dtype": torch.ones(2, dtype=[torch.half, torch.float][job.rank]),
        "no gradient on a rank": torch.ones(2, requires_grad=job.rank == 0),
    }
    job.all_gather(tensors[kind])


WRONG = ["several micro-batches", "other row", "other dtype", "no gradient on a rank"]


def test_refusals() -> None:
    check_messages("gathered", run_ranks(refusals, _wrong, WRONG, nproc=2))
