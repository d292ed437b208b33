"""Each benchmark runs to its end with its smallest options.

`faults.py`, `last_save.py`, `restarts.py` and `verdicts.py` run in the tests of what they check.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from launching import environment

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SMALLEST = {
    "allreduce": "--rounds=1 --ranks 2",
    "checkpoint": "--rounds=1 --nproc 1",
    "clock": "--steps=300",
    "compression": "--rounds=1 --steps=1",
    "dataloader": "--rounds=1 --steps=2",
    "diloco": "--steps=3 --only=loss --rate=1gbit",
    "frameworks": "--rounds=1 --only tiny",
    "gpu": "--rounds=1",
    "layouts": "--rounds=1 --steps=1 --width=64",
    "loader": "--rounds=1",
    "memory": "--rounds=1 --width=64",
    "overhead": "--rounds=1 --steps=20",
    "plan": "predict --hosts 2",
    "precision": "--rounds=1 --only tiny",
    "probe": "--rounds=1",
    "reproducible": "--rounds=1 --steps=5",
    "resume": "--rounds=1",
    "several_hosts": "--rounds=1 --launchers=4",
    "start": "--rounds=1",
    "steps": "--rounds=1 --only tiny",
}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", SMALLEST)
def test_a_benchmark_runs(name: str) -> None:
    done = subprocess.run(
        [sys.executable, BENCHMARKS / f"{name}.py", *SMALLEST[name].split()],
        env=environment(BENCHMARK_RESULTS=""),
        capture_output=True,
        text=True,
        timeout=380,
    )
    if "no hosts" in done.stderr or "skipped" in done.stdout:
        pytest.skip((done.stdout + done.stderr).strip())
    assert done.returncode == 0, done.stderr
    assert "|---" in done.stdout
