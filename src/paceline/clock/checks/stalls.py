"""Checkpoints, evaluation and logging: phases for which the training pauses in some steps."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.clock.evidence import Evidence
from paceline.clock.finding import Finding, percent

# By phase: what to change, and what the phase takes after that, as a share of what it takes now.
STALLS = {
    "checkpoint": ("save half as often", 0.5),
    "evaluation": ("evaluate half as often", 0.5),
    "logging": ("call training.log in a tenth of the steps", 0.1),
}


def check(evidence: Evidence) -> Iterator[Finding]:
    """Phases that take a large part of the time. Sums, not medians: a pause is in few of the windows."""
    windows = evidence.windows
    wall_s = sum(sum(window.wall_s) for window in windows)
    for phase, (cure, share_left) in STALLS.items():
        stall_s = sum(sum(window.spent_s[phase]) for window in windows)
        yield Finding(
            kind=phase,
            title=f"{phase} takes {percent(stall_s / wall_s)} of the time",
            cure=cure,
            gain=wall_s / (wall_s - (1 - share_left) * stall_s),
            details=f"It then takes {percent(share_left)} of what it takes now.",
        )
