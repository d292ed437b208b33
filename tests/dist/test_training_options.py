"""Options of a step and a training: clipping, schedulers of the loop, skipped optimizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_trainings import Recording, backwards, loss_sum, make_data, refusals
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

import paceline
from paceline.errors import ConfigError
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
    norm = float(clip_grad_norm_(model.parameters(), options["clip_norm"]))
    return [p.grad for p in model.parameters()], norm


CLIPPED = [{"clip_norm": 0.05}, {"clip_norm": 1e6}]


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
        want, norm = _clip_with_torch(options)
        torch.testing.assert_close(result["gradients"], want)
        assert result["norm"] == pytest.approx(norm, rel=1e-5)


def _rates(job: Any, kind: str, folder: str, epochs: int) -> list[float]:
    model = paceline.ddp(job, _model())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    batches = paceline.Batches(job, make_data(), global_batch=8, micro_batch=3)
    scheduler: Any = (
        StepLR(optimizer, 2, 0.1)
        if kind == "by epoch"
        else ReduceLROnPlateau(optimizer, factor=0.1, patience=1)
    )
    checkpoints = paceline.Checkpoints(folder, every_epochs=1)
    training = paceline.Training(job, model, optimizer, batches, checkpoints=checkpoints)
    training.keep(scheduler=scheduler)
    rates = []
    for step in training.steps(epochs=epochs):
        rates.append(optimizer.param_groups[0]["lr"])
        backwards(training, step)
        step.update()
        if step.ends_epoch and kind == "by epoch":
            scheduler.step()
        elif step.ends_epoch:
            scheduler.step([3.0, 2.0, 2.5, 2.5, 2.5, 1.0][step.epoch])
    return rates


def _all_rates(job: Any, folder: str) -> dict[str, list[float]]:
    """The learning rate of each step of 6 epochs, resumed after the third, by kind of schedule."""
    return {
        kind: _rates(job, kind, f"{folder}/{kind}", 3) + _rates(job, kind, f"{folder}/{kind}", 6)
        for kind in ("by epoch", "plateau")
    }


@pytest.mark.ci
def test_schedulers_that_the_loop_steps_are_resumed(tmp_path: Path) -> None:
    results = run_ranks(_all_rates, str(tmp_path), nproc=2)
    by_epoch = {
        "by epoch": [1.0, 1.0, 0.1, 0.1, 0.01, 0.01],
        "plateau": [1.0, 1.0, 1.0, 1.0, 0.1, 0.1],
    }
    for kind, want in by_epoch.items():
        per_step = [rate for rate in want for _ in range(3)]
        assert all(rates[kind] == pytest.approx(per_step) for rates in results)


def _refuse(job: Any, kind: str) -> None:
    model = paceline.ddp(job, _model())
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    if kind == "closure":
        optimizer = torch.optim.LBFGS(model.parameters())
    schedule: Any = ReduceLROnPlateau(optimizer) if kind == "plateau" else None
    batches = paceline.Batches(job, make_data(), global_batch=8, micro_batch=3)
    training = paceline.Training(job, model, optimizer, batches, schedule=schedule)
    for step in training.steps(epochs=1):
        backwards(training, step)
        step.update(clip_norm=0.0)


def _refuse_all(job: Any) -> dict[str, Any]:
    return refusals(job, _refuse, ["closure", "plateau", "clip_norm"])


def test_options_that_do_not_fit_are_refused_on_all_ranks() -> None:
    for found in run_ranks(_refuse_all, nproc=2):
        assert [name for name, _ in found.values()] == ["ConfigError"] * 3
        assert "LBFGS is not supported: its `step` needs a closure" in found["closure"][1]
        assert "`if step.ends_epoch: scheduler.step(metrics)`" in found["plateau"][1]
        assert "clip_norm must be more than 0" in found["clip_norm"][1]


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
            ([model, optimizer], optimizer, "AdamW"),
            (None, optimizer, "NoneType"),
        ):
            with pytest.raises(ConfigError) as caught:
                paceline.Training(job, models, optimizers, batches)  # type: ignore[arg-type]
            assert str(caught.value).splitlines()[0].endswith(f"got {got}.")
