"""Faults in the middle of a training: no hang and no silent divergence of the ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import ConfigError, GradientError, LossError, NonFinite, PeerFailed, StepError
from paceline.testing import run_failing_ranks, run_ranks


def _data(n: int = 28) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x[:, :3].argmax(1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(4, 8)
        self.last = nn.Linear(8, 3)
        self.aside = nn.Linear(8, 3)
        self.use_aside = True
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).tanh()
        out: torch.Tensor = self.last(hidden)
        return out + self.aside(hidden) if self.use_aside else out


def _training(job: Any, *, global_batch: int = 7, micro_batch: int = 2, **options: Any) -> Any:
    net = Net()
    if options.pop("frozen", False):
        net.aside.requires_grad_(False)
    model = paceline.ddp(job, net, static_graph=options.pop("static_graph", False))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    batches = paceline.Batches(job, _data(), global_batch=global_batch, micro_batch=micro_batch)
    return paceline.Training(job, model, optimizer, batches, **options)


def _backward(training: Any, step: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    step.backward(F.cross_entropy(training.models[0](x), y, reduction="sum"), count=len(y))


def _flat(training: Any) -> list[float]:
    model = paceline.unwrap(training.models[0])
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()


def _extra_forward(job: Any, where: str) -> list[float]:
    training = _training(job)
    model = training.models[0]
    for step in training.steps(epochs=2):
        for x, y in step:
            if where == "before":
                model(x)
            _backward(training, step, x, y)
            if where == "after":
                model(x).argmax(1)
        step.update()
        if where == "between":
            model(_data().tensors[0][:2])
    return _flat(training)


def _extra_forwards(job: Any) -> list[list[float]]:
    return [_extra_forward(job, where) for where in ("before", "after", "between", "nowhere")]


def test_extra_forwards_change_nothing() -> None:
    want = run_ranks(_extra_forward, "nowhere", nproc=1)[0]
    for rank in run_ranks(_extra_forwards, nproc=3):
        for got in rank:
            assert got == pytest.approx(want, rel=1e-10)


def _change(job: Any, kind: str) -> list[float]:
    training = _training(job, global_batch=4, frozen=kind == "unfreeze")
    net = paceline.unwrap(training.models[0])
    for step in training.steps(epochs=1):
        if step.number == 5:
            if kind == "unfreeze":
                net.aside.requires_grad_(True)
            elif kind == "freeze":
                net.aside.requires_grad_(False)
            elif kind == "unused":
                net.use_aside = False
            elif kind == "unused on rank 1":
                net.use_aside = job.rank != 1
            elif kind == "add":
                net.first.extra = nn.Parameter(torch.ones(1, dtype=torch.float64))
                optimizer = training.optimizers[0]
                optimizer.add_param_group({"params": [net.first.extra]})
        for x, y in step:
            loss = F.cross_entropy(training.models[0](x), y, reduction="sum")
            if kind == "add" and step.number >= 5:
                loss = loss * net.first.extra.sum()
            step.backward(loss, count=len(y))
        step.update()
    return _flat(training)


@pytest.mark.parametrize("kind", ["unfreeze", "freeze", "unused", "unused on rank 1", "add"])
def test_parameters_that_change_on_the_way_are_named_at_once(kind: str) -> None:
    outcomes = run_failing_ranks(_change, kind, nproc=3)
    named = [o.error for o in outcomes if isinstance(o.error, GradientError)]
    assert named, outcomes[0].text
    assert all(isinstance(o.error, (GradientError, PeerFailed)) for o in outcomes)
    assert any("aside" in p or "extra" in p for p in named[0].parameters)
    assert "step 5" in str(named[0])


def _alone(job: Any, kind: str) -> None:
    training = _training(job)
    try:
        for step in training.steps(epochs=5):
            for x, y in step:
                _backward(training, step, x, y)
            if step.number == 3 and job.rank == 1:
                if kind == "break":
                    break
                if kind == "exit":
                    raise SystemExit(0)
                raise ValueError("mine alone")
            step.update()
    except ValueError:
        return


@pytest.mark.parametrize("kind", ["break", "exit", "caught"])
def test_a_rank_that_leaves_in_mid_step_is_named_within_seconds(kind: str) -> None:
    outcomes = run_failing_ranks(_alone, kind, nproc=3, timeout_s=40, deadline_s=30)
    for outcome in outcomes:
        assert "rank 1 left the training loop after step 3" in str(outcome.error), outcome.text


def _loss_alone(job: Any) -> None:
    training = _training(job)
    for step in training.steps(epochs=2):
        for x, y in step:
            _backward(training, step, x, y)
        step.update()
        if job.rank == 0 and step.number == 2:
            float(step.loss)


def test_asking_for_the_loss_on_one_rank_is_named() -> None:
    outcomes = run_failing_ranks(_loss_alone, nproc=3)
    assert isinstance(outcomes[0].error, StepError)
    assert "ranks 1 and 2 did not ask for the loss of step 2" in str(outcomes[0].error)
    assert all(isinstance(o.error, PeerFailed) for o in outcomes[1:])


def _loss_before_update(job: Any) -> list[float]:
    training = _training(job, global_batch=2, micro_batch=1)
    losses = []
    for step in training.steps(until=6):
        for x, y in step:
            _backward(training, step, x, y)
        losses.append(float(step.loss))  # a rank has no sample here
        step.update()
    return losses


def test_the_loss_may_be_asked_for_before_the_update() -> None:
    want = run_ranks(_loss_before_update, nproc=1)[0]
    for got in run_ranks(_loss_before_update, nproc=3):
        assert got == pytest.approx(want, rel=1e-12)


def _stop_and_go_on(job: Any) -> tuple[int, int]:
    training = _training(job)
    for step in training.steps(epochs=1):
        for x, y in step:
            _backward(training, step, x, y)
        step.update()
        if step.ends_epoch:
            step.stop()
    first = training.number
    for step in training.steps(epochs=3):
        for x, y in step:
            _backward(training, step, x, y)
        step.update()
    return first, training.number


def test_a_stop_ends_one_loop_alone() -> None:
    assert run_ranks(_stop_and_go_on, nproc=2) == [(4, 12)] * 2


def _logged(job: Any, folder: str) -> None:
    training = _training(job)
    training.report(folder)
    seen = torch.zeros(())
    for step in training.steps(epochs=2):
        for x, y in step:
            _backward(training, step, x, y)
        step.update()
        seen += 1
        training.log(seen=seen, bad=float("nan"))


def test_logged_tensors_are_those_of_their_step(tmp_path: Path) -> None:
    run_ranks(_logged, str(tmp_path), nproc=2)
    lines = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["seen"] for line in lines] == list(range(1, 9))
    assert {line["bad"] for line in lines} == {"nan"}


def _refused(job: Any, kind: str) -> None:
    if kind == "static graph":
        _training(job, static_graph=True)
        return
    count = "tokens" if kind == "mean of tokens" else "samples"
    training = _training(job, count=count)
    for step in training.steps(until=3):
        for x, y in step:
            if kind == "mean of tokens":
                loss = F.cross_entropy(training.models[0](x), y)
                step.backward(loss, count=(y >= 0).sum())
            elif kind == "mean and a penalty":
                loss = F.cross_entropy(training.models[0](x), y) + 0.0 * x.sum()
                step.backward(loss, count=len(y))
            else:
                _backward(training, step, x, y)
            if kind == "twice":
                _backward(training, step, x, y)
        step.update(clip_norm={"negative bound": -1.0, "bound of 0": 0.0}.get(kind))
        if kind.startswith("log "):
            values = {"text": "a", "none": None, "vector": torch.ones(2)}
            training.log(value=values[kind[4:]])
        if kind == "own name":
            training.log(step=1)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("mean of tokens", LossError),
        ("mean and a penalty", LossError),
        ("twice", StepError),
        ("negative bound", ConfigError),
        ("bound of 0", ConfigError),
        ("log text", ConfigError),
        ("log none", ConfigError),
        ("log vector", ConfigError),
        ("own name", ConfigError),
        ("static graph", ConfigError),
    ],
)
def test_wrong_use_is_refused_on_all_ranks(kind: str, error: type[Exception]) -> None:
    for outcome in run_failing_ranks(_refused, kind, nproc=2):
        assert isinstance(outcome.error, (error, PeerFailed)), outcome.text
        if isinstance(outcome.error, PeerFailed):
            assert error.__name__ in outcome.error.what


def _nan_at_the_end(job: Any) -> None:
    training = _training(job)
    for step in training.steps(until=3):
        for x, y in step:
            loss = F.cross_entropy(training.models[0](x), y, reduction="sum")
            if step.number == 3:
                weight = paceline.unwrap(training.models[0]).last.weight
                loss = loss + (weight * 0).abs().sqrt().sum()  # finite, with a gradient of NaN
            step.backward(loss, count=len(y))
        step.update()


@pytest.mark.parametrize("nproc", [1, 3])
def test_a_nan_gradient_of_the_last_step_is_found(nproc: int) -> None:
    for outcome in run_failing_ranks(_nan_at_the_end, nproc=nproc):
        assert isinstance(outcome.error, NonFinite), outcome.text
