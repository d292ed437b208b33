"""A hang is explained: which rank, in what, at which line of the script, and within seconds."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hangs import KINDS, expected, script
from launching import start


def verdict(text: str, tmp_path: Path, world: int, *options: str) -> tuple[str, float]:
    """What is said first of a run that hangs, and after how many seconds; the run is then ended."""
    (tmp_path / "train.py").write_text(text)
    process = start(
        [
            "run",
            f"--nproc-per-node={world}",
            "--hang-after=2",
            "--shutdown-timeout=1",
            *options,
            "train.py",
        ],
        tmp_path,
    )
    began = time.monotonic()
    assert process.stderr is not None
    lines: list[str] = []
    try:
        for line in process.stderr:
            lines.append(line)
            if line.startswith(("fix:", "paceline: rank")):
                break
    finally:
        process.terminate()
        process.communicate(timeout=60)
    return "".join(lines[1:]), time.monotonic() - began


CASES = [
    pytest.param(name, world, ours, marks=[pytest.mark.slow] if kind.slow or world != 3 else [])
    for name, kind in KINDS.items()
    for world in (2, 3, 4)
    for ours in (False, True)
    if world == 3 or name in ("sleeps", "calls another collective", "is stopped")
]


@pytest.mark.parametrize(("name", "world", "ours"), CASES)
def test_a_hang_is_explained(tmp_path: Path, name: str, world: int, ours: bool) -> None:
    kind = KINDS[name]
    text = script(kind, paceline=ours)
    said, _ = verdict(text, tmp_path, world)
    assert said.startswith(f"{kind.word}: "), said
    for words in expected(kind, text, world):
        assert words in said, f"{words!r} is not in:\n{said}"
    assert len(said.splitlines()) <= 10
