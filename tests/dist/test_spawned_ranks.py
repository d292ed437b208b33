"""What `spawn` says of ranks that fail beside ranks that never end."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import paceline
from paceline import Job
from paceline.errors import ConfigError, LaunchFailed


def _sleep() -> None:
    time.sleep(60)


def _fail_beside_a_sleeper(job: Job) -> None:
    if job.rank == job.world_size - 1:
        raise ValueError("the cause")
    if job.rank == 0:
        _sleep()


@pytest.mark.slow
def test_a_failure_is_raised_rather_than_who_waits_for_it() -> None:
    with pytest.raises(ValueError, match="the cause"):
        paceline.spawn(_fail_beside_a_sleeper, nproc=3, deadline_s=60)


def _leave_beside_a_sleeper(job: Job) -> None:
    if job.rank == 1:
        os._exit(0)
    _sleep()


@pytest.mark.ci
def test_a_rank_that_ends_without_an_error_is_named_rather_than_one_that_is_ended() -> None:
    with pytest.raises(LaunchFailed, match=r"rank 1 ") as caught:
        paceline.spawn(_leave_beside_a_sleeper, nproc=2, deadline_s=60)
    assert "did not finish" not in str(caught.value)


class Sleepy(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        _sleep()
        return index

    def __len__(self) -> int:
        return 2


def _one_sleeps(job: Job, sleeper: int) -> int:
    if job.rank == sleeper:
        next(iter(DataLoader(Sleepy(), num_workers=1, multiprocessing_context="fork")))
    return job.rank


def _others_wait(job: Job, sleeper: int) -> int:
    rank = _one_sleeps(job, sleeper)
    dist.barrier(group=job.group)
    return rank


@pytest.mark.slow
@pytest.mark.parametrize(("nproc", "sleeper"), [(1, 0), (3, 2)])
def test_a_rank_that_does_not_finish_shows_its_stacks(nproc: int, sleeper: int) -> None:
    with pytest.raises(LaunchFailed, match=r"did not finish within 3 s") as caught:
        paceline.spawn(_one_sleeps, sleeper, nproc=nproc, deadline_s=3)
    _assert_shown(caught.value, sleeper)


@pytest.mark.ci
def test_who_is_waited_for_is_shown_beside_a_timeout() -> None:
    with pytest.raises(RuntimeError) as caught:
        paceline.spawn(_others_wait, 2, nproc=3, timeout_s=2, deadline_s=60)
    assert "did not finish" not in str(caught.value)
    _assert_shown(caught.value, 2)


def _assert_shown(error: BaseException, sleeper: int) -> None:
    notes = getattr(error, "__notes__", [])
    (note,) = [note for note in notes if note.startswith(f"on rank {sleeper}:")]
    assert "in _one_sleeps" in note
    assert "in _sleep" in note  # of its loader worker


def _exits(job: Job, code: object) -> None:
    if job.rank == job.world_size - 1:
        sys.exit(code)  # type: ignore[arg-type]


@pytest.mark.parametrize(("nproc", "code"), [(1, 0), (2, 5)])
def test_an_exit_of_a_rank_is_an_error_and_does_not_end_the_caller(nproc: int, code: int) -> None:
    with pytest.raises(
        LaunchFailed, match=rf"rank {nproc - 1} called sys\.exit\({code}\)"
    ) as caught:
        paceline.spawn(_exits, code, nproc=nproc)
    assert "in _exits" in caught.value.__notes__[0]


def _is_killed_and_leaves_a_child(job: Job) -> None:
    if job.rank == job.world_size - 1:
        if os.fork() == 0:  # it has a copy of the pipe to the parent
            time.sleep(20)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_killed_rank_is_noticed_though_its_child_lives_on(nproc: int) -> None:
    begin = time.monotonic()
    with pytest.raises(LaunchFailed, match=f"rank {nproc - 1} was killed by SIGKILL"):
        paceline.spawn(_is_killed_and_leaves_a_child, nproc=nproc)
    assert time.monotonic() - begin < 18


def _writes_later(job: Job, path: Path) -> None:
    def write() -> None:
        time.sleep(1.5)
        path.write_text("whole")

    threading.Thread(target=write).start()


def test_a_thread_may_end_after_the_function_has_returned(tmp_path: Path) -> None:
    paceline.spawn(_writes_later, tmp_path / "result", nproc=1)
    assert (tmp_path / "result").read_text() == "whole"


@pytest.mark.parametrize("option", ["timeout_s", "deadline_s"])
def test_a_time_that_is_not_positive_or_not_finite_is_refused(option: str) -> None:
    for value in (-1, float("inf")):
        said = f"{option} must be more than 0 and finite, got {value}"
        with pytest.raises(ConfigError, match=said):
            paceline.spawn(_exits, 0, nproc=1, **{option: value})
