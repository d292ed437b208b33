"""Which rank makes the others wait in step after step: from the times of collectives to a suspect. Pure.

Where ranks wait for each other, all their steps look alike. What differs is when each enters a collective:
the others wait from their own entering to that of the last. A step is one period of the pattern that
collectives make. They may be asynchronous, as DDP's are, and a rank that is late at one of them is late at
those that follow: so the waits of a step are not added up, and the largest is a lower bound.
"""

from __future__ import annotations

import math
import operator
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

_WINDOWS = (20, 32, 48, 72, 108, 192)  # in steps; what comes seldom needs a longer one
_SUSPECT = 0.13  # of the time
# In standard errors, which of few steps are themselves uncertain: who is late by chance is late as often
# as the others.
_CERTAIN, _CERTAIN_OF_FEW = 4.0, 36
_LATEST = 32  # steps
_LEAST_S = 1e-3  # of a step; less is the machine's unrest
_LIKE = 0.7  # of the collectives repeat with the period
_PATTERN = 512  # collectives in which it is looked for
_SMALL = 0.01  # of the largest: barriers and logged numbers do not make the pattern

Key = tuple[str, int]  # a group's name, and the number of a collective in it
# By rank: when it entered each, in ns, and with how many elements.
Enters = Mapping[int, Mapping[Key, tuple[int, int]]]


@dataclass(frozen=True)
class Step:
    """One period of the pattern that the collectives make.

    Args:
        begun_ns: Since the epoch.
        most: By rank, the longest that others waited for it at one collective, in seconds.
        total: By rank, what they waited at most in all of them.

    Collective: none.
    """

    begun_ns: int
    length_s: float
    most: Mapping[int, float]
    total: Mapping[int, float]

    @property
    def end_ns(self) -> int:
        """Since the epoch. Collective: none."""
        return self.begun_ns + int(self.length_s * 1e9)


class _Arrival(NamedTuple):
    """A collective that all ranks of its group have entered: when, in ns, by rank."""

    number: int
    elements: int
    at: Mapping[int, int]


def suspects(enters: Enters) -> list[tuple[int, list[Step]]]:
    """Ranks that others seem to wait for in step after step, each with the steps of a group."""
    found: list[tuple[int, list[Step]]] = []
    held: set[int] = set()
    groups = {group for entered in enters.values() for group, _ in entered}
    of_groups = filter(None, (read_steps(enters, group) for group in groups))
    for steps in sorted(of_groups, key=lambda steps: len(steps[-1].most)):
        rank = suspect(steps)
        # Who is late in a large group may only wait for another in a small one.
        if rank is not None and rank not in held:
            found.append((rank, steps))
            held |= steps[-1].most.keys()
    return found


def read_steps(enters: Enters, group: str) -> list[Step]:
    """The steps that ranks took together, as far as this group shows."""
    arrivals = _arrivals(enters, group)
    least = max((arrival.elements for arrival in arrivals), default=0) * _SMALL
    steps: list[Step] = []
    for run in _runs(arrivals):
        large = [index for index, arrival in enumerate(run) if arrival.elements >= least]
        if period := _period([run[index].elements for index in large]):
            cuts = large[(len(large) - 1) % period :: period][-_WINDOWS[-1] - 1 :]
            steps += [_step(run[first : last + 1]) for first, last in pairwise(cuts)]
    return steps


def _arrivals(enters: Enters, group: str) -> list[_Arrival]:
    of_group = {
        rank: {number: at for (name, number), at in entered.items() if name == group}
        for rank, entered in enters.items()
    }
    members = {rank: at for rank, at in of_group.items() if at}
    if len(members) < 2:
        return []
    first = next(iter(members.values()))
    return [
        _Arrival(number, first[number][1], {rank: at[number][0] for rank, at in members.items()})
        for number in sorted(set.intersection(*map(set, members.values())))
    ]


def _runs(arrivals: Sequence[_Arrival]) -> list[list[_Arrival]]:
    """Parted where collectives are missing: a recorder keeps only so many."""
    runs: list[list[_Arrival]] = [[]]
    for arrival in arrivals:
        if runs[-1] and runs[-1][-1].number != arrival.number - 1:
            runs.append([])
        runs[-1].append(arrival)
    return runs


def _period(kinds: Sequence[int]) -> int:
    """After how many collectives they repeat; 0 if they do not."""
    kinds = kinds[-_PATTERN:]
    best, period = _LIKE, 0
    for length in range(1, len(kinds) // 3 + 1):
        alike = sum(map(operator.eq, kinds, kinds[length:])) / (len(kinds) - length)
        # Longer only where that explains more; twice the period fits as well.
        if alike > best + 0.02 * (period > 0):
            best, period = alike, length
        if best > 0.98:
            break
    return period


def _step(run: Sequence[_Arrival]) -> Step:
    """From the last collective of the step before, with which `run` begins, to its own."""
    most, total = dict.fromkeys(run[0].at, 0.0), dict.fromkeys(run[0].at, 0.0)
    for arrival in run[1:]:
        # The lower median of the others is the same for all who come after it.
        usual_ns = sorted(arrival.at.values())[len(most) // 2 - 1]
        for rank, at_ns in arrival.at.items():
            if at_ns > usual_ns:
                late_s = (at_ns - usual_ns) / 1e9
                most[rank] = max(most[rank], late_s)
                total[rank] += late_s
    begun_ns = max(run[0].at.values())
    length_s = (max(run[-1].at.values()) - begun_ns) / 1e9
    total = {rank: min(late_s, length_s) for rank, late_s in total.items()}
    return Step(begun_ns, length_s, most, total)


def suspect(steps: Sequence[Step]) -> int | None:
    """The rank that others seem to wait for in step after step."""
    found = []
    windows = [count for count in _WINDOWS if count <= len(steps)]
    for rank in steps[-1].most if windows else ():
        most = [excess(step.most, rank) for step in steps]
        total = [excess(step.total, rank) for step in steps]
        for count in windows:
            late, waited = most[-count:], total[-count:]
            lengths = [step.length_s for step in steps[-count:]]
            share = max(
                _share(late, waited, statistics.fmean(lengths)),
                # Pauses now and then, of whichever rank, hide who is late in each step.
                _share(_usual(late), _usual(waited), statistics.median(lengths)),
            )
            found.append((share, rank))
    share, rank = max(found, default=(0.0, 0))
    return rank if share >= _SUSPECT else None


def _share(late: Sequence[float], waited: Sequence[float], length_s: float) -> float:
    """How much of their time the others wait for a rank; 0 where that may be chance."""
    count = len(late)
    mean, wait_s = statistics.fmean(late), statistics.fmean(waited)
    error = math.sqrt(sum((one - mean) ** 2 for one in late)) / count
    certain = mean >= (_CERTAIN + _CERTAIN_OF_FEW / count) * error
    return wait_s / length_s if certain and wait_s >= _LEAST_S else 0.0


def _usual(values: Sequence[float]) -> list[float]:
    """Each no larger than is usual among them, whatever its sign: what is even about 0 stays so."""
    most = statistics.median(map(abs, values))
    return [max(-most, min(one, most)) for one in values]


def excess(late: Mapping[int, float], rank: int) -> float:
    """By how much more it is waited for than the others are: for chance, nothing in the mean."""
    return late[rank] - (sum(late.values()) - late[rank]) / (len(late) - 1)


def in_most(rank: int, steps: Sequence[Step]) -> bool:
    """Whether it was late in most of the latest steps, and by about as much."""
    late = sorted(latest(rank, steps))
    return late[len(late) // 4] > late[len(late) // 2] / 2 > 0


def latest(rank: int, steps: Sequence[Step]) -> list[float]:
    """How late it was in each of the latest steps, in seconds."""
    return [excess(step.most, rank) for step in steps[-_LATEST:]]
