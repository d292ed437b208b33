"""Test code that runs on several ranks: `run_ranks`, faults as data, and digests.

    def _total(job, x):
        return sum(paceline.gather(job, x * (job.rank + 1)))

    def test_total():
        assert run_ranks(_total, 2.0, nproc=3) == [12.0] * 3

Ranks return values and the parent asserts. Three timeouts are nested: that of a collective is shorter than
the deadline of `run_ranks`, which is shorter than that of pytest.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from paceline.errors import PacelineError
from paceline.job.job import Job
from paceline.job.mesh import Mesh
from paceline.job.store_server import serve_here
from paceline.launch.spawning import RankResult, run_outcomes, spawn

COLLECTIVE_TIMEOUT_S = 20.0
DEADLINE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault to inject on `rank` in `step`, where the script calls `inject` with `phase`.

    Attributes:
        kind: "raise"; "kill" (SIGKILL); "exit" (status 3); "stop" (SIGSTOP); "stall" (sleeps for an hour).
        phase: a word that the script chooses, such as "backward"; "" if it calls `inject` at one point.
    """

    rank: int
    step: int
    kind: Literal["raise", "kill", "exit", "stop", "stall"]
    phase: str = ""


class InjectedFault(PacelineError):
    """The error that a fault of kind "raise" raises."""


def run_ranks(
    function: Callable[..., Any],
    *args: Any,
    nproc: int,
    seed: int = 0,
    timeout_s: float = COLLECTIVE_TIMEOUT_S,
    deadline_s: float = DEADLINE_S,
    mesh: Mesh | None = None,
) -> list[Any]:
    """Call `function(job, *args)` on `nproc` ranks; their results in rank order.

    Raises:
        Exception: the first original error of a rank.
        LaunchFailed: a rank was killed, or the deadline passed.
    """
    return spawn(
        function,
        *args,
        nproc=nproc,
        seed=seed,
        timeout_s=timeout_s,
        deadline_s=deadline_s,
        mesh=mesh,
    )


def run_failing_ranks(
    function: Callable[..., Any],
    *args: Any,
    nproc: int,
    faults: Sequence[Fault] = (),
    timeout_s: float = COLLECTIVE_TIMEOUT_S,
    deadline_s: float = DEADLINE_S,
    mesh: Mesh | None = None,
) -> list[RankResult]:
    """Like `run_ranks`, but return the outcome of each rank, errors included, instead of raising.

    Args:
        faults: the faults that `function` injects; each must happen, or the test would pass without it.

    Raises:
        AssertionError: a fault was never reached.
    """
    store = serve_here(timedelta(seconds=timeout_s))
    outcomes = run_outcomes(
        function,
        args,
        nproc=nproc,
        deadline_s=deadline_s,
        options={"timeout_s": timeout_s, "mesh": mesh},
        store=store,
    )
    seen = dist.PrefixStore("paceline/0", store)
    unused = [fault for n, fault in enumerate(faults) if not seen.check([f"fault/{n}"])]
    assert not unused, f"these faults were never reached: {unused}"
    return outcomes


def digest(value: Any) -> str:
    """sha256 of nested tensors and plain values, such as a `state_dict()`, to compare bit for bit."""
    total = hashlib.sha256()

    def add(thing: Any) -> None:
        if isinstance(thing, torch.Tensor):
            total.update(f"{thing.dtype}{tuple(thing.shape)}".encode())
            flat = thing.detach().cpu().contiguous().reshape(-1)
            total.update(flat.view(torch.uint8).numpy().tobytes())
        elif isinstance(thing, dict):
            for key in sorted(thing, key=str):
                total.update(str(key).encode())
                add(thing[key])
        elif isinstance(thing, list | tuple):
            total.update(b"[")
            for each in thing:
                add(each)
            total.update(b"]")
        else:
            total.update(repr(thing).encode())

    add(value)
    return total.hexdigest()


def inject(
    job: Job,
    faults: Sequence[Fault],
    step: int,
    phase: str = "",
    *,
    folder: str | None = None,
) -> None:
    """Inject the faults of this rank, step and phase. Call it once for each step and phase.

    Args:
        folder: where each fault writes the file `fault-N`, so that it happens once over all restarts of a
            job, and its time can be read. Without it a fault happens whenever its step is reached.
    """
    for number, fault in enumerate(faults):
        if (fault.rank, fault.step, fault.phase) != (job.rank, step, phase):
            continue
        if folder is not None:
            try:
                os.close(os.open(f"{folder}/fault-{number}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
        elif job.store is not None:
            job.store.set(f"fault/{number}", "used")
        _inject(job, fault)


def _inject(job: Job, fault: Fault) -> None:
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "exit":
        os._exit(3)
    elif fault.kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        return  # after SIGCONT
    elif fault.kind == "stall":
        time.sleep(3600)
    raise InjectedFault(f"injected on rank {job.rank} in step {fault.step}.")
