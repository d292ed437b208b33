"""A job that fails loses at most the step in progress: the other ranks save the last completed one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from small_trainings import loss_sum, make_data, small_net
from torch import nn

import paceline
from paceline.errors import NonFinite
from paceline.testing import Fault, digest, inject, run_failing_ranks, run_ranks

STEPS = 12
LAST = 7  # the step before the one with the fault


class Counts(nn.Module):
    """Counts forwards in a buffer, as BatchNorm does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        return x


def _train(
    job: Any,
    folder: str | None,
    faults: list[Fault],
    wrong: float = 1.0,
    layer: type[nn.Module] = nn.Identity,
) -> Any:
    """The step after which this run began, and the state at its end."""
    model = paceline.ddp(job, nn.Sequential(small_net(), layer()).double())
    first, *others = model.parameters()
    optimizers = [torch.optim.Adam([first], lr=0.01), torch.optim.Adam(others, lr=0.01)]
    batches = paceline.Batches(job, make_data(dtype=torch.float64), global_batch=6, micro_batch=1)
    # The order of forwards decides what is in buffers, which reproducible=True refuses.
    options: dict[str, Any] = {"reproducible": layer is nn.Identity}
    if folder is not None:
        options["checkpoints"] = paceline.Checkpoints(folder, every_steps=5)
    training = paceline.Training(job, model, optimizers, batches, **options)
    training.resume()
    start = training.number
    for step in training.steps(until=STEPS):
        inject(job, faults, step.number, "begun")
        for number, batch in enumerate(step):
            if number == 1:
                inject(job, faults, step.number, "backward")
            loss = loss_sum(model, batch) * (wrong if step.number > LAST else 1.0)
            step.backward(loss, reduction="sum")
        step.update(optimizers[0])
        inject(job, faults, step.number, "updated one")
        step.update(optimizers[1])
        inject(job, faults, step.number, "updated")
    return start, digest(
        [paceline.unwrap(model).state_dict(), [o.state_dict() for o in optimizers]]
    )


def _fault(rank: int, kind: Any, phase: str) -> Fault:
    return Fault(rank=rank, step=LAST + 1, kind=kind, phase=phase)


CASES = [
    # the fault, the number of ranks, and the step after which the next run begins
    (_fault(0, "raise", "backward"), 1, LAST),
    (_fault(0, "raise", "updated"), 1, LAST + 1),
    (_fault(0, "raise", "updated one"), 1, 5),  # no state of a whole step is left
    (_fault(0, "kill", "backward"), 2, LAST),
    (_fault(1, "raise", "updated one"), 2, LAST + 1),  # rank 0 has completed the step
    (_fault(0, "kill", "begun"), 3, LAST),
    (_fault(2, "kill", "updated one"), 3, LAST + 1),
    (_fault(1, "exit", "updated"), 3, LAST + 1),
]


@pytest.mark.parametrize(("fault", "nproc", "newest"), CASES)
def test_only_the_step_in_progress_is_lost(
    fault: Fault, nproc: int, newest: int, tmp_path: Path
) -> None:
    folder = str(tmp_path / "checkpoints")
    run_failing_ranks(_train, folder, [fault], nproc=nproc, faults=[fault] if nproc > 1 else [])
    resumed = run_ranks(_train, folder, [], nproc=nproc)
    undisturbed = run_ranks(_train, None, [], nproc=1)
    assert resumed == [(newest, undisturbed[0][1])] * nproc


def test_the_forwards_of_the_step_in_progress_leave_no_trace(tmp_path: Path) -> None:
    folder, fault = str(tmp_path / "checkpoints"), _fault(1, "kill", "backward")
    run_failing_ranks(_train, folder, [fault], 1.0, Counts, nproc=2, faults=[fault])
    resumed = run_ranks(_train, folder, [], 1.0, Counts, nproc=2)
    undisturbed = run_ranks(_train, None, [], 1.0, Counts, nproc=2)
    assert resumed[0] == (LAST, undisturbed[0][1])


def test_a_state_with_nan_is_not_saved(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    outcomes = run_failing_ranks(_train, str(folder), [], float("nan"), nproc=2)
    assert all(isinstance(outcome.error, NonFinite) for outcome in outcomes)
    assert [path.name for path in folder.glob("step-*")] == ["step-5"]


def _sharded(job: Any, folder: str) -> None:
    model = paceline.fsdp(job, nn.Sequential(*(nn.Linear(4, 4) for _ in range(2))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = paceline.Batches(job, make_data(), global_batch=4)
    checkpoints = paceline.Checkpoints(folder, every_steps=3)
    training = paceline.Training(job, model, optimizer, batches, checkpoints=checkpoints)
    for step in training.steps(until=9):
        if step.number == 5 and job.rank == 1:
            while not Path(folder, "step-3").exists():  # it is written in the background
                time.sleep(0.01)
            raise ValueError("a shard is lost")
        step.run(lambda batch: model(batch[0]).square().mean())
        step.update()


def test_shards_of_a_lost_rank_are_not_saved(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    run_failing_ranks(_sharded, str(folder), nproc=2)
    assert [path.name for path in folder.glob("step-*")] == ["step-3"]
