"""Torch's own suite for backends passes on shm, but for what is skipped for a reason that stands here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# What torch keeps from a backend by its name, and what this machine lacks.
SKIPS = (
    r"Test requires backend shm to be one of",  # a list of names in the test
    r"[Oo]nly (gloo|nccl|mpi|Nccl|NCCL|MPI)|only supports|[Rr]equires (nccl|NCCL)",
    r"(shm|backend) (backend )?(does not|doesn't) support",
    r"cuda|CUDA|GPU|gpu|HPU|XPU|NCCL|nccl|ROCm",  # no GPU here
    r"No module named|torchvision|numba|small world size|only supported on|github.com",
)


@pytest.mark.slow
@pytest.mark.skipif(
    "PACELINE_TORCH_SUITE" not in os.environ, reason="takes over ten minutes: make test-torch"
)
@pytest.mark.timeout(7200)
def test_torchs_own_suite_passes(tmp_path: Path) -> None:
    environ = {**os.environ, "TEMP_DIR": str(tmp_path), "GLOO_SOCKET_IFNAME": "lo"}
    script = Path(__file__).with_name("torch_suite.py")
    done = subprocess.run(
        [sys.executable, str(script)], env=environ, capture_output=True, text=True, check=False
    )
    skipped = re.findall(r"skipped ['\"](.*)['\"]", done.stderr)
    unexplained = [why for why in skipped if not any(re.search(skip, why) for skip in SKIPS)]
    assert done.returncode == 0, done.stderr[-20_000:]
    assert not unexplained
    assert done.stderr.count("ok\n") > len(skipped) // 10  # else it ran next to nothing
