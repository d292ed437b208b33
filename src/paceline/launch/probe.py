"""The probe in a rank: where it is and how far it came, for the launcher to read at any time.

A front to `sys._current_frames`, `faulthandler` and torch's flight recorder. Twice a second a thread writes
one line into a file in memory that the launcher holds too: how many collectives were entered and are over,
and where the main thread is. Where no thread of Python gets to run (the interpreter's lock is held by native
code), faulthandler's own thread adds its stacks to that file. All threads' stacks and the recorder's table
are told on request. It judges nothing.

Started by worker.py, by file name: the standard library alone.
"""

from __future__ import annotations

import ast
import contextlib
import faulthandler
import json
import linecache
import multiprocessing.util
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable
from types import CodeType, FrameType, TracebackType
from typing import Any

NAME = "paceline-probe"
BEAT_S = 0.5
_HELD_S = 1.5  # the lock is said to be held when a beat is this late
_ENTRIES = 64  # of the recorder's table, besides those that are not over
_KEYS = (
    *("profiling_name", "process_group", "collective_seq_id", "is_p2p", "input_sizes"),
    *("input_dtypes", "state", "retired", "time_created_ns"),
)
_LIBRARIES = (
    sysconfig.get_paths()["stdlib"],
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
    "<frozen",
)
Stack = list[tuple[str, int, str]]
_dump_later = faulthandler.dump_traceback_later


class Probe:
    """Writes the beats of this process.

    Args:
        fd: A file in memory that the launcher reads.

    Collective: none.
    """

    def __init__(self, fd: int) -> None:
        self.main = threading.main_thread().ident
        # The script has one such timer as well; ours makes way for good.
        faulthandler.dump_traceback_later = self._make_way
        self._timer = True
        # A forked child has no such thread, and would wait for it for ever when it ends.
        self._arming = threading.Lock()
        self._ended = False
        os.register_at_fork(
            before=self._disarm,
            after_in_parent=self._arming.release,
            after_in_child=self._arming.release,
        )
        multiprocessing.util.register_after_fork(self, Probe._in_child)
        # The launcher holds it under the same number, so that it can be had again.
        self._start(fd, f"/proc/{os.getppid()}/fd/{fd}")

    def _start(self, fd: int, home: str = "") -> None:
        os.set_inheritable(fd, False)
        self._fd, self._file, self._home = fd, os.fstat(fd).st_ino, home
        threading.Thread(target=self._beat, name=NAME, daemon=True).start()

    def _in_child(self) -> None:
        # A loader's worker, or whatever else multiprocessing has forked: found by the file's name.
        self.main = threading.main_thread().ident
        with contextlib.suppress(OSError):
            os.close(self._fd)
        self._start(os.memfd_create(NAME))

    def _disarm(self) -> None:
        self._arming.acquire()
        if self._timer:
            faulthandler.cancel_dump_traceback_later()

    def _make_way(self, *args: Any, **options: Any) -> None:
        self._timer = False
        faulthandler.dump_traceback_later = _dump_later
        _dump_later(*args, **options)

    def _beat(self) -> None:
        while True:
            entered, over = counts()
            frame = sys._current_frames().get(self.main or 0)
            beat = {"time": time.monotonic(), "entered": entered, "over": over, **_brief(frame)}
            del frame
            line = json.dumps(beat).encode() + b"\n"
            with self._arming:
                if self._ended or not self._is_ours():
                    return
                os.pwrite(self._fd, line, 0)
                os.ftruncate(self._fd, len(line))
                if self._timer:
                    os.lseek(self._fd, len(line), os.SEEK_SET)
                    _dump_later(_HELD_S, file=self._fd)
            time.sleep(BEAT_S)

    def _is_ours(self) -> bool:
        # A script may have closed all files; the number then is another file's.
        with contextlib.suppress(OSError):
            if os.fstat(self._fd).st_ino == self._file:
                return True
        if self._timer:
            faulthandler.cancel_dump_traceback_later()
        with contextlib.suppress(OSError):
            self._fd = os.open(self._home, os.O_RDWR | os.O_CLOEXEC)
            return os.fstat(self._fd).st_ino == self._file
        return False

    def leave(self, line: bytes) -> None:
        """Write last words where the launcher reads the beats, and beat no more.

        Raises:
            OSError: there is no such file any more.

        Collective: none.
        """
        with self._arming:
            self._ended = True
            if not self._is_ours():
                raise OSError("the launcher is gone")
            os.pwrite(self._fd, line, os.fstat(self._fd).st_size)

    def explain(self, request: dict[str, Any]) -> dict[str, Any]:
        """Everything, for a request of the launcher, or what went wrong. Collective: none."""
        answer = {"event": "explained", "id": request["id"]}
        try:
            return answer | self._everything()
        except Exception as error:  # whatever it is, this rank must go on to hear its launcher
            return answer | {"error": repr(error)}

    def _everything(self) -> dict[str, Any]:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        threads: list[dict[str, Any]] = []
        for ident, frame in sys._current_frames().items():
            if ident != threading.get_ident() and names.get(ident) != NAME:
                told = {"name": names.get(ident, "?"), "stack": stack_of(frame)}
                if ident == self.main:
                    threads.insert(0, told | _call(frame))
                else:
                    threads.append(told)
        return {
            "time": time.time(),
            "threads": threads,
            "entries": [*_recorded(), *_in_memory()],
            "groups": _groups(),
            "step": getattr(sys.modules.get("paceline.whereabouts"), "step", 0),
            "entered": {name: line.entered for name, line in _lines()},
        }


def _brief(frame: FrameType | None) -> dict[str, Any]:
    """Where the main thread is: the innermost line of the script, and a number for the whole stack."""
    place, parts = "", []
    while frame is not None and frame.f_code.co_name != "_bootstrap":  # below are the parent's
        code = frame.f_code
        if not place and is_script(code.co_filename):
            place = f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
        parts.append((id(code), frame.f_lasti))
        frame = frame.f_back
    return {"place": place, "at": hash(tuple(parts))}


def is_script(name: str) -> bool:
    """Whether code is the user's: of no library, and not ours. Collective: none."""
    return not name.startswith(_LIBRARIES) and "site-packages" not in name


def place_of(trace: TracebackType | None) -> str:
    """File, line and function of an error's innermost frame that is the script's. Collective: none."""
    place = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if is_script(code.co_filename):
            place = f"{code.co_filename}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    return place


def stack_of(frame: FrameType | None) -> Stack:
    """File, line and function of each frame, innermost first. Collective: none."""
    stack: Stack = []
    while frame is not None:
        stack.append((frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
        frame = frame.f_back
    return stack


def _call(frame: FrameType | None) -> dict[str, Any]:
    """What the innermost line of the script calls at this moment, and of which peer it waits."""
    peer = None
    while frame is not None and not is_script(frame.f_code.co_filename):
        if frame.f_code.co_name in ("recv", "send"):
            told = frame.f_locals
            peer = told.get("src", told.get("dst", peer))
        frame = frame.f_back
    call = _expression(frame.f_code, frame.f_lasti) if frame is not None else ""
    return {"call": call, "peer": peer}


def _expression(code: CodeType, offset: int) -> str:
    """The name that the instruction at `offset` calls, as it is written in the source."""
    positions = list(code.co_positions())
    line, end_line, start, end = positions[offset // 2]
    if line is None or end_line is None or start is None or end is None:
        return ""
    lines = linecache.getlines(code.co_filename)[line - 1 : end_line]
    if not lines:
        return ""
    raw = [text.encode() for text in lines]
    raw[-1] = raw[-1][:end]
    raw[0] = raw[0][start:]
    with contextlib.suppress(SyntaxError, ValueError):
        tree = ast.parse(b"".join(raw).decode(errors="replace").strip(), mode="eval").body
        if isinstance(tree, ast.Call):
            return ast.unparse(tree.func)[:60]
    return ""


def _dumps(collectives: bool) -> Iterable[dict[str, Any]]:
    module = sys.modules.get("torch._C._distributed_c10d")
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump = getattr(module, name, None)
        if dump is not None:
            yield json.loads(dump(collectives, False))


def _recorded() -> list[dict[str, Any]]:
    """The flight recorder's latest entries, and all that are not over, oldest first."""
    entries = [entry for dump in _dumps(True) for entry in dump.get("entries", [])]
    return [
        {key: entry.get(key) for key in _KEYS}
        for index, entry in enumerate(entries)
        if index >= len(entries) - _ENTRIES or not entry.get("retired")
    ]


def _world() -> Any:
    module = sys.modules.get("torch.distributed.distributed_c10d")
    return getattr(module, "_world", None)


def _names() -> dict[Any, str]:
    world = _world()
    return dict(world.pg_names) if world is not None else {}


def _groups() -> dict[str, list[int]]:
    """The ranks of each process group by its name."""
    return {
        name: sorted(_world().pg_group_ranks.get(group, ())) for group, name in _names().items()
    }


def _lines() -> Iterable[tuple[str, Any]]:
    """The groups of the `shm` backend, which the flight recorder does not see, by name."""
    for group, name in _names().items():
        line = getattr(group, "_line", None)
        if line is not None:
            yield name, line


def _in_memory() -> list[dict[str, Any]]:
    return [
        entry | {"process_group": [name, "shm"]}
        for name, line in _lines()
        for entry in line.unfinished()
    ]


def counts() -> tuple[int, int]:
    """How many operations were entered, and how many of them are over. Collective: none."""
    entered = over = 0
    for dump in _dumps(False):
        for status in dump.get("pg_status", {}).values():
            entered += max(int(status["last_enqueued_collective"]), 0)
            over += max(int(status["last_completed_collective"]), 0)
    for _, line in _lines():
        entered += line.entered
        over += line.entered - line.waiting
    return entered, over
