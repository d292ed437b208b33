"""How many processor cores this process may really use. Pure Python, no torch."""

from __future__ import annotations

import math
import os
from pathlib import Path


def usable_cores(*, cgroup_root: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores by affinity, lowered by the cgroup's CPU quota (v1 or v2); at least 1.

    Collective: none.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = _cgroup_quota(cgroup_root)
    if quota is not None:
        cores = min(cores, max(1, math.floor(quota)))
    return max(1, cores)


def _cgroup_quota(root: Path) -> float | None:
    """The quota in cores; None where there is none. A container sees its own cgroup at the root."""
    try:
        limit, period = (root / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        pass
    try:
        quota = int((root / "cpu" / "cpu.cfs_quota_us").read_text())
        period_us = int((root / "cpu" / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return quota / period_us if quota > 0 and period_us > 0 else None
