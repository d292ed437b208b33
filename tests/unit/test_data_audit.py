"""The data audit of the first epoch: what it finds, what it accepts, what it costs."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import paceline
from paceline.data import epoch_audit, loader
from paceline.data.batches import Batches
from paceline.data.epoch_audit import EpochAudit
from paceline.data.plan import Plan, Position
from paceline.errors import AuditError
from paceline.job.job import Job


@pytest.fixture
def job() -> Iterator[Job]:
    with paceline.join(seed=7) as job:
        yield job


def _ids(*ids: int) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int64)


@pytest.mark.parametrize(
    ("seen", "start", "size", "lost", "doubled"),
    [
        ([3, 1, 0, 2], 0, 4, None, None),
        ([3, 2], 2, 4, None, None),
        ([0, 1, 3], 0, 4, [2], []),
        ([0, 1, 2, 3, 3], 0, 4, [], [3]),
        ([0, 1, 2, 3, 4], 0, 4, [], [4]),
        ([0, 1, 1, 3], 0, 4, [2], [1]),
        ([3, 3, 0, 0], 0, 4, [], []),
        ([0, 2, 3], 2, 4, [], [0]),
        ([], 0, 4, [], []),
    ],
)
def test_lost_and_repeated_samples_are_found_and_a_single_one_is_named(
    job: Job, seen: list[int], start: int, size: int, lost: list[int] | None, doubled: list[int]
) -> None:
    audit = EpochAudit(job, None, Position(0, 2, start))
    audit.add(_ids(*seen[:1]))
    audit.add(_ids(*seen[1:]))
    if lost is None:
        audit.check(2, size)
        return
    with pytest.raises(AuditError, match="epoch 2") as caught:
        audit.check(2, size)
    error = caught.value
    assert (error.lost, error.doubled) == (lost, doubled)
    assert (error.seen, error.expected) == (len(seen), size - start)
    equal = len(seen) == size - start
    than = "but some of them twice" if equal else f"instead of {size - start}"
    assert f"it used {len(seen)} samples" in str(error)
    assert than in str(error)


def test_ids_are_hashed_in_portions(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epoch_audit, "_MAX_PENDING", 3)
    monkeypatch.setattr(epoch_audit, "_CHUNK", 3)
    audit = EpochAudit(job, None, Position(0, 0, 2))
    for first in range(2, 20, 2):
        audit.add(_ids(first, first + 1))
        assert len(audit._pending) < 3
    audit.check(0, 20)


def test_memory_does_not_depend_on_the_size_of_the_dataset(job: Job) -> None:
    size, offset = 3_000_000, 1_500_000
    plan = Plan(size, 1 << 16, 1 << 16, True, 0, 1)
    start = Position(1, 0, offset)
    ids = [torch.from_numpy(block.ids) for block in plan.blocks(start, 1)]
    audit = EpochAudit(job, plan, start)
    tracemalloc.start()
    try:
        for own in ids:
            for part in own.split(1 << 16):
                audit.add(part)
        audit.check(0, size)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # A byte per sample and 8 per sample of the offset would be 15 MB.
    assert peak < 8e6


def _run(batches: Batches, position: Position, epochs: int) -> list[int]:
    return [len(list(step)) for step in batches.iterate(position, epochs=epochs)]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("offset", [0, 4, 10])
def test_a_correct_epoch_passes_from_any_position(job: Job, workers: int, offset: int) -> None:
    data = TensorDataset(torch.arange(11))
    batches = Batches(job, data, global_batch=2, micro_batch=1, workers=workers)
    _run(batches, Position(3, 1, offset), 3)
    assert batches._audited


def test_an_epoch_that_was_left_is_not_audited_and_the_next_whole_one_is(job: Job) -> None:
    batches = Batches(job, TensorDataset(torch.arange(6)), global_batch=2)
    run = batches.iterate(Position(0), epochs=2)
    list(next(run))
    run.close()  # type: ignore[attr-defined]
    assert not batches._audited
    assert batches._loader.epoch_audit is None
    _run(batches, Position(0), 1)
    assert batches._audited


def test_micro_batches_that_the_loop_did_not_read_are_lost_samples(job: Job) -> None:
    batches = Batches(job, TensorDataset(torch.arange(4)), global_batch=2, shuffle=False)
    run = batches.iterate(Position(0), epochs=1)
    list(next(run))
    next(run)
    with pytest.raises(AuditError, match="used 2 samples instead of 4"):
        next(run)


def test_a_loader_that_repeats_a_sample_is_found(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Plan.blocks

    def wrong(*args: Any) -> Any:
        for block in right(*args):
            yield block._replace(ids=np.where(block.ids == 3, 1, block.ids))

    monkeypatch.setattr(loader.Plan, "blocks", wrong)
    batches = Batches(job, TensorDataset(torch.arange(5)), global_batch=2)
    with pytest.raises(AuditError) as caught:
        _run(batches, Position(0), 1)
    assert (caught.value.lost, caught.value.doubled) == ([3], [1])
