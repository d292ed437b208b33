"""`Logger`: where a run's metrics go, and the thread that keeps a slow one from delaying the training."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from paceline import log

Values = Mapping[str, float | int]

_Call = tuple[Any, ...]  # a method of a logger, and its arguments
_MOST_WAITING = 10_000  # calls that wait for a slow logger, of some KB each; more are left out
_CLOSE_S = 30.0  # longest wait at the end, for the slow servers of all loggers together


class Logger(Protocol):
    """A destination of metrics. Any object with these two methods can be given to `Training.report`.

    A third one, `times(step, line)`, is called about once a second if the object has it, and less often after
    the first hour. `line` is a dictionary about the steps since the last call: `steps`, `samples`, `spent_s`
    (by phase, the seconds of each rank), `memory_bytes` and `busy` (by rank); see
    `paceline.clock.record.Window`. A fourth one, `fail()`, is called before `close` if the job has failed.

    All are called on rank 0, in a thread of their own, so that a slow server does not delay the training. If
    one raises, a warning names the error once, the logger gets no more values, and the training goes on. A
    logger that takes no values for so long that 10,000 calls wait misses some, which a warning says.

    Collective: none.
    """

    def log(self, step: int, values: Values) -> None:
        """Write the values of one step. Steps come in increasing order.

        Args:
            values: By name: `epoch` (from 0), `time_s` since the start, and what was logged.
        """

    def close(self) -> None:
        """Write what is left; called once, at the end of the job."""


class BackgroundLogger:
    """Calls a logger in a thread. The thread ends when the object is closed, freed, or Python exits."""

    def __init__(self, logger: Logger) -> None:
        self.takes_times = callable(getattr(logger, "times", None))
        self._worker = _Worker(logger)
        self.close = weakref.finalize(self, self._worker.close)

    def log(self, step: int, values: Values) -> None:
        """Hand over the values of one step; returns at once."""
        self._worker.add(("log", step, values))

    def times(self, step: int, line: Mapping[str, Any]) -> None:
        """Hand over where the time went, if the logger takes it; returns at once."""
        if self.takes_times:
            self._worker.add(("times", step, line))

    def end(self, *, failed: bool) -> None:
        """Begin to close, without waiting; `close` waits.

        Args:
            failed: Whether the job has failed, which the logger is told.
        """
        if failed:
            self._worker.calls.put(("fail",))
        self._worker.end()


def close_all(loggers: Sequence[BackgroundLogger], *, failed: bool) -> None:
    """Close these loggers at the same time. A slow one gets a warning; the wait is at most 30 s for all.

    Args:
        failed: Whether the job has failed, which the loggers are told.
    """
    for logger in loggers:
        logger.end(failed=failed)
    for logger in loggers:
        logger.close()


class _Worker:
    """A thread that calls a logger. It holds no `BackgroundLogger`, so that one can be freed.

    Attributes:
        calls: What the thread has to do; None ends it.
    """

    def __init__(self, logger: Logger) -> None:
        self.calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._logger = logger
        self._name = type(logger).__name__
        self._has_dropped = False
        self._has_timed_out = False  # the job has ended without the logger, and said so
        self._deadline: float | None = None  # of `close`, since `end`
        self._thread = threading.Thread(target=self._run, name=f"{self._name} log", daemon=True)
        self._thread.start()

    def add(self, call: _Call) -> None:
        """Let the thread do this, unless too many calls wait."""
        if self.calls.qsize() < _MOST_WAITING:
            self.calls.put(call)
        elif not self._has_dropped:
            self._has_dropped = True
            log.logger.warning(
                "%s is too slow: %d values wait for it, so it misses some from step %d on. metrics.jsonl has "
                "all of them, if `report` got a folder.",
                *(self._name, _MOST_WAITING, call[1]),
            )

    def end(self) -> None:
        """Let the thread do what is left, and close the logger."""
        if self._deadline is None:
            self._deadline = time.monotonic() + _CLOSE_S
            self.calls.put(None)

    def close(self) -> None:
        """Wait until the thread has ended, for a limited time since `end`."""
        self.end()
        assert self._deadline is not None
        self._thread.join(max(0.0, self._deadline - time.monotonic()))
        if self._thread.is_alive():
            self._has_timed_out = True
            log.logger.warning(
                "%s did not take the last metrics within %.0f s, so it may lack some. metrics.jsonl has all "
                "of them, if `report` got a folder.",
                *(self._name, _CLOSE_S),
            )

    def _run(self) -> None:
        works = True
        while (call := self.calls.get()) is not None:
            method, *arguments = call
            if method == "fail":
                with contextlib.suppress(Exception):
                    if hasattr(self._logger, "fail"):
                        self._logger.fail()
            elif works:  # otherwise dropped, so that they do not fill the memory
                works = self._succeeds(method, *arguments)
        if works:
            self._succeeds("close")
        else:
            with contextlib.suppress(Exception):
                self._logger.close()

    def _succeeds(self, method: str, *arguments: Any) -> bool:
        try:
            getattr(self._logger, method)(*arguments)
        except Exception as error:
            if not self._has_timed_out:
                log.logger.warning(
                    "%s failed and gets no more metrics; the training goes on. metrics.jsonl has all of "
                    "them, if `report` got a folder. The error was: %s: %s",
                    *(self._name, type(error).__name__, error),
                )
            return False
        return True
