"""The reports of failed jobs: the newest ones are kept, and only reports are removed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from paceline.job import rendezvous
from paceline.job.environment import read
from paceline.launch import failure_report

MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


def test_only_old_reports_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with rendezvous._port_file(read(MPIRUN), 4711):
        private = tmp_path / f"paceline-{os.getuid()}"
        before = {path: path.read_text() for path in (private / "rendezvous").iterdir()}
        assert "4711" in before.values()
        written = [Path(failure_report.write([], [], "a rank failed", None)) for _ in range(13)]
        assert {path: path.read_text() for path in (private / "rendezvous").iterdir()} == before
    assert {path.name for path in private.iterdir()} == {"reports", "rendezvous"}
    kept = [path for path in written if path.exists()]
    assert len(kept) == 10
    assert sorted(kept) == sorted((private / "reports").iterdir())
    assert written[-1] in kept
