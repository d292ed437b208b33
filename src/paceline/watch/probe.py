"""The probe in each rank: reports to the launcher where the rank is, and how many collectives it entered.

Twice a second a thread writes one line (a beat) into a file in memory that the launcher has open as well:
how many collectives were entered and completed, and where the main thread is. If native code holds the
interpreter's lock, no Python thread runs; faulthandler's own thread then adds its stacks to the file.
Everything else (stacks of all threads, the flight recorder) is reported on request.

launch/worker.py loads this file without importing the package `paceline`, so it may import only the standard
library and the files next to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import multiprocessing.util
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from paceline.watch.crash import Error, own_errors
from paceline.watch.flight_recorder import counts, table
from paceline.watch.stacks import Stack, call_of, is_in_step, place_of_frame, stack_of

PROBE_NAME = "paceline-probe"
STATE = "state"  # the launcher's question, and the answer
UNSOLICITED_ID = -1  # of an answer that a failing rank gives by itself; see launch/worker.py
_BEAT_S = 0.5
_DUMP_AFTER_S = 1.5  # without a beat: then faulthandler writes the stacks
_TRACEBACK_CHARS = 100_000
_dump_later = faulthandler.dump_traceback_later


class Probe:
    """Writes the beats of this process.

    Args:
        fd: A file in memory that the launcher reads.
    """

    def __init__(self, fd: int) -> None:
        self.main = threading.main_thread().ident or 0
        # faulthandler has one timer. If the script uses it, the probe no longer does.
        faulthandler.dump_traceback_later = self._give_timer_away
        self._timer = True
        # Held while the timer is set or given away, and during a fork: a forked child inherits the armed
        # timer without its thread, and faulthandler would join that thread forever at exit. Reentrant,
        # because a signal handler may run in the thread that holds it.
        self._timer_lock = threading.RLock()
        self._forked_while: list[
            str
        ] = []  # other threads at the last fork; a child keeps those at its own
        self.optimizer_steps = 0  # calls of optimizer.step() that have ended
        os.register_at_fork(
            before=self._before_fork,
            after_in_parent=self._timer_lock.release,
            after_in_child=self._timer_lock.release,
        )
        multiprocessing.util.register_after_fork(self, Probe._in_child)
        self._start(fd)

    def count_optimizer_steps(self, module: Any) -> None:
        """Count the calls of optimizer.step(), of all optimizers together; takes `torch.optim.optimizer`."""

        def count(*_: Any) -> None:
            self.optimizer_steps += 1

        module.register_optimizer_step_post_hook(count)

    def _start(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self._fd, self._inode = fd, os.fstat(fd).st_ino
        threading.Thread(target=self._beat, name=PROBE_NAME, daemon=True).start()

    def _in_child(self) -> None:
        # A loader worker, or another process that multiprocessing forked. The launcher finds it by the
        # name of the file.
        self.main = threading.main_thread().ident or 0
        if self._is_open():
            os.close(self._fd)
        self._start(os.memfd_create(PROBE_NAME))

    def _before_fork(self) -> None:
        # A lock that another thread holds now is never released in the child.
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        self._forked_while = [
            f"{name} ({place})" if (place := place_of_frame(frame)) else name
            for ident, frame in sys._current_frames().items()
            if ident != threading.get_ident()
            and not (name := names.get(ident, "?")).startswith("paceline-")
        ]
        self._timer_lock.acquire()
        if self._timer:
            faulthandler.cancel_dump_traceback_later()

    def _give_timer_away(self, *args: Any, **options: Any) -> None:
        with self._timer_lock:
            self._timer = False
            faulthandler.dump_traceback_later = _dump_later
            _dump_later(*args, **options)

    def _beat(self) -> None:
        while True:
            try:
                entered, completed = counts()
            except (
                Exception
            ) as error:  # as with another torch: the launcher no longer detects hangs
                self._write_error(json.dumps({"error": f"the counts of collectives: {error!r}"}))
                return
            beat = {
                "time": time.monotonic(),
                "entered": entered,
                "completed": completed,
                "place": place_of_frame(sys._current_frames().get(self.main)),
                "forked_while": self._forked_while,
            }
            line = json.dumps(beat).encode() + b"\n"
            with self._timer_lock:
                if not self._is_open():
                    return
                os.pwrite(self._fd, line, 0)
                os.ftruncate(self._fd, len(line))
                if self._timer:
                    os.lseek(self._fd, len(line), os.SEEK_SET)
                    _dump_later(_DUMP_AFTER_S, file=self._fd)
            time.sleep(_BEAT_S)

    def _is_open(self) -> bool:
        # If a script has closed all files, the number may belong to a file of the script now.
        with contextlib.suppress(OSError):
            return os.fstat(self._fd).st_ino == self._inode
        return False

    def _write_error(self, text: str) -> None:
        with self._timer_lock:
            if self._timer:
                faulthandler.cancel_dump_traceback_later()
            if self._is_open():
                os.ftruncate(self._fd, 0)
                os.pwrite(self._fd, text.encode() + b"\n", 0)

    def answer(self, number: int, send: Callable[[dict[str, Any]], Any]) -> None:
        """Send the state of this rank, as an answer to the question with this number."""
        message = {"event": STATE, "id": number}
        try:
            message |= self._state()
        except Exception as error:  # the rank must go on listening to its launcher
            message["error"] = repr(error)
        send(message)

    def _state(self) -> dict[str, Any]:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        threads: list[dict[str, Any]] = []  # the main one first
        for ident, frame in sys._current_frames().items():
            if ident != threading.get_ident() and names.get(ident) != PROBE_NAME:
                thread = {"name": names.get(ident, "?"), "stack": stack_of(frame)}
                if ident == self.main:
                    threads.insert(0, thread | call_of(frame) | {"in_step": is_in_step(frame)})
                else:
                    threads.append(thread)
        current_step = sys.modules.get("paceline.job.current_step")
        return {
            "time": time.time(),
            "threads": threads,
            "raised": self._raised(threads[0]["stack"]) if threads else None,
            "optimizer_steps": self.optimizer_steps,
            "step": getattr(current_step, "step", 0),
            "stage": getattr(current_step, "stage", None),
            **table(),
        }

    def _raised(self, stack: Stack) -> dict[str, Any] | None:
        """The exception that the main thread handles, or that passes through a `finally` block."""
        handled: Any = sys._current_exceptions().get(self.main)
        if isinstance(handled, tuple):  # before Python 3.12
            handled = handled[1]
        errors = own_errors(handled, stack)
        if not errors:
            return None
        error = errors[0]
        trace = traceback.TracebackException(type(error), error, error.__traceback__)
        text = "".join(trace.format())[-_TRACEBACK_CHARS:]
        texts = [f"{(e := Error.of(each, '')).text} at {e.place}" for each in errors]
        return {"error": dataclasses.asdict(Error.of(error, text)), "texts": texts}
