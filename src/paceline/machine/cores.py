"""How many cores this process may use: affinity and container quota, not what the machine has.

A front to `os.sched_getaffinity` and the kernel's cgroup files (version 1 and 2). It does not look at
load, nor at hyperthreads.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Cores that this process may keep busy, at least 1: the lower of affinity and cgroup quota.

    A quota that is no whole number is rounded down: a thread more would be stopped by the kernel for
    part of each period, and all ranks wait for the slowest.
    """
    affinity = len(os.sched_getaffinity(0))
    quota = cgroup_quota()
    return max(1, affinity if quota is None else min(affinity, math.floor(quota)))


def cgroup_quota(membership: Path = _MEMBERSHIP, mount: Path = _MOUNT) -> float | None:
    """The lowest CPU quota of the groups that this process is in, in cores; None if there is none.

    `membership` has the form of /proc/self/cgroup, `mount` that of /sys/fs/cgroup.
    """
    folders = group_folders("cpu", membership, mount)
    quotas = [quota(folder) for folder in folders for quota in (_quota_v2, _quota_v1)]
    return min((quota for quota in quotas if quota is not None), default=None)


def group_folders(
    controller: str, membership: Path = _MEMBERSHIP, mount: Path = _MOUNT
) -> list[Path]:
    """Where the kernel shows the groups of this process and all above them, for cgroup 1 and 2."""
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
        folders += [group for root in roots for group in _ancestry(root, path)]
    return folders


def _ancestry(root: Path, path: str) -> list[Path]:
    # Limits hold for all groups below, so each level counts. In a container the path is often the one
    # on the host, which does not exist inside; the root then is the container's own group.
    group = root / path.lstrip("/")
    return [group, *(parent for parent in group.parents if parent.is_relative_to(root))]


def _quota_v2(group: Path) -> float | None:
    limit, _, period = read_text(group / "cpu.max").strip().partition(" ")
    return int(limit) / int(period) if limit.isdigit() and period.isdigit() else None


def _quota_v1(group: Path) -> float | None:
    limit = read_text(group / "cpu.cfs_quota_us").strip()
    period = read_text(group / "cpu.cfs_period_us").strip()
    # No limit is -1, which is no run of digits.
    return int(limit) / int(period) if limit.isdigit() and period.isdigit() else None


def read_text(path: Path) -> str:
    """The text of a file; empty where it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
