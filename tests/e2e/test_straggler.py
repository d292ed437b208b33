"""A rank that is slower than the others is named, with its phase and line; ranks of equal speed are not."""

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
            ("garbage collection", 2, False, 0),
            ("checkpoint", 2, True, 0),
        ]
    ),
]


@pytest.mark.parametrize(("kind", "world", "ours", "workers"), CASES)
def test_a_slow_rank_is_named(
    tmp_path: Path, kind: str, world: int, ours: bool, workers: int
) -> None:
    # After how many steps it is named depends on the machine: benchmarks/stragglers.py counts them, and
    # tests/unit/test_watch_straggler.py bounds them where time is simulated.
    run = train(tmp_path, kind, world=world, factor=1.5, paceline=ours, workers=workers, steps=2000)
    if workers:
        assert "slow: rank 1 (" in run.said
        assert "\n      data takes " in run.said
        assert "waiting for a loader worker: pid " in run.said
    else:
        assert right(run, tmp_path, kind), run.said
    assert len(run.said.splitlines()) == 4


@pytest.mark.slow
def test_ranks_of_one_pace_are_not(tmp_path: Path) -> None:
    run = train(tmp_path, "uneven", world=2, steps=80)
    assert run.said == ""
    assert run.steps == 79
