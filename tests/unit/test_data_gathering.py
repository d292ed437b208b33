"""Samples gathered for several steps at once: what reading each micro-batch when it is asked for gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, Subset, TensorDataset

import paceline
from paceline.data import gathering, maploader
from paceline.data.batches import Batches
from paceline.data.plan import Plan, Position
from paceline.data.samples import Samples
from paceline.job.job import Job


def _read(dataset: Dataset[Any], plan: Plan, epochs: int) -> list[tuple[Any, ...]]:
    """Every micro-batch: place, samples, and whether it is a ghost."""
    loader = maploader.LocalLoader(_OneDevice(), plan, _samples(dataset))  # type: ignore[arg-type]
    return [
        (step.epoch, micro.offset, micro.is_ghost, [part.tolist() for part in micro.batch])
        for step in loader.steps(Position(7), epochs, equal=True)
        for micro in step
    ]


class _OneDevice:
    device = torch.device("cpu")


def _samples(dataset: Dataset[Any]) -> Samples:
    return Samples(dataset, collate=None, sample_randomness=True, rank=0, world_size=1)


def _digits(n: int) -> TensorDataset:
    # 64 bytes a row each, so that any number of rows may be gathered ahead.
    return TensorDataset(torch.arange(n * 16.0).view(n, 16), torch.arange(n * 8).view(n, 8))


@settings(deadline=None, max_examples=60)  # the machine may be busy
@given(
    st.integers(1, 90),
    st.integers(1, 30),
    st.integers(1, 30),
    st.integers(1, 5),
    st.booleans(),
    st.booleans(),
    st.integers(128, 5000),
)
def test_it_is_what_would_be_read(n, b, micro, world, aligned, subset, at_once) -> None:
    data: Any = _digits(n + 3)
    data = Subset(data, torch.randperm(n + 3)[:n].tolist()) if subset else data
    for rank in range(world):
        plan = Plan(len(data), b, min(micro, b), True, rank, world, aligned)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gathering, "_BYTES", at_once)
            together = _read(data, plan, 2)
            patch.setattr(maploader, "ahead", lambda *_: None)
            assert together == _read(data, plan, 2)


def _ahead(dataset: Dataset[Any], count: int = 8, micro: int = 4) -> gathering.Ahead | None:
    return gathering.ahead(_samples(dataset), torch.arange(3 * count), [count] * 3, micro)


def test_small_tensors_of_torch_are_gathered_by_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    read = Samples.read
    monkeypatch.setattr(
        Samples, "read", lambda self, *args: calls.append(len(args[2])) or read(self, *args)
    )
    ahead = _ahead(_digits(24))
    assert ahead is not None
    batches = [ahead.batch(begin) for begin in range(0, 24, 4)]
    assert calls == [24]
    for batch in batches:
        assert batch is not None
        assert all(part.data_ptr() % 64 == 0 and part.is_contiguous() for part in batch)


def test_what_another_may_write_to_unseen_is_read_when_asked_for() -> None:
    values = torch.zeros(24, 16)
    assert _ahead(TensorDataset(values)) is not None
    for unseen in (
        torch.from_numpy(np.zeros((24, 16), dtype=np.float32)),
        torch.zeros(24, 16).share_memory_(),
        torch.zeros(24, 16, requires_grad=True),
        torch.zeros(24, 3),  # its micro-batches would not lie at 64 bytes
        torch.zeros(24, 1 << 14),  # too large for two steps
    ):
        assert _ahead(TensorDataset(unseen)) is None
    with torch.inference_mode():
        assert _ahead(TensorDataset(torch.zeros(24, 16))) is None
    assert _ahead([(0.0, 1)] * 24) is None  # type: ignore[arg-type]


@pytest.fixture
def job() -> Iterator[Job]:
    with paceline.join() as job:
        yield job


def test_a_write_to_the_dataset_is_seen_at_once(job: Job) -> None:
    labels = torch.zeros(32, 8)
    batches = Batches(job, TensorDataset(labels), global_batch=8, micro_batch=4, shuffle=False)
    writes = 0
    for number, step in enumerate(batches.iterate(Position(0), epochs=2)):
        for micro in step:
            part = micro.batch[0]
            assert part.unique().tolist() == [writes]
            if number % 3 == 1:
                labels.add_(1)
                writes += 1
    assert writes == 6


def test_a_write_into_a_batch_is_seen_by_nobody_else(job: Job) -> None:
    data = torch.ones(32, 8)
    batches = Batches(job, TensorDataset(data), global_batch=8, micro_batch=4, shuffle=False)
    weight = torch.ones(8, requires_grad=True)
    held = torch.zeros(())
    for step in batches.iterate(Position(0), epochs=1):
        first, second = (micro.batch[0] for micro in step)
        held = held + (first * weight).sum()  # a graph that holds the batch
        assert torch.equal(second, torch.ones(4, 8))
        second.mul_(5)
    held.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [16.0] * 8
    assert torch.equal(data, torch.ones(32, 8))
