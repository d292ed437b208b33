"""What a rank keeps for the union run, and what the union run gives its script."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from paceline.audit import record_data
from paceline.audit.events import BackwardBegun
from paceline.audit.models import Models
from paceline.audit.progress import Progress
from paceline.audit.record import Recorder
from paceline.audit.run_plan import RunPlan
from paceline.audit.union import KeptSteps, reached

ORDINARY: Any = {"mode": "ordinary", "world_size": 2, "steps": 20, "kept": (0,), "ranks": 2}


def read(plan: RunPlan, rank: int, loader: DataLoader[Any], *, length: int = 2) -> list[Any]:
    """The batches that a script gets in this run."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("__iter__", "__len__"):
            patch.setattr(DataLoader, name, getattr(DataLoader, name))
        plan.folder.mkdir(exist_ok=True)
        recorder = Recorder(plan.folder, rank)
        record_data.install(Progress(plan, recorder, rank))
        assert len(loader) == length
        batches = list(loader)
        recorder.write(BackwardBegun())
    return batches


def joined(batch: Any) -> Any:
    """A collate function that shows which samples it got together."""
    return [int(each) for each in batch]


@pytest.mark.parametrize(
    ("mode", "one_by_one", "expected"),
    [
        ("union", False, [[0, 1, 10, 11], [2, 12]]),
        ("union", True, [[0, 1], [10, 11], [2], [12]]),
        ("null", False, [[11, 10, 1, 0], [12, 2]]),
    ],
)
@pytest.mark.parametrize("by", ["collate", "batches"])
def test_a_union_gives_the_samples_of_all_ranks(
    by: str, mode: Any, one_by_one: bool, expected: list[list[int]], tmp_path: Path
) -> None:
    """Of a loader that makes batches of samples, and of one whose dataset gives whole batches."""

    def loader(first: int) -> DataLoader[Any]:
        samples = [torch.tensor(first + i) for i in range(3)]
        if by == "collate":
            return DataLoader(samples, batch_size=2, collate_fn=joined)  # type: ignore[arg-type]
        batches = [torch.stack(samples[:2]), torch.stack(samples[2:])]
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]

    plan = RunPlan(tmp_path / "ordinary", **ORDINARY)
    for rank in range(2):
        assert [joined(each) for each in read(plan, rank, loader(10 * rank))][1] == [10 * rank + 2]
    folder = tmp_path / mode
    union = RunPlan(folder, mode, 1, 20, source=plan.folder, ranks=2, one_by_one=one_by_one)
    given = [joined(each) for each in read(union, 0, loader(50), length=len(expected))]
    if by == "batches" and mode == "null":  # the order inside of a batch is the dataset's
        expected = [[10, 11, 0, 1], [12, 2]]
    assert given == expected


def kept_steps(plan: RunPlan, rank: int = 0) -> tuple[KeptSteps, Any]:
    recorder: Any = SimpleNamespace(write=lambda event: None)
    progress = Progress(plan, recorder, rank)
    return KeptSteps(progress, Models(recorder)), progress


def test_the_gradients_of_a_kept_step(tmp_path: Path) -> None:
    """Of each backward since the gradients were cleared; before they were clipped, and after it."""
    steps, progress = kept_steps(RunPlan(tmp_path, **ORDINARY))
    real, imaginary = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1, dtype=torch.cfloat))
    steps._models.on_call(nn.ParameterList([real, imaginary]), trains=True)
    optimizer = torch.optim.SGD([real, imaginary], lr=0.1)
    for factor in (7.0, 1.0, 2.0):
        loss = factor * (real.sum() + (imaginary * (3 - 4j)).real.sum())
        steps.begin_backward([loss])
        loss.backward()  # type: ignore[no-untyped-call]
        if factor == 7.0:
            optimizer.zero_grad()
    steps.keep_reduced([real, imaginary])
    nn.utils.clip_grad_norm_([real, imaginary], 0.0)
    steps.begin_update(1, optimizer)
    kept = torch.load(tmp_path / "step-1-0-0.pt", weights_only=True)
    own = {name: [each.tolist() for each in parts.values()] for name, parts in kept["own"].items()}
    assert [*own.values()] == [[[1.0, 1.0], [2.0, 2.0]], [[3.0, 4.0], [6.0, 8.0]]]
    assert [each.tolist() for each in kept["reduced"].values()] == [[3, 3], [9, 12]]
    assert [each.abs().sum().item() for each in kept["final"].values()] == [0.0, 0.0]
    progress.on_step(optimizer)
    steps.begin_update(2, optimizer)  # this step is not kept
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-1-0-0.pt"]


def test_a_union_has_the_weights_of_the_ranks_in_kept_steps(tmp_path: Path) -> None:
    """Each sample counts by itself in them: without dropout, and without statistics of a batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    inputs = torch.randn(4, 2)
    outputs = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "dropout", F.dropout)
        for mode in ("ordinary", "union"):
            source = tmp_path if mode == "union" else None
            steps, progress = kept_steps(
                RunPlan(tmp_path, **ORDINARY | {"mode": mode, "source": source, "kept": (2,)})
            )
            progress.steps = 2
            for is_kept in (True, False):
                steps.begin_forward(0, model, trains=True)
                assert model[1].training != is_kept
                outputs.append(model(inputs))
                progress.steps = 3
            nn.init.constant_(model[0].weight, 5.0)
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[1], outputs[3])
    assert (outputs[0] != 0).all()
    assert (outputs[1] == 0).any()  # dropout is on again


def test_what_a_step_has_made_of_a_model(tmp_path: Path) -> None:
    """Rank 0 saves it at the next forward of training, without the statistics of BatchNorm."""
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model.register_buffer("seen", torch.zeros(2))
    for rank in range(2):
        plan = RunPlan(tmp_path, **ORDINARY)
        steps, progress = kept_steps(plan, rank)
        for step in range(3):
            progress.steps = step
            steps.begin_forward(0, model, trains=True)
    assert [path.name for path in tmp_path.glob("result-*")] == ["result-1-0-0.pt"]
    found = torch.load(tmp_path / "result-1-0-0.pt", weights_only=True)
    assert found["buffers"] == ["seen"]
    assert [*found["numbers"]] == ["0.weight", "0.bias", "1.weight", "1.bias", "seen"]


@pytest.mark.parametrize(("per_step", "kept"), [(1, {0, 5}), (2, {0, 2})])
def test_the_end_of_the_first_pass_is_kept(per_step: int, kept: set[int], tmp_path: Path) -> None:
    """Its batches may have fewer samples."""
    steps, progress = kept_steps(RunPlan(tmp_path, **ORDINARY))
    model = nn.Linear(2, 2)
    for batch in range(12):  # two passes of 6 batches
        progress.on_batch("loader", 5 - batch % 6)
        steps.begin_forward(0, model, trains=True)
        if batch % per_step == per_step - 1:
            progress.on_step("optimizer")
    found = {int(path.name.split("-")[1]) for path in tmp_path.glob("state-*")}
    assert found == kept


def test_which_parameters_a_loss_reaches() -> None:
    trunk, *heads = (nn.Linear(2, 2) for _ in range(3))
    loss = heads[1](trunk(torch.ones(1, 2)).relu()).sum() + trunk.bias.sum()
    expected = [*trunk.parameters(), *heads[1].parameters()]
    assert {id(p) for p in reached(loss)} == {id(p) for p in expected}
