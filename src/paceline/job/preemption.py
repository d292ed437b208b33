"""Preemption: SIGTERM, SIGUSR1 or SIGUSR2 from a scheduler or a user asks the job to save and end.

A training records the signal and sends it to the other ranks with its next control word. All ranks stop after
the same step, save, and end with exit code 75, which asks for a restart. A second signal ends the process at
once; so does the launcher if a peer failed. Only a save that all ranks have written is committed before.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from paceline.exit_codes import ExitCode

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

# The seconds between SIGTERM and SIGKILL. A launcher sets it for its ranks.
GRACE_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"

# Of the grace, for the exit of the processes, which takes seconds on a busy host.
_EXIT_S = 5.0

# Signals within this time count as one. A scheduler that signals every process of a job reaches a rank twice:
# directly and through the launcher. It may reach the launcher twice too, as a shell that ends may.
SAME_SIGNAL_S = 1.0

# How long a process that ends at once waits for a commit: it writes one file and renames a folder.
COMMIT_S = 5.0


class Preempted(SystemExit):
    """Raised on all ranks after the last step before a preemption was saved; exits with code 75.

    Attributes:
        signal_name: such as "SIGTERM", or "a signal to another rank".
        step: the last finished step.

    Collective: all ranks.
    """

    def __init__(self, signal_name: str, step: int) -> None:
        super().__init__(ExitCode.PREEMPTED)
        self.signal_name = signal_name
        self.step = step

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.signal_name, self.step))


def grace_s() -> float | None:
    """The seconds between SIGTERM and SIGKILL; None if no launcher has told."""
    text = os.environ.get(GRACE_VARIABLE)
    return None if text is None else float(text)


class Notice:
    """Records preemption signals of this process instead of ending it, while a training watches them.

    Attributes:
        received: name of the first signal that was not handled yet; "" if there is none.
        commits: Called before the process ends at once; each waits for one commit, if that has begun.
    """

    def __init__(self) -> None:
        self.received = ""
        self.commits: set[Callable[[], object]] = set()
        self._watchers: set[int] = set()
        self._handled: set[int] = set()
        self._came_at: float | None = None
        self._is_taken = False
        self._ending = False

    def watch(self, watcher: object, *, saves_after_failure: bool) -> None:
        """Record signals from now on, except those that the user handles or ignores.

        Args:
            saves_after_failure: Whether the launcher should give this rank time when another rank fails.
        """
        if self._ending or threading.current_thread() is not threading.main_thread():
            return  # only the main thread may set handlers
        if not self._watchers:
            self.received, self._came_at, self._is_taken = "", None, False
            # The first code of a rank of `paceline run` has this name; it imports no paceline.
            if worker := sys.modules.get("paceline.launch.worker"):
                worker.report_training(saves_after_failure)
        self._watchers.add(id(watcher))
        for number in SIGNALS:
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, self._note)
                self._handled.add(number)

    def unwatch(self, watcher: object) -> None:
        """Stop recording, unless another training watches.

        After a signal to any rank the handlers stay, because the same signal may arrive here later.
        """
        self._watchers.discard(id(watcher))
        if not self._watchers and self._came_at is None and not self._is_taken:
            self._restore()

    def take(self) -> str:
        """Take the recorded signal's name for a `Preempted`; a general name if only other ranks have one.

        If this rank gets that signal later, it has no effect.
        """
        name, self.received = self.received, ""
        self._is_taken = True
        return name or "a signal to another rank"

    def left_s(self) -> float:
        """Seconds until the process must exit; infinity without a signal, or if that is not known."""
        grace = grace_s()
        if self._came_at is None or grace is None:
            return math.inf
        return max(0.0, self._came_at + grace - _EXIT_S - time.monotonic())

    def deliver(self) -> None:
        """Raise the recorded signal, if any: no training is left that could handle it."""
        name, self.received = self.received, ""
        if name:
            self._restore()
            signal.raise_signal(signal.Signals[name])

    def end(self) -> None:
        """End the process at once if it handles preemption signals, and record none later. For any thread."""
        self._ending = True
        if self._handled:
            self.kill()

    def kill(self) -> None:
        """End the process at once. For any thread."""
        self._finish_commits()
        # Not SIGTERM: the main thread may be in native code, and Python handlers do not interrupt that.
        os.kill(os.getpid(), signal.SIGKILL)

    def _finish_commits(self) -> None:
        for finish in list(self.commits):
            finish()

    def ignore_in_worker(self) -> None:
        """Ignore the signals in a loader worker, because its rank needs it to finish a step.

        The second SIGTERM ends the process. The user's own handlers stay.
        """
        ours = (signal.SIG_DFL, self._note)
        for number in SIGNALS:
            if signal.getsignal(number) in ours:
                term = number == signal.SIGTERM
                signal.signal(number, _ignore_first if term else signal.SIG_IGN)

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
            if now - self._came_at < SAME_SIGNAL_S:
                return
        elif self._is_taken or self._watchers:
            self._came_at = now
            if not self._is_taken:
                self.received = signal.Signals(number).name
            return
        self._finish_commits()
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


def _ignore_first(number: int, frame: FrameType | None) -> None:
    """As `Notice._note` counts: signals within a second are one."""
    first_at = time.monotonic()

    def end(number: int, frame: FrameType | None) -> None:
        if time.monotonic() - first_at >= SAME_SIGNAL_S:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    signal.signal(number, end)


notice = Notice()
