"""Defects that trainings had once, each shown by a test that failed before it was mended."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import ConfigError, StepError
from paceline.testing import digest, run_ranks


def _data(n: int = 22) -> TensorDataset:
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(3))
    return TensorDataset(x, x[:, :3].argmax(1))


def _training(job: Any, **options: Any) -> paceline.Training:
    torch.manual_seed(1)
    model = paceline.ddp(job, nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = paceline.Batches(job, _data(), global_batch=6, micro_batch=2)
    return paceline.Training(job, model, optimizer, batches, **options)


def _dtypes_of_two_optimizers(job: Any) -> set[str]:
    """A GAN whose generator step runs the critic again after the critic's backward."""
    generator, critic = (paceline.ddp(job, nn.Linear(4, 4)) for _ in range(2))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (critic, generator)]
    batches = paceline.Batches(job, _data(), global_batch=6, micro_batch=2)
    training = paceline.Training(job, [generator, critic], optimizers, batches, precision="bf16")
    seen = set()
    for step in training.steps(until=2):
        for x, _ in step:
            fake = generator(x)
            first = critic(fake.detach())
            step.backward(first.sum(), count=len(x), optimizer=optimizers[0])
            second = critic(fake)  # it raised here: fake is bf16, the weights are fp32
            step.backward(second.sum(), count=len(x), optimizer=optimizers[1])
            seen |= {str(out.dtype) for out in (fake, first, second)}
            seen.add(f"autocast after the last backward: {torch.is_autocast_enabled('cpu')}")
        for optimizer in optimizers:
            step.update(optimizer)
    return seen


def _forbidden() -> str:
    raise AssertionError("the host name was looked up in a step without an error")


def test_a_step_without_an_error_does_not_look_up_the_host_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with paceline.join() as job:
        training = _training(job, count="tokens")
        monkeypatch.setattr("paceline.errors.socket.gethostname", _forbidden)
        for step in training.steps(until=3):
            for x, y in step:
                loss = F.cross_entropy(training.models[0](x), y, reduction="sum")
                step.backward(loss, count=2 * len(x))
            step.update()


def _schedules_that_need_a_metric(job: Any) -> str:
    model = paceline.ddp(job, nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = paceline.Batches(job, _data(), global_batch=6)
    plateau: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(ConfigError, match="ReduceLROnPlateau") as raised:
        paceline.Training(job, model, optimizer, batches, schedule=plateau)
    return str(raised.value)


def _trainings_alive(job: Any) -> list[bool]:
    """Whether the models of trainings that ended, or were left by `break`, are still in memory."""
    models = []
    for number in range(3):
        training = _training(job)
        models.append(weakref.ref(paceline.unwrap(training.models[0])))
        for step in training.steps(until=3):
            step.run(lambda batch, model=training.models[0]: _loss(model, batch))
            step.update()
            if number == 1:
                break
    del training, step
    gc.collect()
    return [model() is not None for model in models]


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def _everything(job: Any) -> dict[str, Any]:
    return {
        "dtypes": _dtypes_of_two_optimizers(job),
        "plateau": _schedules_that_need_a_metric(job),
        "alive": _trainings_alive(job),
    }


@pytest.mark.parametrize("nproc", [1, 2])
def test_defects_of_trainings_are_mended(nproc: int) -> None:
    for found in run_ranks(_everything, nproc=nproc):
        assert found["dtypes"] == {"torch.bfloat16", "autocast after the last backward: False"}
        assert "scheduler.step(metric)" in found["plateau"]
        assert found["alive"] == [False, False, False]


def _loop_and_run(job: Any) -> dict[str, Any]:
    """The weights after a loop over micro-batches, and after `step.run` with each kind of result."""
    found: dict[str, Any] = {}
    for kind in ("loop", "sum", "pair", "tokens"):
        training = _training(job, count="tokens" if kind == "tokens" else "samples")
        model = training.models[0]
        for step in training.steps(epochs=2):
            if kind == "loop":
                for batch in step:
                    step.backward(_loss(model, batch), count=len(batch[1]))
            elif kind == "sum":
                step.run(lambda batch, model=model: _loss(model, batch))
            else:
                step.run(lambda batch, model=model: (_loss(model, batch), len(batch[1])))
            step.update(clip_norm=1.0)
        found[kind] = digest(paceline.unwrap(model).state_dict())
    training = _training(job, count="tokens")
    with pytest.raises(StepError, match="must return"):
        next(training.steps(until=1)).run(lambda batch: _loss(training.models[0], batch))
    job.left_loop = None
    return found


@pytest.mark.parametrize("nproc", [1, 3])
def test_step_run_is_bit_equal_to_the_loop(nproc: int) -> None:
    for found in run_ranks(_loop_and_run, nproc=nproc):
        assert found["sum"] == found["pair"] == found["loop"]


def _ghosts(job: Any) -> tuple[list[bool], int]:
    """Which micro-batches of a rank were ghosts, and a running statistic that they must not change."""
    torch.manual_seed(1)
    # Two values for each channel of a sample, since torch refuses to normalise a single one.
    norm = nn.BatchNorm1d(2)
    net = nn.Sequential(nn.Unflatten(1, (2, 2)), norm, nn.Flatten(), nn.Linear(4, 3))
    model = paceline.ddp(job, net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = paceline.Batches(job, _data(20), global_batch=6, micro_batch=2)
    training = paceline.Training(job, model, optimizer, batches)
    ghosts, real = [], 0
    for step in training.steps(epochs=1):
        for x, y in step:
            ghosts.append(step.is_ghost)
            real += 0 if step.is_ghost else len(x)
            step.backward(F.cross_entropy(model(x), y, reduction="sum"), count=len(y))
        step.update()
    assert norm.training
    assert int(norm.num_batches_tracked) == ghosts.count(False)
    return ghosts, real


def test_ghosts_keep_ranks_in_step_and_out_of_plain_batchnorm() -> None:
    # 20 samples in steps of 6 over 3 ranks: the last step has 2, so that one rank has none.
    found = run_ranks(_ghosts, nproc=3)
    assert sum(real for _, real in found) == 20
    assert {len(ghosts) for ghosts, _ in found} == {len(found[0][0])}
    assert any(any(ghosts) for ghosts, _ in found)
