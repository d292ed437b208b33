"""Calls with wrong arguments are refused with a sentence that leads to the right ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import ConfigError

DATA = TensorDataset(torch.zeros(8, 2), torch.zeros(8))
call: Any = paceline  # wrong calls are wanted here


def wrapped_linear(job: paceline.Job) -> torch.nn.Module:
    return paceline.ddp(job, torch.nn.Linear(2, 1))


def training(job: paceline.Job, **options: Any) -> Any:
    model = wrapped_linear(job)
    batches = paceline.Batches(job, DATA, global_batch=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return call.Training(job, model, optimizer, batches, **options)


WRONG: dict[str, tuple[Callable[[paceline.Job], Any], str]] = {
    "folder": (
        lambda job: training(job, checkpoints="runs/x"),
        "must be a paceline.Checkpoints, got str",
    ),
    "joined": (lambda job: paceline.join(), r"or call job\.leave\(\)"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_arguments_are_refused(kind: str, job: paceline.Job) -> None:
    function, message = WRONG[kind]
    with pytest.raises(ConfigError, match=message):
        function(job)


def test_batches_cannot_be_iterated(job: paceline.Job) -> None:
    with pytest.raises(paceline.StepError, match=r"for step in training\.steps"):
        list(paceline.Batches(job, DATA, global_batch=4))


def test_jobs_and_steps_are_shown(job: paceline.Job) -> None:
    assert repr(job) == "Job(rank 0 of 1, cpu)"
    trained = training(job)
    for step in trained.steps(until=1):
        assert repr(step) == "Step(number=1, epoch=0, num_samples=4)"
        step.run(lambda batch: trained.models[0](batch[0]).sum(), reduction="sum")
        step.update()


def test_the_value_of_a_loss(job: paceline.Job) -> None:
    trained = training(job)
    for step in trained.steps(until=1):
        for x, _ in step:
            loss = trained.models[0](x).mean() + 3.0
            step.backward(loss)
        step.update()
        assert step.loss.item() == float(step.loss) == loss.item()
        assert "float()" in repr(step.loss)
