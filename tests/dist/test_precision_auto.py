"""`precision="auto"`: it takes what was faster on rank 0, on all ranks, and keeps it."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import ConfigError
from paceline.testing import run_ranks


def _train(job: Any, folder: str, slow: str, until: int) -> tuple[str, list[str], list[Any]]:
    """Train where `slow` (a dtype's name) takes its time; the choice, and the dtypes that were met."""
    model = paceline.ddp(job, torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(1)))
    training = paceline.Training(
        job,
        model,
        optimizer,
        paceline.Batches(job, data, global_batch=8),
        precision="auto",
        checkpoints=paceline.Checkpoints(folder),
    )
    met = []
    for step in training.steps(until=until):
        for (x,) in step:
            out = model(x)
            met.append(str(out.dtype).removeprefix("torch."))
            if met[-1] == slow and job.rank == 0:
                time.sleep(0.05)
            step.backward(out.float().square().sum(), count=len(x))
        step.update()
    return training.precision.name, met, [p.tolist() for p in model.parameters()]


@pytest.mark.parametrize("nproc", [*[pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)], 3])
@pytest.mark.parametrize(("slow", "chosen"), [("float32", "bf16"), ("bfloat16", "fp32")])
def test_all_ranks_take_what_was_faster_and_keep_it(
    tmp_path: Path, nproc: int, slow: str, chosen: str
) -> None:
    ranks = run_ranks(_train, str(tmp_path), slow, 35, nproc=nproc)
    expected = "bfloat16" if chosen == "bf16" else "float32"
    for name, met, weights in ranks:
        assert name == chosen
        assert weights == ranks[0][2]
        runs = [(dtype, len(list(group))) for dtype, group in itertools.groupby(met[:32])]
        assert runs == [("float32", 4), ("bfloat16", 4)] * 4
        assert met[32:] == [expected] * 3
    # A resumed training does not measure again, though now the other one is slow.
    slow = "float32" if slow == "bfloat16" else "bfloat16"
    for name, met, _ in run_ranks(_train, str(tmp_path), slow, 70, nproc=nproc):
        assert name == chosen
        assert set(met) == {expected}


def _reproducible(job: Any) -> None:
    model = paceline.ddp(job, torch.nn.Linear(1, 1))
    batches = paceline.Batches(job, TensorDataset(torch.ones(4, 1)), global_batch=2, micro_batch=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    paceline.Training(job, model, optimizer, batches, precision="auto", reproducible=True)


def test_bits_and_clocks_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match="reproducible=True by the bits"):
        run_ranks(_reproducible, nproc=1)
