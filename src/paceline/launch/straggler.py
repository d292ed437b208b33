"""Which rank makes the others wait in step after step, at what, and why: from times to a sentence. Pure.

Where ranks wait for each other, all their steps look alike. What differs is when each enters a collective:
the others wait from their own entering to that of the last. A step is one period of the pattern that
collectives make. They may be asynchronous, as DDP's are, and a rank that is late at one of them is late at
those that follow: so the waits of a step are not added up, and the largest is a lower bound. What the ranks
are seen to wait, in profiles of their stacks, is the other one.
"""

from __future__ import annotations

import math
import operator
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from paceline.launch.processes import Moment

LEAST_FACTOR = 1.2
_WINDOWS = (20, 32, 48, 72, 108, 192)  # in steps; what comes seldom needs a longer one
_SUSPECT = 0.13  # of the time
# In standard errors, which of few steps are themselves uncertain: who is late by chance is late as often
# as the others.
_CERTAIN, _CERTAIN_OF_FEW = 4.0, 36
_PAUSE, _SELDOM = 3.0, 0.08  # by what is usual; of the steps, less than any window is certain of
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


@dataclass(frozen=True)
class Profile:
    """What a rank was at for some seconds: (phase, place, seconds) of each.

    Collective: none.
    """

    since_ns: int
    seconds: float
    spent: Sequence[tuple[str, str, float]]

    def share(self, phase: str) -> float:
        """Of the time, in this phase. Collective: none."""
        return sum(seconds for name, _, seconds in self.spent if name == phase) / self.seconds

    def place(self, phase: str) -> str:
        """Where most of a phase was spent. Collective: none."""
        found = [(seconds, place) for name, place, seconds in self.spent if name == phase and place]
        return max(found, default=(0.0, ""))[1]


@dataclass(frozen=True)
class Straggler:
    """A rank that others wait for.

    Args:
        factor: Its own time by that of the others; at least so much.
        wait_s: What the others wait for it, of each step.
        phase: What takes longer there than elsewhere.
        phase_s: Of each step, there and at the others.

    Collective: none.
    """

    rank: int
    factor: float
    step_s: float
    wait_s: float
    phase: str
    phase_s: tuple[float, float]
    place: str


class _Arrival(NamedTuple):
    """A collective that all ranks of its group have entered: when, in ns, by rank."""

    number: int
    elements: int
    at: Mapping[int, int]


def suspects(enters: Enters) -> list[tuple[int, list[Step]]]:
    """Ranks that others seem to wait for in step after step, each with the steps of a group.

    Collective: none.
    """
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
    """The steps that ranks took together, as far as this group shows. Collective: none."""
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
    """The rank that others seem to wait for in step after step. Collective: none."""
    found = []
    windows = [count for count in _WINDOWS if count <= len(steps)]
    for rank in steps[-1].most if windows else ():
        most = [_excess(step.most, rank) for step in steps]
        total = [_excess(step.total, rank) for step in steps]
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


def _excess(late: Mapping[int, float], rank: int) -> float:
    """By how much more it is waited for than the others are: for chance, nothing in the mean."""
    return late[rank] - (sum(late.values()) - late[rank]) / (len(late) - 1)


def spoiled(rank: int, steps: Sequence[Step], profiles: Mapping[int, Profile]) -> bool:
    """Whether profiles do not tell what is so in all steps: some are missing, or a rank paused in one.

    Args: as of `judge`.

    Collective: none.
    """
    late = [abs(_excess(step.most, rank)) for step in steps]
    long_s = _PAUSE * statistics.median(late)
    # What comes more often than pauses is what the suspicion is about.
    seldom = sum(late_s > long_s for late_s in late) < _SELDOM * len(late)
    lengths = sorted(step.length_s for step in steps)
    usual_s = lengths[-1 - int(_SELDOM * len(lengths))]
    for member in steps[-1].most:
        profile = profiles.get(member)
        during = [step for step in steps if profile and step.begun_ns >= profile.since_ns]
        if profile is None or len(during) < 3:
            return True
        # At its ends a profile has parts of steps; more than those is a step that is not over.
        if profile.seconds - sum(step.length_s for step in during) > 2 * usual_s:
            return True
        if seldom and any(abs(_excess(step.most, rank)) > long_s for step in during):
            return True
    return False


def judge(rank: int, steps: Sequence[Step], profiles: Mapping[int, Profile]) -> Straggler | None:
    """Whether this rank takes longer than the others, and at what.

    Args:
        steps: Of a group, as far as they are known; those of the time of its profile count.
        profiles: By rank, of all in the group; not `spoiled`.

    Collective: none.
    """
    own = profiles[rank]
    during = [step for step in steps if step.begun_ns >= own.since_ns]
    others = [profiles[other] for other in during[0].most if other != rank]
    step_s = statistics.fmean(step.length_s for step in during)
    late = statistics.fmean(_excess(step.most, rank) for step in during) / step_s

    def share(phase: str) -> float:
        return statistics.fmean(profile.share(phase) for profile in others)

    seen = max(share("waiting") - own.share("waiting"), 0.0)
    busy = 1 - own.share("waiting")
    wait = max(seen, late)
    if wait <= 0 or busy / max(busy - wait, 0.01) < LEAST_FACTOR:
        return None
    # DDP waits within a backward, where a stack does not show it.
    hidden = {"backward": wait - seen}
    phases = {name for profile in profiles.values() for name, _, _ in profile.spent} - {"waiting"}
    elsewhere = {phase: max(share(phase) - hidden.get(phase, 0.0), 0.0) for phase in phases}
    phase = max(phases, key=lambda phase: own.share(phase) - elsewhere[phase])
    return Straggler(
        rank=rank,
        factor=busy / max(busy - wait, 0.01),
        step_s=step_s,
        wait_s=wait * step_s,
        phase=phase,
        phase_s=(own.share(phase) * step_s, elsewhere[phase] * step_s),
        place=own.place(phase),
    )


def render(found: Straggler, who: str, where: str, before: Moment, after: Moment, pid: int) -> str:
    """Four lines on a straggler.

    Args:
        who: Its host and process.
        where: Its place in the script.
        before, after: The host, at the profile's beginning and end.

    Collective: none.
    """
    here_s, there_s = found.phase_s
    why, fix = _host(before, after, pid, found.wait_s / found.step_s)
    return (
        f"slow: rank {found.rank} ({who}) takes {found.factor:.2f}x the time of the others: they "
        f"wait {_short(found.wait_s)} for it in each step of {_short(found.step_s)}\n"
        f"      {found.phase} takes {_short(here_s)} there, {_short(there_s)} elsewhere"
        f"{': ' if where else ''}{where}\n"
        f"why:  {why}\n"
        f"fix:  {fix or _FIXES[found.phase]}\n"
    )


_FIXES = {
    "data": "give its samples to loader workers (num_workers), or make what stands there cheaper.",
    "forward": "see whether it has larger or more samples than the others, or more of the model.",
    "backward": "see whether it has larger or more samples than the others, or more of the model.",
    "optimizer": "see whether it has more parameters to update than the others, or does more there.",
    "collection of garbage": "gc.freeze() once all is built; or gc.disable(), and gc.collect() every "
    "so many steps on all ranks at once.",
    "checkpoint": "save seldom, in the background, or shared among ranks (paceline.Checkpoints does).",
    "the script": "do it on all ranks, seldom, or in another thread or process.",
}


def _short(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _host(before: Moment, after: Moment, pid: int, lost: float) -> tuple[str, str]:
    """What the host did meanwhile, and what to do where that explains much of what was lost."""
    passed_s = after.time_s - before.time_s

    def delay(rank: int) -> float:
        return (after.delay_s.get(rank, 0.0) - before.delay_s.get(rank, 0.0)) / passed_s

    def rate(number: int, name: str) -> float:
        now, then = after.processes.get(number), before.processes.get(number)
        if now is None or then is None:
            return 0.0
        return float(getattr(now, name) - getattr(then, name)) / passed_s

    others = [rank for rank in after.delay_s if rank != pid]
    throttled = (after.throttled_s - before.throttled_s) / passed_s
    waits = delay(pid)
    if throttled > 0.1:
        why = (
            f"the CPU limit of the control group held ranks up {min(throttled, 1):.0%} of the time."
        )
        return why, "raise the limit, or start fewer ranks or threads (OMP_NUM_THREADS)."
    if waits - statistics.fmean(map(delay, others)) > lost / 3:
        job = {number for rank, below in after.ranks.items() for number in (rank, *below)}
        use = sorted(((rate(n, "cpu_s"), n) for n in after.processes if n not in job), reverse=True)
        most = [
            f"pid {number} ({after.processes[number].name}) uses {cores:.1f} of one"
            for cores, number in use[:2]
            if cores > 0.2
        ]
        why = f"its host had no core for it {waits:.0%} of the time"
        return (
            f"{'; '.join([why, *most])}.",
            "end what else runs there, or give the ranks cores of their own, and fewer threads.",
        )
    faults = rate(pid, "faults")
    if faults > 20 + 2 * statistics.fmean(rate(rank, "faults") for rank in others):
        why = f"its host had to read {faults:.0f} pages of its memory a second from a disk."
        return why, "see that memory is enough, and that its files are in it."
    usual = statistics.median([after.mhz[rank] for rank in others if rank in after.mhz] or [0.0])
    if 0 < after.mhz.get(pid, usual) < 0.8 * usual:
        why = f"its core runs at {after.mhz[pid]:.0f} MHz, those of the others at {usual:.0f}."
        return why, "look at the host's cooling and power settings."
    used = min(rate(pid, "cpu_s"), 99.0)
    return (
        f"its code, not its host: it used {used:.1f} cores, and waited for one {waits:.0%} of the time.",
        "",
    )
