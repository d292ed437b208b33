"""Checkpoints, evaluation and logging: phases for which the training pauses in some steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.clock.evidence import Evidence
from paceline.clock.finding import Finding, percent


@dataclass(frozen=True, kw_only=True)
class Stall:
    """What to do about a phase for which the training pauses.

    Args:
        cure: What to change.
        share_left: What the phase takes after that, as a share of what it takes now.
        is_share_of_run: Whether `share_left` is a share of the time of the run instead.
    """

    cure: str
    share_left: float


STALLS = {
    "checkpoint": Stall(cure="save half as often", share_left=0.5),
    "evaluation": Stall(cure="evaluate half as often", share_left=0.5),
    "logging": Stall(cure="call training.log in a tenth of the steps", share_left=0.1),
}


def check(evidence: Evidence) -> Iterator[Finding]:
    """Phases that take a large part of the time. Sums, not medians: a pause is in few of the windows."""
    windows = evidence.windows
    wall_s = sum(sum(window.wall_s) for window in windows)
    for phase, stall in STALLS.items():
        stall_s = sum(sum(window.spent_s[phase]) for window in windows)
        left_s = stall.share_left * stall_s
        if left_s < stall_s:
            yield Finding(
                kind=phase,
                title=f"{phase} takes {percent(stall_s / wall_s)} of the time",
                cure=stall.cure,
                gain=wall_s / (wall_s - stall_s + left_s),
                details=f"It then takes {percent(stall.share_left)} of what it takes now.",
            )
