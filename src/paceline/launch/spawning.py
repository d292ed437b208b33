"""Run a function on several ranks of this host, from a notebook, a debugger or a test.

Uses `multiprocessing` with its fork server, which imports torch once, so that a rank starts in
milliseconds. Use `paceline run` for real training. Functions are sent by cloudpickle, so they may be
defined in a notebook cell or a script, and no rank imports the main module, which would run it again.
A rank writes its outcome to a file, and its stacks when it gets a signal.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import torch
import torch.distributed as dist

from paceline.errors import LaunchFailed
from paceline.exit_codes import signal_name
from paceline.job.arguments import require_integers, require_positive
from paceline.job.job import join
from paceline.job.mesh import Mesh
from paceline.job.store_server import serve_here
from paceline.log import logger
from paceline.machine import usable_cores
from paceline.torch_private import COMPILER
from paceline.watch.crash import Error, RankOutcome, find_first_failure

_GRACE_S = 5.0
_POLL_S = 0.02
_DUMP_S = 0.3  # for the stacks of a rank and its children
# Makes a rank write its stacks. Nothing else uses this signal, and no terminal sends it.
_DUMP_SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGQUIT)
_main_hidden = threading.Lock()
# Imported once, by the fork server. torch imports its compiler for the first optimizer or DDP object, which
# takes a second.
_PRELOADED = [
    "torch",
    "torch.distributed",
    COMPILER,
    "paceline.launch.spawning",
    "paceline.training.trainer",
]


@dataclass
class RankResult:
    """The result of one rank: its value, or its error.

    Args:
        text: The traceback of the error, or the stacks of a rank that did not finish; else empty.
        failure: The failure as `find_first_failure` takes it; None for a rank that did not finish.
    """

    rank: int
    value: Any = None
    error: BaseException | None = None
    text: str = ""
    failure: RankOutcome | None = None


def spawn(
    function: Callable[..., Any],
    *args: Any,
    nproc: int = 2,
    seed: int = 0,
    device: str | None = None,
    timeout_s: float = 600.0,
    deadline_s: float | None = None,
    mesh: Mesh | None = None,
) -> list[Any]:
    """Call `function(job, *args)` on `nproc` new ranks of this host; their results in rank order.

    After its function has returned, a process has 5 s to end its threads and exit handlers.

    Args:
        nproc: Number of ranks.
        seed: See `join`.
        device: See `join`.
        mesh: See `join`.
        timeout_s: How long a collective may wait, in seconds.
        deadline_s: When to end all ranks, in seconds from now; None: never.

    Raises:
        Exception: the first original error of a rank, with the rank's traceback as a note.
        LaunchFailed: a rank was killed or called `sys.exit`, or the deadline passed; with the stacks of
            running ranks.
        ConfigError: `nproc` is less than 1, or a time is not more than 0.

    Collective: none.
    """
    options = {"seed": seed, "device": device, "timeout_s": timeout_s, "mesh": mesh}
    outcomes = run_outcomes(function, args, nproc=nproc, deadline_s=deadline_s, options=options)
    failed = [o for o in outcomes if o.error is not None]
    if failed:
        crash = find_first_failure(o.failure for o in failed if o.failure is not None)
        if crash is not None:
            first = outcomes[crash.original.rank]
        else:  # a rank that ended early, or else the deadline has passed
            first = next((o for o in failed if o.failure is not None), failed[0])
        assert first.error is not None
        if type(first.error) is SystemExit:  # raised here, it would end the caller's process
            code = first.error.code
            first.error = LaunchFailed(
                f"rank {first.rank} called sys.exit({'' if code is None else repr(code)}).",
                where=f"rank {first.rank}",
                fix="return from the function instead.",
                rank=first.rank,
                rank_exit_code=code,
            )
        # A rank with a timeout may have waited for one that did not end: its stacks show why.
        for outcome in failed:
            if outcome.text and (outcome is first or isinstance(outcome.error, LaunchFailed)):
                first.error.add_note(f"on rank {outcome.rank}:\n{outcome.text}")
        raise first.error
    return [o.value for o in outcomes]


def run_outcomes(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    nproc: int,
    deadline_s: float | None,
    options: Mapping[str, Any],
    store: dist.TCPStore | None = None,
) -> list[RankResult]:
    """As `spawn`, but return the outcome of each rank instead of raising.

    Args:
        options: Arguments of `join`, with a `timeout_s`.
        store: For the rendezvous of the ranks; None creates one.
    """
    timeout_s = options["timeout_s"]
    require_integers(1, nproc=nproc)
    require_positive(timeout_s=timeout_s)
    if deadline_s is not None:
        require_positive(deadline_s=deadline_s)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    if store is None:
        store = serve_here(timedelta(seconds=timeout_s))
    payload = cloudpickle.dumps((function, args))
    processes: list[BaseProcess] = []
    with tempfile.TemporaryDirectory(prefix="paceline-spawn-") as name:
        folder = Path(name)
        try:
            for rank in range(nproc):
                environ = _environment(rank, nproc, store.port)
                process = context.Process(target=_serve, args=(folder, payload, environ, options))
                with _hidden_main():
                    process.start()
                processes.append(process)
            return _collect(processes, folder, deadline_s)
        except BaseException:
            for each in processes:
                each.kill()
            raise
        finally:
            for each in processes:
                _end(each)


def _collect(
    processes: Sequence[BaseProcess], folder: Path, deadline_s: float | None
) -> list[RankResult]:
    outcomes: dict[int, RankResult] = {}
    began = time.monotonic()
    deadline = math.inf if deadline_s is None else began + deadline_s
    while True:
        for rank, process in enumerate(processes):
            # Read before the look at its file, which is then the last one.
            has_ended = process.exitcode is not None
            if rank not in outcomes and (folder / str(rank)).exists():
                outcomes[rank] = cloudpickle.loads((folder / str(rank)).read_bytes())
            elif rank not in outcomes and has_ended:
                outcomes[rank] = _early_end(rank, process)
        running = [rank for rank in range(len(processes)) if rank not in outcomes]
        # After a failure the others have a short time to send their outcome.
        if any(outcome.error is not None for outcome in outcomes.values()):
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        if not running:
            return [outcomes[rank] for rank in range(len(processes))]
        if time.monotonic() > deadline:
            for rank in running:
                after_s = time.monotonic() - began
                outcomes[rank] = _unfinished(rank, processes[rank], folder, after_s)
        else:
            wait([processes[rank].sentinel for rank in running], timeout=_POLL_S)


def _unfinished(rank: int, process: BaseProcess, folder: Path, after_s: float) -> RankResult:
    """The outcome of a rank that is ended now, with its stacks and those of its children."""
    with contextlib.suppress(psutil.Error):
        found = psutil.Process(process.pid)
        # A child without a handler is killed by the signal: it is about to end with its rank.
        for each in (found, *found.children()):
            with contextlib.suppress(psutil.Error):
                each.send_signal(_DUMP_SIGNAL)
            time.sleep(_DUMP_S)  # otherwise their lines would mix
    error = LaunchFailed(f"rank {rank} did not finish within {after_s:.0f} s.", rank=rank)
    stacks = folder / f"{rank}.stacks"
    text = stacks.read_text(errors="replace") if stacks.exists() else ""
    process.kill()
    return RankResult(rank, error=error, text=text)


def _early_end(rank: int, process: BaseProcess) -> RankResult:
    code = process.exitcode or 0
    how = f"was killed by {signal_name(-code)}"
    why = "memory ran out, or native code crashed, or a user killed it."
    if code >= 0:
        how = f"ended with exit code {code} before its function returned"
        why = "the function or a library called os._exit, or exit of C."
    error = LaunchFailed(f"rank {rank} {how}.", why=why, rank=rank, rank_exit_code=code)
    return RankResult(rank, error=error, failure=_rank_outcome(rank, returncode=code))


def _rank_outcome(
    rank: int, error: Error | None = None, returncode: int | None = None
) -> RankOutcome:
    here = {"host": "localhost", "pid": os.getpid(), "time": time.time()}
    return RankOutcome(rank=rank, error=error, returncode=returncode, **here)  # type: ignore[arg-type]


def _end(process: BaseProcess) -> None:
    """Wait for the end of a process whose outcome is known; kill it after 5 s."""
    process.join(timeout=_GRACE_S)
    if process.exitcode is None:
        logger.warning(
            "the process %d of a rank was killed: its function has returned, but a thread or an exit "
            "handler still ran after %.0f s.",
            process.pid,
            _GRACE_S,
        )
        process.kill()
        process.join(timeout=_GRACE_S)
    process.close()


@contextlib.contextmanager
def _hidden_main() -> Iterator[None]:
    """Hide the main module from multiprocessing, whose children would run it again.

    They do not need it: cloudpickle sends what the main module defines by value. One thread at a time,
    otherwise a second would restore what the first has hidden.
    """
    main = vars(sys.modules["__main__"])
    with _main_hidden:
        kept: dict[str, Any] = {
            name: main[name] for name in ("__file__", "__spec__") if name in main
        }
        try:
            main.update(__spec__=None)
            main.pop("__file__", None)
            yield
        finally:
            del main["__spec__"]
            main.update(kept)


def _environment(rank: int, nproc: int, port: int) -> dict[str, str]:
    environ = dict(os.environ)
    environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(nproc),
        LOCAL_WORLD_SIZE=str(nproc),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
    )
    return environ


def _serve(
    folder: Path, payload: bytes, environ: dict[str, str], options: Mapping[str, Any]
) -> None:
    """The main function of each rank's process."""
    rank = int(environ["RANK"])
    if isinstance(sys.stdout, io.TextIOWrapper):  # with PYTHONUNBUFFERED lines of ranks would mix
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    stacks = (folder / f"{rank}.stacks").open("w")
    faulthandler.register(_DUMP_SIGNAL, file=stacks, all_threads=True)
    os.environ.clear()
    os.environ.update(environ)
    # The fork server may have been started with a different environment than that of this call. OpenMP also
    # allows a list, "4,2", whose first number is that of the outer loops.
    threads = environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    given = int(threads) if threads.isdecimal() else 0
    torch.set_num_threads(given or max(1, usable_cores() // int(environ["WORLD_SIZE"])))
    outcome = RankResult(rank)
    try:
        function, args = cloudpickle.loads(payload)
        with join(**options) as job:
            outcome.value = function(job, *args)
    except BaseException as error:
        outcome.error = error
        outcome.text = traceback.format_exc()
        outcome.failure = _rank_outcome(rank, Error.of(error, outcome.text))
    written = folder / f"{rank}.new"
    try:
        written.write_bytes(_pack(outcome))
    except OSError:  # no space is left
        sys.stderr.write(outcome.text)
        raise
    with contextlib.suppress(FileNotFoundError):  # the caller has given up, and removed the folder
        written.rename(folder / str(rank))


def _pack(outcome: RankResult) -> bytes:
    try:
        data: bytes = cloudpickle.dumps(outcome)
        cloudpickle.loads(data)  # some exceptions pickle, but cannot be read again
        return data
    except Exception as error:
        text = outcome.text or f"its result cannot be pickled: {error}"
        outcome.value = None
        outcome.error = LaunchFailed(
            f"rank {outcome.rank} failed: {text.strip().splitlines()[-1]}", rank=outcome.rank
        )
        return cloudpickle.dumps(outcome)  # type: ignore[no-any-return]
