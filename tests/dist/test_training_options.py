"""Options of a step and a training: clipping, norms, schedules by epoch and metric, skipped optimizers."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from small_trainings import Recording, backwards, loss_sum, make_data, refusals
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

import paceline
from paceline.errors import ConfigError
from paceline.job.preemption import Preempted
from paceline.testing import run_ranks


def _model(*, wide: bool = False) -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(4, 600 if wide else 8), nn.Tanh(), nn.Linear(600 if wide else 8, 3)
    )


def _clip_with_torch(options: dict[str, Any]) -> tuple[list[torch.Tensor], float]:
    """The gradient of the first step on one process, clipped by torch."""
    model, data = _model(), make_data()
    loss = loss_sum(model, data.tensors) / len(data)
    loss.backward()
    if "clip_value" in options:
        largest = max(float(p.grad.abs().max()) for p in model.parameters())
        clip_grad_value_(model.parameters(), options["clip_value"])
    else:
        norm_type = options.get("norm_type", 2.0)
        largest = float(clip_grad_norm_(model.parameters(), options["clip_norm"], norm_type))
    return [p.grad for p in model.parameters()], largest


CLIPPED = [
    {"clip_norm": 0.05},
    {"clip_norm": 0.05, "norm_type": 1.0},
    {"clip_norm": 0.01, "norm_type": math.inf},
    {"clip_value": 0.01},
    {"clip_norm": 1e6},
]


def _clip(job: Any, options: dict[str, Any], *, sharded: bool = False) -> dict[str, Any]:
    if sharded:
        model = paceline.fsdp(job, _model(), blocks="0")
    else:
        model = paceline.ddp(job, _model())
    optimizer = Recording(model.parameters())
    batches = paceline.Batches(job, make_data(), global_batch=22, micro_batch=3, shuffle=False)
    training = paceline.Training(job, model, optimizer, batches)
    result: dict[str, Any] = {}
    for step in training.steps(until=1):
        backwards(training, step)
        step.update(**options)
        gradients = [g.full_tensor() if sharded else g for g in optimizer.seen[0]]
        result = {"gradients": gradients, "norm": float(step.grad_norm)}
    return result


def _clip_all(job: Any) -> list[dict[str, Any]]:
    results = [_clip(job, options) for options in CLIPPED]
    if job.world_size > 1:
        results += [_clip(job, options, sharded=True) for options in CLIPPED]
    return results


@pytest.mark.parametrize("nproc", [1, 2, 3, 4])
def test_clipping_is_that_of_torch(nproc: int) -> None:
    results = run_ranks(_clip_all, nproc=nproc)
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=0)
    kinds = CLIPPED if nproc == 1 else CLIPPED + CLIPPED
    for options, result in zip(kinds, results[0], strict=True):
        want, largest = _clip_with_torch(options)
        torch.testing.assert_close(result["gradients"], want)
        assert result["norm"] == pytest.approx(largest, rel=1e-5)


def _refuse_clipping(job: Any, kind: str) -> None:
    options: dict[str, Any] = {
        "norm": {"clip_norm": 0.0},
        "value": {"clip_value": -1.0},
        "both": {"clip_norm": 1.0, "clip_value": 1.0},
        "type": {"clip_norm": 1.0, "norm_type": 0.0},
        "no effect": {"norm_type": 1.0},
    }[kind]
    _clip(job, options)


def _refuse_all(job: Any) -> dict[str, Any]:
    return refusals(job, _refuse_clipping, ["norm", "value", "both", "type", "no effect"])


def test_clipping_options_without_sense_are_refused_on_all_ranks() -> None:
    for found in run_ranks(_refuse_all, nproc=2):
        assert {kind: name for kind, (name, _) in found.items()} == dict.fromkeys(
            ["norm", "value", "both", "type", "no effect"], "ConfigError"
        )
        assert "clip_norm and clip_value cannot be combined" in found["both"][1]
        assert "norm_type has no effect" in found["no effect"][1]


def _rates(job: Any, kind: str, folder: str, epochs: int) -> list[float]:
    model = paceline.ddp(job, _model())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    batches = paceline.Batches(job, make_data(), global_batch=8, micro_batch=3)
    schedule: Any = {
        "function": lambda: paceline.PerEpoch(lambda epoch: 0.5**epoch),
        "scheduler": lambda: paceline.PerEpoch(StepLR(optimizer, 2, 0.1)),
        "plateau": lambda: ReduceLROnPlateau(optimizer, factor=0.1, patience=1),
    }[kind]()
    checkpoints = paceline.Checkpoints(folder, every_epochs=1)
    training = paceline.Training(
        job, model, optimizer, batches, schedule=schedule, checkpoints=checkpoints
    )
    rates = []
    for step in training.steps(epochs=epochs):
        rates.append(optimizer.param_groups[0]["lr"])
        backwards(training, step)
        step.update()
        if step.ends_epoch and kind == "plateau":
            training.step_schedule([3.0, 2.0, 2.5, 2.5, 2.5, 1.0][step.epoch])
    return rates


def _all_rates(job: Any, folder: str) -> dict[str, list[float]]:
    """The learning rate of each step of 6 epochs, resumed after the third, by kind of schedule."""
    return {
        kind: _rates(job, kind, f"{folder}/{kind}", 3) + _rates(job, kind, f"{folder}/{kind}", 6)
        for kind in ("function", "scheduler", "plateau")
    }


@pytest.mark.parametrize("nproc", [pytest.param(1, marks=pytest.mark.slow), 2, 3])
@pytest.mark.ci
def test_schedules_by_epoch_and_metric(nproc: int, tmp_path: Path) -> None:
    results = run_ranks(_all_rates, str(tmp_path), nproc=nproc)
    by_epoch = {
        "function": [1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125],
        "scheduler": [1.0, 1.0, 0.1, 0.1, 0.01, 0.01],
        "plateau": [1.0, 1.0, 1.0, 1.0, 0.1, 0.1],
    }
    for kind, want in by_epoch.items():
        per_step = [rate for rate in want for _ in range(3)]
        assert all(rates[kind] == pytest.approx(per_step) for rates in results)


def _wrong_schedule(job: Any, kind: str) -> None:
    model = paceline.ddp(job, _model())
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    if kind == "closure":
        optimizer = torch.optim.LBFGS(model.parameters())
    schedule: Any = ReduceLROnPlateau(optimizer) if kind != "no plateau" else None
    if kind == "per epoch":
        schedule = paceline.PerEpoch(schedule)
    batches = paceline.Batches(job, make_data(), global_batch=8, micro_batch=3)
    training = paceline.Training(job, model, optimizer, batches, schedule=schedule)
    for step in training.steps(epochs=3):
        backwards(training, step)
        step.update()
        if kind in ("differs", "no plateau"):
            training.step_schedule(float(job.rank) if kind == "differs" else 1.0)


def _wrong_schedules(job: Any) -> dict[str, Any]:
    return refusals(
        job, _wrong_schedule, ["closure", "per epoch", "no metric", "differs", "no plateau"]
    )


def test_schedules_without_a_metric_and_optimizers_with_a_closure_are_refused() -> None:
    for found in run_ranks(_wrong_schedules, nproc=2):
        assert found["closure"][0] == "ConfigError"
        assert "LBFGS is not supported: its `step` needs a closure" in found["closure"][1]
        assert found["per epoch"][0] == "ConfigError"
        assert found["no metric"][0] == "StepError"
        assert "got no metric in 3 epochs" in found["no metric"][1]
        assert found["differs"][0] == "RankDisagreement"
        assert found["no plateau"][0] == "ConfigError"


def _plateau(job: Any, folder: str, epochs: int, ends: str = "") -> str:
    """A training with a metric after epoch 3; returns how its loop ends."""
    model = paceline.ddp(job, _model())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    batches = paceline.Batches(job, make_data(), global_batch=8, micro_batch=3)
    training = paceline.Training(
        job,
        model,
        optimizer,
        batches,
        schedule=ReduceLROnPlateau(optimizer),
        checkpoints=paceline.Checkpoints(folder),
    )
    try:
        for step in training.steps(epochs=epochs):
            backwards(training, step)
            step.update()
            if step.ends_epoch and step.epoch == 2:
                if ends == "signal":
                    os.kill(os.getpid(), signal.SIGUSR2)
                elif ends == "stop":
                    step.stop()
                else:
                    training.step_schedule(1.0)
    except Preempted:
        return "preempted"
    return "ended"


def _plateaus(job: Any, folder: str) -> list[str]:
    return [
        _plateau(job, f"{folder}/signal", 9, "signal"),
        _plateau(job, f"{folder}/stop", 9, "stop"),
        _plateau(job, f"{folder}/metric", 3),
        _plateau(job, f"{folder}/metric", 6),  # resumed, without a metric in this run
    ]


def test_a_metric_may_come_in_another_run_of_the_training(tmp_path: Path) -> None:
    (found,) = run_ranks(_plateaus, str(tmp_path), nproc=1)
    assert found == ["preempted", "ended", "ended", "ended"]


def _overflow(job: Any) -> list[float]:
    """The learning rates after two steps; in the first, gradients of the first optimizer overflow."""
    models = [paceline.ddp(job, nn.Linear(4, 1)) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    batches = paceline.Batches(job, make_data(), global_batch=8)
    training = paceline.Training(
        job,
        models,
        optimizers,
        batches,
        precision="fp16",
        schedule=[lambda step: 0.5**step, lambda step: 0.5**step],
    )
    for step in training.steps(until=2):
        for x, _ in step:
            for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                factor = 1000.0 if step.number == 1 and number == 0 else 0.01
                loss = factor * model(x).float().sum()
                step.backward(loss, count=len(x), optimizer=optimizer, reduction="sum")
        for optimizer in optimizers:
            step.update(optimizer)
    return [optimizer.param_groups[0]["lr"] for optimizer in optimizers]


def test_the_schedule_of_an_optimizer_whose_gradients_overflow_does_not_advance() -> None:
    assert run_ranks(_overflow, nproc=1) == [[0.5, 0.25]]


def test_a_swapped_model_and_optimizer_are_named_in_one_line() -> None:
    with paceline.join() as job:
        model, optimizer = _model(), torch.optim.AdamW(_model().parameters())
        batches = paceline.Batches(job, make_data(), global_batch=4)
        for models, optimizers, got in (
            (optimizer, model, "AdamW"),
            ([model, optimizer], optimizer, "a list of Sequential, AdamW"),
            (None, optimizer, "None"),
        ):
            with pytest.raises(ConfigError) as caught:
                paceline.Training(job, models, optimizers, batches)  # type: ignore[arg-type]
            assert str(caught.value).splitlines()[0].endswith(f"got {got}.")
