"""What a training asks of a device in each step. Events and copies to the host are counted on the CPU."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import NonFinite
from paceline.testing import run_ranks
from paceline.training import control_word, training

STEPS = 300
CALLS: Counter[str] = Counter()


class _Event:
    """An event of a device that has always finished."""

    def record(self) -> None:
        CALLS["record"] += 1
        self.at_s = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: _Event) -> float:
        return 1e3 * (later.at_s - self.at_s)

    def synchronize(self) -> None:
        CALLS["synchronize"] += 1


class _Lines:
    def __init__(self) -> None:
        self.lines: dict[int, dict[str, Any]] = {}

    def start(self, run: Any) -> None: ...

    def log(self, step: int, values: Any) -> None:
        assert step not in self.lines
        self.lines[step] = {name: values[name] for name in ("loss", "rank_sum") if name in values}

    def close(self) -> None: ...


def _trains(job: Any, as_device: bool, count: str, bad_step: int, global_batch: int = 12) -> Any:
    if as_device:

        def copied(device: torch.device) -> _Event:
            CALLS["copy"] += 1
            return _Event()

        training._new_event = lambda device: _Event  # type: ignore[assignment]
        control_word._is_on_device = lambda value: isinstance(value, torch.Tensor)  # type: ignore[assignment]
        control_word._is_late = lambda device: True  # type: ignore[assignment]
        control_word._event_after = copied  # type: ignore[assignment]
    model = paceline.ddp(job, nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(
        torch.randn(global_batch * STEPS, 4, generator=torch.Generator().manual_seed(1))
    )
    batches = paceline.Batches(job, data, global_batch=global_batch)
    own = paceline.Training(job, model, optimizer, batches, count=count)
    logger = _Lines()
    own.report(loggers=[logger])
    failed_at = 0
    try:
        for step in own.steps(until=STEPS):
            for (x,) in step:
                loss = model(x).square().sum()
                if step.number == bad_step and job.rank == job.world_size - 1:
                    loss = loss * float("nan")
                step.backward(loss, count=torch.tensor(len(x)), reduction="sum")
            step.update()
            own.log(loss=step.loss)
            if step.number % 7 == 0:
                own.log(reduce="sum", rank_sum=float(job.rank))
    except NonFinite as error:
        failed_at = error.facts["step"]
    return logger.lines, dict(CALLS), failed_at


@pytest.mark.parametrize("nproc", [1, 2, 3])
@pytest.mark.parametrize("count", ["samples", "tokens"])
def test_a_device_is_asked_seldom_and_the_logged_values_stay_the_same(
    nproc: int, count: str
) -> None:
    want = run_ranks(_trains, False, count, 0, nproc=nproc)[0][0]
    assert list(want) == list(range(1, STEPS + 1))
    for rank, (lines, calls, _) in enumerate(run_ranks(_trains, True, count, 0, nproc=nproc)):
        if rank == 0:
            assert lines == want
        assert calls["record"] < 0.5 * STEPS  # ten or more events in a sampled step, none in others
        assert (
            calls["copy"] < 0.5 * STEPS
        )  # at most one for the losses and one for the counts of a word
        assert calls["synchronize"] <= calls["copy"]


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_loss_that_is_not_finite_is_found_through_the_copy(nproc: int) -> None:
    outcomes = run_ranks(_trains, True, "samples", 40, nproc=nproc)
    assert [failed_at for _, _, failed_at in outcomes] == [40] * nproc


def test_a_rank_without_samples_sends_words_of_the_same_length() -> None:
    """One sample a step, so the other ranks have none, and nothing to copy."""
    want = run_ranks(_trains, False, "samples", 0, 1, nproc=3)[0][0]
    assert run_ranks(_trains, True, "samples", 0, 1, nproc=3)[0][0] == want
