"""A notice that this job must make room: SIGTERM, SIGUSR1 or SIGUSR2, from a scheduler or by hand.

A training notes the signal, tells the other ranks with its next control word, and all stop after the same
step, save, and end with exit code 75: run me again. A second signal ends the process at once, as does the
launcher when a peer failed and there is nothing to wait for.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

REQUEUE = 75  # EX_TEMPFAIL of sysexits.h
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

# A scheduler that signals every process of a job reaches a rank twice: itself, and through the launcher.
_ONE_NOTICE_S = 1.0


class Preempted(SystemExit):
    """Raised on all ranks after the last step before a preemption was saved; exits with code 75.

    Attributes:
        signal_name: "SIGTERM"; or "a signal to another rank".
        step: The last step that was done.

    Collective: all ranks.
    """

    def __init__(self, signal_name: str, step: int) -> None:
        super().__init__(REQUEUE)
        self.signal_name = signal_name
        self.step = step

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.signal_name, self.step))


class Notice:
    """The signals of this process, noted instead of obeyed while somebody watches them.

    Attributes:
        received: The name of the first that came and was not taken up yet; "" before.
    """

    def __init__(self) -> None:
        self.received = ""
        self._watchers: set[int] = set()
        self._handled: set[int] = set()
        self._came_at: float | None = None
        self._ending = False

    def watch(self, watcher: object) -> None:
        """Note signals from now on; those that the user handles or ignores stay the user's."""
        if self._ending or threading.current_thread() is not threading.main_thread():
            return  # only the main thread may set handlers
        if not self._watchers:
            self.received, self._came_at = "", None
        self._watchers.add(id(watcher))
        for number in SIGNALS:
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, self._note)
                self._handled.add(number)

    def unwatch(self, watcher: object) -> None:
        """Obey signals again, unless others watch.

        After a notice the handlers stay, so that the same notice may come by another way.
        """
        self._watchers.discard(id(watcher))
        if not self._watchers and self._came_at is None:
            self._restore()

    def take(self) -> str:
        """The name of what came, for a `Preempted`, or what stands for it where it came to others."""
        name, self.received = self.received, ""
        return name or "a signal to another rank"

    def deliver(self) -> None:
        """Obey what was noted and can be met no more; nothing where nothing came."""
        name, self.received = self.received, ""
        if name:
            self._restore()
            signal.raise_signal(signal.Signals[name])

    def end(self) -> None:
        """End at once if signals are noted now, and note none later. From any thread."""
        self._ending = True
        if self._handled:
            # Not SIGTERM: the main thread may be in native code, which no handler of ours interrupts.
            os.kill(os.getpid(), signal.SIGKILL)

    def outlive(self) -> None:
        """In a helper process of a rank: stay for the steps that the rank has yet to end.

        SIGTERM is obeyed the second time. What the user handles stays the user's.
        """
        ours = (signal.SIG_DFL, self._note)
        for number in SIGNALS:
            if signal.getsignal(number) in ours:
                term = number == signal.SIGTERM
                signal.signal(number, _pass_over if term else signal.SIG_IGN)

    def _restore(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        while self._handled:
            number = self._handled.pop()
            if signal.getsignal(number) == self._note:
                signal.signal(number, signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._came_at is not None:
            if now - self._came_at < _ONE_NOTICE_S:
                return
        elif self._watchers:
            self._came_at = now
            self.received = signal.Signals(number).name
            return
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


def _pass_over(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)


notice = Notice()


def end(order: object = None) -> None:
    """What the launcher has a rank do whose peer failed."""
    notice.end()
