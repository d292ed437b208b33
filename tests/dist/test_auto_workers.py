"""`workers="auto"`: the same samples, read by as many workers as the first steps asked for."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import paceline
from paceline.data.plan import Position
from paceline.testing import run_ranks

SIZE, GLOBAL_BATCH = 120, 4


class Rows(Dataset[Any]):
    """Numbers, each of which takes a while to read."""

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.wait_s)
        return index, torch.rand(())


def _read(job: Any, wait_s: float, workers: Any) -> tuple[Any, Any]:
    batches = paceline.Batches(job, Rows(wait_s), global_batch=GLOBAL_BATCH, workers=workers)
    rows = []
    for step in batches.iterate(Position(job.seed, 0, 0), epochs=2):
        own = []
        for micro in step:
            numbers, drawn = micro.batch
            own += list(zip(numbers.tolist(), drawn.tolist(), strict=True))
        time.sleep(0.002)  # the step computes
        rows.append((step.epoch, step.offset, own))
    return rows, getattr(batches._loader, "workers", None)


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_slow_reading_gets_workers_and_the_same_samples(nproc: int) -> None:
    expected = run_ranks(_read, 0.0, 0, nproc=nproc)
    found = run_ranks(_read, 0.004, "auto", nproc=nproc)
    for (rows, _), (want, _) in zip(found, expected, strict=True):
        assert rows == want
    assert all(workers >= 1 for _, workers in found)


def test_reading_that_takes_no_time_gets_none() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(SIZE))
    assert run_ranks(_workers_for, data, nproc=2) == [0, 0]


def test_two_delays_do_not_decide() -> None:
    assert run_ranks(_workers_for, _Delayed(), nproc=2) == [0, 0]


class _Delayed(Dataset[Any]):
    """Rows that take no time, but for two, as where another program takes the core for a moment."""

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        if self.reads in (20, 30):  # of 38 on each of two ranks
            time.sleep(0.2)
        return index


def _workers_for(job: Any, data: Any) -> Any:
    batches = paceline.Batches(job, data, global_batch=GLOBAL_BATCH, workers="auto")
    for step in batches.iterate(Position(job.seed, 0, 0), epochs=1):
        for _ in step:
            time.sleep(0.1)
    return batches._loader.workers  # type: ignore[union-attr]
