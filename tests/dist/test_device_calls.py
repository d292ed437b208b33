"""What a training asks of a device in each step. Events and copies to the host are counted on the CPU."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
import torch
from small_trainings import make_training
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


def _trains(job: Any, as_device: bool, count: str, bad_step: int, global_batch: int) -> Any:
    if as_device:

        def copied(device: torch.device) -> _Event:
            CALLS["copy"] += 1
            return _Event()

        training._new_event = lambda device: _Event  # type: ignore[assignment]
        control_word._is_on_device = lambda value: isinstance(value, torch.Tensor)  # type: ignore[assignment]
        control_word._is_late = lambda device: True  # type: ignore[assignment]
        control_word._event_after = copied  # type: ignore[assignment]
    torch.manual_seed(0)
    model = paceline.ddp(job, nn.Linear(4, 1))
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(global_batch * STEPS, 4, generator=generator))
    own = make_training(job, model, data, global_batch=global_batch, count=count)
    logger = _Lines()
    own.report(loggers=[logger])
    failed_at = 0
    is_bad = global_batch == 1 or job.rank == job.world_size - 1
    try:
        for step in own.steps(until=STEPS):
            for (x,) in step:
                loss = model(x).square().sum()
                if step.number == bad_step and is_bad:
                    loss = loss * float("nan")
                step.backward(loss, count=torch.tensor(len(x)), reduction="sum")
            step.update()
            own.log(loss=step.loss)
            if step.number % 7 == 0:
                own.log(reduce="sum", rank_sum=float(job.rank))
    except NonFinite as error:
        failed_at = error.facts["step"]
    return logger.lines, CALLS.copy(), failed_at


def _with_and_without(job: Any, count: str, global_batch: int) -> list[Any]:
    plain = _trains(job, False, count, 0, global_batch)
    as_device = _trains(job, True, count, 0, global_batch)
    return [plain, as_device, _trains(job, True, count, 40, global_batch)]


@pytest.mark.parametrize(
    ("nproc", "count", "global_batch"),
    [
        (2, "samples", 12),
        (
            3,
            "tokens",
            1,
        ),  # ranks without a sample have nothing to copy, and send words of equal length
        pytest.param(1, "tokens", 12, marks=pytest.mark.ci),
        pytest.param(3, "tokens", 12, marks=pytest.mark.ci),
    ],
)
def test_a_device_is_asked_seldom_and_the_logged_values_stay_the_same(
    nproc: int, count: str, global_batch: int
) -> None:
    results = run_ranks(_with_and_without, count, global_batch, nproc=nproc)
    want = results[0][0][0]
    assert list(want) == list(range(1, STEPS + 1))
    assert results[0][1][0] == want
    for _, (_, calls, _), (_, _, failed_at) in results:
        assert calls["record"] < 0.5 * STEPS  # ten or more events in a sampled step, none in others
        # At most one for the losses and one for the counts of a word.
        assert calls["copy"] < 0.5 * STEPS
        assert calls["synchronize"] <= calls["copy"]
        assert failed_at == 40  # a loss that is not finite is found through the copy
