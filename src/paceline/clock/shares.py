"""What limits a run of which only the share of each phase is known, from samples of stacks."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.clock.finding import CURES, LEAST_GAIN, Finding, percent

# Phases whose work other processes or threads can do while the step goes on.
_MOVABLE = ("data", "checkpoint", "garbage collection")


def judge_shares(shares: Mapping[str, float]) -> list[Finding]:
    """The phases that could take no time of a step; the gain is an upper bound.

    Args:
        shares: By phase: its share of the time, the mean over ranks.
    """
    findings = [
        Finding(
            kind=phase,
            title=f"{percent(share)} of the time goes to {phase}",
            cure=CURES[phase],
            gain=1 / max(1 - share, 0.01),
        )
        for phase in _MOVABLE
        if (share := shares.get(phase, 0.0))
    ]
    return [finding for finding in findings if finding.gain >= LEAST_GAIN]
