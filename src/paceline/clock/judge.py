"""Says what limits a run, what to change, and how much faster it would be: evidence in, findings out. Pure.

`clock/evidence.py` reduces the record of a run to one step. Each file of `clock/checks` has one function
`check(evidence)`, which yields findings. A new check is a new file there, and a line in `_CHECKS`.

Each cure is judged alone, and only reported if it makes the steps at least 1.1 times as fast.
"""

from __future__ import annotations

from paceline.clock.checks import communication, loading, stalls, stragglers
from paceline.clock.evidence import collect
from paceline.clock.finding import LEAST_GAIN, Finding
from paceline.clock.record import Record

_CHECKS = (stragglers.check, loading.check, communication.check, stalls.check)
CHECKED = "data, slow ranks, communication, checkpoints, evaluation and logging"


def judge(record: Record) -> list[Finding] | None:
    """What limits a run, the best gain first; None if its newest start was too short to tell."""
    evidence = collect(record)
    if evidence is None:
        return None
    findings = [finding for check in _CHECKS for finding in check(evidence)]
    return sorted((f for f in findings if f.gain >= LEAST_GAIN), key=lambda f: -f.gain)
