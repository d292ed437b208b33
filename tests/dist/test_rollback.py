"""`training.rollback` goes back to the newest checkpoint; 100 skipped steps in a row are an error."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_trainings import loss_sum, make_data, refusals, small_net

import paceline
from paceline.errors import NonFinite
from paceline.testing import digest, run_failing_ranks, run_ranks

CI_1, CI_3 = (pytest.param(n, marks=pytest.mark.ci) for n in (1, 3))
STEPS = 12
SAVED, BAD = 6, 8  # the newest checkpoint, and the step that is rolled back


class _Counter:
    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def _training(job: Any, folder: Path, data: Any = None, **options: Any) -> paceline.Training:
    model = paceline.ddp(job, small_net(dropout=0.5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = make_data() if data is None else data
    workers = None if isinstance(data, torch.utils.data.DataLoader) else 1
    batches = paceline.Batches(job, data, global_batch=4, micro_batch=2, workers=workers)
    return paceline.Training(
        job,
        model,
        optimizer,
        batches,
        schedule=lambda step: 1 / (1 + step),
        checkpoints=paceline.Checkpoints(folder / "checkpoints", every_steps=3),
        **options,
    )


def _run(job: Any, folder: Path, how: str | None, when: str = "") -> Any:
    """The losses by step, in the order of the steps, and the state at the end."""
    training = _training(job, folder)
    counter = _Counter()
    training.keep(counter=counter)
    training.report(folder, loggers=[paceline.CSV(folder / "table.csv")])
    losses = []
    for step in training.steps(until=STEPS):
        is_bad = how is not None and step.number == BAD
        if is_bad and when == "before":
            training.rollback(data=how)  # type: ignore[arg-type]
            how = None
            continue
        step.run(lambda batch: loss_sum(training.models[0], batch), reduction="sum")
        step.update()
        counter.steps += 1
        losses.append((step.number, float(step.loss)))
        training.log(loss=step.loss)
        if is_bad and when == "after":
            training.rollback(data=how)  # type: ignore[arg-type]
            how = None
    state = training.state_dict()
    return losses, digest([state["models"], state["optimizers"], state["schedules"], counter.steps])


@pytest.mark.parametrize("nproc", [CI_1, 2, CI_3])
@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.ci), "after"])
def test_the_same_steps_follow(nproc: int, when: str, tmp_path: Path) -> None:
    losses, state = run_ranks(_run, tmp_path / "undisturbed", None, nproc=nproc)[0]
    again = losses[: BAD - (when == "before")] + losses[SAVED:]
    for rank in run_ranks(_run, tmp_path / "rolled", "keep", when, nproc=nproc):
        assert rank == (again, state)
    lines = (tmp_path / "rolled/metrics.jsonl").read_text().splitlines()
    values = [json.loads(line) for line in lines]
    assert [(each["step"], each["loss"]) for each in values] == losses
    with (tmp_path / "rolled/table.csv").open() as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == [*range(1, STEPS + 1)]


def _stops_and_goes_back(job: Any, folder: Path) -> tuple[int, int]:
    training = _training(job, folder)
    num_bodies = 0
    for step in training.steps(until=STEPS):
        step.run(lambda batch: loss_sum(training.models[0], batch), reduction="sum")
        step.update()
        num_bodies += 1
        if step.number == BAD:
            training.rollback()
            if job.rank == job.world_size - 1:
                step.stop()
    return num_bodies, training.number


@pytest.mark.parametrize("nproc", [CI_1, 2])
def test_a_stop_in_the_step_that_is_rolled_back_ends_the_loop(nproc: int, tmp_path: Path) -> None:
    assert run_ranks(_stops_and_goes_back, tmp_path, nproc=nproc) == [(BAD, SAVED)] * nproc


def _after_nan(job: Any, folder: Path, how: Any) -> Any:
    """The samples of each step that was taken, by number; sample 13, in step 4, is NaN."""
    x, y = make_data().tensors
    x = x.clone()
    x[13] = torch.nan
    data = torch.utils.data.TensorDataset(torch.arange(22), x, y)
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=False)
    training = _training(job, folder, loader, on_non_finite="raise")
    model = training.models[0]
    seen: list[tuple[int, list[int]]] = []

    def train() -> None:
        for step in training.steps(until=6):
            own = []
            for batch in step:
                own += batch[0].tolist()
                step.backward(loss_sum(model, batch[1:]), reduction="sum")
            step.update(clip_norm=1.0)
            each = paceline.gather(job, own if not step.is_padding else [])
            seen.append((step.number, sorted(n for numbers in each for n in numbers)))

    for _ in range(2):
        try:
            train()
        except NonFinite:
            training.rollback(data=how)
    return seen, training.position.epoch, training.position.offset


@pytest.mark.parametrize("nproc", [CI_1, 2])
def test_after_nan_the_training_goes_on_without_its_samples(nproc: int, tmp_path: Path) -> None:
    kept = run_ranks(_after_nan, tmp_path / "keep", "keep", nproc=nproc)
    first = [(1, [0, 1, 2, 3]), (2, [4, 5, 6, 7]), (3, [8, 9, 10, 11])]
    assert kept[0] == (first, 0, 12)  # the same NaN again
    skipped = run_ranks(_after_nan, tmp_path / "skip", "skip", nproc=nproc)
    more = [(4, [16, 17, 18, 19]), (5, [20, 21]), (6, [0, 1, 2, 3])]
    assert skipped[0] == (first + more, 1, 4)


def _none_saved(job: Any, folder: Path) -> dict[str, tuple[str, str]]:
    def call(job: Any, kind: str) -> None:
        training = _training(job, folder)
        for _ in training.steps(until=2):
            training.rollback()

    return refusals(job, call, ["none"])


def test_a_checkpoint_is_needed(tmp_path: Path) -> None:
    for found in run_ranks(_none_saved, tmp_path, nproc=2):
        assert found["none"][0] == "CheckpointError"
        assert "no checkpoint to go back to" in found["none"][1]


def _always_bad(job: Any, folder: Path) -> tuple[str, int]:
    training = _training(job, folder, on_non_finite="skip")
    model = training.models[0]
    try:
        for step in training.steps():
            factor = float("nan") if step.number > 2 else 1.0
            step.run(lambda batch: loss_sum(model, batch) * factor, reduction="sum")  # noqa: B023
            step.update()
    except NonFinite as error:
        return str(error), step.number
    raise AssertionError


@pytest.mark.ci
def test_a_hundred_steps_in_a_row_that_are_left_out_are_an_error(tmp_path: Path) -> None:
    for text, number in run_ranks(_always_bad, tmp_path, nproc=2):
        assert number == 102
        assert "100 steps in a row" in text
        assert "where: rank 0, sample" in text
        assert "; rank 1, sample" in text


def _scaled(job: Any, folder: Path, kind: str) -> tuple[list[int], int]:
    """In fp16, go back after a hundred steps that were left out, or between the updates of two optimizers."""
    model = paceline.ddp(job, small_net())
    first, *others = model.parameters()
    optimizers = [torch.optim.SGD([first], lr=0.01), torch.optim.SGD(others, lr=0.01)]
    batches = paceline.Batches(job, make_data(), global_batch=4, micro_batch=2)
    checkpoints = paceline.Checkpoints(folder, every_steps=60 if kind == "limit" else 2)
    training = paceline.Training(
        job, model, optimizers, batches, checkpoints=checkpoints, precision="fp16"
    )
    left_at: list[int] = []

    def train() -> None:
        for step in training.steps(until=120 if kind == "limit" and not left_at else 64):
            is_bad = not left_at and step.number > 4
            factor = float("nan") if is_bad and kind == "limit" else 1.0
            step.run(lambda batch: loss_sum(model, batch) * factor, reduction="sum")  # noqa: B023
            step.update(optimizers[0])
            if is_bad and kind == "between":
                left_at.append(step.number)
                training.rollback()
                continue
            step.update(optimizers[1])

    try:
        train()
    except NonFinite as error:
        left_at.append(error.step)
        training.rollback()
        train()
    return left_at, training.number


@pytest.mark.ci
@pytest.mark.parametrize(("kind", "left_at"), [("limit", 104), ("between", 5)])
def test_after_a_rollback_the_loss_scale_begins_a_new_step(
    kind: str, left_at: int, tmp_path: Path
) -> None:
    assert run_ranks(_scaled, tmp_path, kind, nproc=1) == [([left_at], 64)]


class _Broken(_Counter):
    def load_state_dict(self, state: dict[str, int]) -> None:
        raise ValueError("cannot be loaded")


def _fails_in_rollback(job: Any, folder: Path) -> None:
    training = _training(job, folder)
    training.keep(counter=_Broken())
    for step in training.steps(until=STEPS):
        step.run(lambda batch: loss_sum(training.models[0], batch), reduction="sum")
        step.update()
        if step.number == BAD:
            training.rollback()


def test_a_rollback_that_fails_saves_no_step(tmp_path: Path) -> None:
    (outcome,) = run_failing_ranks(_fails_in_rollback, tmp_path, nproc=1)
    assert isinstance(outcome.error, ValueError)
    saved = [path.name for path in (tmp_path / "checkpoints").glob("step-*")]
    assert sorted(saved) == ["step-3", f"step-{SAVED}"]
