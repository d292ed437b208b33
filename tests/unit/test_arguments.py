"""Calls with wrong arguments are refused with a sentence that leads to the right ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import ConfigError

DATA = TensorDataset(torch.zeros(8, 2), torch.zeros(8))
call: Any = paceline  # wrong calls are wanted here


@pytest.fixture
def job() -> Iterator[paceline.Job]:
    with paceline.join() as job:
        yield job


def wrapped_linear(job: paceline.Job) -> torch.nn.Module:
    return paceline.ddp(job, torch.nn.Linear(2, 1))


def training(job: paceline.Job, **options: Any) -> Any:
    model = wrapped_linear(job)
    batches = paceline.Batches(job, DATA, global_batch=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return call.Training(job, model, optimizer, batches, **options)


WRONG: dict[str, tuple[Callable[[paceline.Job], Any], str]] = {
    "swapped": (
        lambda job: call.Batches(DATA, job, global_batch=4),
        "argument of Batches must be the job, got TensorDataset",
    ),
    "swapped ddp": (
        lambda job: call.ddp(torch.nn.Linear(2, 1), job),
        r"fix: +ddp\(job, module, \.\.\.\), where `job`",
    ),
    "no job": (lambda job: call.ddp(torch.nn.Linear(2, 1)), "the job, got Linear"),
    "nothing": (lambda job: call.evaluate(), "argument of evaluate must be the job, got none"),
    "unknown": (
        lambda job: call.Batches(job, DATA, batch_size=4),
        "Batches has no argument 'batch_size'(.|\n)*its arguments are job, dataset, global_batch",
    ),
    "near": (lambda job: call.Checkpoints("x", every_epoch=1), "did you mean every_epochs?"),
    "of fit": (lambda job: call.Trainer(clip_norm=1.0), "give it to Trainer.fit: clip_norm="),
    "of Trainer": (
        lambda job: call.Trainer(torch.nn.Linear(2, 1), len, len, DATA).fit(1, epoch=2),
        "Trainer.fit has no argument 'epoch'",
    ),
    "folder": (
        lambda job: training(job, checkpoints="runs/x"),
        "must be a paceline.Checkpoints, got str",
    ),
    "joined": (lambda job: paceline.join(), r"or call job\.leave\(\)"),
    "schedule": (lambda job: training(job, schedul=1), "did you mean schedule?"),
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


def test_signatures_stay() -> None:
    assert next(iter(inspect.signature(paceline.ddp).parameters)) == "job"
    assert "global_batch" in inspect.signature(paceline.Trainer).parameters
    assert paceline.evaluate.__doc__


def test_the_value_of_a_loss(job: paceline.Job) -> None:
    trained = training(job)
    for step in trained.steps(until=1):
        for x, _ in step:
            loss = trained.models[0](x).mean() + 3.0
            step.backward(loss)
        step.update()
        assert step.loss.item() == float(step.loss) == loss.item()
        assert "float()" in repr(step.loss)
