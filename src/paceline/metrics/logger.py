"""`Logger`: where a run's metrics go, and the thread that keeps a slow one from delaying the training."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from paceline import log
from paceline.errors import ConfigError
from paceline.job.preemption import notice

Values = Mapping[str, float | int]

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
        """Write the values of one step. Steps come in increasing order; `Training.rollback` goes back.

        Args:
            values: By name: `epoch` (from 0), `time_s` since the start, and what was logged.
        """

    def close(self) -> None:
        """Write what is left; called once, at the end of the job."""


def require(module: str, *, extra: str) -> None:
    """Raise ConfigError if an optional package is not installed."""
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"{module} is not installed.", fix=f"pip install 'paceline[{extra}]'")


class BackgroundLogger:
    """Calls a logger in a thread, which ends when this object is closed, or Python exits."""

    def __init__(self, logger: Logger) -> None:
        self.takes_times = callable(getattr(logger, "times", None))
        self._logger = logger
        self._name = type(logger).__name__
        # Methods of the logger with their arguments; None ends the thread.
        self._calls: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._has_dropped = False
        self._has_timed_out = False  # the job has ended without the logger, and said so
        self._close_s = _CLOSE_S  # less after a preemption signal, whose grace is for the save too
        self._deadline: float | None = None  # of `close`, since `end`
        self._thread = threading.Thread(target=self._run, name=f"{self._name} log", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # for a job that is never left

    def log(self, step: int, values: Values) -> None:
        """Hand over the values of one step; returns at once."""
        self._add("log", step, values)

    def times(self, step: int, line: Mapping[str, Any]) -> None:
        """Hand over where the time went, if the logger takes it; returns at once."""
        if self.takes_times:
            self._add("times", step, line)

    def _add(self, method: str, step: int, values: Mapping[str, Any]) -> None:
        if self._calls.qsize() < _MOST_WAITING:
            self._calls.put((method, step, values))
        elif not self._has_dropped:
            self._has_dropped = True
            log.logger.warning(
                "%s is too slow: %d values wait for it, so it misses some from step %d on. metrics.jsonl has "
                "all of them, if `report` got a folder.",
                *(self._name, _MOST_WAITING, step),
            )

    def end(self, *, failed: bool = False) -> None:
        """Begin to close, without waiting; `close` waits.

        Args:
            failed: Whether the job has failed, which the logger is told.
        """
        if self._deadline is not None:
            return
        self._close_s = min(_CLOSE_S, notice.left_s())
        self._deadline = time.monotonic() + self._close_s
        if failed and hasattr(self._logger, "fail"):
            self._calls.put(("fail",))
        self._calls.put(None)

    def close(self) -> None:
        """Wait until the logger is closed, for a limited time since `end`."""
        self.end()
        atexit.unregister(self.close)
        assert self._deadline is not None
        self._thread.join(max(0.0, self._deadline - time.monotonic()))
        if self._thread.is_alive():
            self._has_timed_out = True
            log.logger.warning(
                "%s did not take the last metrics within %.0f s, so it may lack some. metrics.jsonl has all "
                "of them, if `report` got a folder.",
                *(self._name, self._close_s),
            )

    def _run(self) -> None:
        works = True
        while (call := self._calls.get()) is not None:
            if works or call == ("fail",):  # others are dropped
                works = self._succeeds(*call) and works
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


def close_all(loggers: Sequence[BackgroundLogger], *, failed: bool) -> None:
    """Close these loggers at the same time. A slow one gets a warning; the wait is at most 30 s for all.

    Args:
        failed: Whether the job has failed, which the loggers are told.
    """
    for logger in loggers:
        logger.end(failed=failed)
    for logger in loggers:
        logger.close()
