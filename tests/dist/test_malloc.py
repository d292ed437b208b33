"""Memory that is freed stays with a rank on CPU, unless the user has a say in it."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.job.malloc import keep_freed_memory
from paceline.testing import run_ranks

_PIECES, _PIECE_BYTES = 6, 8 << 20


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _kept(job: Any) -> float:
    """Which share of some tensors' memory is still this process's when they are gone."""
    before = _resident_bytes()
    pieces = [torch.ones(_PIECE_BYTES // 4) for _ in range(_PIECES)]
    assert _resident_bytes() - before > 0.9 * _PIECES * _PIECE_BYTES
    del pieces
    return (_resident_bytes() - before) / (_PIECES * _PIECE_BYTES)


@pytest.mark.skipif(torch.cuda.is_available(), reason="ranks on GPUs leave glibc as it is")
def test_freed_memory_stays_unless_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("MALLOC_") or n == "GLIBC_TUNABLES"]:
        monkeypatch.delenv(name)
    assert run_ranks(_kept, nproc=1)[0] > 0.9
    monkeypatch.setenv("PACELINE_KEEP_MEMORY", "0")
    assert run_ranks(_kept, nproc=1)[0] < 0.5


@pytest.mark.parametrize(
    "environ",
    [{"MALLOC_ARENA_MAX": "8"}, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=8"}],
)
def test_the_tuning_of_users_stands(environ: dict[str, str]) -> None:
    assert not keep_freed_memory(environ)
