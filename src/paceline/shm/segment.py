"""The memory that the ranks of a group share: a board of small numbers, and two slots for each rank.

It is an anonymous file (`memfd_create`): it has no name, so nothing is left of it however its processes end,
and the size of /dev/shm does not limit it. Group rank 0 makes it, the others open it through /proc.

Memory order: a rank writes its slot, then its number on the board; who reads the number and then the slot
sees what was written, because x86-64 keeps stores in order and loads in order, and an aligned store of 8
bytes is seen whole. Other processors promise less and get Gloo.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import secrets
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_ALIGN = 4096
_COLUMNS = 9
_TOTAL_BYTES = 32 << 20  # of all slots of a group, as far as the smallest slot allows
_SLOT_BYTES = (64 << 10, 2 << 20)
_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE = 202, 0, 1  # of x86-64, between processes
_syscall = ctypes.CDLL(None).syscall  # gives up the interpreter's lock while it waits
_MOST_VIEWS = 256  # kept, as making one takes longer than reading what is small


class Unavailable(Exception):
    """Why these ranks cannot share memory."""


def slot_bytes(size: int) -> int:
    """How much one slot holds in a group of `size` ranks: less where there are many."""
    least, most = _SLOT_BYTES
    if size == 2:
        return most // 2  # each rank reads one slot, which stays in the cache of its core
    return max(least, min(most, _TOTAL_BYTES // (2 * size) & -_ALIGN))


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Segment:
    """The mapped memory of one group of `size` ranks.

    Attributes:
        posted: the last turn that each rank has reached, in rank order.
        gone: 0, or why a rank takes no part any more: 1 it left, 2 + r it failed because of rank r.
        notes: what each rank says about its operation, for even and for odd turns.
        offers: the number of the region that each rank offers, likewise; 0 where it has none.
        slot_bytes: what one slot holds; each rank has one for even and one for odd turns.

    Collective: all ranks of the group, through `open_segment`.
    """

    def __init__(self, memory: mmap.mmap, rank: int, size: int) -> None:
        self.memory = memory
        self.rank = rank
        self.size = size
        self.slot_bytes = slot_bytes(size)
        board = memoryview(memory)[: _board_bytes(size)].cast("q")
        columns = [board[1 + n * size : 1 + (n + 1) * size] for n in range(_COLUMNS)]
        self.posted, self.gone, self._pids, self._starts, self._dozing = columns[:5]
        self.notes, self.offers = columns[5:7], columns[7:9]
        self._bell = board[1 + _COLUMNS * size :]
        self._data = _board_bytes(size)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._base = begin + self._data
        self._bell_address = ctypes.c_void_p(begin + 8 * (1 + _COLUMNS * size))
        self._views: dict[tuple[int, torch.dtype, int, int], Sequence[torch.Tensor]] = {}
        pid = os.getpid()
        self._pids[rank], self._starts[rank] = pid, _status(pid)[1]

    def address(self, turn: int, rank: int) -> int:
        """Where the slot of `rank` for `turn` begins."""
        return self._base + self._slot(turn, rank)

    def _slot(self, turn: int, rank: int) -> int:
        return ((turn & 1) * self.size + rank) * self.slot_bytes

    def views(self, turn: int, dtype: torch.dtype, first: int, last: int) -> Sequence[torch.Tensor]:
        """Elements `first` to `last` of the slots for `turn`, in rank order."""
        key = (turn & 1, dtype, first, last)
        found = self._views.get(key)
        if found is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            count, width = last - first, dtype.itemsize
            starts = [self._data + self._slot(turn, r) + first * width for r in range(self.size)]
            found = [
                torch.frombuffer(self.memory, dtype=dtype, count=count, offset=start)
                for start in starts
            ]
            self._views[key] = found
        return found

    def doze(self, turn: int, most_s: float) -> None:
        """Wait without a core until all have reached `turn`, or somebody rings, or time is up.

        Store and load of two ranks may pass each other, so that a ring is missed: hence the time.
        """
        rung = self._bell[0]
        self._dozing[self.rank] = 1
        if min(self.posted) < turn:
            limit = _Timespec(int(most_s), int(most_s % 1 * 1e9))
            expected = ctypes.c_uint32(rung & 0xFFFFFFFF)
            _syscall(_FUTEX, self._bell_address, _FUTEX_WAIT, expected, ctypes.byref(limit))
        self._dozing[self.rank] = 0

    def ring(self, *, always: bool = False) -> None:
        """Wake those who doze, if there are any."""
        if always or any(self._dozing):
            self._bell[0] += 1
            _syscall(_FUTEX, self._bell_address, _FUTEX_WAKE, ctypes.c_int(1 << 30), None)

    def condition(self, rank: int) -> str:
        """What the system says of the process of `rank`: "running", "stopped" or "dead"."""
        pid = self._pids[rank]
        state, start = _status(pid)
        if start != self._starts[rank] or state in "ZX":
            return "dead"
        return "stopped" if state in "Tt" else "running"

    def pid(self, rank: int) -> int:
        """The process id of `rank`."""
        return self._pids[rank]


def open_segment(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Segment:
    """Map one memory on all ranks of a group.

    Raises:
        Unavailable: on all ranks alike, where one of them cannot.

    Collective: all ranks of the group, once.
    """
    memory, reason = None, ""
    try:
        memory = _make(store, size, timeout) if rank == 0 else _find(store, size, timeout)
        segment = Segment(memory, rank, size)
    except (Unavailable, OSError, ValueError) as error:
        reason = str(error) or type(error).__name__
        if rank == 0 and memory is None:
            store.set("memory", "none")
    store.set(f"verdict/{rank}", reason)
    deadline = time.monotonic() + timeout.total_seconds()
    for other in range(size):
        left_s = max(0.001, deadline - time.monotonic())
        store.wait([f"verdict/{other}"], timedelta(seconds=left_s))
        verdict = store.get(f"verdict/{other}").decode()
        if verdict:
            raise Unavailable(f"rank {other}: {verdict}")
    return segment


def _board_bytes(size: int) -> int:
    return -(-8 * (2 + _COLUMNS * size) // _ALIGN) * _ALIGN


def _total_bytes(size: int) -> int:
    return _board_bytes(size) + 2 * size * slot_bytes(size)


def _refuse_unfit() -> None:
    if platform.machine() not in ("x86_64", "AMD64") or not hasattr(os, "memfd_create"):
        raise Unavailable(f"not for {platform.system()} on {platform.machine()}")


def place() -> str:
    """What must be equal for one process to see the memory and the state of another: boot, pid namespace."""
    try:
        return f"{_BOOT.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""  # not Linux, for which there is no segment either


def _make(store: dist.Store, size: int, timeout: timedelta) -> mmap.mmap:
    _refuse_unfit()
    descriptor = os.memfd_create("paceline")
    try:
        os.ftruncate(descriptor, _total_bytes(size))
        memory = mmap.mmap(descriptor, _total_bytes(size))
        mark = secrets.token_bytes(8)
        memory[:8] = mark
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        store.set("memory", f"{path} {mark.hex()} {place()}")
        # The descriptor must live until all have opened it, the memory lives as long as a mapping does.
        store.wait([f"opened/{rank}" for rank in range(1, size)], timeout)
    finally:
        os.close(descriptor)
    return memory


def _find(store: dist.Store, size: int, timeout: timedelta) -> mmap.mmap:
    rank_mark = f"opened/{store.add('openers', 1)}"
    try:
        store.wait(["memory"], timeout)
        found = store.get("memory").decode()
        if found == "none":
            raise Unavailable("rank 0 could not make the memory")
        path, mark, theirs = found.split(" ", 2)
        _refuse_unfit()
        if theirs != place():
            raise Unavailable("ranks on several hosts, or in containers that do not see each other")
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            memory = mmap.mmap(descriptor, _total_bytes(size))
        finally:
            os.close(descriptor)
        if memory[:8] != bytes.fromhex(mark):
            raise Unavailable("the memory of rank 0 cannot be reached")
        return memory
    finally:
        store.set(rank_mark, "")


def _status(pid: int) -> tuple[str, int]:
    """The state letter and the start time of a process; "X" where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", 0
    return fields[0], int(fields[19])
