"""The reports of failed jobs: all are kept, beside the run if its folder is given."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from paceline.launch import failure_report


@pytest.mark.parametrize("is_given", [True, False])
def test_no_report_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_given: bool
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    log_dir = str(tmp_path / "runs" / "a") if is_given else None
    written = [failure_report.write([], [], f"failure {n}", log_dir) for n in range(13)]
    folder = Path(log_dir or tmp_path / f"paceline-{os.getuid()}" / "reports")
    assert {str(path) for path in folder.iterdir()} == set(written)
    texts = [(Path(path) / "verdict.txt").read_text() for path in written]
    assert texts == [f"failure {n}" for n in range(13)]
