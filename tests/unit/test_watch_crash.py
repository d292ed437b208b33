"""Which rank failed first, judged from facts."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
from collections.abc import Callable

import pytest
import torch.distributed as dist

from paceline.errors import CollectiveTimeout, ConfigError, PeerFailed, SaveFailed
from paceline.launch.messages import JobInfo, render_failure, render_restart
from paceline.watch.crash import Error, FirstFailure, RankOutcome, find_first_failure
from paceline.watch.rank_state import last_call

SHAPE = JobInfo(world_size=4, restarts=0, max_restarts=3)
NODES = JobInfo(world_size=4, restarts=0, max_restarts=3, silent_nodes=1)


def error(kind: str = "ValueError", message: str = "bad", *, lost_peer: bool = False) -> Error:
    return Error(
        type=kind,
        kinds=(f"builtins.{kind}", "builtins.Exception"),
        message=message,
        traceback=f"Traceback\n{kind}: {message}\n",
        module="__main__",
        place="train.py:7 in main",
        lost_peer=lost_peer,
    )


def lost_peer() -> Error:
    return error("RuntimeError", "connection closed", lost_peer=True)


def fact(rank: int, time: float, *, returncode: int | None = 1, **more: object) -> RankOutcome:
    return RankOutcome(rank=rank, host="h", pid=rank, time=time, returncode=returncode, **more)  # type: ignore[arg-type]


def judged(*facts: RankOutcome) -> FirstFailure:
    found = find_first_failure(facts)
    assert found is not None
    return found


def report(*facts: RankOutcome, info: JobInfo = SHAPE) -> list[str]:
    return render_failure(judged(*facts), info).splitlines()


def test_ranks_that_run_ended_well_or_were_stopped_did_not_fail() -> None:
    stopped = fact(1, 2.0, returncode=-15, stopped=True)
    ended, running = fact(0, 1.0, returncode=0), fact(2, 0.0, returncode=None)
    assert find_first_failure([ended, stopped, running]) is None


def test_the_cause_wins_over_an_earlier_follower() -> None:
    verdict = judged(fact(0, 1.0, error=lost_peer()), fact(1, 1.4, error=error()))
    assert (verdict.original.rank, verdict.followers, verdict.certain) == (1, (0,), True)


def raised(error: Exception, module: str = "__main__", cause: Exception | None = None) -> Exception:
    """The error with a traceback whose innermost frame is in this module."""
    names = {"__name__": module}
    exec("def fail(error): raise error", names)
    error.__cause__, error.__suppress_context__ = cause, cause is not None
    with contextlib.suppress(type(error)):
        names["fail"](error)  # type: ignore[operator]
    return error


C10D = "torch.distributed.distributed_c10d"
RPC = "torch.distributed.rpc.api"
GLOO = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:4"
)


@pytest.mark.parametrize(
    ("raises", "follows"),
    [
        (lambda: raised(dist.DistNetworkError("lost")), True),
        (lambda: raised(PeerFailed("rank 1 failed first")), True),
        (lambda: raised(RuntimeError(GLOO), "torch.autograd.graph"), True),
        (lambda: raised(RuntimeError("a second backward"), "torch.autograd.graph"), False),
        (lambda: raised(RuntimeError("lost"), "torch.nn.functional"), False),
        (lambda: raised(RuntimeError("connection closed by peer")), False),
        (lambda: raised(ValueError("lost"), C10D), False),
        (lambda: raised(RuntimeError(f"Gloo connectFullMesh failed with {GLOO}"), C10D), True),
        (lambda: raised(RuntimeError("ProcessGroupGloo::broadcast: invalid root: 5"), C10D), False),
        (lambda: raised(RuntimeError("Split sizes doesn't match total dim 0 size"), C10D), False),
        (lambda: raised(RuntimeError("RPCErr:1:RPC ran for more than set timeout"), RPC), True),
        (
            lambda: raised(RuntimeError("eof (this error originated at tensorpipe/x.cc:9)"), RPC),
            True,
        ),
        (
            lambda: raised(
                RuntimeError("On WorkerInfo(id=1, name=w1):\nRuntimeError: shapes"), RPC
            ),
            False,
        ),
        (lambda: raised(RuntimeError(GLOO), "torch.nn.parallel.distributed"), True),
        (lambda: raised(RuntimeError("is not needed"), "torch.nn.parallel.distributed"), False),
        (lambda: raised(RuntimeError("found 2 ranks!"), "torch.distributed.device_mesh"), False),
        (lambda: raised(RuntimeError(GLOO), "torch._ops"), True),  # of a functional collective
        # A script's own error, once or twice around the error of the lost peer.
        (lambda: raised(OSError("sync"), cause=raised(RuntimeError(GLOO), C10D)), True),
        (lambda: raised(OSError("a"), cause=raised(KeyError("b"), cause=PeerFailed("c"))), True),
        (lambda: raised(OSError("sync"), cause=raised(RuntimeError("bad"))), False),
        (lambda: behind_finally(raised(RuntimeError(GLOO), C10D), OSError("clean-up")), True),
        # An error of Paceline says itself what happened.
        (lambda: raised(CollectiveTimeout("late"), cause=dist.DistStoreError("late")), False),
    ],
)
def test_followers_are_known_by_type_and_by_where_they_waited(
    raises: Callable[[], Exception], follows: bool
) -> None:
    assert fact(0, 1.0, error=Error.of(raises(), "")).follows is follows


def behind_finally(before: Exception, error: Exception) -> Exception:
    """The error as it is after a `finally` block in which it replaced another one."""
    with contextlib.suppress(type(error)):
        try:
            raise before
        finally:
            raise error
    return error


@pytest.mark.parametrize("returncode", [1, 0])
def test_an_error_that_a_lost_peer_replaced_is_the_cause_if_there_is_no_other(
    returncode: int,
) -> None:
    barrier = raised(RuntimeError(GLOO), C10D)
    replaced = fact(1, 2.0, error=Error.of(behind_finally(KeyError("label 7"), barrier), ""))
    broken = raised(RuntimeError("Application timeout caused pair closure"), C10D)
    follower = Error.of(behind_finally(raised(RuntimeError(GLOO), C10D), broken), "")
    assert (replaced.how, replaced.follows) == ("KeyError: 'label 7'", True)
    verdict = judged(fact(0, 1.0, error=follower), replaced)
    assert (verdict.original.rank, verdict.followers, verdict.certain) == (1, (0,), True)
    other = fact(2, 1.5, returncode=returncode, error=error() if returncode else None)
    assert judged(fact(0, 1.6, error=follower), replaced, other).original.rank == 2


def test_an_error_that_causes_itself_is_judged() -> None:
    one, two = ValueError(), KeyError()
    one.__cause__, two.__cause__ = two, one
    assert not Error.of(one, "").lost_peer


def test_a_death_by_a_signal_is_a_cause_and_one_that_we_sent_is_none() -> None:
    verdict = judged(
        fact(0, 1.1, error=lost_peer()),
        fact(1, 1.0, returncode=-signal.SIGKILL),
        fact(2, 1.5, returncode=-signal.SIGTERM, stopped=True),
    )
    assert (verdict.original.rank, verdict.exit_code, verdict.others) == (1, 137, ())


def test_only_followers_make_an_uncertain_verdict() -> None:
    verdict = judged(fact(0, 1.0, error=lost_peer()), fact(1, 1.1, error=lost_peer()))
    assert not verdict.certain
    assert "another host" in render_failure(verdict, NODES)
    assert "host," not in render_failure(verdict, SHAPE).partition("why:")[2]


def test_a_rank_that_ended_with_0_is_the_cause_of_those_that_lost_it() -> None:
    verdict = judged(
        fact(0, 1.1, error=lost_peer()),
        fact(1, 1.0, returncode=0),
        fact(2, 1.05, error=lost_peer()),
        fact(3, 2.0, returncode=0, stopped=True),
    )
    # A cause may still be on its way, so the launcher goes on listening.
    assert (verdict.original.rank, verdict.certain, verdict.exit_code) == (1, False, 1)
    assert render_failure(verdict, SHAPE).splitlines() == [
        "[2] Traceback",
        "[2] RuntimeError: connection closed",
        "paceline: rank 1 ended with exit code 0 while the others went on",
        "  where: rank 1, host h, pid 1",
        "  why:   it reached its end, or called sys.exit(0) or os._exit(0), before the others were done.",
        "  fix:   let all ranks do the same number of steps and end together.",
        "  ranks 0 and 2 failed as a consequence: they lost their peer.",
    ]
    assert "or the cause is on another host" in render_failure(verdict, NODES)
    assert render_restart(verdict, SHAPE) == (
        "paceline: rank 1 ended with exit code 0 while the others went on (host h, pid 1); "
        "restart 1 of 3 begins\n"
    )


def test_a_failure_wins_over_a_rank_that_ended_with_0() -> None:
    ended, follower = fact(1, 1.0, returncode=0), fact(0, 1.1, error=lost_peer())
    verdict = judged(ended, follower, fact(2, 1.3, error=error()))
    assert (verdict.original.rank, verdict.ranks, verdict.followers) == (2, (2,), (0,))


def test_a_preempted_rank_did_not_fail() -> None:
    preempted = fact(0, 1.0, returncode=75)
    assert find_first_failure([preempted]) is None
    verdict = judged(preempted, fact(1, 1.2, error=error()))
    assert (verdict.original.rank, verdict.exit_code, verdict.others) == (1, 1, ())
    # If the others only lost it, a scheduler may start the job again.
    verdict = judged(preempted, fact(1, 1.2, error=lost_peer()))
    assert (verdict.original.rank, verdict.exit_code) == (0, 75)
    text = render_failure(verdict, SHAPE)
    assert "rank 0 ended with exit code 75 while the others went on" in text
    assert "why:   it was preempted, and the others were not." in text


def test_a_rank_that_ended_long_after_the_loss_did_not_cause_it() -> None:
    verdict = judged(fact(0, 1.0, error=lost_peer()), fact(1, 9.0, returncode=0))
    assert verdict.original.rank == 0


def test_equal_errors_are_one() -> None:
    verdict = judged(*(fact(rank, 1.0 + rank / 10, error=error()) for rank in range(4)))
    text = render_failure(verdict, SHAPE)
    assert "ranks 0-3 of 4 failed: ValueError: bad" in text
    assert text.count("Traceback") == 1


@pytest.mark.parametrize(
    ("returncode", "code"), [(3, 3), (-9, 137), (-11, 139), (1, 1), (None, 1), (-15, 1), (74, 74)]
)
def test_the_exit_code_is_the_first_failures(returncode: int | None, code: int) -> None:
    # One that told of an error counts as failed by it, also where it was stopped before it had ended.
    # With a code of its own, that one stands.
    told = error() if returncode in (None, -15, 74) else None
    assert judged(fact(0, 1.0, returncode=returncode, error=told)).exit_code == code


def test_a_rank_that_was_stopped_after_its_error_has_the_code_of_the_error() -> None:
    told = Error.of(SaveFailed("the disk is full"), "")
    assert judged(fact(0, 1.0, returncode=-15, error=told)).exit_code == 74


def test_the_report_has_the_traceback_first_and_once() -> None:
    failures = [
        fact(0, 2.0, error=lost_peer()),
        fact(1, 1.0, error=error()),
        fact(2, 3.0, error=error("KeyError", "'x'")),
        fact(3, 2.0, error=lost_peer()),
    ]
    assert report(*failures) == [
        "[1] Traceback",
        "[1] ValueError: bad",
        "paceline: rank 1 of 4 failed: ValueError: bad",
        "  where: rank 1, host h, pid 1, exit code 1, train.py:7 in main",
        "  ranks 0 and 3 failed as a consequence: they lost their peer.",
        "  rank 2 failed later: KeyError: 'x'.",
    ]


def test_a_known_error_gets_its_cause_and_cure() -> None:
    text = "Expected to have finished reduction in the prior iteration before starting a new one."
    lines = report(fact(0, 1.0, error=error("RuntimeError", text)))
    assert lines[-2].startswith("  why:   DDP reduces a gradient for each parameter")
    assert lines[-1].startswith("  fix:   freeze it")


def test_a_known_error_says_more_than_where_it_was_raised() -> None:
    text = "Rank 1 failed to pass monitoredBarrier in 1000 ms"
    waited = error("RuntimeError", text, lost_peer=True)
    assert "  why:   the rank that the line names" in "\n".join(report(fact(0, 1.0, error=waited)))
    unknown = report(fact(0, 1.0, error=lost_peer()))
    assert "  why:   it failed where ranks wait" in "\n".join(unknown)


def test_a_job_of_one_rank_has_lost_no_peer() -> None:
    info = dataclasses.replace(SHAPE, world_size=1)
    assert "  why: " not in "\n".join(report(fact(0, 1.0, error=lost_peer()), info=info))


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (9, "a process outside the job or the kernel sent SIGKILL"),
        (7, "native code accessed memory"),
    ],
)
def test_a_signal_gets_its_cause_and_cure(number: int, why: str) -> None:
    lines = report(fact(0, 1.0, returncode=-number))
    assert lines[-2].startswith(f"  why:   {why}")
    assert lines[-1].startswith("  fix:   ")


WORKER = "DataLoader worker (pid 7)"


@pytest.mark.parametrize(
    ("cause", "why"),
    [
        (f"{WORKER} is killed by signal: Terminated. ", "as a scheduler sends it"),
        (f"{WORKER} is killed by signal: Killed. ", "sent SIGKILL to the worker"),
        (f"{WORKER} is killed by signal: Segmentation fault. ", "accessed memory"),
        (f"{WORKER} exited unexpectedly with exit code 3. Details are lost", "os._exit()"),
        ("stopped", "the loader sees only that it is gone"),  # not in the table
    ],
)
@pytest.mark.parametrize("depth", [1, 2])
def test_the_cause_of_an_error_says_more_than_the_error(cause: str, why: str, depth: int) -> None:
    error = raised(RuntimeError(cause))
    for _ in range(depth):
        outer = RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")
        error = raised(outer, cause=error)
    (line,) = [
        line
        for line in report(fact(0, 1.0, error=Error.of(error, "")))
        if line.startswith("  why:")
    ]
    assert why in line
    assert (cause.strip(". ") in line) is (cause != "stopped")


def test_an_error_of_ours_explains_itself() -> None:
    ours = Error.of(ConfigError("rank 0 cannot listen: Address already in use."), "")
    assert not [line for line in report(fact(0, 1.0, error=ours)) if "why:" in line]


def test_what_ranks_called_last_is_said_where_native_code_gave_up() -> None:
    said = "what(): op.preamble.length <= op.nbytes. 44 vs 12."
    followers = (fact(n, 1.1, error=lost_peer()) for n in (1, 2, 3))
    short, long = "all_reduce #4 (f32[7])", "all_reduce #4 (f32[9])"
    info = dataclasses.replace(SHAPE, calls={0: "", 1: long, 2: short, 3: short})
    lines = report(fact(0, 1.0, returncode=-6, abort_message=said), *followers, info=info)
    assert lines[0] == "paceline: rank 0 of 4 failed: killed by SIGABRT"
    assert lines[2].startswith("  why:   collectives are matched by order alone")
    assert (
        "  called last: rank 1 all_reduce #4 (f32[9]); ranks 2 and 3 all_reduce #4 (f32[7])."
        in lines
    )


@pytest.mark.parametrize("answer", [{}, {"entries": [1]}, {"entries": [{}]}, {"entries": 3}])
def test_an_answer_that_says_nothing(answer: dict[str, object]) -> None:
    assert last_call(answer, "") == ""
