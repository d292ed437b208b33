"""How long a run of `paceline verify` may take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.audit.run_plan import RunPlan
from paceline.verify.session import VerifyOptions, _timeout_s

OPTIONS = VerifyOptions(
    script=["train.py"],
    counts=[1, 2],
    steps=None,
    strict=False,
    bitwise=False,
    rtol=None,
    hang_after_s=20,
    timeout_s=600,
)
ORDINARY = RunPlan(Path("ordinary"), "ordinary", 2, 20)
DIVIDED = RunPlan(Path("divided"), "divided", 2, 20, solo=Path("solo"))


@pytest.mark.parametrize(
    ("plan", "longest_s", "limit_s"),
    [(ORDINARY, 1.0, 600), (DIVIDED, 1.0, 30), (DIVIDED, 9.0, 90), (DIVIDED, 100.0, 600)],
)
def test_a_replay_may_take_ten_times_as_long_as_the_runs_before(
    plan: RunPlan, longest_s: float, limit_s: float
) -> None:
    assert _timeout_s(plan, OPTIONS, longest_s) == limit_s


def test_no_replay_takes_longer_than_the_user_allows() -> None:
    assert _timeout_s(DIVIDED, replace(OPTIONS, timeout_s=10), 5.0) == 10
