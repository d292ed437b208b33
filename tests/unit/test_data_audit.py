"""The audit of the first epoch: what it finds, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import paceline
from paceline.data import coverage, maploader
from paceline.data.batches import Batches
from paceline.data.coverage import Audit
from paceline.data.plan import Position
from paceline.errors import AuditError
from paceline.job.job import Job

NOTHING = np.zeros(0, dtype=np.int64)


@pytest.fixture
def job() -> Iterator[Job]:
    with paceline.join(seed=7) as job:
        yield job


def _ids(*ids: int) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int64)


def test_each_sample_once_is_right_in_any_order(job: Job) -> None:
    counts = Audit(job, None)
    counts.saw(_ids(3, 1))
    counts.saw(_ids())
    counts.saw(_ids(0, 2))
    counts.close(epoch=0, size=4, used_before=NOTHING)
    with pytest.raises(AuditError):  # it did count: a fifth sample is missed
        counts.close(epoch=0, size=5, used_before=NOTHING)


@pytest.mark.parametrize("num_samples", [None, 4])
@pytest.mark.parametrize(
    ("seen", "used", "lost", "doubled"),
    [
        ([0, 1, 3], [], [2], []),
        ([0, 1, 2, 3, 3], [], [], [3]),
        ([3, 3, 0, 0], [], [1, 2], [0, 3]),
        ([0, 1, 2, 3, 4], [], [], [4]),
        ([1, 2], [0], [3], []),
        ([0, 1, 2, 3], [0], [], [0]),
        ([], [], [0, 1, 2, 3], []),
    ],
)
def test_what_was_lost_or_doubled_is_named(
    job: Job,
    num_samples: int | None,
    seen: list[int],
    used: list[int],
    lost: list[int],
    doubled: list[int],
) -> None:
    counts = Audit(job, num_samples)
    counts.saw(_ids(*seen))
    with pytest.raises(AuditError) as caught:
        counts.close(epoch=2, size=4, used_before=np.array(used, dtype=np.int64))
    assert (caught.value.lost, caught.value.doubled) == (lost, doubled)
    assert "epoch 2" in str(caught.value)


def test_long_lists_are_shortened_in_the_text_alone(job: Job) -> None:
    with pytest.raises(AuditError, match=r"100 lost \(0, 1, 2, 3, 4, 5, 6, 7, \.\.\.\)") as caught:
        Audit(job, None).close(epoch=0, size=100, used_before=NOTHING)
    assert len(caught.value.lost) == 100


def test_ids_are_counted_in_portions(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "_PENDING", 3)
    counts = Audit(job, None)
    for first in range(0, 20, 2):
        counts.saw(_ids(first, first + 1))
        assert len(counts._pending) < 3
    counts.close(epoch=0, size=20, used_before=NOTHING)


def _run(batches: Batches, position: Position, epochs: int) -> list[int]:
    return [len(list(step)) for step in batches.iterate(position, epochs=epochs)]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("offset", [0, 4, 10])
def test_a_sound_epoch_passes_from_any_position(job: Job, workers: int, offset: int) -> None:
    data = TensorDataset(torch.arange(11))
    batches = Batches(job, data, global_batch=2, micro_batch=1, workers=workers)
    _run(batches, Position(3, 1, offset), 3)
    assert batches._audited
    batches.close()


def test_an_abandoned_epoch_is_not_audited_and_the_next_whole_one_is(job: Job) -> None:
    batches = Batches(job, TensorDataset(torch.arange(6)), global_batch=2)
    run = batches.iterate(Position(0), epochs=2)
    list(next(run))
    run.close()  # type: ignore[attr-defined]
    assert not batches._audited
    assert batches._loader.audit is None
    _run(batches, Position(0), 1)
    assert batches._audited


def test_micro_batches_that_nobody_read_are_lost_samples(job: Job) -> None:
    batches = Batches(job, TensorDataset(torch.arange(4)), global_batch=2, shuffle=False)
    run = batches.iterate(Position(0), epochs=1)
    list(next(run))
    next(run)
    with pytest.raises(AuditError) as caught:
        next(run)
    assert caught.value.lost == [2, 3]


def test_a_loader_that_repeats_a_sample_is_found_out(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = maploader.Plan.blocks

    def wrong(*args: Any) -> Any:
        for block in right(*args):
            yield block._replace(ids=torch.where(block.ids == 3, 1, block.ids))

    monkeypatch.setattr(maploader.Plan, "blocks", wrong)
    batches = Batches(job, TensorDataset(torch.arange(5)), global_batch=2)
    with pytest.raises(AuditError) as caught:
        _run(batches, Position(0), 1)
    assert (caught.value.lost, caught.value.doubled) == ([3], [1])
