"""What the kernel counts of memory: who was killed for it, how much there may be, and what /dev/shm holds.

A front to the kernel's cgroup files (version 1 and 2), /proc/vmstat and statvfs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from paceline.cores import ancestry

_MEMBERSHIP = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")
_SHM = "/dev/shm"
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

    Collective: none.
    """

    kills: int | None = None
    host_kills: int = 0
    limit_bytes: int | None = None
    peak_bytes: int | None = None
    shm_bytes: int = 0
    shm_free_bytes: int = 0

    def killed_since(self, before: Memory) -> str:
        """What the kernel has killed for memory since `before`, in words; empty if nothing.

        Collective: none.
        """
        if self.kills is not None and self.kills > (before.kills or 0):
            limit = f"limit {size(self.limit_bytes)}" if self.limit_bytes else "no limit of its own"
            peak = f", peak {size(self.peak_bytes)}" if self.peak_bytes else ""
            return f"{limit}{peak} (oom_kill {before.kills or 0} -> {self.kills})"
        if self.host_kills > before.host_kills:
            return f"the host ran out (oom_kill {before.host_kills} -> {self.host_kills})"
        return ""


def read(membership: Path = _MEMBERSHIP, mount: Path = _MOUNT) -> Memory:
    """The counters now; `membership` and `mount` have the form of the kernel's. Collective: none."""
    groups: list[Path] = []
    names = ("memory.events", "memory.max", "memory.peak")
    for line in _read(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            groups = ancestry(mount / "memory", path)
            names = ("memory.oom_control", "memory.limit_in_bytes", "memory.max_usage_in_bytes")
            break
        if not controllers:
            groups = ancestry(mount, path)
    limits = [int(text) for group in groups if (text := _read(group / names[1]).strip()).isdigit()]
    limits = [limit for limit in limits if limit < _NO_LIMIT]
    own = next((group for group in groups if (group / names[0]).exists()), None)
    peak = _read(own / names[2]).strip() if own is not None else ""
    try:
        shm = os.statvfs(_SHM)
        shm_bytes, shm_free = shm.f_frsize * shm.f_blocks, shm.f_frsize * shm.f_bavail
    except OSError:
        shm_bytes = shm_free = 0
    return Memory(
        kills=_counter(own / names[0]) if own is not None else None,
        host_kills=_counter(Path("/proc/vmstat")) or 0,
        limit_bytes=min(limits, default=None),
        peak_bytes=int(peak) if peak.isdigit() else None,
        shm_bytes=shm_bytes,
        shm_free_bytes=shm_free,
    )


def size(count: int | None) -> str:
    """A number of bytes for people. Collective: none."""
    value = float(count or 0)
    return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def _counter(path: Path) -> int | None:
    for line in _read(path).splitlines():
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
