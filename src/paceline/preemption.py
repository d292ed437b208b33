"""A notice that this job must make room: SIGTERM, SIGUSR1 or SIGUSR2, from a scheduler or by hand.

A training notes the signal, tells the other ranks with its next control word, and all stop after the same
step, save, and end with exit code 75: run me again. A second signal ends the process at once, as does the
launcher when a peer failed and there is nothing to wait for.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

REQUEUE = 75  # EX_TEMPFAIL of sysexits.h
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class Preempted(SystemExit):
    """Raised on all ranks after the last step before a preemption was saved; exits with code 75.

    Collective: all ranks.
    """

    def __init__(self, signal_name: str, step: int) -> None:
        super().__init__(REQUEUE)
        self.signal_name = signal_name
        self.step = step


class Notice:
    """The signals of this process, noted instead of obeyed while somebody watches them.

    Attributes:
        received: The name of the first that came; "" before.

    Collective: none.
    """

    def __init__(self) -> None:
        self.received = ""
        self._handled: list[int] = []
        self._ending = False

    def watch(self) -> None:
        """Note signals from now on; those that the user handles or ignores stay the user's.

        Collective: none.
        """
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may set handlers
        for number in SIGNALS:
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, self._note)
                self._handled.append(number)

    def unwatch(self) -> None:
        """Obey signals again. Collective: none."""
        if threading.current_thread() is not threading.main_thread():
            return
        while self._handled:
            number = self._handled.pop()
            if signal.getsignal(number) == self._note:
                signal.signal(number, signal.SIG_DFL)

    def end(self) -> None:
        """Take what comes next as an order to end at once. From any thread. Collective: none."""
        self._ending = True
        if self._handled:
            os.kill(os.getpid(), signal.SIGTERM)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received or self._ending:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.received = signal.Signals(number).name


notice = Notice()


def end(order: object = None) -> None:
    """What the launcher has a rank do whose peer failed. Collective: none."""
    notice.end()
