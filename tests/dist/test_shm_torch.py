"""Torch's own suite for backends passes on shm, but for what is skipped for a reason that stands here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SKIPS = (
    r"cuda|CUDA|GPU|gpu|NCCL|[Nn]ccl|torchvision",  # not on this machine, or for it alone
    r"Only MPI supports",  # kept from Gloo by name; tests/dist/test_shm.py has them
    r"world size",  # of 4, or 3
    r"issues/\d+|Test is failing",  # broken in torch
    r"file://|flakiness",  # kept from all, or tried on another kind of store
    r"refuses all names but gloo",  # `job.control` is a group of that name
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
    assert total and int(total[1]) - len(skipped) >= PASSED
