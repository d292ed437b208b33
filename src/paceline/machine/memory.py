"""What the kernel counts of memory: who was killed for it, how much there may be, and what /dev/shm holds.

A front to the kernel's cgroup files (version 1 and 2), /proc/vmstat and statvfs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.machine.cores import group_folders, read_text
from paceline.machine.host import format_bytes, shared_memory_bytes

_MEMBERSHIP = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60  # version 1 writes a number near 2**63


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The counters at one moment.

    Args:
        kills: Processes of this control group that the kernel has killed for memory; None: unknown.
        host_kills: The same for the whole host.
        limit_bytes: Of the group or one above it; None where there is none.
        peak_bytes: The most that the group has used.
        shm_bytes: Size of /dev/shm.
        shm_free_bytes: Of which nobody uses.
    """

    kills: int | None = None
    host_kills: int = 0
    limit_bytes: int | None = None
    peak_bytes: int | None = None
    shm_bytes: int = 0
    shm_free_bytes: int = 0

    def killed_since(self, before: Memory) -> str:
        """What the kernel has killed for memory since `before`, in words; empty if nothing."""
        if self.kills is not None and self.kills > (before.kills or 0):
            limit = (
                f"limit {format_bytes(self.limit_bytes)}"
                if self.limit_bytes
                else "no limit of its own"
            )
            peak = f", peak {format_bytes(self.peak_bytes)}" if self.peak_bytes else ""
            return f"{limit}{peak} (oom_kill {before.kills or 0} -> {self.kills})"
        if self.host_kills > before.host_kills:
            return f"the host ran out (oom_kill {before.host_kills} -> {self.host_kills})"
        return ""


def read(membership: Path = _MEMBERSHIP, mount: Path = _MOUNT) -> Memory:
    """The counters now; `membership` and `mount` have the form of the kernel's."""
    groups = group_folders("memory", membership, mount)
    limits = [
        int(text)
        for group in groups
        for name in ("memory.max", "memory.limit_in_bytes")
        if (text := read_text(group / name).strip()).isdigit()
    ]
    counters = ("memory.events", "memory.oom_control")
    own = next((g for g in groups if any((g / name).exists() for name in counters)), None)
    kills, peak = None, ""
    if own is not None:
        kills = next((n for name in counters if (n := _counter(own / name)) is not None), None)
        peaks = (own / "memory.peak", own / "memory.max_usage_in_bytes")
        peak = next((text for path in peaks if (text := read_text(path).strip())), "")
    shm_bytes, shm_free = shared_memory_bytes()
    return Memory(
        kills=kills,
        host_kills=_counter(Path("/proc/vmstat")) or 0,
        limit_bytes=min((limit for limit in limits if limit < _NO_LIMIT), default=None),
        peak_bytes=int(peak) if peak.isdigit() else None,
        shm_bytes=shm_bytes,
        shm_free_bytes=shm_free,
    )


def _counter(path: Path) -> int | None:
    for line in read_text(path).splitlines():
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return None
