"""Run a function on several ranks of this host, from a notebook, a debugger or a test.

Uses `multiprocessing` with its fork server, which imports torch once, so that a rank starts in
milliseconds. Use `paceline run` for real training. Functions are sent by cloudpickle, so they may be
defined in a notebook cell or a script, and no rank imports the main module, which would run it again.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import multiprocessing
import os
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TextIO

import cloudpickle
import psutil
import torch
import torch.distributed as dist

from paceline.errors import ConfigError, LaunchFailed
from paceline.exit_codes import signal_name
from paceline.job.job import join
from paceline.job.mesh import Mesh
from paceline.job.store_server import serve_here
from paceline.log import logger
from paceline.machine import usable_cores
from paceline.torch_private import COMPILER
from paceline.watch.crash import Error, RankOutcome, find_first_failure

_GRACE_S = 5.0
_DUMP_S = 2.0
_LONG_LINE = 2000  # characters; a longer line without an end is cut
# Makes a rank write its stacks. Nothing else uses this signal, and no terminal sends it.
_DUMP_SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGQUIT)
_SIZE = struct.Struct("!Q")  # of an outcome, in bytes; sent before it
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
    outcomes = run_outcomes(
        function,
        args,
        nproc=nproc,
        seed=seed,
        device=device,
        timeout_s=timeout_s,
        deadline_s=deadline_s,
        mesh=mesh,
    )
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
    seed: int = 0,
    device: str | None = None,
    timeout_s: float = 600.0,
    deadline_s: float | None = None,
    mesh: Mesh | None = None,
    store: dist.TCPStore | None = None,
) -> list[RankResult]:
    """As `spawn`, but return the outcome of each rank instead of raising.

    `store` is for the rendezvous of the ranks; None creates one.
    """
    if isinstance(nproc, bool) or not isinstance(nproc, int) or nproc < 1:
        raise ConfigError(f"nproc must be at least 1, got {nproc!r}.")
    for name, value in (("timeout_s", timeout_s), ("deadline_s", deadline_s)):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name} must be more than 0 and finite, got {value}.")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    if store is None:
        store = serve_here(timedelta(seconds=timeout_s))
    payload = cloudpickle.dumps((function, args))
    options = {"seed": seed, "device": device, "timeout_s": timeout_s, "mesh": mesh}
    ranks: list[_Rank] = []
    try:
        for number in range(nproc):
            ours, theirs = context.Pipe(duplex=False)
            os.set_blocking(ours.fileno(), False)
            stack, stack_end = context.Pipe(duplex=False)
            environ = _environment(number, nproc, store.port)
            process = context.Process(
                target=_serve, args=(theirs, stack_end, payload, environ, options), daemon=False
            )
            with _hidden_main():
                process.start()
            theirs.close()
            stack_end.close()
            ranks.append(_Rank(process, ours, stack))
        return _collect(ranks, deadline_s)
    except BaseException:
        for each in ranks:
            each.process.kill()
        raise
    finally:
        for each in ranks:
            each.close()


@dataclass
class _Rank:
    """A rank, as its parent process sees it: the process, and the pipes for its outcome and its stacks."""

    process: BaseProcess
    pipe: Connection
    stacks: Connection
    received: bytearray = field(default_factory=bytearray)

    def receive(self) -> RankResult | None:
        """The outcome, once all of it has come; what has come before is kept. It never waits for the rank."""
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self.pipe.fileno(), 1 << 20):
                self.received += part
        size = _SIZE.unpack_from(self.received)[0] if len(self.received) >= _SIZE.size else math.inf
        if len(self.received) < _SIZE.size + size:
            return None
        outcome: RankResult = cloudpickle.loads(memoryview(self.received)[_SIZE.size :])
        return outcome

    def dump_stacks(self) -> str:
        """The stacks of a rank that does not finish, and of its children that can write them."""
        with contextlib.suppress(psutil.Error):
            rank = psutil.Process(self.process.pid)
            # A child without a handler is killed by the signal: it is about to end with its rank.
            for each in (rank, *rank.children()):
                with contextlib.suppress(psutil.Error):
                    each.send_signal(_DUMP_SIGNAL)
                time.sleep(0.1)  # otherwise their lines would mix
        text = b""
        until = time.monotonic() + _DUMP_S
        while wait([self.stacks], timeout=max(0.0, until - time.monotonic())):
            part = os.read(self.stacks.fileno(), 1 << 16)
            if not part:
                break
            text += part
            until = min(until, time.monotonic() + 0.2)
        return text.decode(errors="replace")

    def close(self) -> None:
        """Close the pipes; kill the process if it does not end by itself within 5 s."""
        self.process.join(timeout=_GRACE_S)
        if self.process.is_alive():
            logger.warning(
                "the process %d of a rank was killed: its function has returned, but a thread or an exit "
                "handler still ran after %.0f s.",
                self.process.pid,
                _GRACE_S,
            )
            self.process.kill()
        self.process.join(timeout=_GRACE_S)
        self.process.close()
        self.pipe.close()
        self.stacks.close()


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
        PACELINE_LAUNCHED="1",  # the lines of output begin with the rank
    )
    return environ


def _serve(
    pipe: Connection,
    stacks: Connection,
    payload: bytes,
    environ: dict[str, str],
    options: dict[str, Any],
) -> None:
    """The main function of each rank's process."""
    faulthandler.register(_DUMP_SIGNAL, file=stacks.fileno(), all_threads=True)
    rank = int(environ["RANK"])
    os.environ.clear()
    os.environ.update(environ)
    # The fork server may have been started with a different environment than that of this call. OpenMP also
    # allows a list, "4,2", whose first number is that of the outer loops.
    threads = environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    given = int(threads) if threads.isdecimal() else 0
    torch.set_num_threads(given or max(1, usable_cores() // int(environ["WORLD_SIZE"])))
    streams = [_Lines(sys.stdout, rank), _Lines(sys.stderr, rank)]
    sys.stdout, sys.stderr = streams
    outcome = RankResult(rank)
    try:
        function, args = cloudpickle.loads(payload)
        with join(**options) as job:
            outcome.value = function(job, *args)
    except BaseException as error:
        outcome.error = error
        outcome.text = traceback.format_exc()
        outcome.failure = _rank_outcome(rank, Error.of(error, outcome.text))
    for stream in streams:
        stream.finish()
    data = _pack(outcome)
    left = memoryview(_SIZE.pack(len(data)) + data)
    while left:
        left = left[os.write(pipe.fileno(), left) :]
    pipe.close()


class _Lines:
    """The output of a rank: whole lines, so that those of several ranks do not mix.

    Lines of rank 0 are as they are; those of other ranks begin with "[1] ", as under `paceline run`. A line
    without an end is written when the rank ends, or when it is very long.
    """

    def __init__(self, stream: TextIO, rank: int) -> None:
        self._stream = stream
        self._prefix = f"[{rank}] " if rank else ""
        self._partial = ""
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write the lines that are complete."""
        with self._lock:
            *lines, self._partial = (self._partial + text).split("\n")
            if len(self._partial) > _LONG_LINE:
                lines, self._partial = [*lines, self._partial], ""
            if lines:
                # One call: the kernel does not mix what several processes write to a pipe, up to 4 KiB.
                self._stream.write("".join(f"{self._prefix}{line}\n" for line in lines))
                self._stream.flush()
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write all of them."""
        self.write("".join(lines))

    def finish(self) -> None:
        """Write what is left."""
        if self._partial:
            self.write("\n")

    def isatty(self) -> bool:
        """A progress bar needs the terminal for itself, which several ranks share."""
        return False


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


def _collect(ranks: list[_Rank], deadline_s: float | None) -> list[RankResult]:
    outcomes: dict[int, RankResult] = {}
    start = time.monotonic()
    deadline = None if deadline_s is None else start + deadline_s
    while len(outcomes) < len(ranks):
        open_ranks = [number for number in range(len(ranks)) if number not in outcomes]
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            for number in open_ranks:
                outcomes[number] = _unfinished(number, ranks[number], time.monotonic() - start)
            break
        # A child of a rank may hold the rank's end of the pipe open, so the end of its process counts too.
        waiting = [ranks[number] for number in open_ranks]
        wait([r.pipe for r in waiting] + [r.process.sentinel for r in waiting], timeout=left)
        for number in open_ranks:
            has_ended = not ranks[
                number
            ].process.is_alive()  # before the read, which is then the last
            outcome = ranks[number].receive()
            if outcome is not None or has_ended:
                outcomes[number] = outcome or _early_end(number, ranks[number])
        # After a failure the others have a short time to send their outcome.
        if any(o.error is not None for o in outcomes.values()):
            limit = time.monotonic() + _GRACE_S
            deadline = limit if deadline is None else min(deadline, limit)
    return [outcomes[number] for number in range(len(ranks))]


def _unfinished(number: int, rank: _Rank, after_s: float) -> RankResult:
    error = LaunchFailed(f"rank {number} did not finish within {after_s:.0f} s.", rank=number)
    outcome = RankResult(number, error=error, text=rank.dump_stacks())
    rank.process.kill()
    return outcome


def _rank_outcome(
    rank: int, error: Error | None = None, returncode: int | None = None
) -> RankOutcome:
    here = {"host": "localhost", "pid": os.getpid(), "time": time.time()}
    return RankOutcome(rank=rank, error=error, returncode=returncode, **here)  # type: ignore[arg-type]


def _early_end(number: int, rank: _Rank) -> RankResult:
    code = rank.process.exitcode or 0
    how = f"was killed by {signal_name(-code)}"
    why = "memory ran out, or native code crashed, or a user killed it."
    if code >= 0:
        how = f"ended with exit code {code} before its function returned"
        why = "the function or a library called os._exit, or exit of C."
    error = LaunchFailed(f"rank {number} {how}.", why=why, rank=number, rank_exit_code=code)
    return RankResult(number, error=error, failure=_rank_outcome(number, returncode=code))
