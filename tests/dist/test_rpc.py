"""`paceline.rpc`: torch's RPC between the ranks of a job, its end, and the failure of a rank."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from torch.distributed import autograd, rpc

import paceline
from paceline.testing import run_failing_ranks, run_ranks

CI = pytest.mark.ci
_served: list[int] = []


def _serve(rank: int) -> int:
    _served.append(rank)
    return os.getpid()


def _scaled(x: torch.Tensor) -> torch.Tensor:
    return 3 * x


def _call_all(job: paceline.Job) -> tuple[list[int], int, float]:
    with paceline.rpc(job, timeout_s=20) as names:
        if job.rank == 0:
            time.sleep(0.5)  # the others wait at the end of the block, and answer
        pids = [rpc.rpc_sync(name, _serve, args=(job.rank,)) for name in names]
        x = torch.ones(2, requires_grad=True)
        with autograd.context() as context:
            loss = rpc.rpc_sync(names[-1], _scaled, args=(x,)).sum()
            autograd.backward(context, [loss])
            gradient = autograd.get_gradients(context)[x]
    first, _served[:] = sorted(_served), []
    assert first == list(range(job.world_size))
    with paceline.rpc(job):  # again in the same job
        assert rpc.rpc_sync("rank0", os.getpid) == pids[0]
    return pids, os.getpid(), float(gradient.sum())


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_each_rank_calls_each_rank_until_all_have_ended(nproc: int) -> None:
    found = run_ranks(_call_all, nproc=nproc)
    own = [pid for _, pid, _ in found]
    assert len(set(own)) == nproc
    assert [pids for pids, _, _ in found] == [own] * nproc
    assert [gradient for _, _, gradient in found] == [6.0] * nproc


def _lose_a_rank(job: paceline.Job, how: str, in_a_call: bool) -> float:
    with paceline.rpc(job, timeout_s=5):
        if job.rank == 1:
            time.sleep(0.3)
            if how == "raise":
                raise ValueError("rank 1 is wrong")
            os.kill(os.getpid(), signal.SIGKILL)
        while in_a_call:
            rpc.rpc_sync("rank1", os.getpid)
            time.sleep(0.01)
    return 0.0


@pytest.mark.parametrize(
    ("how", "in_a_call"), [("raise", True), ("kill", False), pytest.param("kill", True, marks=CI)]
)
def test_the_failure_of_a_rank_ends_the_others(how: str, in_a_call: bool) -> None:
    began = time.monotonic()
    outcomes = run_failing_ranks(_lose_a_rank, how, in_a_call, nproc=3)
    for rank in (0, 2):
        error = outcomes[rank].error
        assert isinstance(error, RuntimeError), outcomes
        assert ("rank 1 is wrong" in str(error)) == (how == "raise")
    assert time.monotonic() - began < 20


def _fail_in_a_long_call(job: paceline.Job) -> None:
    with paceline.rpc(job):
        if job.rank == 0:
            rpc.rpc_async("rank1", time.sleep, args=(30,))
            time.sleep(0.3)
            raise ValueError("rank 0 is wrong")


def test_after_an_error_no_rank_waits_for_a_remote_function() -> None:
    began = time.monotonic()
    outcomes = run_failing_ranks(_fail_in_a_long_call, nproc=2)
    assert "rank 0 is wrong" in str(outcomes[1].error)
    assert time.monotonic() - began < 15


def _own_errors(job: paceline.Job) -> list[str]:
    found = []
    with paceline.rpc(job) as names:
        for wrong in ({"timeout_s": 0}, {"num_worker_threads": 0}, {}):
            with pytest.raises(paceline.ConfigError) as caught, paceline.rpc(job, **wrong):
                pass
            found.append(str(caught.value))
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):  # as torch has it
            rpc.rpc_sync(names[-1], divmod, args=(1, 0))
    return found


def test_wrong_use_and_an_error_of_a_call_leave_rpc_running() -> None:
    for texts in run_ranks(_own_errors, nproc=2):
        assert [("timeout_s" in t, "num_worker" in t, "already" in t) for t in texts] == [
            (True, False, False),
            (False, True, False),
            (False, False, True),
        ]


def _alone(job: paceline.Job) -> Any:
    if job.rank == 0:
        with paceline.rpc(job):
            pass


def test_a_rank_that_calls_rpc_alone_is_told_who_did_not() -> None:
    outcomes = run_failing_ranks(_alone, nproc=2)
    assert isinstance(outcomes[0].error, paceline.StepError)
    assert "rank 1 did not call `paceline.rpc`" in str(outcomes[0].error)


def _call_a_stopped_rank(job: paceline.Job) -> float:
    pid, waited_s = paceline.gather(job, os.getpid())[1], 0.0
    with paceline.rpc(job, timeout_s=1) as names:
        if job.rank == 0:
            os.kill(pid, signal.SIGSTOP)
            began = time.monotonic()
            with pytest.raises(RuntimeError, match="timeout"):
                rpc.rpc_sync(names[1], os.getpid)
            waited_s = time.monotonic() - began
            os.kill(pid, signal.SIGCONT)
    return waited_s


def test_a_call_waits_no_longer_than_its_timeout() -> None:
    waited_s, _ = run_ranks(_call_a_stopped_rank, nproc=2)
    assert 0.9 < waited_s < 5
