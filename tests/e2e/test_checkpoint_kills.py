"""SIGKILL during a save, by `benchmarks/faults.py` and `benchmarks/last_save.py`."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
from launching import rows_of


def _counts(deadline_s: float, **counts: int) -> Any:
    words = [f"--{name}={count}" for name, count in counts.items()]
    return {row.pop("kills"): row for row in rows_of("faults", words, deadline_s)}


@pytest.mark.parametrize("kills", [5, pytest.param(20, marks=pytest.mark.ci)])
def test_no_kill_tears_or_loses_a_checkpoint(kills: int) -> None:
    assert _counts(100, random=kills, calls=0, ranks=0)["random"] == {"whole": kills}


needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")


@needs_strace
@pytest.mark.ci
def test_no_kill_at_a_system_call_tears_or_loses_a_checkpoint() -> None:
    # The first call of each kind, and the second of those that write.
    assert _counts(100, random=0, calls=20, ranks=0)["calls"]["whole"] == 20


@pytest.mark.ci
def test_no_kill_or_full_disk_in_the_last_save_of_a_failed_job_loses_a_checkpoint() -> None:
    kills, full = rows_of("last_save", ["--kills=4", "--full=1"], 100)
    assert kills.pop("the last step was saved", 0) <= 4
    assert kills == {"what": "kills", "whole": 4}
    assert full in ({"what": "full", "whole": 1}, {"what": "full"})  # where nothing can be mounted


@needs_strace
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_of_1000_kills_none_tears_or_loses_a_checkpoint() -> None:
    found = _counts(3500, random=800, calls=190, ranks=10)
    assert found["random"] == {"whole": 800}
    assert set(found["calls"]) <= {"whole", "system calls"}
    assert found["ranks"] == {"whole": 10}
