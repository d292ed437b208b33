"""The shadow: a state in memory that outlives the ranks, and what a training does with it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import ConfigError
from paceline.testing import Fault, InjectedFault, inject, run_failing_ranks, run_ranks


def _train(job: Any, folder: str, faults: list[Fault], memory: str) -> tuple[list[int], list[Any]]:
    if memory:
        os.environ["PACELINE_SHADOW"] = memory
    model = paceline.ddp(job, torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)))
    optimizer = torch.optim.Adam(model.parameters())
    data = TensorDataset(torch.randn(48, 4, generator=torch.Generator().manual_seed(1)))
    training = paceline.Training(
        job,
        model,
        optimizer,
        paceline.Batches(job, data, global_batch=8),
        checkpoints=paceline.Checkpoints(folder, every_steps=1000, shadow=True),
    )
    done = []
    for step in training.steps(epochs=3):
        for (x,) in step:
            step.backward(model(x).square().sum(), count=len(x))
        step.update()
        if memory:  # so that each step's is there
            training.saving._shadow.kept.finish(job)  # type: ignore[union-attr]
        inject(job, faults, step.number)
        done.append(step.number)
    return done, [p.tolist() for p in model.parameters()]


@pytest.mark.parametrize("nproc", [1, 2, 3, 4])
def test_what_is_in_memory_is_gone_on_from(tmp_path: Path, nproc: int) -> None:
    straight = run_ranks(_train, str(tmp_path / "straight"), [], "", nproc=nproc)[0]
    folder, memory = str(tmp_path / "kept"), str(tmp_path / "memory")
    faults = [Fault(rank=nproc - 1, step=7, kind="raise")]
    outcomes = run_failing_ranks(_train, folder, faults, memory, nproc=nproc)
    assert isinstance(outcomes[nproc - 1].error, InjectedFault)
    steps, weights = run_ranks(_train, folder, [], memory, nproc=nproc)[0]
    assert steps == list(range(7, 19))  # nothing was saved on disk before the fault
    assert weights == straight[1]


def test_damage_in_memory_is_not_trusted(tmp_path: Path) -> None:
    folder, memory = str(tmp_path / "kept"), tmp_path / "memory"
    run_failing_ranks(_train, folder, [Fault(rank=0, step=7, kind="raise")], str(memory), nproc=2)
    for path in memory.rglob("rank-0.bin"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    assert run_ranks(_train, folder, [], str(memory), nproc=2)[0][0] == list(range(1, 19))


def test_it_is_refused_where_it_had_no_effect(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no effect with resume='never'"):
        paceline.Checkpoints(tmp_path, shadow=True, resume="never")
