"""The state of a training by name: other layouts, and what optimizers keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.data import TensorDataset

import paceline
from paceline.testing import run_ranks


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


@pytest.fixture(scope="module")
def want(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = str(tmp_path_factory.mktemp("plain"))
    run_ranks(_averages, folder, "", 2, nproc=1)
    found: list[float] = run_ranks(_averages, folder, "", 4, nproc=1)[0]
    return found


CI = pytest.mark.ci


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("", 1), ("checkpoint", 2)),
        (("compile, checkpoint", 1), ("fsdp, checkpoint", 2)),
        pytest.param(("checkpoint", 2), ("", 3), marks=CI),
        pytest.param(("fsdp", 2), ("fsdp", 3), marks=CI),
        pytest.param(("fsdp", 4), ("compile", 1), marks=CI),
    ],
)
def test_wrapped_in_another_way_after_a_resume(
    before: tuple[str, int], after: tuple[str, int], want: list[float], tmp_path: Path
) -> None:
    """The model and a kept average of its parameters, which has the names and the sharding of that model."""
    for until, (how, nproc) in ((2, before), (4, after)):
        found = run_ranks(_averages, str(tmp_path), how, until, nproc=nproc)
    assert found == [pytest.approx(want, rel=1e-4, abs=1e-6)] * after[1]
