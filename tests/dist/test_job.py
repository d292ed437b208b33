"""Joining, leaving and failing: with every launcher's variables, on one to four ranks."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import (
    ConfigError,
    LaunchFailed,
    PeerFailed,
    RankDisagreement,
    StepError,
)
from paceline.job import collectives, failures
from paceline.job.devices import choose_backend, choose_device
from paceline.job.environment import RankInfo
from paceline.job.failures import ExceptHook
from paceline.testing import Fault, inject, run_failing_ranks, run_ranks


def _facts(job: Any) -> dict[str, Any]:
    total = torch.ones(3)
    if job.group is not None:
        dist.all_reduce(total, group=job.group)
    return {
        "rank": job.rank,
        "device": str(job.device),
        "total": total.tolist(),
        "gathered": collectives.gather(job, {"r": job.rank, "text": "x" * job.rank}),
        "agreed": paceline.agree(job, "a thing", [1, "two"]),
        "from rank 0": paceline.on_rank0(job, lambda: {"rank": job.rank}),
        "drawn": [torch.rand(1).item(), float(np.random.rand()), random.random()],
        "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
        "listens on": [
            c.laddr.ip for c in psutil.Process().net_connections() if c.status == "LISTEN"
        ],
    }


@pytest.mark.parametrize("nproc", [1, 2, 3, 4])
def test_ranks_know_their_place_and_talk(nproc: int) -> None:
    all_facts = run_ranks(_facts, nproc=nproc)
    for rank, facts in enumerate(all_facts):
        assert facts["rank"] == rank
        assert facts["device"] == "cpu" or torch.cuda.is_available()
        assert facts["total"] == [nproc] * 3
        assert facts["gathered"] == [{"r": r, "text": "x" * r} for r in range(nproc)]
        assert facts["agreed"] == [1, "two"]
        assert facts["from rank 0"] == {"rank": 0}
        assert facts["drawn"] == all_facts[0]["drawn"]
        assert set(facts["listens on"]) <= {"127.0.0.1"}
        assert facts["interface"] == ("lo" if nproc > 1 else os.environ.get("GLOO_SOCKET_IFNAME"))


def _disagree(job: Any) -> None:
    paceline.agree(job, "a size", 7 if job.rank != 1 else 5, where="here", fix="mend it.")


def test_a_disagreement_names_who_holds_what_on_all_ranks() -> None:
    for outcome in run_failing_ranks(_disagree, nproc=3):
        assert isinstance(outcome.error, RankDisagreement)
        assert outcome.error.values == [7, 5, 7]
        assert "7 on ranks 0 and 2, 5 on rank 1" in str(outcome.error)


def _join_with_own_seed(job: Any) -> None:
    job.leave()
    paceline.join(seed=7 if job.rank != 1 else 5)


def test_different_seeds_are_refused_on_all_ranks() -> None:
    for outcome in run_failing_ranks(_join_with_own_seed, nproc=3):
        assert isinstance(outcome.error, RankDisagreement)
        assert outcome.error.values == [7, 5, 7]
        assert '"seed"' in str(outcome.error)


def _rank0_raises(job: Any) -> None:
    def action() -> None:
        raise OSError("disk is gone")

    paceline.on_rank0(job, action)


def test_an_error_of_rank_0_reaches_all() -> None:
    outcomes = run_failing_ranks(_rank0_raises, nproc=3)
    assert isinstance(outcomes[0].error, OSError)
    for outcome in outcomes[1:]:
        assert isinstance(outcome.error, PeerFailed)
        assert "disk is gone" in str(outcome.error)


def _result_without_json(job: Any) -> str:
    try:
        collectives.on_rank0(job, lambda: {1, 2})
    except (TypeError, paceline.PacelineError) as error:
        return type(error).__name__
    return "none"


def test_a_result_that_json_cannot_represent_is_an_error_of_all_ranks() -> None:
    assert run_ranks(_result_without_json, nproc=2) == ["TypeError", "PeerFailed"]


def _sums(job: Any, faults: list[Fault]) -> str:
    for step in range(3):
        inject(job, faults, step)
        collectives.gather(job, 1.0)
    return "done"


def _survives(job: Any, faults: list[Fault]) -> str:
    """The failing rank catches its own error and goes on; its peers must still get the error."""
    try:
        with job:
            return _sums(job, faults)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_an_error_that_leaves_the_block_can_be_caught_and_still_reaches_the_others() -> None:
    faults = [Fault(rank=2, step=1, kind="raise")]
    outcomes = run_failing_ranks(_survives, faults, nproc=3, faults=faults)
    for outcome in outcomes[:2]:
        assert outcome.value.startswith("PeerFailed: rank 2 failed first")
    assert outcomes[2].value.startswith("InjectedFault")


def _closes_its_groups(job: Any) -> str:
    """Rank 1 closes its groups, and so do the ranks that notice. They and a fork of rank 1 live on."""
    noticed = [f"noticed/{rank}" for rank in (0, 2, 3)]
    if job.rank == 1:
        fork = os.fork()
        if fork == 0:
            time.sleep(60)
            os._exit(0)
        failures.abort_process_groups()
        try:
            job.store.wait(noticed, timedelta(seconds=20))
        finally:
            os.kill(fork, signal.SIGKILL)
            os.waitpid(fork, 0)
        return "none"
    try:
        dist.all_reduce(torch.ones(1000), group=job.control)
    except RuntimeError as error:
        failures.abort_process_groups()
        job.store.set(f"noticed/{job.rank}", "")
        job.store.wait(noticed, timedelta(seconds=20))  # no rank breaks connections by its end
        return type(error).__name__
    return "none"


def test_closed_groups_break_the_collectives_of_all_ranks() -> None:
    """Gloo's own `abort` does nothing. Rank 3 has no connection in its ring with rank 1."""
    outcomes = run_failing_ranks(_closes_its_groups, nproc=4)
    assert [outcome.value for outcome in outcomes] == [
        "RuntimeError",
        "none",
        *["RuntimeError"] * 2,
    ]


def _fails_and_joins_again(job: Any) -> dict[str, Any]:
    first, hook = job.peers, sys.excepthook
    assert isinstance(hook, ExceptHook)
    with contextlib.suppress(ZeroDivisionError), job:
        raise ZeroDivisionError
    released = hook.peers is None
    with paceline.join() as again:
        total = sum(collectives.gather(again, 1.0))
        peers = again.peers
        return {
            "released": released,
            "total": total,
            "has new peers": peers is not first and hook.peers is peers,
            "knows the old failure": peers is None or peers.failure() is not None,
        }


def test_after_a_caught_error_the_next_join_has_new_peers() -> None:
    assert [outcome.value for outcome in run_failing_ranks(_fails_and_joins_again, nproc=2)] == [
        {
            "released": True,
            "total": 2.0,
            "has new peers": True,
            "knows the old failure": False,
        }
    ] * 2


def test_a_fault_that_is_never_reached_fails_the_test() -> None:
    faults = [Fault(rank=1, step=99, kind="kill")]
    with pytest.raises(AssertionError, match="never reached"):
        run_failing_ranks(_sums, faults, nproc=2, faults=faults)


def _leaves(job: Any) -> list[Any]:
    hook: Any = sys.excepthook
    inside = [
        os.environ.get("GLOO_SOCKET_IFNAME"),
        hook.peers is job.peers,
        callable(hook.previous),
    ]
    job.leave()
    job.leave()  # once more does nothing
    after = [os.environ.get("GLOO_SOCKET_IFNAME"), dist.is_initialized(), job.alive]
    return [*inside, *after, sys.excepthook is hook.before]


def _calls_after_leaving(job: Any) -> list[str]:
    job.leave()
    errors = []
    for call in (
        lambda: paceline.gather(job, 1),
        lambda: paceline.agree(job, "a value", 1),
        lambda: paceline.sum_over_ranks(job, 1),
        lambda: paceline.on_rank0(job, dict),
    ):
        with pytest.raises(StepError) as caught:
            call()
        errors.append(caught.value.what)
    return errors


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_job_that_was_left_makes_no_calls(nproc: int) -> None:
    for errors in run_ranks(_calls_after_leaving, nproc=nproc):
        assert errors == ["this job has been left."] * 4


def test_leaving_undoes_all_changes_of_the_process() -> None:
    expected = ["lo", True, True, None, False, False, True]
    assert run_ranks(_leaves, nproc=2) == [expected] * 2


def _joins_twice(job: Any) -> str:
    try:
        paceline.join()
    except ConfigError as error:
        return error.what
    return "joined twice"


def test_a_second_join_is_refused() -> None:
    assert run_ranks(_joins_twice, nproc=1) == ["this process has joined a job already."]


def _joins_after_a_library(job: Any) -> str:
    job.leave()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        paceline.join()
    except ConfigError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return "joined"


def test_a_join_after_init_process_group_is_refused() -> None:
    for rank, text in enumerate(run_ranks(_joins_after_a_library, nproc=2)):
        assert "this process has a process group already" in text
        assert f"rank {rank} of 2" in text
        assert "call paceline.join before the library" in text


@pytest.mark.parametrize(
    "wrong",
    [
        *({"seed": seed} for seed in ("7", True)),
        *({"timeout_s": seconds} for seconds in (0, float("inf"), "600")),
        *({"device": device} for device in ("tpux", "meta")),
        {"mesh": 3},
    ],
)
def test_wrong_arguments_of_join(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        paceline.join(**wrong)


def test_one_process_without_a_launcher_needs_no_group() -> None:
    with paceline.join(seed=3) as job:
        assert (job.rank, job.world_size, job.launcher) == (0, 1, "none")
        assert job.group is None
        assert not dist.is_initialized()


class _Closing:
    """An object that closes itself when the job ends, as a training does."""

    def __init__(self, job: Any, name: str, closed: list[str]) -> None:
        self.name, self.closed = name, closed
        self.forget = job.on_leave(self.close)

    def close(self) -> None:
        self.closed.append(self.name)


def test_an_action_that_was_removed_is_not_called_and_keeps_nothing_alive() -> None:
    closed: list[str] = []
    with paceline.join() as job:
        first, second = _Closing(job, "first", closed), _Closing(job, "second", closed)
        gone = weakref.ref(second)
        second.forget()
        second.forget()
        del second
        assert gone() is None
        third = _Closing(job, "third", closed)
    assert closed == ["third", "first"]
    first.forget()  # after the job has ended
    third.forget()


@pytest.mark.parametrize("nproc", [0, -1, True, 1.5])
def test_spawn_needs_a_number_of_processes(nproc: Any) -> None:
    with pytest.raises(ConfigError):
        paceline.spawn(_facts, nproc=nproc)


def test_the_results_of_a_lambda_come_back() -> None:
    offset = 10
    assert paceline.spawn(lambda job, x: job.rank + x + offset, 1, nproc=2) == [11, 12]


def _output_of_a_rank(job: Any) -> tuple[Any, ...]:
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return sys.stdout.writable(), sys.stdout.errors


def test_the_output_of_a_rank_is_a_stream_as_usual() -> None:
    assert paceline.spawn(_output_of_a_rank, nproc=1) == [(True, sys.__stdout__.errors)]


def _ends_in_its_own_time(job: Any, how: str) -> str:
    """Rank 0 works for 2 s after the others have come to the end; collectives may wait 1 s."""
    if how == "break":
        model = paceline.ddp(job, torch.nn.Linear(1, 1))
        batches = paceline.Batches(job, TensorDataset(torch.ones(8, 1)), global_batch=4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in paceline.Training(job, model, optimizer, batches).steps():
            for (x,) in step:
                step.backward(model(x).mean())
            step.update()
            if step.number == 3:
                break
    if job.rank == 0:
        time.sleep(2)
    if job.rank == 0 and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return "done"


@pytest.mark.parametrize(
    ("nproc", "how"), [pytest.param(4, "end", marks=pytest.mark.ci), (3, "break")]
)
def test_a_rank_may_work_for_long_after_the_others_have_ended(nproc: int, how: str) -> None:
    results = paceline.spawn(_ends_in_its_own_time, how, nproc=nproc, timeout_s=1)
    assert results == ["done"] * nproc


def test_a_rank_that_is_killed_at_the_end_frees_the_others() -> None:
    began = time.monotonic()
    outcomes = run_failing_ranks(_ends_in_its_own_time, "kill", nproc=3, timeout_s=60)
    assert time.monotonic() - began < 20
    assert all("rank 0" in str(outcome.error) or outcome.rank for outcome in outcomes)
    assert all(outcome.error is not None for outcome in outcomes)


def _stops_while_it_sends(job: Any, by: signal.Signals) -> bytes:
    write = Path.write_bytes

    def write_a_part(path: Path, data: Any) -> int:
        write(path, data[:1000])
        os.kill(os.getpid(), by)
        return 1000

    if job.rank == 0:
        Path.write_bytes = write_a_part  # type: ignore[method-assign,assignment]
    return bytes(1_000_000)


@pytest.mark.parametrize(
    ("by", "error"),
    [(signal.SIGKILL, "rank 0 was killed by SIGKILL"), (signal.SIGSTOP, "rank 0 did not finish")],
)
def test_a_rank_that_ends_or_stops_while_it_sends_its_result(by: Any, error: str) -> None:
    began = time.monotonic()
    with pytest.raises(LaunchFailed, match=error):
        paceline.spawn(_stops_while_it_sends, by, nproc=2, deadline_s=3)
    assert time.monotonic() - began < 20


LOCAL = {"launcher": "torch", "rank": 0, "world_size": 4, "local_rank": 0}


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for what a host without GPU lacks")
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="none is visible"):
        choose_device("cuda", RankInfo(**LOCAL, local_world_size=4))


def test_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    one_host, two_hosts = (RankInfo(**LOCAL, local_world_size=n) for n in (4, 2))
    assert choose_backend(None, cpu, one_host) == "shm"
    assert choose_backend(None, cpu, two_hosts) == "gloo"
    assert choose_backend("gloo", cpu, one_host) == "gloo"
    monkeypatch.setenv("PACELINE_BACKEND", "gloo")
    assert choose_backend(None, cpu, one_host) == "gloo"
    if not dist.is_mpi_available():
        monkeypatch.setitem(sys.modules, "mpi4py", None)
        with pytest.raises(ConfigError, match="needs mpi4py") as without:
            choose_backend("mpi", cpu, one_host)
        assert "pip install 'paceline[mpi]'" in without.value.fix
    with pytest.raises(ConfigError, match="leave `backend` out"):
        choose_backend("carrier-pigeon", cpu, one_host)
    monkeypatch.setenv("PACELINE_BACKEND", "carrier-pigeon")
    with pytest.raises(ConfigError, match="unset PACELINE_BACKEND"):
        choose_backend(None, cpu, one_host)
