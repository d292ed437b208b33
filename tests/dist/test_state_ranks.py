"""The state of a training by name: old versions, other layouts, and what optimizers keep."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn
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
