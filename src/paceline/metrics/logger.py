"""`Logger`: where a run's metrics go, and the thread that keeps a slow one from delaying the training."""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Mapping
from typing import Any, Protocol

from paceline import log

Values = Mapping[str, float | int]

_Call = tuple[Any, ...]  # a method of a logger, and its arguments
_CLOSE_S = 30.0  # longest wait for a slow server at the end


class Logger(Protocol):
    """A destination of metrics. Any object with these two methods can be given to `Training.report`.

    A third one, `times(step, line)`, is called about once a second if the object has it, and less often after
    the first hour. `line` is a dictionary about the steps since the last call: `steps`, `samples`, `spent_s`
    (by phase, the seconds of each rank), `memory_bytes` and `busy` (by rank); see
    `paceline.clock.record.Window`. A fourth one, `fail()`, is called before `close` if the job has failed.

    All are called on rank 0, in a thread of their own, so that a slow server does not delay the training. If
    one raises, a warning names the error once, the logger gets no more values, and the training goes on.

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
        calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        name = type(logger).__name__
        abandoned = threading.Event()  # the job has ended without the logger, and said so
        thread = threading.Thread(
            target=_run, args=(logger, calls, abandoned), name=f"{name} log", daemon=True
        )
        thread.start()
        self._calls = calls
        self.takes_times = callable(getattr(logger, "times", None))
        self.close = weakref.finalize(self, _end, name, calls, thread, abandoned)

    def log(self, step: int, values: Values) -> None:
        """Hand over the values of one step; returns at once."""
        self._calls.put(("log", step, values))

    def times(self, step: int, line: Mapping[str, Any]) -> None:
        """Hand over where the time went, if the logger wants to know; returns at once."""
        if self.takes_times:
            self._calls.put(("times", step, line))

    def fail(self) -> None:
        """Say that the job has failed; called before `close`."""
        self._calls.put(("fail",))


def _run(
    logger: Logger, calls: queue.SimpleQueue[_Call | None], abandoned: threading.Event
) -> None:
    works = True
    while (call := calls.get()) is not None:
        method, *arguments = call
        if method == "fail":
            with contextlib.suppress(Exception):
                if hasattr(logger, "fail"):
                    logger.fail()
        elif works:  # otherwise dropped, so that they do not fill the memory
            works = _succeeds(logger, abandoned, method, *arguments)
    if works:
        _succeeds(logger, abandoned, "close")
    else:
        with contextlib.suppress(Exception):
            logger.close()


def _succeeds(logger: Logger, abandoned: threading.Event, method: str, *arguments: Any) -> bool:
    try:
        getattr(logger, method)(*arguments)
    except Exception as error:
        if not abandoned.is_set():
            log.logger.warning(
                "%s failed and gets no more metrics; the training goes on. metrics.jsonl has all of them, if "
                "`report` got a folder. The error was: %s: %s",
                *(type(logger).__name__, type(error).__name__, error),
            )
        return False
    return True


def _end(
    name: str, calls: queue.SimpleQueue[Any], thread: threading.Thread, abandoned: threading.Event
) -> None:
    calls.put(None)
    thread.join(_CLOSE_S)
    if thread.is_alive():
        abandoned.set()
        log.logger.warning(
            "%s did not take the last metrics within %.0f s, so it may lack some. metrics.jsonl has all of "
            "them, if `report` got a folder.",
            *(name, _CLOSE_S),
        )
