"""Replicas that drift apart are found, named, and never saved; those that do not are left in peace."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import ConfigError, Desync
from paceline.testing import run_failing_ranks, run_ranks
from paceline.training.desync import _FIRST_STEPS, _MAX_TIME_SHARE, _sum


def _training(job: Any, **options: Any) -> Any:
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(3))
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    net[1].register_buffer("seen", torch.zeros(3, dtype=torch.int32))
    model = paceline.ddp(job, net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    batches = paceline.Batches(job, TensorDataset(x, x[:, :3].argmax(1)), global_batch=8)
    return paceline.Training(job, model, optimizer, batches, **options)


def _train(job: Any, training: Any, steps: int, tamper: dict[str, Any] | None = None) -> Any:
    """Train; in step `tamper["step"]` change a bit on `tamper["ranks"]`."""
    for step in training.steps(until=steps):
        for x, y in step:
            step.backward(F.cross_entropy(training.models[0](x), y, reduction="sum"), count=len(y))
        step.update()
        if tamper and step.number == tamper["step"] and job.rank in tamper["ranks"]:
            _flip(training, tamper["what"])
    return training


def _flip(training: Any, what: str) -> None:
    if what == "random":
        random.random()
        return
    if what == "numpy.random":
        np.random.rand()
        return
    if what == "buffer":
        paceline.unwrap(training.models[0])[1].seen.view(-1)[2] ^= 1
        return
    net = paceline.unwrap(training.models[0])
    weight = net[2].weight
    tensor = weight if what == "weight" else training.optimizers[0].state[weight][what]
    # The least significant bit: less than any tolerance would see.
    tensor.detach().view(-1).view(torch.int32)[5] ^= 1


def _drift(job: Any, tamper: dict[str, Any], options: dict[str, Any]) -> None:
    training = _training(job, **options)
    _train(job, training, 12, tamper)


def _errors(nproc: int, tamper: dict[str, Any], **options: Any) -> list[Desync]:
    outcomes = run_failing_ranks(_drift, tamper, options, nproc=nproc)
    errors = [outcome.error for outcome in outcomes]
    assert all(isinstance(error, Desync) for error in errors), errors
    return errors  # type: ignore[return-value]


@pytest.mark.parametrize(("nproc", "rank"), [(3, 2), (4, 1)])
def test_a_bit_on_one_rank_is_found_by_majority(nproc: int, rank: int) -> None:
    tamper = {"step": 5, "ranks": [rank], "what": "weight"}
    for error in _errors(nproc, tamper, desync_every=2):
        assert (error.parameter, error.ranks, error.since, error.step) == ("2.weight", [rank], 4, 6)
        assert str(error).startswith(
            f"rank {rank} of {nproc} holds other values than the rest of 2.weight: replicas"
        )
        assert "all were equal after step 4" in str(error)
        assert error.exit_code == 70


def test_two_of_four_ranks_are_no_majority() -> None:
    error = _errors(4, {"step": 3, "ranks": [0, 3], "what": "weight"}, desync_every=1)[0]
    assert (error.parameter, error.ranks) == ("2.weight", None)
    assert str(error).startswith("ranks hold different values of 2.weight: replicas")


def test_two_ranks_differ_and_nobody_can_say_who_is_right() -> None:
    error = _errors(2, {"step": 3, "ranks": [1], "what": "weight"}, desync_every=4)[1]
    assert (error.parameter, error.ranks, error.since, error.step) == ("2.weight", None, 0, 4)


def test_optimizer_state_is_compared_too() -> None:
    error = _errors(3, {"step": 3, "ranks": [0], "what": "exp_avg_sq"}, desync_every=3)[2]
    assert (error.parameter, error.ranks) == ("exp_avg_sq of 2.weight", [0])


@pytest.mark.parametrize(("nproc", "what"), [(2, "buffer"), (3, "numpy.random"), (4, "random")])
def test_what_else_was_asked_for_is_compared_too(nproc: int, what: str) -> None:
    tamper = {"step": 3, "ranks": [1], "what": what}
    for error in _errors(nproc, tamper, desync_every=2, desync_also=["buffers", "rng"]):
        name = "buffer 1.seen" if what == "buffer" else f"the state of {what}"
        ranks = [1] if nproc > 2 else None
        assert (error.parameter, error.ranks, error.since, error.step) == (name, ranks, 2, 4)
        assert error.differing == [name]


def _drift_before_a_save(job: Any, folder: str) -> None:
    keep = paceline.Checkpoints(folder, every_steps=2)
    # No comparison is due at an interval in these steps.
    training = _training(job, checkpoints=keep, desync_every=100)
    _train(job, training, 2)  # whose save is waited for
    _train(job, training, 6, {"step": 3, "ranks": [1], "what": "weight"})


def test_what_has_drifted_is_not_saved(tmp_path: Path) -> None:
    outcomes = run_failing_ranks(_drift_before_a_save, str(tmp_path), nproc=3)
    assert [type(outcome.error) for outcome in outcomes] == [Desync] * 3
    saved = [path.name for path in tmp_path.iterdir() if path.name.startswith("step-")]
    assert saved == ["step-2"]


def _off(job: Any, every: int) -> int:
    training = _training(job, desync_every=every)
    # If 0 were taken for None, the first comparison would be due in step 10.
    _train(job, training, 12, {"step": 10, "ranks": [1], "what": "weight"})
    return int(training.number)


def test_zero_never_compares() -> None:
    assert run_ranks(_off, 0, nproc=2) == [12, 12]


def _sound(job: Any, options: dict[str, Any], tamper: dict[str, Any] | None = None) -> Any:
    training = _train(job, _training(job, **options), 12, tamper)
    replicas = training._replicas
    return replicas._equal, replicas._due, replicas._cost_s


@pytest.mark.parametrize("nproc", [2, 3, 4])
@pytest.mark.parametrize("options", [{}, {"reproducible": True}], ids=json.dumps)
def test_sound_replicas_are_left_in_peace(nproc: int, options: dict[str, Any]) -> None:
    found = run_ranks(_sound, options | {"desync_every": 1}, nproc=nproc)
    assert [each[:2] for each in found] == [(12, 13)] * nproc


_SLOW = pytest.mark.slow


@pytest.mark.parametrize("nproc", [2, pytest.param(3, marks=_SLOW), pytest.param(4, marks=_SLOW)])
def test_generators_stay_equal_though_ranks_hold_other_samples(nproc: int) -> None:
    options = {"desync_every": 1, "desync_also": ["buffers", "rng"]}
    assert [each[:2] for each in run_ranks(_sound, options, nproc=nproc)] == [(12, 13)] * nproc


def test_what_was_not_asked_for_may_differ() -> None:
    tamper = {"step": 3, "ranks": [1], "what": "buffer"}
    found = run_ranks(_sound, {"desync_every": 1}, tamper, nproc=2)
    assert [each[:2] for each in found] == [(12, 13)] * 2


def test_the_first_comparison_sets_the_next_interval() -> None:
    found = run_ranks(_sound, {}, nproc=2)
    (equal, due, cost_s), (other_equal, other_due, _) = found
    assert (equal, due) == (other_equal, other_due)
    assert equal == _FIRST_STEPS
    # These steps take milliseconds, and a comparison at least tens of microseconds.
    assert due - equal >= _FIRST_STEPS
    assert 0 < cost_s < 10
    assert 0 < _MAX_TIME_SHARE <= 0.005


def _alone(job: Any) -> int:
    return int(_train(job, _training(job, desync_every=1), 3).number)


def test_one_process_has_nothing_to_compare() -> None:
    assert run_ranks(_alone, nproc=1) == [3]


def _bad(job: Any, every: Any, also: Any = ()) -> str:
    with pytest.raises(ConfigError) as error:
        _training(job, desync_every=every, desync_also=also)
    return str(error.value)


def _by_trainer(job: Any) -> str:
    trainer = paceline.Trainer(
        nn.Linear(4, 3),
        F.cross_entropy,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        TensorDataset(torch.ones(8, 4), torch.zeros(8, dtype=torch.long)),
        global_batch=4,
        desync_every=-1,
    )
    with pytest.raises(ConfigError) as error:
        trainer.fit(epochs=1)
    return str(error.value)


def test_trainer_hands_it_on() -> None:
    assert "desync_every" in run_ranks(_by_trainer, nproc=1)[0]


@pytest.mark.parametrize("every", [-1, True])
def test_a_number_of_steps_is_asked_for(every: Any) -> None:
    assert "desync_every" in run_ranks(_bad, every, nproc=1)[0]


@pytest.mark.parametrize(
    ("every", "also", "said"),
    [
        (1, "rng", "may hold"),
        (1, ["gradients"], "got ['gradients']"),
        (0, ["rng"], "has no effect with desync_every=0"),
    ],
)
def test_what_else_is_checked(every: int, also: Any, said: str) -> None:
    assert said in run_ranks(_bad, every, also, nproc=1)[0]


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.bool, torch.complex128]
)
@pytest.mark.parametrize("size", [1, 3, 8, 17])
def test_each_byte_counts(dtype: torch.dtype, size: int) -> None:
    tensor = torch.ones(size + 1).to(dtype)[1:]  # a view whose bytes begin anywhere
    before = int(_sum(tensor))
    data = tensor.view(-1).view(torch.uint8)
    for at in range(len(data)):
        data[at] ^= 1
        assert int(_sum(tensor)) != before
        data[at] ^= 1
    assert int(_sum(tensor)) == before


def test_a_tensor_that_is_not_contiguous_counts_as_its_copy() -> None:
    tensor = torch.arange(12.0).reshape(3, 4).t()
    assert int(_sum(tensor)) == int(_sum(tensor.contiguous()))
