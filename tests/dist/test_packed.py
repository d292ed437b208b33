"""Small gradients in shared memory are summed without DDP's reducer, with the result of DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_trainings import backwards, loss_sum, make_data, refusals, weights_of
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import TensorDataset

import paceline
from paceline.parallel.ddp import DDPStrategy
from paceline.parallel.packed import PackedStrategy
from paceline.testing import run_ranks


class Net(nn.Module):
    def __init__(self, width: int = 8, *, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(4, width)
        self.norm = nn.Linear(width, width).double()  # of another dtype than the rest
        self.last = nn.Linear(width, 3)
        self.table = nn.Embedding(3, 3, sparse=True) if sparse else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(torch.tanh(self.first(x)).double()).float()
        return self.last(hidden)


def _training(
    job: Any, model: nn.Module, *, micro_batch: int | None = None, **options: Any
) -> paceline.Training:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = paceline.Batches(job, make_data(), global_batch=6, micro_batch=micro_batch)
    return paceline.Training(job, model, optimizer, batches, **options)


def _run(training: paceline.Training) -> list[float]:
    for step in training.steps(until=8):
        backwards(training, step)
        step.update(clip_norm=1.0)
    return weights_of(*training.models)


def _both(job: Any, precision: str, count: str) -> tuple[list[float], list[float]]:
    options: dict[str, Any] = {"precision": precision, "count": count, "micro_batch": 1}
    packed = _training(job, paceline.ddp(job, Net()), **options)
    by_ddp = _training(job, paceline.ddp(job, Net(), bucket_mb=1), **options)
    weights = _run(packed), _run(by_ddp)
    assert (type(packed._context.strategy) is PackedStrategy) == (job.world_size > 1)
    assert (type(by_ddp._context.strategy) is DDPStrategy) == (job.world_size > 1)
    return weights


KINDS = (("fp32", "samples"), ("fp16", "tokens"))


def _both_of_each_kind(job: Any) -> list[tuple[list[float], list[float]]]:
    return [_both(job, *kind) for kind in KINDS]


@pytest.mark.parametrize("nproc", [1, 2, 3, 4])
def test_the_weights_are_those_of_ddp(nproc: int) -> None:
    for pairs in run_ranks(_both_of_each_kind, nproc=nproc):
        for packed, by_ddp in pairs:
            if nproc == 3:  # DDP divides by 3, and the loss was multiplied by it
                assert packed == pytest.approx(by_ddp, rel=1e-5, abs=1e-6)
            else:
                assert packed == by_ddp


def _hooked(job: Any) -> nn.Module:
    model: Any = paceline.ddp(job, Net())
    model.register_comm_hook(job.group, allreduce_hook)
    return model


CASES: dict[str, Any] = {
    "default": lambda job: paceline.ddp(job, Net()),
    "buckets": lambda job: paceline.ddp(job, Net(), bucket_mb=25.5),
    "static": lambda job: paceline.ddp(job, Net(), static_graph=True),
    "unused": lambda job: paceline.ddp(job, Net(), find_unused=True),
    "large": lambda job: paceline.ddp(job, Net(400)),
    "sparse": lambda job: paceline.ddp(job, Net(sparse=True), find_unused=True),
    "hooked": _hooked,
}


def _chosen(job: Any) -> dict[str, bool]:
    found = {}
    for name, make in CASES.items():
        strategy = _training(job, make(job))._context.strategy
        found[name] = type(strategy) is PackedStrategy
    return found


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_ddp_keeps_what_only_ddp_can_do(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_BACKEND", backend)
    for found in run_ranks(_chosen, nproc=2):
        assert found == {name: name == "default" and backend == "shm" for name in CASES}


def _hook_between_steps(job: Any) -> None:
    model: Any = paceline.ddp(job, Net())
    training = _training(job, model)
    for step in training.steps(until=3):
        backwards(training, step)
        step.update()
        if step.number == 1:
            model.register_comm_hook(job.group, allreduce_hook)


class Late(nn.Module):
    """Uses one of its layers in one micro-batch of a step alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.always, self.once = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.always(x) + (self.once(x) if bool(x[0, 0] > 100) else 0)


def _used_once(job: Any, at: int) -> list[float]:
    """Train with a layer that micro-batch `at` of three uses. Forwards between steps have no backward."""
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(3))
    x[:, 0] += 200 * (torch.arange(24) % 3 == at)
    data = TensorDataset(x / 200, x[:, 1:].argmax(1))
    model = paceline.ddp(job, Late())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = paceline.Batches(
        job, data, global_batch=3 * job.world_size, micro_batch=1, shuffle=False
    )
    training = paceline.Training(job, model, optimizer, batches)
    for step in training.steps(until=2):
        step.run(lambda batch: loss_sum(model, (200 * batch[0], batch[1])))
        step.update()
        model(x)
    return weights_of(model)


class Table(nn.Module):
    """An embedding that nobody recognises as a sparse one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(3, 3))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return F.embedding(rows, self.table, sparse=True)


def _sparse_gradient(job: Any) -> None:
    model = paceline.ddp(job, Table())
    for step in _training(job, model).steps(until=2):
        step.run(lambda batch: model(batch[1]).sum())
        step.update()


def _updated_in_the_loop(job: Any) -> None:
    models = [paceline.ddp(job, nn.Linear(4, 3)) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    batches = paceline.Batches(job, make_data(), global_batch=6)
    training = paceline.Training(job, models, optimizers, batches, count="tokens")
    for step in training.steps(until=1):
        for batch in step:
            for model, optimizer in zip(models, optimizers, strict=True):
                step.backward(loss_sum(model, batch), count=len(batch[1]), optimizer=optimizer)
                step.update(optimizer)


def _forwards(job: Any) -> list[str]:
    seen: list[str] = []
    model: Any = paceline.ddp(job, Net())
    model.register_forward_hook(lambda *_: seen.append("wrapper"))
    model.module.register_forward_hook(lambda *_: seen.append("module"))
    with model.no_sync():
        model(torch.zeros(2, 4)).sum().backward()
    return seen


WRONG: dict[str, tuple[Any, str, str]] = {
    "hook": (_hook_between_steps, "ConfigError", "training.steps"),
    "sparse": (_sparse_gradient, "GradientError", "bucket_mb"),
    "update": (_updated_in_the_loop, "StepError", "after that loop"),
}


def _each(job: Any) -> tuple[Any, ...]:
    errors = refusals(job, lambda job, kind: WRONG[kind][0](job), WRONG)
    return [_used_once(job, at) for at in (0, 2)], _forwards(job), errors


def test_hooks_sparse_gradients_and_layers_used_once() -> None:
    weights = []
    for used_once, forwards, errors in run_ranks(_each, nproc=2):
        weights.append(used_once)
        assert forwards == ["module", "wrapper"]
        for kind, (_, name, text) in WRONG.items():
            assert errors[kind][0] == name
            assert text in errors[kind][1]
    assert weights[0] == weights[1]
