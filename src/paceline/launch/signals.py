"""Signals to the launcher: recorded at once, handled where it is safe, forwarded to the ranks.

A signal that was ignored at the start (nohup) stays ignored, unlike in torchrun. SIGUSR1 and SIGUSR2 are
only forwarded.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType

from paceline.job.preemption import SAME_SIGNAL_S

# torch's default of --signals-to-handle.
DEFAULT_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"

# Schedulers announce preemption with these; they do not end the launcher.
_FOR_RANKS = (signal.SIGUSR1, signal.SIGUSR2)


class SignalReceived(Exception):
    """The launcher has received a signal that ends it."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"received {number.name}")
        self.number = number


class ReceivedSignals:
    """The received signals of the launcher, and whether they may interrupt the main thread."""

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._first_at = self._last_at = 0.0
        self._for_ranks: list[signal.Signals] = []
        self._interruptible = False

    @property
    def skip_grace(self) -> bool:
        """Whether a later signal asks to end without a grace period."""
        return self._last_at - self._first_at > SAME_SIGNAL_S

    def check(self) -> None:
        """Raise for a received signal.

        Raises:
            SignalReceived: a signal was received.
        """
        if self.received:
            raise SignalReceived(self.received[0])

    def take_for_ranks(self) -> list[signal.Signals]:
        """The signals that were received since the last call and have to be forwarded to the ranks."""
        taken: list[signal.Signals] = []
        while self._for_ranks:
            taken.append(self._for_ranks.pop(0))
        return taken

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let a signal interrupt the body, which waits for other nodes while no script runs."""
        self.received += self.take_for_ranks()
        # First this, then the check: between them, a signal would be missed.
        self._interruptible = True
        try:
            self.check()
            yield
        finally:
            self._interruptible = False

    @contextlib.contextmanager
    def handled(self, numbers: Sequence[signal.Signals]) -> Iterator[None]:
        """Handle these signals in the body, except those that are ignored.

        SIGUSR1 and SIGUSR2 are forwarded to the ranks, unless they are among these or handled already.
        """
        before = {}
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    before[number] = signal.signal(number, self._note)
            for number in _FOR_RANKS:
                if number not in before and signal.getsignal(number) is signal.SIG_DFL:
                    before[number] = signal.signal(number, self._note_for_ranks)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._last_at = time.monotonic()
        self._first_at = self._first_at or self._last_at
        self.received.append(signal.Signals(number))
        if self._interruptible:
            self._interruptible = False
            self.check()

    def _note_for_ranks(self, number: int, frame: FrameType | None) -> None:
        if not self._interruptible:
            self._for_ranks.append(signal.Signals(number))
        else:
            self._note(number, frame)  # no script runs that could receive it


def parse_signals(names: str) -> list[signal.Signals]:
    """The signals of a list such as `SIGTERM,SIGINT`.

    Raises:
        ValueError: a name is not a signal, or one that cannot be handled.
    """
    found: list[signal.Signals] = []
    for name in names.split(","):
        number = signal.Signals.__members__.get(name.strip())
        if number is None or number in (signal.SIGKILL, signal.SIGSTOP):
            raise ValueError(f"{name.strip()!r} is not a signal that can be handled")
        found.append(number)
    return found
