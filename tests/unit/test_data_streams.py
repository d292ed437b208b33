"""Streams: the shares of ranks and workers exhaustively, then whole runs on one process."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import random
import tracemalloc
from collections import UserDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

import paceline
from paceline.data.batches import Batches
from paceline.data.digest import digest
from paceline.data.plan import Position
from paceline.data.samples import ReadErrors
from paceline.data.streams import End, Part, StreamPlan, StreamReader
from paceline.errors import DataError
from paceline.job.job import Job

START = Position(7)


class Whole(IterableDataset):  # type: ignore[type-arg]
    """A stream that shuffles in a buffer, so that each item depends on all draws before it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        buffer: list[int] = []
        for number in [*range(self.size), None, None]:
            if number is not None:
                buffer.append(number)
            if buffer and (len(buffer) > 2 or number is None):
                drawn = buffer.pop(random.randrange(len(buffer)))
                yield drawn, self.epoch, torch.rand(()).item(), float(np.random.rand())


class Sharded:
    """Offers each rank its part, and nothing else that can be read by mistake."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("read as a whole")

    def shard(self, index: int, count: int) -> Iterator[Any]:
        for number in range(index, self.size, count):
            yield number, torch.rand(()).item()


def _reader(dataset: Any, b: int, micro: int, rank: int, world: int) -> StreamReader:
    plan, errors = StreamPlan(b, micro, rank, world), ReadErrors(rank, world)
    return StreamReader(dataset, plan, errors, sample_randomness=True, collate=list)


def _parts(reader: StreamReader, position: Position, epochs: int, workers: int) -> list[Any]:
    """The parts as a DataLoader gives them: from the workers in turn."""
    readers = [
        reader.parts(position, epochs, False, worker=worker, workers=workers)
        for worker in range(workers)
    ]
    parts = []
    for turn in itertools.cycle(range(workers)):
        part = next(readers[turn], None)
        if part is None:
            return parts
        parts.append(part)
    raise AssertionError


def test_shares_make_up_each_step_for_any_ranks_workers_and_position() -> None:
    for kind, n, b in itertools.product((Whole, Sharded), (1, 2, 7), (1, 3, 4, 8)):
        alone = _parts(_reader(kind(n), b, b, 0, 1), START, 2, 1)
        steps = [part for part in alone if isinstance(part, Part)]
        assert [part.num_read for part in steps] == [min(b, n - at) for at in range(0, n, b)] * 2
        for world, workers in itertools.product((1, 2, 3), (1, 2, 3)):
            dealt = [
                _parts(_reader(kind(n), b, 2, rank, world), START, 2, workers)
                for rank in range(world)
            ]
            found: dict[int, dict[int, Any]] = {}
            for own in dealt:
                _check_ends(own, workers)
                epoch, step, ends = 0, 0, 0
                for part in own:
                    if isinstance(part, End):
                        ends += 1
                        epoch, step = ends // workers, 0
                        continue
                    places = found.setdefault(epoch * 100 + step, {})
                    for at, batch in part.micro_batches:
                        assert 1 <= len(at) == len(batch) <= 2
                        assert not places.keys() & set(at)
                        places.update(zip(at, batch, strict=True))
                    step += 1
            together = [
                [places[at] for at in sorted(places)]
                for _, places in sorted(found.items())
                if places
            ]
            assert together == [part.micro_batches[0][1] for part in steps]


def _check_ends(parts: list[Any], workers: int) -> None:
    """All workers' ends of an epoch come together, after its last step."""
    kinds = [isinstance(part, End) for part in parts]
    runs = [len(list(run)) for is_end, run in itertools.groupby(kinds) if is_end]
    assert sum(runs) == 2 * workers
    assert all(run % workers == 0 for run in runs)


def _everything(
    batches: Batches, position: Position = START, *, epochs: int = 2, equal: bool = False
) -> list[Any]:
    seen = []
    for step in batches.iterate(position, epochs=epochs, equal=equal):
        rows = []
        for micro in step:
            assert micro.count >= 1
            rows += list(zip(*(part.tolist() for part in micro.batch), strict=True))
        where = (step.epoch, step.offset, step.num_samples, step.ends_epoch, step.next_position)
        seen.append((where, rows))
    return seen


@pytest.mark.parametrize("kind", [Whole, Sharded])
def test_steps_are_the_same_for_any_workers_and_after_any_resume(
    job: Job, kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="paceline")
    before = torch.get_rng_state(), repr(np.random.get_state()), random.getstate()
    straight = _everything(Batches(job, kind(11), global_batch=4))
    assert [where[:4] for where, _ in straight] == [
        (epoch, at, min(4, 11 - at), at == 8) for epoch in range(2) for at in range(0, 11, 4)
    ]
    assert sorted(row[0] for _, rows in straight[:3] for row in rows) == list(range(11))
    if kind is Whole:
        assert all({row[1] for row in rows} == {where[0]} for where, rows in straight)
        assert [row[0] for _, rows in straight[:3] for row in rows] != list(range(11))
    for workers in (0, 1, 2):
        batches = Batches(job, kind(11), global_batch=4, micro_batch=3, workers=workers)
        assert (batches.steps_per_epoch, batches.num_samples) == (None, None)
        assert _everything(batches) == straight
        assert _everything(batches, straight[1][0][-1]) == straight[2:]
        assert "reading 8 samples of the stream" in caplog.text
        assert _everything(batches, straight[2][0][-1]) == straight[3:]
        batches.close()
    # The generators of the training are left alone.
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (repr(np.random.get_state()), random.getstate()) == before[1:]


class SelfSplitting(IterableDataset):  # type: ignore[type-arg]
    """As torch's documentation has it: each worker gives its share."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        for number in range(9):
            if info is None or number % info.num_workers == info.id:
                yield (number,)


def test_a_dataset_that_splits_itself_over_workers_still_gives_all(job: Job) -> None:
    batches = Batches(job, SelfSplitting(), global_batch=2, workers=2)
    numbers = [row[0] for _, rows in _everything(batches, epochs=1) for row in rows]
    assert sorted(numbers) == list(range(9))


class ByChance(IterableDataset):  # type: ignore[type-arg]
    """Differs in each process: the first gives fewer, or other numbers."""

    def __init__(self, fewer: int, shift: int) -> None:
        self.fewer = fewer
        self.shift = shift

    def __iter__(self) -> Iterator[Any]:
        # Names end in a number that counts up with each process.
        first = int(multiprocessing.current_process().name.rpartition("-")[2]) % 2 == 0
        for number in range(9 - (self.fewer if first else 0)):
            yield (number + (self.shift if first else 0),)


def test_workers_that_read_different_streams_are_found(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    batches = Batches(job, ByChance(3, 0), global_batch=2, workers=2)
    with pytest.raises(DataError, match="different length"):
        _everything(batches, epochs=1)
    batches.close()
    paceline.log._shown.clear()
    with caplog.at_level(logging.WARNING, logger="paceline"):
        batches = Batches(job, ByChance(0, 1), global_batch=2, workers=2)
        _everything(batches, epochs=1)
    assert "begins with different samples" in caplog.text


class Failing(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[Any]:
        yield from range(3)
        raise ZeroDivisionError("broken")


class Shapes(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[Any]:
        return (torch.zeros(size) for size in range(4))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_fails_names_the_place(job: Job, workers: int) -> None:
    batches = Batches(job, Failing(), global_batch=2, workers=workers)
    with pytest.raises(DataError, match=r"sample 3 .*ZeroDivisionError: broken") as caught:
        list(batches.iterate(START, epochs=1))
    assert caught.value.sample == 3
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    batches.close()
    ragged = Batches(job, Shapes(), global_batch=2, workers=workers)
    with pytest.raises(DataError, match="samples 0, 1 could not be collated"):
        list(ragged.iterate(START, epochs=1))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_empty_stream_or_one_that_ends_too_early_is_an_error(job: Job, workers: int) -> None:
    batches = Batches(job, Whole(0), global_batch=2, workers=workers)
    with pytest.raises(DataError, match="gave no sample"):
        next(batches.iterate(START, epochs=1))
    batches.close()
    batches = Batches(job, Whole(5), global_batch=2, workers=workers)
    with pytest.raises(DataError, match="ended before sample 6"):
        next(batches.iterate(Position(7, 0, 6), epochs=1))


def test_an_endless_stream_is_read_no_further_than_needed(job: Job) -> None:
    read = []

    class Endless:
        def __iter__(self) -> Iterator[Any]:
            for number in itertools.count():
                read.append(number)
                yield number

    run = Batches(job, Endless(), global_batch=2).iterate(START, epochs=1)
    found = [next(iter(next(run))).batch.tolist() for _ in range(3)]
    assert found == [[0, 1], [2, 3], [4, 5]]
    assert len(read) <= 10


@pytest.mark.ci
def test_a_resume_far_into_a_stream_needs_no_memory_for_what_it_skips(job: Job) -> None:
    class Long:
        def __iter__(self) -> Iterator[int]:
            return iter(range(200_000))

    run = Batches(job, Long(), global_batch=2).iterate(Position(7, 0, 150_000), epochs=1)
    tracemalloc.start()
    try:
        assert next(iter(next(run))).batch.tolist() == [150_000, 150_001]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3_000_000  # 20 bytes for each skipped sample


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_the_digest_of_a_sparse_tensor_reads_its_indices_and_values() -> None:
    def sparse(at: int, value: float) -> torch.Tensor:
        where = torch.tensor([[0], [at]])
        return torch.sparse_coo_tensor(where, torch.tensor([value]), (10**6, 10**6))

    one = sparse(7, 1.0)
    assert digest(one, elements=4) == digest(sparse(7, 1.0), elements=4)
    assert len({digest(each) for each in (one, sparse(8, 1.0), sparse(7, 2.0))}) == 3
    in_halves = torch.sparse_coo_tensor([[0, 0], [7, 7]], [0.5, 0.5], (10**6, 10**6))
    assert digest(in_halves) == digest(one)
    dense = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    for to_sparse in ("to_sparse_csr", "to_sparse_csc"):
        own = [getattr(each, to_sparse)() for each in (dense, dense.T, 2 * dense)]
        assert len({digest(each) for each in own}) == 3


def test_digests_tell_samples_apart_and_ignore_what_they_cannot_read() -> None:
    x = torch.arange(4.0)
    items = [x, x + 1, x.to(torch.bfloat16), (x, 1), {"a": x}, "a", b"a", 1, np.arange(3), [None]]
    assert len({digest(item) for item in items}) == len(items)
    assert digest((x, object())) == digest((x.clone(), object()))
    assert digest({"dtype": np.float32}) == digest({"dtype": object()})
    assert digest(x[::2]) == digest(torch.tensor([0.0, 2.0]))
    # Views whose bytes are not the values, and what an evaluation gives.
    c = torch.tensor([1 + 2j])
    assert digest(c.conj()) == digest(torch.tensor([1 - 2j])) != digest(c)
    assert digest(torch._neg_view(x)) == digest(-x)
    assert digest(UserDict(a=x)) == digest({"a": x})
