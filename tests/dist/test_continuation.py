"""A training that goes on: after a `break`, and from the state of another program."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_trainings import backwards, loss_sum, make_data, refusals, weights_of
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

import paceline
from paceline.testing import run_ranks

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "constant": lambda optimizer: None,
    "function": lambda optimizer: lambda step: 1 / (1 + step),
    "steps": lambda optimizer: StepLR(optimizer, 2),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 10),
}


def _training(job: Any, *, schedule: str = "function", adam: bool = False, **options: Any) -> Any:
    torch.manual_seed(7)
    model = paceline.ddp(job, nn.Linear(4, 3))
    kind = torch.optim.AdamW if adam else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.1)
    batches = paceline.Batches(job, make_data(), global_batch=4)
    chosen = SCHEDULES[schedule](optimizer)
    return paceline.Training(job, model, optimizer, batches, schedule=chosen, **options)


def _train(training: Any, until: int, break_after: int = 0) -> Any:
    for step in training.steps(until=until):
        backwards(training, step)
        step.update()
        if step.number == break_after:
            break
    return training


def _breaks(job: Any, folder: str) -> dict[str, Any]:
    whole = weights_of(*_train(_training(job), 7).models)
    left = _train(_training(job), 7, break_after=3)
    saved = left.state_dict()
    found = {"step": saved["step"], "offset": saved["position"][2]}
    other = _training(job)
    other.load_state_dict(saved)
    found["loaded"] = weights_of(*_train(other, 7).models) == whole
    found["went on"] = weights_of(*_train(left, 7).models) == whole
    checkpoints = paceline.Checkpoints(folder)
    saving = _train(_training(job, checkpoints=checkpoints), 7, break_after=3)
    found["refused"] = refusals(job, lambda job, kind: saving.save(), ["save"])
    return found


@pytest.mark.parametrize("nproc", [1, 3])
def test_a_step_counts_that_was_updated_before_a_break(nproc: int, tmp_path: Any) -> None:
    for found in run_ranks(_breaks, str(tmp_path), nproc=nproc):
        assert found["step"] == 3
        assert found["offset"] == 12
        assert found["loaded"]
        assert found["went on"]
        assert "outside the loop" in found["refused"]["save"][1]


def _leaves_nothing_behind(job: Any, folder: str) -> dict[str, Any]:
    """What a loop that was left asked for does not concern the next one."""
    found: dict[str, Any] = {}
    checkpoints = paceline.Checkpoints(folder, every_steps=100)
    training = _training(job, checkpoints=checkpoints)
    abandoned = training.steps(until=90)
    for step in abandoned:
        backwards(training, step)
        step.update()
        if step.number == 3:
            step.stop()
            training.save(best=True)
            break
    if job.rank == 0:
        time.sleep(0.1)
    loop = training.steps(until=90)
    for step in loop:
        backwards(training, step)
        step.update()
        if step.number == 6:
            abandoned.close()
            found["number"] = training.number
    found["end"] = training.number
    found["saved"] = [each.name for each in Path(folder).glob("step-*")]
    return found


@pytest.mark.parametrize("nproc", [1, 3])
def test_requests_of_a_loop_that_was_left_are_forgotten(nproc: int, tmp_path: Any) -> None:
    for found in run_ranks(_leaves_nothing_behind, str(tmp_path), nproc=nproc):
        assert found["number"] == 5  # step 6 is in progress
        assert found["end"] == 90
        assert found["saved"] == ["step-90"]


def _other_programs(job: Any) -> dict[str, tuple[str, str]]:
    def resume(job: Any, kind: str) -> None:
        before, after = kind.split(" to ")
        state = _train(_training(job, **_options(before)), 2).state_dict()
        training = _training(job, **_options(after))
        weights = weights_of(*training.models)
        try:
            training.load_state_dict(state)
        finally:
            assert weights_of(*training.models) == weights or before == after

    kinds = ["constant to function", "function to constant", "steps to cosine", "steps to steps"]
    return refusals(job, resume, [*kinds, "SGD to AdamW"])


def _options(name: str) -> dict[str, Any]:
    return {"schedule": name} if name in SCHEDULES else {"adam": name == "AdamW"}


@pytest.mark.parametrize("nproc", [1, 2])
def test_the_state_of_another_program_is_refused(nproc: int) -> None:
    for found in run_ranks(_other_programs, nproc=nproc):
        assert set(found.pop("SGD to AdamW")) == {
            "CheckpointError",
            "optimizer 0 is AdamW, the checkpoint was trained with SGD.\n"
            "  fix:   build the same optimizer as the run that saved it, or choose another folder.",
        }
        assert {error for error, _ in found.values()} == {"CheckpointError"}
        assert "with no schedule, this training has LambdaLR" in found["constant to function"][1]
        assert "with LambdaLR, this training has none" in found["function to constant"][1]
        assert "with StepLR, this training has CosineAnnealingLR" in found["steps to cosine"][1]
        assert "steps to steps" not in found


COUNTS: dict[str, Any] = {
    "numpy": lambda batch: np.int64(len(batch[1])),
    "tensor": lambda batch: torch.tensor(len(batch[1])),
    "float": lambda batch: float(len(batch[1])),
    "text": lambda batch: str(len(batch[1])),
}


def _counts(job: Any) -> dict[str, tuple[str, str]]:
    def train(job: Any, kind: str) -> None:
        training = _training(job)
        for step in training.steps(until=1):
            for batch in step:
                step.backward(
                    loss_sum(training.models[0], batch), count=COUNTS[kind](batch), reduction="sum"
                )
            step.update()

    return refusals(job, train, COUNTS)


def test_a_count_that_is_no_integer_is_refused() -> None:
    found = run_ranks(_counts, nproc=1)[0]
    assert set(found) == {"float", "text"}
    assert "count must be an integer or a tensor of shape (), got '4'." in found["text"][1]
