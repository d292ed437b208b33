"""Ranks that the others wait for in each step.

The rank that waits least is the slowest one. It is late if at least half of the other ranks wait for it long
enough, in most of the windows. `find_late` finds such ranks; `judge_late` says how much slower they are, and
in which phase.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, median_low

from paceline.clock.evidence import Evidence, is_long
from paceline.clock.finding import CURES, LEAST_GAIN, Finding, duration
from paceline.clock.step_clock import WAITS
from paceline.errors import name_ranks

_LEAST_FACTOR = 1.2  # of a rank's own time by that of the others


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """Ranks that the others wait for in each step.

    Args:
        ranks: Those that take longer in the same phase.
        factor: Their own time by that of the others: a lower bound.
        step_s: Length of a step.
        wait_s: Time per step that the others wait for them.
        phase: The phase that takes longer on these ranks than on the others.
        phase_s: Seconds per step in that phase, on these ranks and on the others.
    """

    ranks: Sequence[int]
    factor: float
    step_s: float
    wait_s: float
    phase: str
    phase_s: tuple[float, float]

    def title(self, names: str) -> str:
        """The sentence about them; `names` are "rank 3" or "ranks 2 and 3"."""
        takes, it = ("take", "them") if len(self.ranks) > 1 else ("takes", "it")
        return (
            f"{names} {takes} {self.factor:.2f}x the time of the others: they wait {duration(self.wait_s)} "
            f"for {it} in each step of {duration(self.step_s)}"
        )

    @property
    def comparison(self) -> str:
        """How long the phase takes on these ranks and on the others."""
        what = "the rest of the loop" if self.phase == "other" else self.phase
        here_s, there_s = self.phase_s
        it = "them" if len(self.ranks) > 1 else "it"
        return f"{what} takes {duration(here_s)} on {it}, {duration(there_s)} on the others"


def check(evidence: Evidence) -> Iterator[Finding]:
    """The slowest rank, with those that take longer in the same phase."""
    waits_s = [
        {rank: sum(window.per_step(phase, rank) for phase in WAITS) for rank in evidence.ranks}
        for window in evidence.windows
    ]
    late = find_late(waits_s, evidence.step_s)
    if not late:
        return
    others = [rank for rank in evidence.ranks if rank not in late]
    own = {name: seconds for name, seconds in evidence.spent_s.items() if name not in WAITS}
    others_s = {name: median(seconds[rank] for rank in others) for name, seconds in own.items()}

    def slower_phase(rank: int) -> str:
        return max(own, key=lambda name: own[name][rank] - others_s[name])

    same_phase = [rank for rank in late if slower_phase(rank) == slower_phase(late[0])]
    found = judge_late(
        same_phase,
        step_s=evidence.step_s,
        wait_s=fmean(waited_for_s(waits_s, rank) for rank in same_phase),
        own_s=fmean(evidence.own_s(rank) for rank in same_phase),
        phases_s={name: (fmean(own[name][r] for r in same_phase), others_s[name]) for name in own},
    )
    if found is None or (found.phase == "data" and evidence.run.get("workers")):
        return  # clock/checks/loading.py says when workers are too slow
    details = "The gain is that of ranks as fast as the next slowest."
    if rest := set(late).difference(same_phase):
        details += (
            f" This includes {name_ranks(rest)}, which the others wait for too, in another phase."
        )
    next_s = max(evidence.own_s(rank) for rank in others)
    yield Finding(
        kind="straggler",
        title=f"{found.title(name_ranks(same_phase))} ({found.comparison})",
        cure=CURES[found.phase],
        gain=found.step_s / (found.step_s - max(evidence.own_s(late[0]) - next_s, 0.0)),
        details=details,
    )


def find_late(waits_s: Sequence[Mapping[int, float]], step_s: float) -> list[int]:
    """The ranks that the others wait for in most steps of `step_s`, if any; the slowest first.

    Further ranks are late with the slowest one if they wait so little that it would not help to make the
    slowest one alone faster.

    Args:
        waits_s: In each of some windows of steps, by rank: the seconds per step that it waits for others.
    """
    if len(waits_s[0]) < 2:
        return []
    usual_s = {rank: median(window[rank] for window in waits_s) for rank in waits_s[0]}
    slowest_first = sorted(usual_s, key=lambda rank: usual_s[rank])
    slowest = slowest_first[0]
    waited_s = sorted(_waited_for_by_window_s(waits_s, slowest))
    usual_waited_s = median(waited_s)
    # Most are about as large as their median. Random ones would have both signs.
    is_steady = waited_s[len(waited_s) // 4] > usual_waited_s / 2 > 0
    if not (is_steady and is_long(usual_waited_s, step_s)):
        return []
    little_s = min(step_s - step_s / LEAST_GAIN, usual_waited_s / 2)
    late = [rank for rank in slowest_first if usual_s[rank] - usual_s[slowest] < little_s]
    return late if len(late) < len(slowest_first) else []  # if all are late, none is slower


def waited_for_s(waits_s: Sequence[Mapping[int, float]], rank: int) -> float:
    """How long at least half of the other ranks wait for this one in a step: the median over the windows."""
    return median(_waited_for_by_window_s(waits_s, rank))


def _waited_for_by_window_s(waits_s: Sequence[Mapping[int, float]], rank: int) -> list[float]:
    """The same in each window: how much longer than this rank the others wait."""
    return [
        median_low([wait_s for other, wait_s in window.items() if other != rank]) - window[rank]
        for window in waits_s
    ]


def judge_late(
    late: Sequence[int],
    *,
    step_s: float,
    wait_s: float,
    own_s: float,
    phases_s: Mapping[str, tuple[float, float]],
) -> Straggler | None:
    """How much slower these ranks are, and in which phase; None if the factor is too small to report.

    Args:
        wait_s: Time per step that the others wait for them.
        own_s: Time of a step in which they do not wait for others.
        phases_s: By phase, without waits: seconds of a step on these ranks, and on the others.
    """
    factor = own_s / max(own_s - wait_s, 0.01 * step_s)
    if factor < _LEAST_FACTOR:
        return None
    phase = max(phases_s, key=lambda name: phases_s[name][0] - phases_s[name][1])
    return Straggler(
        ranks=late,
        factor=factor,
        step_s=step_s,
        wait_s=wait_s,
        phase=phase,
        phase_s=phases_s[phase],
    )
