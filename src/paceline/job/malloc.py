"""glibc's `malloc` keeps the memory that a step frees for the next step: a front to `mallopt`.

torch allocates CPU tensors with `malloc`. By default glibc returns freed tensors to the kernel, so each step
may get the same megabytes again, zeroed page by page: up to a sixth of the time of a bf16 step. glibc adapts
its thresholds to the largest block that was ever freed, so without this call the time depends on history.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

# From glibc's malloc.h. Setting one of them ends glibc's own adaptation of both, so both are set.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_MAX_TRIM_BYTES = 2**31 - 1  # mallopt takes an int
_MAX_MMAP_BYTES = 32 << 20  # mallopt refuses more; larger tensors stay separate mappings


def keep_freed_memory(environ: Mapping[str, str]) -> bool:
    """Let this process keep freed blocks of up to 32 MiB until it ends; whether it does now.

    Does nothing with `PACELINE_KEEP_MEMORY=0`, if the user has tuned glibc, or with another C library.
    """
    tuned = any(name.startswith("MALLOC_") for name in environ)
    if tuned or "glibc.malloc" in environ.get("GLIBC_TUNABLES", ""):
        return False
    libc = ctypes.CDLL(None)
    if environ.get("PACELINE_KEEP_MEMORY") == "0" or not hasattr(libc, "mallopt"):
        return False
    return bool(
        libc.mallopt(_MMAP_THRESHOLD, _MAX_MMAP_BYTES)
        and libc.mallopt(_TRIM_THRESHOLD, _MAX_TRIM_BYTES)
    )
