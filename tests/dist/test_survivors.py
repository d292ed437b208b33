"""A job that fails loses at most the step in progress: the other ranks save the last completed one."""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_gpt import GPT, make_tokens, token_loss, wrap
from small_trainings import loss_sum, make_data, make_training, small_net, train
from torch import nn

import paceline
from paceline import Mesh, log
from paceline.errors import NonFinite, PeerFailed, SaveFailed, StepError
from paceline.job import current_step
from paceline.job import job as job_module
from paceline.testing import Fault, digest, inject, run_failing_ranks, run_ranks
from paceline.training import survivors

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


def _wait_for(checkpoint: Path) -> None:
    while not checkpoint.exists():  # it is written in the background
        time.sleep(0.01)


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
        if folder is not None and step.number == LAST + 1 and start == 0:
            _wait_for(Path(folder, "step-5"))
        inject(job, faults, step.number, "begun")
        for number, batch in enumerate(step):
            if number == 1:
                inject(job, faults, step.number, "backward")
            loss = loss_sum(model, batch) * (wrong if step.number > LAST else 1.0)
            step.backward(loss, reduction="sum")
        inject(job, faults, step.number, "summed")
        step.update(optimizers[0])
        inject(job, faults, step.number, "updated one")
        step.update(optimizers[1])
        inject(job, faults, step.number, "updated")
    return start, digest(
        [paceline.unwrap(model).state_dict(), [o.state_dict() for o in optimizers]]
    )


def _fault(rank: int, kind: Any, phase: str) -> list[Fault]:
    return [Fault(rank=rank, step=LAST + 1, kind=kind, phase=phase)]


CASES = [
    # the fault, the number of ranks, and the step after which the next run begins
    (_fault(0, "raise", "backward"), 1, LAST),
    pytest.param(_fault(0, "raise", "summed"), 1, LAST, marks=pytest.mark.ci),
    (_fault(0, "raise", "updated"), 1, LAST + 1),
    (_fault(0, "raise", "updated one"), 1, 5),  # no state of a whole step is left
    (_fault(0, "kill", "backward"), 2, LAST),
    (_fault(1, "raise", "updated one"), 2, LAST + 1),  # rank 0 has completed the step
    (_fault(0, "kill", "begun"), 3, LAST),
    (_fault(2, "kill", "updated one"), 3, LAST + 1),
    (_fault(1, "exit", "updated"), 3, LAST + 1),
    # A rank is blocked when another one dies.
    pytest.param(
        [*_fault(2, "kill", "backward"), *_fault(1, "stall", "begun")],
        *(3, LAST),
        marks=pytest.mark.ci,
    ),
]


@pytest.mark.parametrize(("faults", "nproc", "newest"), CASES)
def test_only_the_step_in_progress_is_lost(
    faults: list[Fault], nproc: int, newest: int, tmp_path: Path
) -> None:
    folder = str(tmp_path / "checkpoints")
    run_failing_ranks(_train, folder, faults, nproc=nproc, faults=faults if nproc > 1 else [])
    resumed = run_ranks(_train, folder, [], nproc=nproc)
    undisturbed = run_ranks(_train, None, [], nproc=1)
    assert resumed == [(newest, undisturbed[0][1])] * nproc


def test_the_forwards_of_the_step_in_progress_leave_no_trace(tmp_path: Path) -> None:
    folder, faults = str(tmp_path / "checkpoints"), _fault(1, "kill", "backward")
    run_failing_ranks(_train, folder, faults, 1.0, Counts, nproc=2, faults=faults)
    resumed = run_ranks(_train, folder, [], 1.0, Counts, nproc=2)
    undisturbed = run_ranks(_train, None, [], 1.0, Counts, nproc=2)
    assert resumed[0] == (LAST, undisturbed[0][1])


def _train_on_a_busy_device(job: Any, folder: str, faults: list[Fault]) -> Any:
    job_module.becomes_idle = lambda device: False  # type: ignore[attr-defined]
    return _train(job, folder, faults)


@pytest.mark.ci
def test_nothing_is_saved_if_the_device_waits_for_a_lost_rank(tmp_path: Path) -> None:
    faults = _fault(1, "kill", "backward")
    run_failing_ranks(_train_on_a_busy_device, str(tmp_path), faults, nproc=2, faults=faults)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-5"]


def _leave_one_out(job: Any, folder: str) -> None:
    model = paceline.ddp(job, small_net())
    first, *others = model.parameters()
    optimizers = [torch.optim.Adam([first]), torch.optim.Adam(others)]
    batches = paceline.Batches(job, make_data(), global_batch=4)
    checkpoints = paceline.Checkpoints(folder, every_steps=2)
    training = paceline.Training(job, model, optimizers, batches, checkpoints=checkpoints)
    for step in training.steps(until=STEPS):
        step.run(lambda batch: loss_sum(model, batch), reduction="sum")
        for optimizer in optimizers[: 1 if step.number == 4 else 2]:
            step.update(optimizer)


def test_half_a_step_is_not_saved(tmp_path: Path) -> None:
    (outcome,) = run_failing_ranks(_leave_one_out, str(tmp_path), nproc=1)
    assert isinstance(outcome.error, StepError)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-2"]


def _end_of_schedule(job: Any, folder: str) -> None:
    def rate(count: int) -> float:
        if count == 4:
            raise ValueError("the schedule has ended")
        return 1.0

    model = paceline.ddp(job, small_net())
    optimizer = torch.optim.Adam(model.parameters())
    batches = paceline.Batches(job, make_data(), global_batch=4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    checkpoints = paceline.Checkpoints(folder, every_steps=2)
    training = paceline.Training(
        job, model, optimizer, batches, checkpoints=checkpoints, schedule=schedule
    )
    for step in training.steps(until=STEPS):
        step.run(lambda batch: loss_sum(model, batch), reduction="sum")
        step.update()


def test_a_step_whose_schedule_raised_is_not_saved(tmp_path: Path) -> None:
    (outcome,) = run_failing_ranks(_end_of_schedule, str(tmp_path), nproc=1)
    assert isinstance(outcome.error, ValueError)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-2"]


def test_a_state_with_nan_is_not_saved(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    outcomes = run_failing_ranks(_train, str(folder), [], float("nan"), nproc=2)
    assert all(isinstance(outcome.error, NonFinite) for outcome in outcomes)
    assert [path.name for path in folder.glob("step-*")] == ["step-5"]


def _layout(job: Any, folder: str, victims: list[int], kind: str = "kill") -> Any:
    """The step after which this run began, and the weights at its end. Saves every second step.

    In the forward of step 4 the last of the victims kills all of them at once, or raises an exception. The
    others notice that a second later.
    """
    log.logger.addHandler(logging.FileHandler(f"{folder}.log"))
    pids = paceline.gather(job, os.getpid())
    training = make_training(
        job,
        wrap(job, GPT()),
        make_tokens(9),
        optimizer=torch.optim.Adam,
        folder=folder,
        count="tokens",
    )
    training.resume()
    start = training.number

    def loss(model: nn.Module, batch: Any) -> Any:
        found = token_loss(model, batch)  # parameters are gathered
        if current_step.step == 4 and kind == "raise" and job.rank not in victims:
            time.sleep(1)
        if current_step.step == 4 and job.rank in victims[-1:]:
            _wait_for(Path(folder, "step-2"))
            if kind == "raise":
                raise OSError("injected")
            for rank in victims:
                os.kill(pids[rank], signal.SIGKILL)
        return found

    return start, digest(train(training, loss, until=6).weights)


HYBRID = Mesh(dp_replicate=2, dp_shard=2)


@pytest.mark.parametrize(
    ("mesh", "victims", "kind", "newest"),
    [
        (Mesh(dp_shard=2), [1], "kill", 2),
        pytest.param(Mesh(dp_shard=3), [1], "raise", 3, marks=pytest.mark.ci),
        # Each of them holds the whole model.
        pytest.param(Mesh(dp_replicate=3), [0, 2], "kill", 3, marks=pytest.mark.ci),
        pytest.param(HYBRID, [0, 3], "kill", 3, marks=pytest.mark.ci),
        pytest.param(HYBRID, [1, 3], "kill", 2, marks=pytest.mark.ci),  # both copies of a shard
        pytest.param(HYBRID, [3], "kill", 3, marks=pytest.mark.slow),
        pytest.param(Mesh(tp=2), [0], "raise", 3, marks=pytest.mark.ci),
        pytest.param(Mesh(dp_replicate=2, tp=2), [1], "kill", 3, marks=pytest.mark.ci),
        pytest.param(Mesh(dp_replicate=2, pp=2), [3], "raise", 2, marks=pytest.mark.ci),
    ],
    ids=str,
)
def test_the_last_step_is_saved_if_every_part_of_the_model_is_left(
    mesh: Mesh, victims: list[int], kind: str, newest: int, tmp_path: Path
) -> None:
    size, folder = mesh.data_size * mesh.tp * mesh.pp, tmp_path / "checkpoints"
    run_failing_ranks(_layout, str(folder), victims, kind, nproc=size, mesh=mesh)
    assert max(int(path.name[5:]) for path in folder.glob("step-*")) == newest
    if newest == 2 and mesh.pp == 1:
        assert "no rank that is left has the shards of" in Path(f"{folder}.log").read_text()
    if newest == 3:
        resumed = run_ranks(_layout, str(folder), [], nproc=size, mesh=mesh)
        undisturbed = run_ranks(_layout, str(tmp_path / "other"), [], nproc=size, mesh=mesh)
        assert [start for start, _ in resumed] == [newest] * size
        assert resumed[0][1] == undisturbed[0][1]


def test_the_first_rank_decides_who_saves() -> None:
    """Both copies of two parts are left, and rank 0 comes when the others have given it up."""
    store, parts = dist.HashStore(), [0, 1, 0, 1]
    for rank in (1, 2, 3):
        store.set(f"{rank}", "5")
    jobs = [Namespace(rank=rank, world_size=4) for rank in (3, 0)]
    assert [survivors._writers(job, store, 5, parts) for job in jobs] == [[1, 2], [1, 2]]


def test_shards_of_different_steps_are_not_saved(caplog: pytest.LogCaptureFixture) -> None:
    store = dist.HashStore()
    store.set("0", "4")
    job: Any = Namespace(rank=1, world_size=2)
    with caplog.at_level("WARNING"):
        assert survivors._writers(job, store, 5, [0, 1]) == []
    assert "have not done the same step" in caplog.text


def _save_where_rank_0_cannot(job: Any, folder: str) -> str:
    survivors = job.among([0, 1, 2], dist.PrefixStore("survivors", job.store))
    with pytest.raises((SaveFailed, PeerFailed)) as raised:
        paceline.Checkpoints(folder).save_after_failure(
            survivors, 1, {"w": torch.ones(3)}, finite=()
        )
    return str(raised.value).splitlines()[0]


@pytest.mark.ci
def test_all_ranks_that_save_together_get_the_error_of_the_first(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    own, *others = run_ranks(_save_where_rank_0_cannot, f"{tmp_path}/file/run", nproc=3)
    assert own.startswith(f"the folder {tmp_path}/file/run cannot be changed")
    assert all(text.startswith(f"rank 0 failed first: SaveFailed: {own[:40]}") for text in others)
