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

    Collective: none.
    """
    affinity = len(os.sched_getaffinity(0))
    quota = cgroup_quota(_MEMBERSHIP, _MOUNT)
    return max(1, affinity if quota is None else min(affinity, math.floor(quota)))


def cgroup_quota(membership: Path, mount: Path) -> float | None:
    """The lowest CPU quota of the groups that this process is in, in cores; None if there is none.

    `membership` has the form of /proc/self/cgroup, `mount` that of /sys/fs/cgroup.

    Collective: none.
    """
    quotas: list[float] = []
    for line in _read(membership).splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0":
            found = [_quota_v2(group) for group in ancestry(mount, path)]
            found += [_quota_v2(group) for group in ancestry(mount / "unified", path)]
        elif "cpu" in controllers.split(","):
            found = [
                _quota_v1(group)
                for name in (controllers, "cpu")
                for group in ancestry(mount / name, path)
            ]
        else:
            continue
        quotas += [quota for quota in found if quota is not None]
    return min(quotas, default=None)


def ancestry(root: Path, path: str) -> list[Path]:
    """The folders of a cgroup and those above it, up to `root`. Collective: none."""
    # Limits hold for all groups below, so each level counts. In a container the path is often the one
    # on the host, which does not exist inside; the root then is the container's own group.
    group = root / path.lstrip("/")
    return [group, *(parent for parent in group.parents if parent.is_relative_to(root))]


def _quota_v2(group: Path) -> float | None:
    limit, _, period = _read(group / "cpu.max").strip().partition(" ")
    return int(limit) / int(period) if limit.isdigit() and period.isdigit() else None


def _quota_v1(group: Path) -> float | None:
    limit = _read(group / "cpu.cfs_quota_us").strip()
    period = _read(group / "cpu.cfs_period_us").strip()
    # No limit is -1, which is no run of digits.
    return int(limit) / int(period) if limit.isdigit() and period.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
