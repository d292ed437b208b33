"""The shared memory of a group: a header of 64-bit counters, and two slots of data for each rank.

The memory is an anonymous file (`memfd_create`). It has no name, so the kernel frees it however the processes
end, and the size of /dev/shm does not limit it. Group rank 0 creates it; the others open it through /proc.

Memory order: a rank writes its slot first and its counter in the header second. A rank that sees the counter
also sees the slot, because x86-64 reorders neither stores with stores nor loads with loads, and an aligned
8-byte store is atomic. Other processors do not promise this; they use Gloo.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.machine import process_status, start_ticks
from paceline.store_exchange import gather

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAME = "paceline"  # of the anonymous file, in /proc
_PAGE_BYTES = 4096
_COLUMNS = 9  # of the header; a column has one 64-bit cell for each rank
_TOTAL_BYTES = 32 << 20  # for all slots of a group; more only if slots have their smallest size
_SLOT_BYTES = (64 << 10, 2 << 20)  # smallest and largest slot
_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE = 202, 0, 1  # x86-64 system call, shared between processes
_syscall = ctypes.CDLL(None).syscall  # releases the interpreter lock during the call
# Limit of cached tensor views. Creating a view takes longer than reading a small slot.
_MAX_VIEWS = 256


class SharedMemoryUnavailable(Exception):
    """The ranks of a group cannot share memory; the text says why."""


def slot_bytes(size: int) -> int:
    """The size of one slot in a group of `size` ranks."""
    least, most = _SLOT_BYTES
    if size == 2:
        return most // 2  # a slot of this size stays in the cache of the core that reads it
    return max(least, min(most, _TOTAL_BYTES // (2 * size) & -_PAGE_BYTES))


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Segment:
    """The mapped shared memory of one group. Created by `open_segment`.

    Attributes:
        rounds: the last round that each rank has reached, in rank order. See `collectives`.
        status: 0 while a rank takes part; 1 after it left; 2 + r after it failed because of rank r.
        signatures: the collective that each rank called, as an integer, for even and for odd rounds.
        bucket_ids: the shared bucket that each rank reduces, for even and for odd rounds; 0 for none.
        slot_bytes: size of one slot. Each rank has one slot for even and one for odd rounds.
    """

    def __init__(self, memory: mmap.mmap, rank: int, size: int) -> None:
        self.memory = memory
        self.rank = rank
        self.size = size
        self.slot_bytes = slot_bytes(size)
        # The first 8 bytes of the header hold the token of `_create`.
        header = memoryview(memory)[: _header_bytes(size)].cast("q")
        columns = [header[1 + n * size : 1 + (n + 1) * size] for n in range(_COLUMNS)]
        self.rounds, self.status, self._pids, self._start_times, self._sleeping = columns[:5]
        self.signatures, self.bucket_ids = columns[5:7], columns[7:9]
        self._wake_count = header[1 + _COLUMNS * size :]
        self._data = _header_bytes(size)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._base = begin + self._data
        self._wake_address = ctypes.c_void_p(begin + 8 * (1 + _COLUMNS * size))
        self._views: dict[tuple[int, torch.dtype, int, int], Sequence[torch.Tensor]] = {}
        self._pids[rank] = os.getpid()
        self._start_times[rank] = start_ticks(os.getpid()) or 0

    def address(self, round_number: int, rank: int) -> int:
        """The address of the slot of `rank` for round `round_number`."""
        return self._base + self._slot_offset(round_number, rank)

    def _slot_offset(self, round_number: int, rank: int) -> int:
        return ((round_number & 1) * self.size + rank) * self.slot_bytes

    def views(
        self, round_number: int, dtype: torch.dtype, first: int, last: int
    ) -> Sequence[torch.Tensor]:
        """Elements `first` to `last` of all slots for round `round_number`, in rank order."""
        key = (round_number & 1, dtype, first, last)
        found = self._views.get(key)
        if found is None:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            count, width = last - first, dtype.itemsize
            offsets = [
                self._data + self._slot_offset(round_number, r) + first * width
                for r in range(self.size)
            ]
            found = [
                torch.frombuffer(self.memory, dtype=dtype, count=count, offset=offset)
                for offset in offsets
            ]
            self._views[key] = found
        return found

    def sleep(self, round_number: int, timeout_s: float) -> None:
        """Sleep on a futex until all ranks have reached round `round_number`, a wake-up, or the timeout.

        The timeout is necessary: x86-64 may reorder a store with a later load, so a wake-up can be missed.
        """
        expected = ctypes.c_uint32(self._wake_count[0] & 0xFFFFFFFF)
        self._sleeping[self.rank] = 1
        if min(self.rounds) < round_number:
            limit = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
            _syscall(_FUTEX, self._wake_address, _FUTEX_WAIT, expected, ctypes.byref(limit))
        self._sleeping[self.rank] = 0

    def wake(self, *, always: bool = False) -> None:
        """Wake the sleeping ranks. Without `always`, do nothing if no rank sleeps."""
        if always or any(self._sleeping):
            self._wake_count[0] += 1
            _syscall(_FUTEX, self._wake_address, _FUTEX_WAKE, ctypes.c_int(1 << 30), None)

    def process_state(self, rank: int) -> str:
        """The state of the process of `rank`: "running", "stopped" or "dead"."""
        status = process_status(self._pids[rank])
        if status is None or status[0] in "ZX" or status[1] != self._start_times[rank]:
            return "dead"
        return "stopped" if status[0] in "Tt" else "running"

    def pid(self, rank: int) -> int:
        """The process id of `rank`."""
        return self._pids[rank]


def open_segment(store: dist.Store, rank: int, size: int) -> Segment:
    """Map the same memory on all ranks of a group. All its ranks must call it, once.

    Raises:
        SharedMemoryUnavailable: on all ranks, if any rank cannot map it.
    """
    descriptor, problem = None, ""
    try:
        try:
            where = ""
            _refuse_unsupported()
            if rank == 0:
                descriptor = os.memfd_create(_NAME)
                memory, where = _create(descriptor, size)
        finally:
            if rank == 0:
                store.set("memory", where)
        if rank != 0:
            memory = _open(store.get("memory").decode(), size)
        segment = Segment(memory, rank, size)
    except (SharedMemoryUnavailable, OSError, ValueError) as error:
        problem = str(error) or type(error).__name__
    try:
        # Rank 0 keeps the descriptor until all ranks have opened it. Then their mappings keep the memory.
        problems = gather(store, "problem", problem, rank, size)
    finally:
        if descriptor is not None:
            os.close(descriptor)
    for other, text in enumerate(problems):
        if text:
            raise SharedMemoryUnavailable(f"rank {other}: {text}")
    return segment


def open_unlinked(pid: int, descriptor: int, prefix: str = "/") -> int:
    """Open for writing what a process of this user has open: a file that has no name any more.

    Other users can write the numbers, because torch's store has no authentication. So the file is examined
    first: opening a device or a pipe may have effects.

    Args:
        prefix: of its former path.

    Raises:
        OSError: there is no such file, or it is another one.
    """
    handle = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_PATH | os.O_CLOEXEC)
    try:
        status, link = os.fstat(handle), f"/proc/self/fd/{handle}"
        is_unlinked = stat.S_ISREG(status.st_mode) and status.st_nlink == 0
        is_own = status.st_uid == os.geteuid() and os.readlink(link).startswith(prefix)
        if not (is_unlinked and is_own):
            raise PermissionError(f"file {descriptor} of process {pid} is no memory of this job")
        return os.open(link, os.O_RDWR | os.O_CLOEXEC)
    finally:
        os.close(handle)


def _header_bytes(size: int) -> int:
    return -(-8 * (2 + _COLUMNS * size) // _PAGE_BYTES) * _PAGE_BYTES


def _total_bytes(size: int) -> int:
    return _header_bytes(size) + 2 * size * slot_bytes(size)


def _refuse_unsupported() -> None:
    if platform.machine() not in ("x86_64", "AMD64") or not hasattr(os, "memfd_create"):
        raise SharedMemoryUnavailable(f"not supported: {platform.system()} on {platform.machine()}")


def _host_id() -> str:
    """Boot id and pid namespace: equal for processes that can open each other's files in /proc."""
    return f"{_BOOT_ID.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def _create(descriptor: int, size: int) -> tuple[mmap.mmap, str]:
    """Map the memory of rank 0; also where and how the other ranks find it."""
    os.ftruncate(descriptor, _total_bytes(size))
    memory = mmap.mmap(descriptor, _total_bytes(size))
    token = secrets.token_bytes(8)
    memory[:8] = token
    return memory, f"{os.getpid()} {descriptor} {token.hex()} {_host_id()}"


def _open(where: str, size: int) -> mmap.mmap:
    if not where:
        raise SharedMemoryUnavailable("rank 0 could not create the memory")
    pid, descriptor, token, host_id = where.split(" ", 3)
    if host_id != _host_id():
        raise SharedMemoryUnavailable(
            "it is on another host than rank 0, or in a container of its own"
        )
    handle = open_unlinked(int(pid), int(descriptor), f"/memfd:{_NAME} ")
    try:
        memory = mmap.mmap(handle, _total_bytes(size))
    finally:
        os.close(handle)
    if memory[:8] != bytes.fromhex(token):
        raise SharedMemoryUnavailable("the file opened is not the memory of rank 0")
    return memory
