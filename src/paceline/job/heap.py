"""Memory that a step frees stays with the process for the next step: a front to glibc's `mallopt`.

torch takes CPU tensors from `malloc`, and glibc gives freed ones back to the kernel, so that each step of
a training may get the same megabytes anew, zeroed page by page: up to a sixth of a bf16 step. glibc's
bounds grow with the largest block that was ever freed, so without this it depends on what came before.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

# From glibc's malloc.h. Setting either ends glibc's own adapting of both, so both are set.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_MOST_BYTES = 2**31 - 1  # mallopt takes an int
_MMAP_MOST_BYTES = 32 << 20  # more is refused; larger tensors stay mappings of their own


def keep_freed_memory(environ: Mapping[str, str]) -> bool:
    """Have this process keep freed blocks of up to 32 MiB; whether it does now.

    It lasts until the process ends. Nothing is done with `PACELINE_KEEP_MEMORY=0`, where the user has
    tuned glibc, and with other C libraries.
    """
    tuned = any(name.startswith("MALLOC_") for name in environ)
    if tuned or "glibc.malloc" in environ.get("GLIBC_TUNABLES", ""):
        return False
    libc = ctypes.CDLL(None)
    if environ.get("PACELINE_KEEP_MEMORY") == "0" or not hasattr(libc, "mallopt"):
        return False
    return bool(
        libc.mallopt(_MMAP_THRESHOLD, _MMAP_MOST_BYTES)
        and libc.mallopt(_TRIM_THRESHOLD, _MOST_BYTES)
    )
