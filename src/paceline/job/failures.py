"""Failure propagation: a rank that fails informs its peers through the store.

Collectives only report that a connection broke. A failing rank therefore writes a mark to the store before
it closes its connections, and its peers read the mark and name that rank. An exception that reaches the top
of the program ends the process at once: an interpreter that winds down would wait for peers, or abort in
torch's threads and hide the error.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType

import torch.distributed as dist

from paceline import torch_private
from paceline.credentials import redact
from paceline.errors import PacelineError, PeerFailed, rank_location
from paceline.exit_codes import ExitCode
from paceline.job import current_step

# Keys of the store.
PREFIX = "peers"
_FAILED = "failed"
_ENDED = "ended"

_POLL_S = 0.005
_READERS_WAIT_S = 1.0  # limits how long rank 0 keeps its store for ranks that have not ended

# Set when the launcher tells this rank that another one has failed; a rank that was killed leaves no mark.
peer_failed = threading.Event()
# The ranks of this host that it found dead then.
killed_ranks: set[int] = set()


class Peers:
    """The mark of the rank that failed first, which its peers read from the store."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._ended_keys = [f"{_ENDED}/{each}" for each in range(world_size)]
        self._lingered = False

    def mark_failed(self, error: BaseException) -> None:
        """Record that `error` ends this rank, unless another rank failed first."""
        text = "".join(traceback.format_exception_only(error)).strip().splitlines()[0]
        mark = json.dumps({"rank": self._rank, "step": current_step.step, "text": redact(text)})
        try:
            self._store.compare_set(_FAILED, "", mark)
            self._store.set(self._ended_keys[self._rank], "")
        except RuntimeError:
            return  # rank 0 has ended, and the store with it

    def all_failed(self) -> bool:
        """Whether all ranks have left a mark; at least the last one to fail sees those of the others."""
        return self._store.check(self._ended_keys)

    def wait_for_readers(self) -> None:
        """If the store ends with this process, wait a moment for ranks that may still read the mark."""
        hosted_by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if self._rank != 0 or hosted_by_launcher or self._lingered:
            return
        self._lingered = True
        self._wait_for(self._ended_keys, _READERS_WAIT_S)

    @staticmethod
    def has_failure(store: dist.Store) -> bool:
        """Whether a rank of the job has failed; for threads, which have their own client of the store."""
        return peer_failed.is_set() or bool(store.check([f"{PREFIX}/{_FAILED}"]))

    def failure(self, *, wait_s: float = 0.0) -> PeerFailed | None:
        """The error to raise because another rank failed first; None if none is known."""
        if not self._wait_for([_FAILED], wait_s):
            return None
        mark = json.loads(self._store.get(_FAILED))
        if mark["rank"] == self._rank:
            return None
        return PeerFailed(
            f"rank {mark['rank']} failed first: {mark['text']}",
            where=rank_location(self._rank, self._world_size, step=current_step.step),
            why=f"rank {mark['rank']} ended in step {mark['step']}; this rank waited for it.",
            rank=mark["rank"],
        )

    def failure_behind_broken_collective(self) -> PeerFailed | None:
        """The peer's failure that broke a collective; None if no peer left a mark, as when it was killed."""
        try:
            # The mark is written before the connections close, so this wait is for a slow store.
            return self.failure(wait_s=0.1)
        except RuntimeError:
            return None  # rank 0 has ended, and the store with it

    def _wait_for(self, keys: list[str], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not self._store.check(keys):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True


def tell_launcher(error: BaseException) -> None:
    """Tell `paceline run`, if it started this process: it ends this rank soon after the first peer."""
    # The first code of such a rank runs under this name; it does not import paceline, nor this room it.
    report = getattr(sys.modules.get("paceline.launch.worker"), "report_before_clean_up", None)
    if report is not None and not isinstance(error, SystemExit | KeyboardInterrupt):
        report(error)


_noted: set[str] = set()  # the sockets of the process groups


@contextlib.contextmanager
def note_connections() -> Iterator[None]:
    """Note which sockets are made in this context, also by other threads, for `abort_process_groups`."""
    global _noted
    before = set(_sockets())
    try:
        yield
    finally:
        _noted = set(_sockets()) - before


def abort_process_groups() -> None:
    """Close all process groups without waiting for peers; their collectives break at once, on all ranks.

    Gloo's `abort` does nothing, and forks of this process hold its connections too. So they are shut down:
    a rank that has no failed neighbor in a ring would wait until this process ends.
    """
    abort = torch_private.find("torch.distributed.distributed_c10d._abort_process_group")
    (abort or dist.destroy_process_group)()
    for name, file in _sockets().items():
        if name in _noted:
            # An error if it has no peer, or was closed in the meantime.
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(file)) as connection:
                if isinstance(connection.getpeername(), tuple):  # of TCP
                    connection.shutdown(socket.SHUT_RDWR)


def _sockets() -> dict[str, int]:
    """The open sockets of this process: the name with the inode, and the file descriptor."""
    found = {}
    # The first error: there are no file descriptors left, or no /proc.
    with contextlib.suppress(OSError):
        for file in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # closed in the meantime
                if (name := os.readlink(f"/proc/self/fd/{file}")).startswith("socket:"):
                    found[name] = int(file)
    return found


Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class ExceptHook:
    """`sys.excepthook` of a job of several processes: inform the peers, show the error, end the process.

    After a job has failed it stays, because the threads of its groups still run.

    Attributes:
        peers: of the current job; None between jobs.
        previous: the hook before this one, which shows the error. It is torch's, with the rank in each line.
        before: the hook before the job, which is restored when the job is left.
    """

    def __init__(self, previous: Hook, before: Hook) -> None:
        self.peers: Peers | None = None
        self.previous = previous
        self.before = before

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self.mark_failed(error)
        self.previous(kind, error, trace)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        if dist.is_initialized():
            abort_process_groups()  # the collectives of the others break, and they read the mark
        if self.peers is not None:
            self.peers.wait_for_readers()
        code = error.exit_code if isinstance(error, PacelineError) else ExitCode.FAILED
        os._exit(ExitCode.INTERRUPTED if issubclass(kind, KeyboardInterrupt) else code)

    def mark_failed(self, error: BaseException) -> None:
        """Inform the peers, if the job has not been left."""
        if self.peers is not None:
            self.peers.mark_failed(error)


_installed: ExceptHook | None = None


def install_excepthook(peers: Peers, before: Hook) -> None:
    """End the process when an exception reaches the top, except in an interactive interpreter.

    Args:
        before: `sys.excepthook` before `init_process_group`, which adds one at each call.
    """
    global _installed
    if hasattr(sys, "ps1") or _runs_in_a_notebook():
        return
    if _installed is None:
        _installed = ExceptHook(sys.excepthook, before)
        sys.excepthook = _installed
    _installed.peers = peers


def _runs_in_a_notebook() -> bool:
    kernel = sys.modules.get("ipykernel.kernelapp")  # also present where something only imported it
    return kernel is not None and bool(kernel.IPKernelApp.initialized())


def uninstall_excepthook() -> None:
    """Undo `install_excepthook`, unless the program has replaced the hook since."""
    global _installed
    if _installed is not None:
        _installed.peers = None
        if sys.excepthook is _installed:
            sys.excepthook = _installed.before
            _installed = None


def release_peers() -> None:
    """Release the job, which an error has ended."""
    if _installed is not None:
        _installed.peers = None
