"""The state of a training by name: old versions, other layouts, and what optimizers keep."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.data import TensorDataset

import paceline
from paceline.testing import run_ranks

V1 = Path(__file__).parents[1] / "data/state_v1"  # saved before parameters had names


def _trainings(job: Any) -> dict[str, tuple[Any, ...]]:
    """The models, optimizers and options of the three trainings in `V1`."""
    plain = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    matrices = [p for p in plain.parameters() if p.ndim > 1]
    vectors = [p for p in plain.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    linear, first, last = nn.Linear(4, 1), nn.Linear(4, 3), nn.Linear(3, 1)
    found: dict[str, tuple[Any, ...]] = {
        "plain": ([plain], [torch.optim.AdamW(groups, lr=0.5)], {"schedule": lambda n: 0.9**n}),
        "reproducible": (
            [linear],
            [torch.optim.SGD(linear.parameters(), lr=0.5, momentum=0.1)],
            {"reproducible": True},
        ),
        "two": (
            [first, last],
            [
                torch.optim.Adam(first.parameters(), lr=0.5),
                torch.optim.SGD(last.parameters(), lr=0.5, momentum=0.1),
            ],
            {},
        ),
    }
    return {
        name: ([paceline.ddp(job, model) for model in models], optimizers, options)
        for name, (models, optimizers, options) in found.items()
    }


def _plain(value: Any) -> Any:
    return value.double().tolist() if isinstance(value, torch.Tensor) else value


def _resume_v1(job: Any, folder: str) -> dict[str, Any]:
    data = TensorDataset(torch.zeros(24, 4), torch.ones(24, 1))
    found = {}
    for name, (models, optimizers, options) in _trainings(job).items():
        training = paceline.Training(
            job,
            models,
            optimizers,
            paceline.Batches(job, data, global_batch=8, micro_batch=4),
            checkpoints=paceline.Checkpoints(f"{folder}/{name}", resume="must"),
            **options,
        )
        assert list(training.steps(until=1)) == []  # it resumes, and has nothing left to do
        position = training.position
        inner = [paceline.unwrap(model) for model in models]
        names = {
            p: f"{number}.{name}"
            for number, model in enumerate(inner)
            for name, p in model.named_parameters()
        }
        groups = [optimizer.param_groups for optimizer in optimizers]
        found[name] = {
            "models": [{n: _plain(t) for n, t in m.state_dict().items()} for m in inner],
            "optimizers": [
                {names[p]: {k: _plain(v) for k, v in s.items()} for p, s in o.state.items()}
                for o in optimizers
            ],
            "lr": [[group["lr"] for group in each] for each in groups],
            "step": training.number,
            "position": [position.seed, position.epoch, position.offset],
        }
    return found


def test_state_version_1_is_resumed(tmp_path: Path) -> None:
    want = {f.name: json.loads((f / "expected.json").read_text()) for f in V1.iterdir()}
    for nproc in (1, 2, 3):
        shutil.copytree(V1, tmp_path / f"{nproc}")
        assert run_ranks(_resume_v1, str(tmp_path / f"{nproc}"), nproc=nproc) == [want] * nproc


def test_weights_are_loaded_from_state_version_1() -> None:
    for name in ("plain", "two"):
        want = json.loads((V1 / name / "expected.json").read_text())["models"]
        with paceline.join() as job:
            models = _trainings(job)[name][0]
        for number, model in enumerate(models):
            paceline.load_weights(model, V1 / name, number=number)
            assert {n: _plain(t) for n, t in model.state_dict().items()} == want[number]


class _Average:
    """An average of the parameters, by the names of the wrapped model and as a list."""

    def __init__(self, model: nn.Module) -> None:
        self.by_name = {n: p.detach().clone() for n, p in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        for name, p in model.named_parameters():
            self.by_name[name].lerp_(p.detach(), 0.25)

    def state_dict(self) -> dict[str, Any]:
        return {"by_name": dict(self.by_name), "in order": list(self.by_name.values())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert list(state["by_name"]) == list(self.by_name)
        for own, value, same in zip(
            self.by_name.values(), state["by_name"].values(), state["in order"], strict=True
        ):
            own.copy_(value)
            own.copy_(same)


def _averages(job: Any, folder: str, how: str, until: int) -> list[float]:
    torch.manual_seed(1)
    first: nn.Module = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
    if "compile" in how:
        first = torch.compile(first, backend="eager")
    if "checkpoint" in how:
        first = checkpoint_wrapper(first)
    plain = nn.Sequential(first, nn.Linear(6, 1))
    if "fsdp" in how:
        model = paceline.fsdp(job, plain, blocks=[nn.Linear], param_dtype=torch.float32)
    else:
        model = paceline.ddp(job, plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(2))
    batches = paceline.Batches(job, TensorDataset(x, x[:, :1]), global_batch=12)
    checkpoints = paceline.Checkpoints(folder, resume="auto" if until == 2 else "must")
    training = paceline.Training(job, model, optimizer, batches, checkpoints=checkpoints)
    average = _Average(model)
    training.keep(average=average)
    for step in training.steps(until=until):
        for x, y in step:
            step.backward(nn.functional.mse_loss(model(x), y))
        step.update()
        average.update(model)
    tensors = [*model.state_dict().values(), *average.by_name.values()]
    whole = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors]
    return torch.cat([t.flatten() for t in whole]).tolist()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("", 1), ("checkpoint", 2)),
        (("checkpoint", 2), ("", 3)),
        (("compile, checkpoint", 1), ("fsdp, checkpoint", 2)),
        (("fsdp", 2), ("fsdp", 3)),
        (("fsdp", 4), ("compile", 1)),
    ],
)
def test_wrapped_in_another_way_after_a_resume(
    before: tuple[str, int], after: tuple[str, int], tmp_path: Path
) -> None:
    """The model and a kept average of its parameters, which has the names and the sharding of that model."""
    want = run_ranks(_averages, str(tmp_path / "plain"), "", 2, nproc=1)
    want = run_ranks(_averages, str(tmp_path / "plain"), "", 4, nproc=1)
    for until, (how, nproc) in ((2, before), (4, after)):
        found = run_ranks(_averages, str(tmp_path / "other"), how, until, nproc=nproc)
    assert found == [pytest.approx(want[0], rel=1e-4, abs=1e-6)] * after[1]
