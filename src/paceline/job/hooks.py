"""What happens in a rank when an exception reaches the top: it is recorded, shown, and ends the process.

An interpreter that winds down after an error would wait for peers, or abort in torch's threads and bury
the error. So with more than one process, and never in an interactive interpreter, the process ends at
once after the error was marked, printed and flushed.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from types import TracebackType

import torch.distributed as dist
from torch.distributed import distributed_c10d

from paceline.errors import PacelineError
from paceline.job.peers import Peers

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class End:
    """The hook: tells the others, shows the error as the hook before it did, and ends the process.

    Args:
        peers: Whom it tells.
        previous: The hook that it stands before.
    """

    def __init__(self, peers: Peers, previous: Hook) -> None:
        self.peers = peers
        self.previous = previous

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        mark(self.peers, error)
        self.previous(kind, error, trace)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        if dist.is_initialized():
            distributed_c10d._abort_process_group()  # the others' collectives break now, and they ask
        self.peers.linger()
        code = error.exit_code if isinstance(error, PacelineError) else 1
        os._exit(130 if issubclass(kind, KeyboardInterrupt) else code)


_installed: End | None = None


def mark(peers: Peers, error: BaseException) -> None:
    """Tell the other ranks that `error` ends this one."""
    text = "".join(traceback.format_exception_only(error)).strip()
    try:
        peers.mark_failed(text.splitlines()[0])
    except RuntimeError:
        return  # rank 0 and its store went first, so somebody else's failure is already the news


def interactive() -> bool:
    """Whether this interpreter serves a person line by line."""
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules


def install(peers: Peers) -> None:
    """End the process when an exception reaches the top."""
    global _installed
    if interactive() or _installed is not None:
        return
    sys.excepthook = _installed = End(peers, sys.excepthook)


def uninstall() -> None:
    """Undo `install`."""
    global _installed
    if _installed is not None:
        sys.excepthook = _installed.previous
        _installed = None
