"""A rank that is slower than the others is named with its phase and line, within 50 steps; others are not."""

from __future__ import annotations

from pathlib import Path

import pytest
from stragglers import right, train

CASES = [
    pytest.param("data", 2, False, 0, marks=[]),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [
            ("data", 2, True, 1),
            ("forward", 4, False, 0),
            ("backward", 4, True, 0),
            ("collection of garbage", 2, False, 0),
            ("checkpoint", 2, True, 0),
        ]
    ),
]


@pytest.mark.parametrize(("kind", "world", "ours", "workers"), CASES)
def test_a_slow_rank_is_named(
    tmp_path: Path, kind: str, world: int, ours: bool, workers: int
) -> None:
    for folder in (tmp_path / "first", tmp_path / "again"):
        folder.mkdir()
        run = train(
            folder, kind, world=world, factor=1.5, paceline=ours, workers=workers, steps=200
        )
        if run.said and workers:
            assert "slow: rank 1 (" in run.said, run.said
            assert "\n      data takes " in run.said, run.said
            assert "waiting for a loader's worker: pid " in run.said, run.said
        elif run.said:
            assert right(run, folder, kind), run.said
        if run.steps <= 50:
            break  # else the machine paused while the ranks were looked at: not twice in a row
    assert run.steps <= 50
    assert len(run.said.splitlines()) == 4


@pytest.mark.slow
def test_ranks_of_one_pace_are_not(tmp_path: Path) -> None:
    run = train(tmp_path, "uneven", world=2, steps=80)
    assert run.said == ""
    assert run.steps == 79
