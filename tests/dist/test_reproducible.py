"""`reproducible=True`: one sha256 of weights, optimizer state and losses on 1, 2, 3, 4 and 8 processes."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_trainings import (
    check_messages,
    loss_sum,
    make_training,
    refusals,
    train,
    weights_of,
)
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import IterableDataset, TensorDataset

import paceline
from paceline.errors import CheckpointError
from paceline.parallel.exact import ExactSum
from paceline.testing import digest, run_failing_ranks, run_ranks


def _data() -> TensorDataset:
    # 6 features, so that samples begin at addresses of any alignment.
    x = torch.randn(62, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :3].argmax(1))


def _net(*, batchnorm: bool, momentum: float | None = 0.1) -> nn.Module:
    norm = [nn.BatchNorm1d(24, momentum=momentum)] if batchnorm else []
    return nn.Sequential(nn.Linear(6, 24), *norm, nn.Tanh(), nn.Dropout(0.3), nn.Linear(24, 3))


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def _training(
    job: Any, *, batchnorm: bool = True, momentum: float | None = 0.1, **options: Any
) -> paceline.Training:
    torch.manual_seed(0)
    model = paceline.ddp(job, _net(batchnorm=batchnorm, momentum=momentum))
    # 62 samples: the last step of an epoch has 18.
    options = {"optimizer": _adamw, "micro_batch": 4, "reproducible": True, **options}
    return make_training(job, model, _data(), global_batch=22, **options)


def _loop(training: Any, until: int, *, grow: float = 1.0, forwards: bool = False) -> list[float]:
    model, losses = training.models[0], []
    for step in training.steps(until=until):
        factor = grow if step.number == 4 else 1.0
        step.run(
            lambda batch, factor=factor: (factor * loss_sum(model, batch), len(batch[1])),
            reduction="sum",
        )
        step.update(clip_norm=1.0)
        losses.append(float(step.loss))
        if forwards:
            model(_data().tensors[0])
    return losses


def _digests(training: paceline.Training, losses: list[float]) -> dict[str, str]:
    return {
        "weights": digest(paceline.unwrap(training.models[0]).state_dict()),
        "optimizer": digest(training.optimizers[0].state_dict()),
        "losses": digest(losses),
    }


def _train(
    job: Any, *, grow: float = 1.0, forwards: bool = False, **setting: Any
) -> dict[str, str]:
    training = _training(job, **setting)
    return _digests(training, _loop(training, 6, grow=grow, forwards=forwards))


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {
        "optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        "batchnorm": False,
        "micro_batch": 5,
    },
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "tokens": {"count": "tokens"},
    "average of statistics": {"momentum": None},
    "one micro-batch": {"micro_batch": 22},
    "forwards between steps": {"batchnorm": False, "forwards": True},  # without a backward
    "a repeated step": {"grow": 1e6},  # a gradient larger than its scale allows
}


def _by_trainer(job: Any) -> str:
    trainer = paceline.Trainer(
        lambda: torch.manual_seed(0) and _net(batchnorm=True),
        F.cross_entropy,
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        _data(),
        global_batch=22,
        micro_batch=4,
        reproducible=True,
    )
    return digest(trainer.fit(2, clip_norm=1.0).model.state_dict())


def _train_all(job: Any) -> dict[str, Any]:
    found = {name: _train(job, **setting) for name, setting in SETTINGS.items()}
    if job.world_size < 3:
        assert _by_trainer(job) == found["plain"]["weights"]
    return found


@pytest.mark.parametrize("worlds", [(1, 2, 4), pytest.param((1, 3, 8), marks=pytest.mark.ci)])
def test_the_same_bits_on_any_number_of_processes(worlds: tuple[int, ...]) -> None:
    first, *others = [rank for nproc in worlds for rank in run_ranks(_train_all, nproc=nproc)]
    assert all(other == first for other in others)
    assert run_ranks(_train, nproc=1, seed=1) != [first["plain"]]


def _changing(job: Any, folder: Path, until: int) -> dict[str, str]:
    training = _training(job, checkpoints=paceline.Checkpoints(folder, every_steps=1))
    return _digests(training, _loop(training, until)[-1:])


def test_the_number_of_processes_may_change_on_the_way(tmp_path: Path) -> None:
    want = run_ranks(_changing, tmp_path / "a", 6, nproc=1)[0]
    for nproc, until in ((3, 1), (2, 4), (1, 6)):
        got = run_ranks(_changing, tmp_path / "b", until, nproc=nproc)[0]
    assert got == want


def _redone(job: Any) -> list[int]:
    """How often each step's micro-batches were asked for."""
    training = _training(job, micro_batch=11)
    asked = []
    for step in training.steps(until=5):
        asked.append(0)
        for x, y in step:
            asked[-1] += 1
            loss = loss_sum(training.models[0], (x, y))
            step.backward(loss * (1e6 if step.number == 3 else 1), count=len(y), reduction="sum")
        step.update()
    return asked


def test_a_step_that_outgrows_what_was_foreseen_is_done_again() -> None:
    # Two micro-batches a step. The first is always run twice: nothing is foreseen yet. The third
    # step's gradients are 2^20 times larger.
    with paceline.join() as job:
        assert _redone(job) == [4, 2, 4, 2, 2]


def _scaled_in_place(job: Any, in_place: bool) -> list[float]:
    training = _training(job, micro_batch=11)
    losses = []
    for step in training.steps(until=3):
        for x, y in step:
            x = x.mul_(0.5) if in_place else x * 0.5
            step.backward(loss_sum(training.models[0], (x, y)), count=len(y), reduction="sum")
        step.update()
        losses.append(float(step.loss))
    return losses


def test_a_loop_may_change_its_batches_in_place() -> None:
    # The data itself are read by index, so that only the repetition of the first step shows.
    with paceline.join() as job:
        assert _scaled_in_place(job, True) == _scaled_in_place(job, False)


def _sum_of_small_gradients(job: Any) -> list[list[float]]:
    sums = []
    for dtype, values in SMALL.items():
        p = nn.Parameter(torch.zeros(2, dtype=dtype))
        total = ExactSum(job, [p], most_micro_batches=job.world_size)
        for gradient in (torch.ones(2, dtype=dtype), torch.tensor(values, dtype=dtype)):
            while True:
                total.begin()
                p.grad = gradient.clone()
                total.add()
                if total.all_fitted():
                    break
            total.finish()
        assert p.grad is not None
        sums.append((p.grad.double() / job.world_size).tolist())
    return sums


# Values that overflow in their own type if they are scaled to integers.
SMALL = {
    torch.float32: [3e-25, 1e-24],
    torch.float16: [0.5, 0.25],
    torch.bfloat16: [0.5, 0.25],
}


@pytest.mark.parametrize("nproc", [1, 3])
def test_gradients_of_every_type_and_size_are_summed(nproc: int) -> None:
    for sums in run_ranks(_sum_of_small_gradients, nproc=nproc):
        for got, want in zip(sums, SMALL.values(), strict=True):
            assert got == pytest.approx(want, rel=1e-3, abs=0)


def test_a_gradient_of_zeros_is_a_gradient() -> None:
    with paceline.join() as job:
        used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        total = ExactSum(job, [used, unused], most_micro_batches=1)
        for _ in range(2):
            total.begin()
            used.grad = torch.zeros(2)
            total.add()
            fitted = total.all_fitted()
        total.finish()
    assert fitted
    assert used.grad is not None
    assert not used.grad.any()
    assert unused.grad is None


def _close_to_normal(job: Any, reproducible: bool) -> list[float]:
    torch.manual_seed(0)
    model = paceline.ddp(job, _net(batchnorm=False).double())
    x, y = _data().tensors
    data = TensorDataset(x.double(), y)
    training = make_training(
        job, model, data, global_batch=22, micro_batch=4, reproducible=reproducible
    )
    train(training, until=6, clip_norm=1.0)
    return weights_of(model)


def test_it_is_the_same_training_but_for_rounding() -> None:
    # One process: the micro-batches are the same then, and so is dropout.
    with paceline.join() as job:
        normal, exact = (_close_to_normal(job, r) for r in (False, True))
    # Whole numbers of 45 bits stand for gradients of 53.
    assert exact == pytest.approx(normal, rel=1e-9)


def _restores(job: Any) -> tuple[bool, bool, int]:
    torch.set_num_threads(2)
    _loop(_training(job), 2)
    inside = torch.are_deterministic_algorithms_enabled()
    job.leave()
    return inside, torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()


def _grow_the_trained_set(job: Any, reproducible: bool) -> tuple[str, list[float], int]:
    """Unfreeze the first layer, add the last one, and let BatchNorm learn, all after some steps."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    model = paceline.ddp(job, net, find_unused=True)
    net[0].requires_grad_(False)
    net[3].requires_grad_(False)
    optimizer = torch.optim.SGD([*net[0].parameters(), *net[1].parameters()], lr=0.1)
    batches = paceline.Batches(job, _data(), global_batch=22, micro_batch=4)
    training = paceline.Training(job, model, optimizer, batches, reproducible=reproducible)
    net.eval()
    for step in training.steps(until=6):
        if step.number == 3:
            net[0].requires_grad_(True)
        if step.number == 5:
            net[3].requires_grad_(True)
            optimizer.add_param_group({"params": list(net[3].parameters())})
        for batch in step:
            if step.number > 1:
                net.train()
            step.backward(loss_sum(model, batch), count=len(batch[1]), reduction="sum")
        step.update()
    state = net.state_dict()
    return digest(state), state["0.weight"].flatten().tolist(), int(net[1].num_batches_tracked)


def test_parameters_and_batchnorms_that_are_trained_later_count() -> None:
    (plain,) = run_ranks(_grow_the_trained_set, False, nproc=1)
    ends = [
        each for nproc in (1, 3) for each in run_ranks(_grow_the_trained_set, True, nproc=nproc)
    ]
    assert {end[0] for end in ends} == {ends[0][0]}
    torch.testing.assert_close(ends[0][1], plain[1])
    assert ends[0][2] == plain[2] > 0


class _Unequal(nn.Module):
    """Two weights of one shape, and an empty one. Gradients of the second have some elements near 0."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(6, 6, bias=False) for _ in range(2))
        self.empty = nn.Parameter(torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sizes = torch.logspace(0, -14, 6)
        out: torch.Tensor = (1e4 * self.first(x) + self.second(x * sizes))[:, :3]
        return out + self.empty.sum()


def _thaws(job: Any, begin: int, end: int, state: Any, first: range, second: range) -> Any:
    """Steps `begin + 1` to `end`, in which the weights are trained in these ranges of steps."""
    torch.manual_seed(0)
    net = _Unequal()

    def freeze(number: int) -> None:
        net.first.requires_grad_(number in first)
        net.second.requires_grad_(number in second)

    freeze(begin + 1)
    adam = partial(torch.optim.Adam, lr=1e-5, eps=1e-30)
    training = make_training(
        job, net, _data(), optimizer=adam, global_batch=22, micro_batch=4, reproducible=True
    )
    if state is not None:
        training.load_state_dict(state)
    for step in training.steps(until=end):
        freeze(step.number)
        step.run(lambda batch: loss_sum(net, batch), reduction="sum")
        step.update()
    return training.state_dict()


@pytest.mark.parametrize(
    ("first", "second"),
    [(range(1, 4), range(4, 7)), (range(1, 3), range(1, 7)), (range(1, 7), range(2, 3))],
)
def test_a_resume_around_frozen_parameters_is_bit_equal(first: range, second: range) -> None:
    with paceline.join() as job:
        straight = _thaws(job, 0, 6, None, first, second)
        half = copy.deepcopy(_thaws(job, 0, 2, None, first, second))
        resumed = _thaws(job, 2, 6, half, first, second)
        assert digest(resumed) == digest(straight)


def test_threads_and_determinism_are_restored() -> None:
    assert run_ranks(_restores, nproc=2) == [(True, False, 2)] * 2


class _Numbers(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter((torch.zeros(6), 0) for _ in range(8))


class _Counting(nn.Module):
    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.in_place = in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_place:
            self.calls += 1
        else:
            self.calls = self.calls + 1
        out: torch.Tensor = self.linear(x)
        return out


class _Twice(nn.Module):
    """Normalises two inputs with one layer, as a siamese net does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(self.norm(x)) - self.linear(self.norm(x + 10))
        return out


class _Recomputing(nn.Module):
    """Runs its norm again in the backward, as activation checkpointing does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normal = checkpoint(self.norm, x, use_reentrant=False)
        out: torch.Tensor = self.linear(normal)
        return out


def test_a_batchnorm_that_runs_again_in_the_backward_counts_once() -> None:
    model = _Recomputing()
    with paceline.join() as job:
        training = make_training(
            job, model, _data(), global_batch=16, micro_batch=4, reproducible=True
        )
        train(training, until=2)
    assert model.norm.num_batches_tracked == 2 * 4


def _exact(job: Any, net: nn.Module, data: Any = None, *, bad_rank: int = -1) -> None:
    training = make_training(
        job,
        paceline.ddp(job, net),
        data or _data(),
        global_batch=8,
        micro_batch=4,
        reproducible=True,
    )
    factor = math.nan if job.rank == bad_rank else 1.0
    train(training, lambda model, batch: factor * loss_sum(model, batch), until=3)


def _update_in_the_loop(job: Any) -> None:
    training = _training(job)
    for step in training.steps(until=1):
        for batch in step:
            step.backward(loss_sum(training.models[0], batch), count=len(batch[0]), reduction="sum")
            step.update()


def _wrong_threads(job: Any) -> None:
    os.environ["PACELINE_REPRODUCIBLE_THREADS"] = "two"
    try:
        _training(job)
    finally:
        os.environ.pop("PACELINE_REPRODUCIBLE_THREADS")


WRONG: dict[str, Callable[[Any], Any]] = {
    "update in the loop": _update_in_the_loop,
    "sparse": lambda job: _exact(job, nn.Embedding(4, 3, sparse=True)),
    "stream": lambda job: _exact(job, _net(batchnorm=False), _Numbers()),
    "syncbn": lambda job: _exact(job, paceline.sync_batchnorm(job, _net(batchnorm=True))),
    "buffer": lambda job: _exact(job, _Counting(in_place=True)),
    "assigned buffer": lambda job: _exact(job, _Counting(in_place=False)),
    "norm twice": lambda job: _exact(job, _Twice()),
    "threads": _wrong_threads,
    "nan": lambda job: _exact(job, _net(batchnorm=False), bad_rank=0),
}


def _wrong(job: Any, kind: str) -> None:
    WRONG[kind](job)


def test_what_cannot_be_reproducible_is_refused_on_all_ranks() -> None:
    check_messages("reproducible", run_ranks(refusals, _wrong, list(WRONG), nproc=2))


def _in_the_other_mode(job: Any, folder: Path) -> None:
    checkpoints = paceline.Checkpoints(folder)
    _loop(_training(job, checkpoints=checkpoints, reproducible=False), 2)


def test_a_checkpoint_of_the_other_mode_is_refused(tmp_path: Path) -> None:
    run_ranks(_changing, tmp_path, 1, nproc=1)
    for outcome in run_failing_ranks(_in_the_other_mode, tmp_path, nproc=2):
        assert isinstance(outcome.error, CheckpointError)
