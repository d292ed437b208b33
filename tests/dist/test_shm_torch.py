"""torch's own tests for backends pass on shm, except those skipped for a reason listed here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SKIPS = (
    r"cuda|CUDA|GPU|gpu|NCCL|[Nn]ccl|NVIDIA|torchvision",  # needs what this machine lacks
    r"Only MPI supports",  # skipped for Gloo by its name; test_shm.py covers them
    r"world size",  # needs 3 or 4 ranks
    r"issues/\d+|Test is failing",  # broken in torch
    r"file://|flakiness",  # skipped for all backends, or needs another store
    r"refuses all names but gloo",  # of monitored_barrier; `job.control` is a Gloo group
)
PASSED = 88  # of torch 2.13; Gloo passes 90


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_torchs_own_suite_passes(tmp_path: Path) -> None:
    environ = {**os.environ, "TEMP_DIR": str(tmp_path), "GLOO_SOCKET_IFNAME": "lo"}
    script = Path(__file__).with_name("torch_suite.py")
    done = subprocess.run(
        [sys.executable, str(script)], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-20_000:]
    skipped = re.findall(r"skipped ['\"](.*)['\"]", done.stderr)
    assert [why for why in skipped if not any(re.search(skip, why) for skip in SKIPS)] == []
    total = re.search(r"^Ran (\d+) tests", done.stderr, re.MULTILINE)
    assert total
    assert int(total[1]) - len(skipped) >= PASSED
