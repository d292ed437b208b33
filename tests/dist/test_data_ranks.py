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
from paceline.data.batches import Batches
from paceline.data.evaluation import EvaluationBatches
from paceline.data.plan import Position
from paceline.errors import (
    ConfigError,
    DataError,
    PacelineError,
    RankDisagreement,
)
from paceline.job.job import Job
from paceline.testing import run_ranks

EPOCHS = 2


class Augmented:
    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(()).item(), float(np.random.randn()), random.random()


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
    return {"augmented": Augmented, "stream": Stream, "sharded": Sharded}[kind]()


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
            rows, firsts, padding = [], [], 0
            for micro in micros:
                found = list(zip(*(part.tolist() for part in micro.batch), strict=True))
                assert 1 <= micro.count == len(found) <= micro_batch
                if micro.is_padding:
                    padding += 1
                    assert micro.count == 1
                else:
                    rows += found
                    firsts.append((micro.offset, found[0][0]))
            where = (step.epoch, step.offset, step.num_samples, step.ends_epoch, step.next_position)
            steps.append((where, rows, firsts, len(micros), padding))
        batches.close()
        out.append(steps)
    return out


KINDS = ["tensors", "augmented", "stream", "sharded"]
# workers, micro_batch, equal
CONFIGS = [(0, 2, False), (1, 2, False), (2, 2, False), (0, 1, True), (1, 1, True)]


def _evaluated(job: Job) -> list[tuple[int, list[int]]]:
    found = EvaluationBatches(job, Augmented(), micro_batch=3)
    return [(one.index, one.batch[0].tolist()) for one in found]


def _read_all(job: Job) -> dict[str, Any]:
    rows = [_rows(job, KINDS, *config) for config in CONFIGS]
    return {"rows": rows, "evaluated": _evaluated(job)}


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
                together.sort()  # ranks take places in turn there; the stream is in order
                assert sorted(rows) == rows
            assert together == rows, kind
            if equal:
                assert len({other[3] for other in others}) == 1, kind
            else:
                assert all(other[4] == 0 for other in others), kind
            # The offset of a micro-batch means the same sample on any number of ranks.
            order = [row[0] for row in rows]
            for other in others:
                assert all(order[place - where[1]] == first for place, first in other[2]), kind


@pytest.mark.parametrize("nproc", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_steps_and_evaluations_are_the_same_on_any_ranks(alone: list[Any], nproc: int) -> None:
    ranks = run_ranks(_read_all, nproc=nproc)
    for number, config in enumerate(CONFIGS):
        found = [rank["rows"][number] for rank in ranks]
        _assert_as_alone(alone, found, equal=config[2])
    evaluated = [one for rank in ranks for one in rank["evaluated"]]
    assert evaluated == [(i, list(range(13))[3 * i : 3 * i + 3]) for i in range(5)]


# Failures


class ByRank(IterableDataset):  # type: ignore[type-arg]
    """A stream that splits itself over ranks, which it must not."""

    def __init__(self, rank: int, count: int, size: int) -> None:
        self.rank, self.count, self.size = rank, count, size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, self.size, self.count))


class Uneven:
    """The first shard continues after the others have ended."""

    def __iter__(self) -> Iterator[int]:
        return iter(())

    def shard(self, index: int, count: int) -> Iterator[int]:
        return iter(range(index, 20 if index == 0 else 4, count))


def _error(job: Job, dataset: Any, *, offset: int = 0, **options: Any) -> PacelineError | None:
    try:
        for step in Batches(job, dataset, **options).iterate(Position(0, 0, offset), epochs=1):
            list(step)
    except PacelineError as error:
        return error
    return None


def _errors_on_all_ranks(job: Job) -> dict[str, Any]:
    rank, eight = job.rank, TensorDataset(torch.arange(8))
    warnings: list[str] = []
    log.logger.warning = lambda message, *_: warnings.append(message)  # type: ignore[method-assign]
    try:
        found: dict[str, Any] = {
            "samples": _error(job, TensorDataset(torch.arange(5 + rank)), global_batch=2),
            "arguments": _error(job, eight, global_batch=2 + rank),
            "length": _error(job, ByRank(rank, job.world_size, 5), global_batch=2),
            "other samples": _error(job, ByRank(rank, job.world_size, 8), global_batch=2),
            "uneven": _error(job, Uneven(), global_batch=4),
            "uneven later": _error(job, Uneven(), global_batch=4, offset=4),
            "empty stream": _error(job, Stream(0), global_batch=4),
            "empty set": _error(job, TensorDataset(torch.empty(0)), global_batch=4),
        }
    finally:
        del log.logger.warning
    found["warned"] = sum("different samples" in text for text in warnings)
    return found


def test_what_all_ranks_can_know_is_an_error_on_all() -> None:
    for found in run_ranks(_errors_on_all_ranks, nproc=2):
        kinds = {name: type(error) for name, error in found.items() if name != "warned"}
        assert kinds == {
            "samples": RankDisagreement,
            "arguments": RankDisagreement,
            "length": RankDisagreement,
            "other samples": type(None),
            "uneven": DataError,
            "uneven later": DataError,
            "empty stream": DataError,
            "empty set": ConfigError,
        }
        assert "samples" in str(found["samples"])
        assert "global_batch" in str(found["arguments"])
        assert found["length"].values == [1, 0]
        assert found["warned"] == 1
        assert "more samples after sample 8" in str(found["uneven"])
        assert "gave no sample" in str(found["empty stream"])


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
    with pytest.raises(DataError, match="sample 9") as caught:
        run_ranks(_fail, workers, nproc=2)
    assert caught.value.rank == 1
    assert caught.value.worker == (0 if workers else None)
