"""The probe in a rank: where it is and how far it came, for the launcher to read at any time.

A front to `sys._current_frames`, `faulthandler` and torch's flight recorder. Twice a second a thread writes
one line into a file in memory that the launcher holds too: how many collectives were entered and are over,
and where the main thread is. Where no thread of Python gets to run (the interpreter's lock is held by native
code), faulthandler's own thread adds its stacks to that file. All threads' stacks and the recorder's table
are told on request, and so are when collectives were entered, and what the main thread is at for a while.
It judges nothing.

Started by worker.py, by file name: the standard library alone.
"""

from __future__ import annotations

import ast
import contextlib
import faulthandler
import functools
import gc
import json
import linecache
import math
import multiprocessing.util
import os
import pickle
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable
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
_SAMPLES = 200  # of a profile
# What a rank is at, by the files of its stack; an earlier line wins.
_PHASES = {
    "checkpoint": (
        *("torch/serialization.py", "torch/distributed/checkpoint/", "/safetensors/"),
        *("paceline/checkpoint/", "paceline/training/saving.py"),
    ),
    "data": ("torch/utils/data/", "paceline/data/"),
    "backward": ("torch/autograd/graph.py", "torch/autograd/__init__.py"),
    "optimizer": (
        *("torch/optim/", "torch/nn/utils/clip_grad.py"),
        *("paceline/training/clipping.py", "paceline/training/optimizers.py"),
    ),
    "forward": ("torch/nn/",),
}
_WAITS = (
    *("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py"),
    "paceline/shm/",
)
Stack = list[tuple[str, int, str]]
_dump_later = faulthandler.dump_traceback_later


class Probe:
    """Writes the beats of this process.

    Args:
        fd: A file in memory that the launcher reads.
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
        """
        with self._arming:
            self._ended = True
            if not self._is_ours():
                raise OSError("the launcher is gone")
            os.pwrite(self._fd, line, os.fstat(self._fd).st_size)

    def hear(self, request: dict[str, Any], send: Callable[[dict[str, Any]], Any]) -> None:
        """Answer a request of the launcher, or say what went wrong."""

        def answer() -> None:
            told = {"event": request["do"], "id": request["id"]}
            try:
                told |= getattr(self, f"_{request['do']}")(request)
            except Exception as error:  # whatever it is, this rank must go on to hear its launcher
                told["error"] = repr(error)
            send(told)

        if request["do"] == "profile":
            threading.Thread(target=answer, name=NAME, daemon=True).start()
        else:
            answer()

    def _explain(self, _: dict[str, Any]) -> dict[str, Any]:
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
            "step": getattr(sys.modules.get("paceline.job.current_step"), "step", 0),
            "entered": {name: line.entered for name, line in _lines()},
        }

    def _pace(self, request: dict[str, Any]) -> dict[str, Any]:
        """Which collectives were entered since then, and when."""
        return {"entered": [one for one in _arrivals() if one[2] > request["since"]]}

    def _profile(self, request: dict[str, Any]) -> dict[str, Any]:
        """What the main thread is at from now on for some seconds, as (phase, place, seconds) in turn."""
        spent: list[tuple[str, str, float]] = []
        # Seconds of collections that are over, when the one began that is not, and where.
        collected = (0.0, 0.0, "")

        def collect(moment: str, _: dict[str, int]) -> None:
            nonlocal collected
            now, (over_s, begun, place) = time.perf_counter(), collected
            if moment == "start":
                collected = (over_s, now, _place(sys._getframe(1)))
            elif begun:
                collected = (over_s + now - begun, 0.0, place)

        since_ns, first = time.time_ns(), time.perf_counter()
        last, counted_s = first, 0.0
        gc.callbacks.append(collect)
        try:
            while last < first + request["seconds"]:
                time.sleep(request["seconds"] / _SAMPLES)
                # No thread runs in a collection, so what passed in it is not of this sample. The
                # callback itself may be where this one comes to run.
                now, (over_s, begun, place) = time.perf_counter(), collected
                over_s += now - begun if begun else 0.0
                garbage_s = over_s - counted_s
                if garbage_s:
                    spent.append(("collection of garbage", place, garbage_s))
                phase = _phase(sys._current_frames().get(self.main or 0))
                spent.append((*phase, now - last - garbage_s))
                last, counted_s = now, over_s
        finally:
            gc.callbacks.remove(collect)
        return self._pace(request) | {"since_ns": since_ns, "spent": spent}


def _brief(frame: FrameType | None) -> dict[str, Any]:
    """Where the main thread is: the innermost line of the script, and a number for the whole stack."""
    place, parts = _place(frame), []
    while frame is not None and frame.f_code.co_name != "_bootstrap":  # below are the parent's
        parts.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return {"place": place, "at": hash(tuple(parts))}


def _place(frame: FrameType | None) -> str:
    """The innermost line of the script."""
    while frame is not None and frame.f_code.co_name != "_bootstrap":  # below are the parent's
        if is_script(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def _phase(frame: FrameType | None) -> tuple[str, str]:
    """What a stack is at, and where in the script."""
    place, phase, depth = _place(frame), len(_PHASES), 0
    while frame is not None:
        waits, found = _kind_of(frame.f_code.co_filename)
        if waits and depth < 3:
            return "waiting", place
        phase, depth, frame = min(phase, found), depth + 1, frame.f_back
    return [*_PHASES, "the script"][phase], place


@functools.cache
def _kind_of(file: str) -> tuple[bool, int]:
    """Whether this file waits for other ranks, and its line in `_PHASES`."""
    phases = [any(part in file for part in parts) for parts in _PHASES.values()]
    return any(part in file for part in _WAITS), [*phases, True].index(True)


def is_script(name: str) -> bool:
    """Whether code is the user's: of no library, and not ours."""
    return not name.startswith(_LIBRARIES) and "site-packages" not in name


def place_of(trace: TracebackType | None) -> str:
    """File, line and function of an error's innermost frame that is the script's."""
    place = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if is_script(code.co_filename):
            place = f"{code.co_filename}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    return place


def stack_of(frame: FrameType | None) -> Stack:
    """File, line and function of each frame, innermost first."""
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
    for name in ("_dump_nccl_trace", "_dump_fr_trace"):
        dump = getattr(module, name, None)
        if dump is not None:
            # Without stacks, and not only what is active. As JSON it takes twice as long.
            yield pickle.loads(dump(collectives, False, False))


def _recorded() -> list[dict[str, Any]]:
    """The recorder's latest entries, and all not over, oldest first; groups without a name are ours."""
    found = (entry for dump in _dumps(True) for entry in dump.get("entries", []))
    entries = [entry for entry in found if entry["process_group"][0]]
    first = len(entries) - _ENTRIES
    kept = (entry for n, entry in enumerate(entries) if n >= first or not entry.get("retired"))
    return [{key: entry.get(key) for key in _KEYS} for entry in kept]


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


def _arrivals() -> Iterable[tuple[str, int, int, int]]:
    """The latest collectives: group, number, when they were entered in ns, elements."""
    for dump in _dumps(True):
        for entry in dump.get("entries", ()):
            if not entry["is_p2p"] and entry["process_group"][0]:
                elements = sum(map(math.prod, entry["input_sizes"]))
                at_ns = entry["time_created_ns"]
                yield entry["process_group"][0], entry["collective_seq_id"], at_ns, elements
    for name, line in _lines():
        base_ns = time.time_ns() - time.monotonic_ns()
        for number, issued, elements in tuple(line.recent):
            yield f"{name} shm", number, base_ns + int(issued * 1e9), elements


def _in_memory() -> list[dict[str, Any]]:
    return [
        entry | {"process_group": [name, "shm"]}
        for name, line in _lines()
        for entry in line.unfinished()
    ]


def counts() -> tuple[int, int]:
    """How many operations were entered, and how many of them are over."""
    entered = over = 0
    for dump in _dumps(False):
        for status in dump.get("pg_status", {}).values():
            entered += max(int(status["last_enqueued_collective"]), 0)
            over += max(int(status["last_completed_collective"]), 0)
    for _, line in _lines():
        entered += line.entered
        over += line.entered - line.waiting
    return entered, over
