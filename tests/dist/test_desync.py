"""Replicas that drift apart are found, named, and never saved; those that do not are left in peace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_trainings import backwards, make_data, make_training, refusals, train
from torch import nn

import paceline
from paceline.errors import ConfigError, RankDisagreement
from paceline.testing import run_failing_ranks, run_ranks
from paceline.training.desync import sum_of


def _training(job: Any, **options: Any) -> Any:
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    net[1].register_buffer("seen", torch.zeros(3, dtype=torch.int32))
    model = paceline.ddp(job, net)
    options = {"optimizer": torch.optim.AdamW, "global_batch": 8, **options}
    return make_training(job, model, make_data(40), **options)


def _train(job: Any, training: Any, steps: int, tamper: dict[str, Any] | None = None) -> Any:
    """Train; in step `tamper["step"]` change a bit on `tamper["ranks"]`."""
    for step in training.steps(until=steps):
        backwards(training, step)
        step.update()
        if tamper and step.number == tamper["step"] and job.rank in tamper["ranks"]:
            _flip(training, tamper["what"])
    return training


def _flip(training: Any, what: str) -> None:
    net = paceline.unwrap(training.models[0])
    weight = net[2].weight
    if what == "buffer":
        net[1].seen[2] ^= 1
    else:
        tensor = weight if what == "weight" else training.optimizers[0].state[weight][what]
        # The least significant bit: less than any tolerance would see.
        tensor.detach().view(-1).view(torch.int32)[5] ^= 1


def _drift(job: Any, tamper: dict[str, Any], options: dict[str, Any]) -> None:
    training = _training(job, **options)
    _train(job, training, 12, tamper)


@pytest.mark.parametrize(
    ("nproc", "ranks", "what", "name", "majority"),
    [
        (3, [2], "weight", "2.weight", True),
        (4, [0, 3], "weight", "2.weight", False),
        (3, [0], "exp_avg_sq", "exp_avg_sq of 2.weight", True),
    ],
)
def test_a_changed_bit_is_found_and_named(
    nproc: int, ranks: list[int], what: str, name: str, majority: bool
) -> None:
    tamper = {"step": 5, "ranks": ranks, "what": what}
    outcomes = run_failing_ranks(_drift, tamper, {"desync_every": 2}, nproc=nproc)
    for error in [outcome.error for outcome in outcomes]:
        assert isinstance(error, RankDisagreement)
        named = ranks if majority else None
        assert (error.parameter, error.ranks, error.since, error.step) == (name, named, 4, 6)
        start = f"ranks hold different values of {name}: replicas"
        if majority:
            start = (
                f"rank {ranks[0]} of {nproc} holds other values than the rest of {name}: replicas"
            )
        assert str(error).startswith(start)
        assert "all were equal after step 4" in str(error)
        assert error.exit_code == 70


def _drift_after_a_load(job: Any) -> None:
    other = _train(job, _training(job), 8).state_dict()
    training = _train(job, _training(job, desync_every=1), 4)
    training.load_state_dict(other)
    _train(job, training, 12, {"step": 9, "ranks": [1], "what": "weight"})


def test_a_comparison_before_a_later_state_was_loaded_is_not_mentioned() -> None:
    for outcome in run_failing_ranks(_drift_after_a_load, nproc=2):
        assert isinstance(outcome.error, RankDisagreement)
        assert "this is the first comparison after step 8" in str(outcome.error)


def _drift_before_a_save(job: Any, folder: str) -> None:
    keep = paceline.Checkpoints(folder, every_steps=2)
    training = _training(job, checkpoints=keep, desync_every=100)
    _train(job, training, 2)  # whose save is waited for
    _train(job, training, 6, {"step": 3, "ranks": [1], "what": "weight"})


def test_what_has_drifted_is_not_saved(tmp_path: Path) -> None:
    outcomes = run_failing_ranks(_drift_before_a_save, str(tmp_path), nproc=3)
    assert [type(outcome.error) for outcome in outcomes] == [RankDisagreement] * 3
    saved = [path.name for path in tmp_path.iterdir() if path.name.startswith("step-")]
    assert saved == ["step-2"]


def _sound(job: Any) -> list[tuple[int, int]]:
    """The last step compared and the next one due, of trainings in which no comparison must fail."""
    buffer = {"step": 3, "ranks": [1], "what": "buffer"}
    cases: list[tuple[dict[str, Any], dict[str, Any] | None]] = [
        ({"desync_every": 1}, None),
        ({"desync_every": 1, "reproducible": True}, None),
        ({"desync_every": 1}, buffer),  # buffers are not compared
        ({}, None),
    ]
    found = []
    for options, tamper in cases:
        replicas = _train(job, _training(job, **options), 12, tamper)._replica_check
        found.append((replicas._equal_step, replicas.due))
    off = _training(job, desync_every=0)
    _train(job, off, 12, {"step": 10, "ranks": [1], "what": "weight"})
    assert off.number == 12
    return found


@pytest.mark.parametrize("nproc", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_equal_replicas_and_what_was_not_requested_pass(nproc: int) -> None:
    ranks = run_ranks(_sound, nproc=nproc)
    assert ranks == [ranks[0]] * nproc
    assert ranks[0][:3] == [(12, 13)] * 3
    assert ranks[0][3] == (10, 30)  # then after 20 more steps, 40, ..., 1000


def _sharded(job: Any) -> None:
    model = paceline.fsdp(job, nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), blocks=nn.Linear)
    training = make_training(job, model, make_data(40), optimizer=torch.optim.AdamW, desync_every=2)
    train(training, until=3)
    if job.rank == 3:
        own = model[0].weight.to_local()
        own.detach().view(-1).view(torch.int32)[0] ^= 1
    train(training, until=6)


def _drifted_parts(job: Any) -> dict[str, tuple[str, str]]:
    return refusals(job, lambda job, _: _sharded(job), ["drift"])


def test_parts_of_sharded_tensors_are_compared_between_replicas() -> None:
    # Ranks 1 and 3 hold the same parts.
    mesh = paceline.Mesh(dp_replicate=2, dp_shard=2)
    for found in run_ranks(_drifted_parts, nproc=4, mesh=mesh):
        kind, text = found["drift"]
        assert kind == "RankDisagreement"
        assert "ranks hold different values of 0.weight: replicas have drifted apart" in text
        assert "all were equal after step 2" in text


def test_settings_are_checked() -> None:
    with paceline.join() as job:
        for every in (-1, True):
            with pytest.raises(ConfigError, match="desync_every"):
                _training(job, desync_every=every)
        assert _train(job, _training(job, desync_every=1), 3).number == 3  # nothing to compare


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.bool, torch.complex128]
)
@pytest.mark.parametrize("size", [1, 3, 8, 17])
def test_each_byte_counts(dtype: torch.dtype, size: int) -> None:
    tensor = torch.ones(size + 1).to(dtype)[1:]  # a view whose bytes begin anywhere
    before = int(sum_of(tensor))
    data = tensor.view(-1).view(torch.uint8)
    for at in range(len(data)):
        data[at] ^= 1
        assert int(sum_of(tensor)) != before
        data[at] ^= 1
    assert int(sum_of(tensor)) == before


def test_a_tensor_that_is_not_contiguous_counts_as_its_copy() -> None:
    tensor = torch.arange(12.0).reshape(3, 4).t()
    assert int(sum_of(tensor)) == int(sum_of(tensor.contiguous()))


@pytest.mark.parametrize("shape", [(50, 4), (3000, 4), (5000, 3), (7, 5)])
def test_rows_that_change_places_are_seen(shape: tuple[int, int]) -> None:
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    seen = {int(sum_of(weights))}
    for first, second in ((0, 1), (0, 6), (2, shape[0] - 1)):
        order = torch.arange(shape[0])
        order[first], order[second] = second, first
        seen.add(int(sum_of(weights[order])))
    assert len(seen) == 4
