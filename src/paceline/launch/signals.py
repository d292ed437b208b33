"""Signals to the launcher: noted at once, acted on where it is safe, passed on to the ranks.

A front to torch's `SignalException`, which its agent understands. A signal that was ignored when we were
started (nohup) stays ignored, unlike in torchrun.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator, Sequence
from types import FrameType

from torch.distributed.elastic.multiprocessing import SignalException

# What torch handles unless it is told otherwise.
DEFAULT = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"


class Signals:
    """The signals that came, and whether the main thread may be interrupted.

    Collective: none.
    """

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._interruptible = False

    @property
    def hurry(self) -> bool:
        """Whether a second signal asks to end without any grace. Collective: none."""
        return len(self.received) > 1

    def check(self) -> None:
        """Act on a signal that came.

        Raises:
            SignalException: one did.

        Collective: none.
        """
        if self.received:
            number = self.received[0]
            raise SignalException(f"received {number.name}", sigval=number)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let a signal interrupt what runs in here: long waits in torch's code. Collective: none."""
        self.check()
        self._interruptible = True
        try:
            yield
        finally:
            self._interruptible = False

    @contextlib.contextmanager
    def handled(self, numbers: Sequence[signal.Signals], *, force: bool) -> Iterator[None]:
        """Handle these signals meanwhile; with `force`, those that were ignored as well.

        Collective: none.
        """
        before = {}
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                if force or signal.getsignal(number) is not signal.SIG_IGN:
                    before[number] = signal.signal(number, self._note)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))
        if self._interruptible:
            self._interruptible = False
            self.check()


def parse(names: str) -> list[signal.Signals]:
    """The signals of a list such as `SIGTERM,SIGINT`.

    Raises:
        ValueError: a name is no signal, or one that cannot be handled.

    Collective: none.
    """
    found: list[signal.Signals] = []
    for name in names.split(","):
        number = signal.Signals.__members__.get(name.strip())
        if number is None or number in (signal.SIGKILL, signal.SIGSTOP):
            raise ValueError(f"{name.strip()!r} is not a signal that can be handled")
        found.append(number)
    return found
