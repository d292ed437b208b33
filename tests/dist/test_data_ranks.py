"""The samples of every step are the same for any number of ranks and workers; failures reach all."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from paceline import log
from paceline.data import maploader
from paceline.data.batches import Batches
from paceline.data.evaluation import evaluation_batches
from paceline.data.plan import Position
from paceline.errors import AuditError, ConfigError, DataError, RankDisagreement, SampleError
from paceline.job.job import Job
from paceline.testing import run_failing_ranks, run_ranks

EPOCHS = 2


class Augmented:
    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(()).item(), float(np.random.randn()), random.random()


class Asking:
    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int, generator: torch.Generator | None = None) -> Any:
        return index, torch.randn((), generator=generator).item()


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __init__(self, size: int = 13) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.size):
            yield number, torch.rand(()).item()


class Sharded:
    def __init__(self, size: int = 13) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("read as a whole")

    def shard(self, index: int, count: int) -> Iterator[Any]:
        for number in range(index, self.size, count):
            yield number, torch.rand(()).item()


def _dataset(kind: str) -> Any:
    if kind == "tensors":
        return TensorDataset(torch.arange(13), torch.arange(13) * 2)
    return {"augmented": Augmented, "asking": Asking, "stream": Stream, "sharded": Sharded}[kind]()


def _rows(job: Job, kinds: list[str], workers: int, micro_batch: int, equal: bool) -> list[Any]:
    """For each kind and step: what this rank knows of the step, and its samples by place."""
    out = []
    for kind in kinds:
        batches = Batches(
            job, _dataset(kind), global_batch=5, micro_batch=micro_batch, workers=workers
        )
        steps = []
        for step in batches.iterate(Position(7), epochs=EPOCHS, equal=equal):
            micros = list(step)
            assert len(micros) == step.num_micro_batches
            assert [m.is_last for m in micros] == [False] * (len(micros) - 1) + [True] * bool(
                micros
            )
            rows, firsts, ghosts = [], [], 0
            for micro in micros:
                found = list(zip(*(part.tolist() for part in micro.batch), strict=True))
                assert 1 <= micro.count == len(found) <= micro_batch
                if micro.is_ghost:
                    ghosts += 1
                    assert micro.count == 1
                else:
                    rows += found
                    firsts.append((micro.offset, found[0][0]))
            where = (step.epoch, step.offset, step.num_samples, step.ends_epoch, step.next_position)
            steps.append((where, rows, firsts, len(micros), ghosts))
        batches.close()
        out.append(steps)
    return out


KINDS = ["tensors", "augmented", "asking", "stream", "sharded"]


@pytest.fixture(scope="module")
def alone() -> list[Any]:
    return run_ranks(_rows, KINDS, 0, 5, False, nproc=1)[0]


def _assert_as_alone(alone: list[Any], ranks: list[Any], *, equal: bool) -> None:
    for kind, reference, *found in zip(KINDS, alone, *ranks, strict=True):
        assert len({len(steps) for steps in found}) == 1, kind
        for one, *others in zip(reference, *found, strict=True):
            where, rows = one[0], one[1]
            assert all(other[0] == where for other in others), kind
            together = [row for other in others for row in other[1]]
            if kind in ("stream", "sharded"):
                together.sort()  # dealt in turn there; a stream's own order is by number here
                assert sorted(rows) == rows
            assert together == rows, kind
            if equal:
                assert len({other[3] for other in others}) == 1, kind
            else:
                assert all(other[4] == 0 for other in others), kind
            # The place of a micro-batch's first sample means that sample in any world.
            order = [row[0] for row in rows]
            for other in others:
                assert all(order[place - where[1]] == first for place, first in other[2]), kind


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("nproc", [2, 3, 4])
def test_the_samples_of_every_step_are_the_same_list(
    alone: list[Any], nproc: int, workers: int
) -> None:
    _assert_as_alone(alone, run_ranks(_rows, KINDS, workers, 2, False, nproc=nproc), equal=False)


@pytest.mark.parametrize(("nproc", "workers"), [(1, 0), (2, 1), (4, 0)])
def test_with_equal_all_ranks_have_as_many_micro_batches(
    alone: list[Any], nproc: int, workers: int
) -> None:
    _assert_as_alone(alone, run_ranks(_rows, KINDS, workers, 1, True, nproc=nproc), equal=True)


def _tiny(job: Job, kind: str, size: int, global_batch: int, workers: int) -> Any:
    data = {"map": TensorDataset(torch.arange(size)), "stream": Stream(size)}
    dataset = data.get(kind) or Sharded(size)
    batches = Batches(job, dataset, global_batch=global_batch, workers=workers)
    seen = []
    for step in batches.iterate(Position(7), epochs=2):
        ids = [i for micro in step for i in micro.batch[0].tolist()]
        seen.append((step.num_samples, step.ends_epoch, ids))
    batches.close()
    return seen


def _tinies(job: Job) -> list[Any]:
    """Fewer samples than ranks, ranks without any, and epochs that end between ranks."""
    return [
        _tiny(job, kind, size, global_batch, workers)
        for kind in ("map", "stream", "sharded")
        for size in (1, 2, 3)
        for global_batch in (1, 2, 7)
        for workers in ((0, 2) if (size, global_batch) == (3, 2) else (0,))
    ]


def test_fewer_samples_than_ranks_and_empty_ranks_are_ordinary() -> None:
    everyone = run_ranks(_tinies, nproc=3)
    for one in zip(*everyone, strict=True):
        lengths = {len(steps) for steps in one}
        assert len(lengths) == 1
        size = sum(step[0] for step in one[0]) // 2
        for steps in zip(*one, strict=True):
            assert len({step[:2] for step in ((s[0], s[1]) for s in steps)}) == 1
            assert sum(len(step[2]) for step in steps) == steps[0][0]
        ids = [i for steps in one for step in steps for i in step[2]]
        assert sorted(ids) == sorted(list(range(size)) * 2)


def _evaluated(job: Job) -> list[tuple[int, list[int]]]:
    found = evaluation_batches(job, Augmented(), micro_batch=3)
    return [(one.index, one.batch[0].tolist()) for one in found]


@pytest.mark.parametrize("nproc", [1, 2, 4])
def test_an_evaluation_is_cut_the_same_for_any_ranks(nproc: int) -> None:
    found = [one for rank in run_ranks(_evaluated, nproc=nproc) for one in rank]
    assert found == [(i, list(range(13))[3 * i : 3 * i + 3]) for i in range(5)]


# Failures


def _disagree(job: Job, what: str) -> None:
    size = 5 + (job.rank if what == "samples" else 0)
    global_batch = 2 + (job.rank if what == "global_batch" else 0)
    Batches(job, TensorDataset(torch.arange(size)), global_batch=global_batch)


@pytest.mark.parametrize("what", ["samples", "global_batch"])
def test_ranks_with_different_data_or_arguments_all_hear_of_it(what: str) -> None:
    for outcome in run_failing_ranks(_disagree, what, nproc=2):
        assert isinstance(outcome.error, RankDisagreement)
        assert what in str(outcome.error)


def _lose_one(job: Job) -> None:
    """Rank 1, which has samples 4 to 7, takes 3 instead of 6."""
    right = maploader.Plan.blocks

    def wrong(*args: Any) -> Any:
        for block in right(*args):
            yield block._replace(ids=torch.where(block.ids == 6, 3, block.ids))

    if job.rank == 1:
        maploader.Plan.blocks = wrong  # type: ignore[method-assign]
    try:
        batches = Batches(job, TensorDataset(torch.arange(8)), global_batch=8, shuffle=False)
        for step in batches.iterate(Position(0), epochs=1):
            list(step)
    finally:
        maploader.Plan.blocks = right  # type: ignore[method-assign]


def test_a_sample_that_one_rank_lost_is_an_error_on_all() -> None:
    for outcome in run_failing_ranks(_lose_one, nproc=2):
        assert isinstance(outcome.error, AuditError)
        assert (outcome.error.lost, outcome.error.doubled) == ([6], [3])


class Failing(Augmented):
    def __getitem__(self, index: int) -> Any:
        if index == 9:
            raise ZeroDivisionError("broken file")
        return index


def _fail(job: Job, workers: int) -> None:
    batches = Batches(job, Failing(), global_batch=13, shuffle=False, workers=workers)
    for step in batches.iterate(Position(0), epochs=1):
        list(step)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_fails_names_its_rank(workers: int) -> None:
    with pytest.raises(SampleError, match="sample 9") as caught:
        run_ranks(_fail, workers, nproc=2)
    assert caught.value.rank == 1
    assert caught.value.worker == (0 if workers else None)


class ByRank(IterableDataset):  # type: ignore[type-arg]
    """A stream that splits itself over ranks, as it must not."""

    def __init__(self, rank: int, count: int, size: int) -> None:
        self.rank, self.count, self.size = rank, count, size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, self.size, self.count))


def _read_own_stream(job: Job, size: int) -> int:
    said: list[str] = []
    log.logger.warning = lambda message, *_: said.append(message)  # type: ignore[method-assign]
    try:
        batches = Batches(job, ByRank(job.rank, job.world_size, size), global_batch=2)
        for step in batches.iterate(Position(0), epochs=1):
            list(step)
    finally:
        del log.logger.warning
    return sum("different samples" in text for text in said)


def test_ranks_that_read_different_streams_are_found() -> None:
    for outcome in run_failing_ranks(_read_own_stream, 5, nproc=2):
        assert isinstance(outcome.error, RankDisagreement)
        assert outcome.error.values == [1, 0]
    assert run_ranks(_read_own_stream, 8, nproc=2) == [1, 1]


class Uneven:
    """One shard goes on after the others have ended."""

    def __iter__(self) -> Iterator[int]:
        return iter(())

    def shard(self, index: int, count: int) -> Iterator[int]:
        return iter(range(index, 20 if index == 0 else 4, count))


def _read_uneven(job: Job) -> None:
    batches = Batches(job, Uneven(), global_batch=4)
    for step in batches.iterate(Position(0), epochs=1):
        list(step)


def test_shards_that_do_not_belong_together_are_found() -> None:
    for outcome in run_failing_ranks(_read_uneven, nproc=2):
        assert isinstance(outcome.error, AuditError)
        assert 5 in outcome.error.lost


def _empty_stream(job: Job) -> None:
    next(Batches(job, Stream(0), global_batch=4).iterate(Position(0), epochs=1))


def test_an_empty_stream_is_an_error_on_all_ranks() -> None:
    for outcome in run_failing_ranks(_empty_stream, nproc=2):
        assert isinstance(outcome.error, DataError)
        assert "gave no sample" in str(outcome.error)


def _empty_set(job: Job) -> None:
    Batches(job, TensorDataset(torch.empty(0)), global_batch=4)


def test_an_empty_set_is_an_error_on_all_ranks() -> None:
    for outcome in run_failing_ranks(_empty_set, nproc=2):
        assert isinstance(outcome.error, ConfigError)


def _missing_ghost(job: Job) -> None:
    for step in Batches(job, Sharded(1), global_batch=2).iterate(Position(0), epochs=1, equal=True):
        list(step)


def test_a_rank_whose_shard_is_empty_cannot_keep_company() -> None:
    outcomes = run_failing_ranks(_missing_ghost, nproc=2)
    assert isinstance(outcomes[1].error, DataError)
    assert "no sample to keep" in str(outcomes[1].error)
