"""The exchange of small values: a call that only some ranks make is named on all ranks within seconds."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from small_trainings import backwards, loss_sum, make_data
from torch import nn

import paceline
from paceline.errors import CollectiveTimeout, PeerFailed, StepError
from paceline.job import collectives
from paceline.job.exchange import LEFT_JOB, LEFT_LOOP, WORD, Header, disagreement
from paceline.testing import run_failing_ranks, run_ranks

CI = pytest.mark.ci


def _calls(job: Any, call: str, where: str, others: str, folder: str) -> None:
    """Rank 0 makes a call at some place. The others make none, or another one."""
    torch.manual_seed(1)
    model = paceline.ddp(job, nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = paceline.Batches(job, make_data(), global_batch=6, micro_batch=2)
    training = paceline.Training(
        job,
        model,
        optimizer,
        batches,
        checkpoints=paceline.Checkpoints(folder),
    )
    step: Any = None
    calls: dict[str, Any] = {
        "": lambda: None,
        "save": training.save,
        "export": partial(training.export, f"{folder}/model.pth"),
        "load_state_dict": lambda: training.load_state_dict(training.state_dict()),
        "resume": training.resume,
        "evaluate": lambda: paceline.evaluate(
            job, model, make_data(), lambda m, b: {"loss": (loss_sum(m, b), 1)}
        ),
        "loss": lambda: float(step.loss),
        "agree": lambda: paceline.agree(job, "a value", 1),
        "on_rank0": lambda: paceline.on_rank0(job, dict),
    }

    def come_to(place: str) -> None:
        if place == where:
            calls[call if job.rank == 0 else others]()

    come_to("before the loop")
    for step in training.steps(until=3):
        if step.number == 2:
            come_to("before the sum")
        backwards(training, step)
        step.update()
        if step.number == 2:
            come_to("after the update")
    come_to("after the loop")


@pytest.mark.parametrize(
    ("call", "where", "others", "nproc", "backend"),
    [
        ("save", "before the sum", "", 3, "shm"),
        ("save", "after the update", "evaluate", 3, "gloo"),
        pytest.param("export", "before the sum", "", 2, "shm", marks=CI),
        pytest.param("export", "after the loop", "evaluate", 3, "shm", marks=CI),
        pytest.param("load_state_dict", "before the loop", "", 2, "shm", marks=CI),
        ("resume", "before the loop", "evaluate", 3, "shm"),
        pytest.param("evaluate", "before the loop", "", 2, "shm", marks=CI),
        pytest.param("evaluate", "before the sum", "", 3, "shm", marks=CI),
        ("evaluate", "after the loop", "", 3, "shm"),
        ("loss", "after the update", "", 3, "shm"),
        pytest.param("loss", "after the loop", "", 2, "shm", marks=CI),
        pytest.param("agree", "after the update", "", 2, "gloo", marks=CI),
        pytest.param("on_rank0", "before the sum", "", 2, "shm", marks=CI),
    ],
)
def test_a_call_of_one_rank_is_named_on_all_ranks_within_seconds(
    call: str,
    where: str,
    others: str,
    nproc: int,
    backend: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PACELINE_BACKEND", backend)
    began = time.monotonic()
    outcomes = run_failing_ranks(
        _calls, call, where, others, str(tmp_path), nproc=nproc, timeout_s=60
    )
    assert time.monotonic() - began < 40
    named = {
        "loss": "float(step.loss)",
        "agree": "agree('a value')",
        "on_rank0": "on_rank0",
        "evaluate": "evaluate",
    }
    name = named.get(call, f"training.{call}")
    missing = "rank 1" if nproc == 2 else "ranks 1 and 2"
    assert f"{missing} did not call `{name}` at this point" in str(outcomes[0].error)
    for outcome in outcomes:
        assert isinstance(outcome.error, StepError | PeerFailed), outcome.text
    assert not (tmp_path / "model.pth").exists()


def _late(job: Any, sleep_s: float) -> list[Any]:
    if job.rank == 1:
        time.sleep(sleep_s)
    found = collectives.gather(job, "x" * 300 * job.rank)
    return [len(each) for each in found]


def test_a_late_rank_is_awaited_and_values_may_be_long() -> None:
    assert run_ranks(_late, 2.5, nproc=3) == [[0, 300, 600]] * 3


def test_a_rank_that_does_not_come_is_named_by_the_timeout() -> None:
    outcomes = run_failing_ranks(_late, 6.0, nproc=3, timeout_s=1)
    assert isinstance(outcomes[0].error, CollectiveTimeout | PeerFailed)
    errors = [o.error for o in outcomes if isinstance(o.error, CollectiveTimeout)]
    assert errors
    assert errors[0].missing == [1]
    assert "rank 1 did not come within 1 s" in str(errors[0])


def _slow_step(job: Any) -> list[float]:
    """A rank is slow in each place of a step; nobody takes that for a call left out."""
    torch.manual_seed(1)
    model = paceline.ddp(job, nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = paceline.Batches(job, make_data(), global_batch=6)
    losses = []
    training = paceline.Training(job, model, optimizer, batches)
    for step in training.steps(until=4):
        for x, y in step:
            if job.rank == 1 and step.number == 2:
                time.sleep(2)
            step.backward(nn.functional.cross_entropy(model(x), y))
        if job.rank == 0 and step.number == 3:
            time.sleep(2)
        step.update()
        losses.append(float(step.loss))
    return losses


def test_a_slow_rank_is_no_error() -> None:
    first, second = run_ranks(_slow_step, nproc=2)
    assert first == second
    assert len(first) == 4


def _without_samples(job: Any) -> float:
    """In a reproducible step of one micro-batch, all ranks but one have no samples."""
    model = paceline.ddp(job, nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = paceline.Batches(job, make_data(), global_batch=6)
    training = paceline.Training(job, model, optimizer, batches, reproducible=True)
    for step in training.steps(until=1):
        for x, y in step:
            step.backward(nn.functional.cross_entropy(model(x), y))
        step.update()
        if job.rank == job.world_size - 1:  # it has the samples
            time.sleep(2)
        collectives.gather(job, None)
    return float(model.module.weight.sum())


@pytest.mark.parametrize("nproc", [2, 3])
def test_a_rank_without_samples_in_a_step_may_wait_after_it(nproc: int) -> None:
    assert len(set(run_ranks(_without_samples, nproc=nproc))) == 1


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_all_ranks_know_who_called_what(rank: int) -> None:
    save = Header("training.save", 4, 0)
    text = str(disagreement([save, Header(WORD, 4, 0), Header("", 5, 0)], rank))
    assert "ranks 1 and 2 did not call `training.save` at this point, rank 0 did" in text
    assert "rank 1 ended step 4, rank 2 went on in step 5" in text
    left = Header(LEFT_LOOP, 4, 0)
    text = str(disagreement([left, Header(WORD, 4, 0), left], rank))
    assert "ranks 0 and 2 left the training loop after step 4, rank 1 did not" in text
    ended = Header(LEFT_JOB, 4, 0)
    error = disagreement([Header("evaluate", 4, 0), ended, ended], rank)
    assert "ranks 1 and 2 did not call `evaluate` at this point, rank 0 did" in str(error)
    assert "ranks 1 and 2 left the training and the job" in str(error)
    # The launcher shows the error of the rank that called, which has the line of the call.
    assert isinstance(error, StepError if rank == 0 else PeerFailed)


def _arrives_at_the_timeout(job: Any) -> int:
    for _ in range(8):
        if job.rank == 0:
            time.sleep(0.5)  # when the first wait of the others times out
        collectives.gather(job, None, call="a call")
    return job.rank  # type: ignore[no-any-return]


def test_a_rank_that_comes_at_the_end_of_a_wait_is_no_error() -> None:
    assert run_ranks(_arrives_at_the_timeout, nproc=3) == [0, 1, 2]
