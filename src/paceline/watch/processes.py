"""What the kernel knows about processes of this host; for the launcher.

A front to psutil, and to /proc for what psutil does not have.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import psutil

from paceline.machine import process_status, read_text, stat_fields
from paceline.watch.probe import PROBE_NAME
from paceline.watch.rank_state import (
    FORKED_BESIDE,
    LATE_BEAT_S,
    read_beat,
    read_dump,
    read_place,
    read_stack,
)

_SIGKILL_PENDING = 1 << (signal.SIGKILL - 1)  # in SigPnd
_EXITING = 0x4  # PF_EXITING of the kernel, in a thread's flags
_PROBE_FILE = f"/memfd:{PROBE_NAME}"


def read_state(pid: int) -> str:
    """The state of a process as in /proc; empty if it does not exist.

    R runs, S sleeps, D waits for a device, T is stopped, t is held by a debugger, Z is dead.
    """
    status = process_status(pid)
    return status[0] if status is not None else ""


def is_ending(pid: int) -> bool:
    """Whether a process whose main thread has ended is exiting: all its threads exit or are killed.

    On a busy host the kernel may take a while, and its parent may not have waited for it yet.
    """
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            fields = stat_fields(f"/proc/{pid}/task/{task}")
            if not fields or fields[0] in "ZX" or int(fields[6]) & _EXITING:
                continue
            status = read_text(Path(f"/proc/{pid}/task/{task}/status"))
            pending = status.partition("SigPnd:")[2].split()[:1]
            if pending and not int(pending[0], 16) & _SIGKILL_PENDING:
                return False
    return True


def kernel_function(pid: int) -> str:
    """The kernel's function that the process waits in; empty if unknown."""
    return read_text(Path(f"/proc/{pid}/wchan")).strip("0\n")


def describe_workers(pid: int, cwd: str) -> tuple[str, ...]:
    """A few words for each child of a rank that may be a loader worker; those in the script first."""
    words = []
    own = _probe_files(pid)
    for child in _children(pid):
        state = read_state(child)
        files = _probe_files(child)
        text = "".join(text for inode, text in files.items() if inode not in own)
        in_lock = state == "S" and "futex" in kernel_function(child)
        # A spawned worker has no probe; torch names its process. A child of `os.fork` has its rank's file and
        # no probe, and so has a worker that waits for a lock before it begins.
        shared = "".join(text for inode, text in files.items() if inode in own)
        not_begun = bool(not text and in_lock and shared)
        if not state or not (text or not_begun or _name(child).startswith("pt_data_worker")):
            continue
        beat = read_beat(text)
        where = read_place(beat.get("place", ""), cwd)
        if time.monotonic() - beat.get("time", 0.0) > LATE_BEAT_S and (dump := read_dump(text)):
            where = read_stack(dump, cwd)
        does = {"T": "stopped", "t": "held by a debugger", "D": "in a disk wait", "Z": "dead"}.get(
            state
        )
        if does is None:
            unknown = "is idle" if text else "runs" if state == "R" else "waits"
            unknown = "has not begun" if not_begun else unknown
            place = where.function_at_line or unknown
            does = f"in {place}" if "() at " in place else place
        threads = read_beat(text or shared).get("forked_while")
        if in_lock and threads:
            names = " and ".join(threads[:2]).replace(cwd.rstrip("/") + "/", "")
            does += f", waits for a lock, and was {FORKED_BESIDE} {names}"
        words.append((not where.script, f"pid {child} {does}"))
    return tuple(text for _, text in sorted(words))


def _children(pid: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.Error:
        return []


def _name(pid: int) -> str:
    return read_text(Path(f"/proc/{pid}/comm")).strip()


def _probe_files(pid: int) -> dict[int, str]:
    """The files of probes (probe.py) that a process has open: their text, by inode."""
    found = {}
    with contextlib.suppress(OSError):
        for fd in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(fd.path).startswith(_PROBE_FILE):
                    found[os.stat(fd.path).st_ino] = Path(fd.path).read_text(errors="replace")
    return found
