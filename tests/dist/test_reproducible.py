"""`reproducible=True`: one sha256 of weights, optimizer state and losses on 1, 2, 3, 4 and 8 processes."""

from __future__ import annotations

import copy
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_trainings import loss_sum, refusals, weights_of
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import IterableDataset, TensorDataset

import paceline
from paceline.errors import CheckpointError
from paceline.parallel.exact import ExactSum
from paceline.testing import digest, run_failing_ranks, run_ranks

WORLDS = (1, 2, 3, 4, 8)


def _data() -> TensorDataset:
    # 6 features, so that samples begin at addresses of any alignment.
    x = torch.randn(62, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :3].argmax(1))


def _net(*, batchnorm: bool, momentum: float | None = 0.1) -> nn.Module:
    norm = [nn.BatchNorm1d(24, momentum=momentum)] if batchnorm else []
    return nn.Sequential(nn.Linear(6, 24), *norm, nn.Tanh(), nn.Dropout(0.3), nn.Linear(24, 3))


def _training(job: Any, setting: dict[str, Any], **options: Any) -> paceline.Training:
    torch.manual_seed(0)
    net = _net(batchnorm=setting.get("batchnorm", True), momentum=setting.get("momentum", 0.1))
    model = paceline.ddp(job, net)
    optimizer: torch.optim.Optimizer
    if setting.get("optimizer") == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = paceline.Batches(
        job,
        _data(),
        global_batch=22,  # 62 samples: the last step of an epoch has 18
        micro_batch=setting.get("micro_batch", 4),
        workers=setting.get("workers", 0),
    )
    return paceline.Training(
        job,
        model,
        optimizer,
        batches,
        precision=setting.get("precision", "fp32"),
        count=setting.get("count", "samples"),
        reproducible=True,
        **options,
    )


def _loop(
    training: paceline.Training, *, grow: float = 1.0, forwards: bool = False, **how: Any
) -> list[float]:
    losses = []
    for step in training.steps(**how):
        for x, y in step:
            loss = loss_sum(training.models[0], (x, y))
            step.backward(loss * (grow if step.number == 4 else 1.0), count=len(y), reduction="sum")
        step.update(clip_norm=1.0)
        losses.append(float(step.loss))
        if forwards:
            training.models[0](_data().tensors[0])
    return losses


def _digests(training: paceline.Training, losses: list[float]) -> dict[str, str]:
    optimizer = training.optimizers[0]
    return {
        "weights": digest(paceline.unwrap(training.models[0]).state_dict()),
        "optimizer": digest(optimizer.state_dict()),
        "losses": digest(losses),
    }


def _train(job: Any, setting: dict[str, Any]) -> dict[str, str]:
    training = _training(job, setting)
    forwards = setting.get("forwards", False)
    losses = _loop(training, epochs=2, grow=setting.get("grow", 1.0), forwards=forwards)
    return _digests(training, losses)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"optimizer": "sgd", "batchnorm": False, "micro_batch": 5},
    {"precision": "bf16"},
    {"precision": "fp16"},
    {"count": "tokens"},
    {"momentum": None},
    {"micro_batch": 22},
    {"batchnorm": False, "forwards": True},  # without a backward, between steps
    {"grow": 1e6},  # a gradient larger than its scale allows: the step is repeated
]


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
    found: dict[str, Any] = {str(setting): _train(job, setting) for setting in SETTINGS}
    if job.world_size < 4:
        assert _by_trainer(job) == found["{}"]["weights"]
    if job.world_size == 2:
        assert _train(job, {"workers": 2}) == found["{}"]
    return found


def test_the_same_bits_on_any_number_of_processes() -> None:
    found = [rank for nproc in WORLDS for rank in run_ranks(_train_all, nproc=nproc)]
    for setting in map(str, SETTINGS):
        assert all(rank[setting] == found[0][setting] for rank in found), setting
    assert run_ranks(_train, {}, nproc=1, seed=1) != [found[0]["{}"]]


def _changing(job: Any, folder: str, until: int) -> dict[str, str]:
    checkpoints = paceline.Checkpoints(folder, every_steps=1)
    training = _training(job, {}, checkpoints=checkpoints)
    losses = _loop(training, until=until)
    return _digests(training, losses[-1:])


def test_the_number_of_processes_may_change_on_the_way(tmp_path: Path) -> None:
    want = run_ranks(_changing, str(tmp_path / "a"), 6, nproc=1)[0]
    for nproc, until in ((3, 1), (2, 3), (4, 5), (1, 6)):
        got = run_ranks(_changing, str(tmp_path / "b"), until, nproc=nproc)[0]
    assert got == want


def _redone(job: Any) -> list[int]:
    """How often each step's micro-batches were asked for."""
    training = _training(job, {"micro_batch": 11})
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
    training = _training(job, {"micro_batch": 11})
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


@pytest.mark.parametrize("nproc", [1, 2, 3])
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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = _data().tensors
    batches = paceline.Batches(job, TensorDataset(x.double(), y), global_batch=22, micro_batch=4)
    training = paceline.Training(job, model, optimizer, batches, reproducible=reproducible)
    _loop(training, epochs=2)
    return weights_of(model)


def test_it_is_the_same_training_but_for_rounding() -> None:
    # One process: the micro-batches are the same then, and so is dropout.
    with paceline.join() as job:
        normal, exact = (_close_to_normal(job, r) for r in (False, True))
    # Whole numbers of 45 bits stand for gradients of 53.
    assert exact == pytest.approx(normal, rel=1e-9)


def _restores(job: Any) -> tuple[bool, bool, int]:
    torch.set_num_threads(2)
    training = _training(job, {})
    _loop(training, until=2)
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
        each
        for nproc in (1, 2, 3, 4)
        for each in run_ranks(_grow_the_trained_set, True, nproc=nproc)
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
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-5, eps=1e-30)
    batches = paceline.Batches(job, _data(), global_batch=22, micro_batch=4)
    training = paceline.Training(job, net, optimizer, batches, reproducible=True)
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


def test_what_was_pinned_is_given_back() -> None:
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
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = paceline.Batches(job, _data(), global_batch=16, micro_batch=4)
        training = paceline.Training(job, model, optimizer, batches, reproducible=True)
        _loop(training, until=2)
    assert model.norm.num_batches_tracked == 2 * 4


def _refused(job: Any, kind: str) -> None:
    model: nn.Module = _net(batchnorm=True)
    if "buffer" in kind:
        model = _Counting(in_place=kind == "buffer")
    if kind == "norm twice":
        model = _Twice()
    if kind == "sparse":
        model = nn.Embedding(4, 3, sparse=True)
    if kind == "threads":
        os.environ["PACELINE_REPRODUCIBLE_THREADS"] = "two"
    if kind == "syncbn":
        model = paceline.sync_batchnorm(job, model)
    if kind == "nan":
        model = _net(batchnorm=False)
    model = paceline.ddp(job, model)
    data: Any = _Numbers() if kind == "stream" else _data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = paceline.Batches(job, data, global_batch=8, micro_batch=4)
    try:
        training = paceline.Training(job, model, optimizer, batches, reproducible=True)
    finally:
        os.environ.pop("PACELINE_REPRODUCIBLE_THREADS", None)
    if kind == "update in the loop":
        for step in training.steps(until=1):
            for batch in step:
                step.backward(loss_sum(model, batch), count=len(batch[0]), reduction="sum")
                step.update()
    _loop(training, grow=math.nan if kind == "nan" and job.rank == 0 else 1.0, until=5)


WRONG = {
    "update in the loop": "StepError",
    "sparse": "ConfigError",
    "stream": "ConfigError",
    "syncbn": "ConfigError",
    "buffer": "ConfigError",
    "assigned buffer": "ConfigError",
    "norm twice": "ConfigError",
    "threads": "ConfigError",
    "nan": "NonFinite",
}


def test_what_cannot_be_reproducible_is_refused_on_all_ranks() -> None:
    for found in run_ranks(refusals, _refused, list(WRONG), nproc=2):
        assert {kind: name for kind, (name, _) in found.items()} == WRONG
        assert "changes the buffer 'calls'" in found["assigned buffer"][1]
        assert "layer 'norm' ran 2 times in one micro-batch" in found["norm twice"][1]
        assert "got 'two'" in found["threads"][1]


def _saves(job: Any, folder: str) -> None:
    _loop(_training(job, {}, checkpoints=paceline.Checkpoints(folder)), until=1)


def _resumes_normally(job: Any, folder: str) -> None:
    model = paceline.ddp(job, _net(batchnorm=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = paceline.Batches(job, _data(), global_batch=22, micro_batch=4)
    checkpoints = paceline.Checkpoints(folder)
    _loop(paceline.Training(job, model, optimizer, batches, checkpoints=checkpoints), until=2)


def test_a_checkpoint_of_the_other_mode_is_refused(tmp_path: Path) -> None:
    run_ranks(_saves, str(tmp_path), nproc=1)
    for outcome in run_failing_ranks(_resumes_normally, str(tmp_path), nproc=2):
        assert isinstance(outcome.error, CheckpointError)
