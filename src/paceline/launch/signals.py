"""Signals to the launcher: noted at once, acted on where it is safe, passed on to the ranks.

A front to torch's `SignalException`, which its agent understands. A signal that was ignored when we were
started (nohup) stays ignored, unlike in torchrun. SIGUSR1 and SIGUSR2 are for the ranks alone.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from torch.distributed.elastic.multiprocessing import SignalException

# What torch handles unless it is told otherwise.
DEFAULT = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"

# Notices of preemption, which end no launcher.
FOR_RANKS = (signal.SIGUSR1, signal.SIGUSR2)

STUCK_S = 5.0


class Signals:
    """The signals that came, and whether the main thread may be interrupted.

    Args:
        stuck: Called with a signal, in a thread, when the main thread did not take it for `STUCK_S`
            seconds: it waits in native code, which no Python handler interrupts.
        wake: Called in a thread when any signal came: the main thread has something to do.
    """

    def __init__(self, stuck: Callable[[int], None], wake: Callable[[], None]) -> None:
        self.received: list[signal.Signals] = []
        self._passing: list[signal.Signals] = []
        self._stuck = stuck
        self._wake = wake
        self._interruptible = False
        self._handled: set[int] = set()

    @property
    def hurry(self) -> bool:
        """Whether a second signal asks to end without any grace."""
        return len(self.received) > 1

    def check(self) -> None:
        """Act on a signal that came.

        Raises:
            SignalException: one did.
        """
        if self.received:
            number = self.received[0]
            raise SignalException(f"received {number.name}", sigval=number)

    def take_passing(self) -> list[signal.Signals]:
        """The signals that came for the ranks alone since the last call."""
        taken: list[signal.Signals] = []
        while self._passing:
            taken.append(self._passing.pop(0))
        return taken

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let a signal interrupt what runs in here: long waits in torch's code, with no rank at work."""
        self.received += self.take_passing()
        self.check()
        self._interruptible = True
        try:
            yield
        finally:
            self._interruptible = False

    @contextlib.contextmanager
    def handled(self, numbers: Sequence[signal.Signals], *, force: bool) -> Iterator[None]:
        """Handle these signals meanwhile; with `force`, those that were ignored as well.

        SIGUSR1 and SIGUSR2, if they are neither among these nor handled, are kept for the ranks.
        """
        before = {}
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                if force or signal.getsignal(number) is not signal.SIG_IGN:
                    before[number] = signal.signal(number, self._note)
            self._handled = set(before)
            for number in FOR_RANKS:
                if number not in before and signal.getsignal(number) is signal.SIG_DFL:
                    before[number] = signal.signal(number, self._pass)
        with self._watched() if before else contextlib.nullcontext():
            try:
                yield
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        thread = threading.Thread(target=self._watch, args=(ours,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            theirs.close()
            thread.join()
            ours.close()

    def _watch(self, wakeups: socket.socket) -> None:
        # Every signal with a Python handler is told here at once, in whatever the main thread waits.
        while numbers := wakeups.recv(64):
            self._wake()
            ours = [number for number in numbers if number in self._handled]
            deadline = time.monotonic() + STUCK_S
            while ours and not self.received and time.monotonic() < deadline:
                time.sleep(0.05)
            if ours and not self.received:
                self._stuck(ours[0])

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))
        if self._interruptible:
            self._interruptible = False
            self.check()

    def _pass(self, number: int, frame: FrameType | None) -> None:
        if self._interruptible:
            self._note(number, frame)  # nobody to pass it on to
        else:
            self._passing.append(signal.Signals(number))


def parse(names: str) -> list[signal.Signals]:
    """The signals of a list such as `SIGTERM,SIGINT`.

    Raises:
        ValueError: a name is no signal, or one that cannot be handled.
    """
    found: list[signal.Signals] = []
    for name in names.split(","):
        number = signal.Signals.__members__.get(name.strip())
        if number is None or number in (signal.SIGKILL, signal.SIGSTOP):
            raise ValueError(f"{name.strip()!r} is not a signal that can be handled")
        found.append(number)
    return found
