"""What this host offers to this process: cores, memory, shared memory, ports.

A front to psutil, and to the kernel's cgroup files (versions 1 and 2), which psutil does not read.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ConfigError

_MEMBERSHIP = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")
_VMSTAT = Path("/proc/vmstat")
_COMMAND_LENGTH = 80


def usable_cores() -> int:
    """Cores that this process may keep busy, at least 1: the lower of affinity and cgroup quota.

    A fractional quota is rounded down: with one more thread the kernel would stop the process for part of
    each period, and all ranks wait for the slowest. Load and hyperthreads are not considered.
    """
    affinity = len(os.sched_getaffinity(0))
    quota = cgroup_quota()
    return max(1, affinity if quota is None else min(affinity, math.floor(quota)))


def cgroup_quota(membership: Path = _MEMBERSHIP, mount: Path = _MOUNT) -> float | None:
    """The lowest CPU quota, in cores, of the cgroups of this process and their parents; None without one.

    `membership` has the format of /proc/self/cgroup, `mount` that of /sys/fs/cgroup.
    """
    quotas = []
    for group in cgroup_folders("cpu", membership, mount):
        limit, _, period = read_text(group / "cpu.max").strip().partition(" ")
        quotas.append((limit, period))
        limit = read_text(group / "cpu.cfs_quota_us").strip()
        quotas.append((limit, read_text(group / "cpu.cfs_period_us").strip()))
    # "max" and -1 mean no limit.
    numbers = [int(q) / int(p) for q, p in quotas if q.isdigit() and p.isdigit()]
    return min(numbers, default=None)


def cgroup_folders(
    controller: str, membership: Path = _MEMBERSHIP, mount: Path = _MOUNT
) -> list[Path]:
    """The folders of the cgroups of this process and of all their parents, for cgroup 1 and 2."""
    folders: list[Path] = []
    for line in read_text(membership).splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0":
            roots = [mount, mount / "unified"]
        elif controller in controllers.split(","):
            roots = [mount / controllers, mount / controller]
        else:
            continue
        folders += [group for root in roots for group in _with_parents(root, path)]
    return folders


def _with_parents(root: Path, path: str) -> Iterator[Path]:
    # A limit holds for all groups below it, so each level counts. In a container the path is often the
    # one on the host, which does not exist inside; the root then is the container's own group.
    group = root / path.lstrip("/")
    yield group
    yield from (parent for parent in group.parents if parent.is_relative_to(root))


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory limits and counters of this process's cgroup and host at one moment.

    Attributes:
        kills: processes of this cgroup that the kernel killed because memory ran out; None if unknown.
        host_kills: the same for the whole host.
        limit_bytes: the lowest limit of the cgroup and its parents; None if not below the host's memory.
        peak_bytes: the highest usage of the cgroup; None if unknown.
        host_bytes: the memory of the host.
        shm_bytes: size of /dev/shm; 0 if there is none.
        shm_free_bytes: free space of /dev/shm.
    """

    kills: int | None = None
    host_kills: int = 0
    limit_bytes: int | None = None
    peak_bytes: int | None = None
    host_bytes: int = 0
    shm_bytes: int = 0
    shm_free_bytes: int = 0

    def killed_since(self, before: Memory) -> str:
        """Describe the out-of-memory kills since `before`; empty if there were none."""
        if self.kills is not None:
            # It counts kills of this cgroup by any limit, so those of the host are of other processes.
            if self.kills <= (before.kills or 0):
                return ""
            limit = "the job has no memory limit"
            if self.limit_bytes:
                limit = f"limit {format_bytes(self.limit_bytes)}"
            peak = f", peak {format_bytes(self.peak_bytes)}" if self.peak_bytes else ""
            return f"{limit}{peak} (oom_kill {before.kills or 0} -> {self.kills})"
        if self.host_kills > before.host_kills:
            return f"the host ran out (oom_kill {before.host_kills} -> {self.host_kills})"
        return ""


def read_memory(membership: Path = _MEMBERSHIP, mount: Path = _MOUNT) -> Memory:
    """Read limits and counters now; the paths are as in `cgroup_quota`."""
    groups = cgroup_folders("memory", membership, mount)
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [_number(g / name) for g in groups for name in ("memory.max", "memory.limit_in_bytes")]
    events = [g / name for g in groups for name in ("memory.events", "memory.oom_control")]
    own = next((path.parent for path in events if path.exists()), None)
    kills = [n for path in events if path.parent == own and (n := _oom_kills(path)) is not None]
    names = ("memory.peak", "memory.max_usage_in_bytes")
    peaks = [n for name in names if own and (n := _number(own / name)) is not None]
    shm_bytes, shm_free_bytes = _shared_memory()
    return Memory(
        kills=kills[0] if kills else None,
        host_kills=_oom_kills(_VMSTAT) or 0,
        # Version 1 writes a number near 2**63 for no limit.
        limit_bytes=min((n for n in limits if n is not None and n < host_bytes), default=None),
        peak_bytes=peaks[0] if peaks else None,
        host_bytes=host_bytes,
        shm_bytes=shm_bytes,
        shm_free_bytes=shm_free_bytes,
    )


def _shared_memory() -> tuple[int, int]:
    try:
        shm = os.statvfs("/dev/shm")
    except OSError:
        return 0, 0
    return shm.f_blocks * shm.f_frsize, shm.f_bavail * shm.f_frsize


def _number(path: Path) -> int | None:
    text = read_text(path).strip()
    return int(text) if text.isdigit() else None


def _oom_kills(path: Path) -> int | None:
    for line in read_text(path).splitlines():
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return None


def network_interfaces() -> dict[str, list[str]]:
    """The IP addresses of this host by interface; only interfaces that are up and have one."""
    import psutil

    states = psutil.net_if_stats()
    families = (socket.AF_INET, socket.AF_INET6)
    found = {
        name: [a.address.partition("%")[0] for a in addresses if a.family in families]
        for name, addresses in psutil.net_if_addrs().items()
        if name in states and states[name].isup
    }
    return {name: addresses for name, addresses in found.items() if addresses}


def owner_of_port(port: int) -> str | None:
    """Describe the process that listens on a TCP port here: pid, command and age; None if there is none."""
    import psutil

    tcp = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    listening = [c for c in tcp if c.laddr and c.laddr.port == port]
    for pid in (connection.pid for connection in listening if connection.pid is not None):
        try:
            process = psutil.Process(pid)
            command = " ".join(process.cmdline()).strip() or process.name()
            age = _duration(time.time() - process.create_time())
        except psutil.Error:
            continue  # it has ended, or this user may not see it
        if len(command) > _COMMAND_LENGTH:
            command = f"{command[:_COMMAND_LENGTH]} ..."
        return f"pid {pid} ({command}), started {age} ago"
    return "a process that this user may not see" if listening else None


def launching_process(prefix: str) -> str:
    """Identify the closest ancestor process whose name starts with `prefix`, else the parent process.

    Returns:
        A text that no other process on this host has: its pid, with its start time for such an ancestor,
        because the kernel reuses pids.
    """
    import psutil

    try:
        for ancestor in psutil.Process().parents():
            if ancestor.name().startswith(prefix):
                return f"{ancestor.pid} {start_ticks(ancestor.pid)}"
    except psutil.Error:
        pass  # an ancestor that this user may not see
    return str(os.getppid())


def private_folder(parent: Path) -> Path:
    """The folder of this user alone in `parent`, in which other users may make folders and links, too.

    Raises:
        ConfigError: its name leads to something else.
    """
    folder = parent / f"paceline-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    is_open = not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o077
    if is_open or status.st_uid != os.getuid():
        raise ConfigError(
            f"{folder} is not a folder that only this user may open.",
            where=f"host {socket.gethostname()}",
            why="another user of the host may have made it.",
            fix="set TMPDIR to a folder that only this user may write to, the same for all ranks.",
        )
    return folder


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since the host booted; None if it has ended.

    All processes of a host read the same number. psutil's `create_time` depends on the wall clock.
    """
    status = process_status(pid)
    return status[1] if status else None


def process_status(pid: int) -> tuple[str, int] | None:
    """The kernel's letter for the state of a process, and its `start_ticks`; None if it has ended.

    Ranks that wait in a collective call it; importing psutil would slow down the start of every rank.
    """
    fields = stat_fields(f"/proc/{pid}")
    return (fields[0], int(fields[19])) if fields else None


def stat_fields(folder: str) -> list[str]:
    """The fields of /proc/.../stat from the state on, by the folder there; empty if it has ended."""
    return read_text(Path(folder, "stat")).rpartition(")")[2].split()


def _duration(seconds: float) -> str:
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds // unit:.0f} {name}"
    return f"{max(0.0, seconds):.0f} s"


def format_bytes(size: float) -> str:
    """Format a number of bytes as "64 MiB"."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def read_text(path: Path) -> str:
    """The text of a file; empty if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
