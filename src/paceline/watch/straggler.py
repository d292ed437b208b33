"""What a rank is at that the others wait for, by how much it is slower, and why: to a sentence. Pure.

That they wait is known by the times of collectives (lateness.py), which is a lower bound. What the ranks are
seen to wait, in profiles of their stacks, is the other one.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from paceline.watch.lateness import Step, excess, in_most, latest
from paceline.watch.processes import Moment

_LEAST_FACTOR = 1.2
_PARTS = 5, 8  # of a profile, whole steps each: at least, and at most

Average = Callable[[Iterable[float]], float]
Place = tuple[str, str]  # a phase, and where in the script


@dataclass(frozen=True)
class Profile:
    """What a rank was at for some seconds.

    Args:
        since_ns: Since the epoch.
        spent: (phase, place, seconds), one after the other.
    """

    since_ns: int
    spent: Sequence[tuple[str, str, float]]

    def until_ns(self) -> float:
        """When it ended."""
        return self.since_ns + sum(seconds for _, _, seconds in self.spent) * 1e9

    def between(self, begun_ns: float, end_ns: float) -> dict[Place, float]:
        """Seconds within this time, by phase and place."""
        spent: dict[Place, float] = defaultdict(float)
        at_ns = float(self.since_ns)
        for phase, place, seconds in self.spent:
            next_ns = at_ns + seconds * 1e9
            if next_ns > begun_ns and at_ns < end_ns:
                within_ns = min(next_ns, end_ns) - max(at_ns, begun_ns)
                spent[phase, place] += within_ns / 1e9
            at_ns = next_ns
        return spent


@dataclass(frozen=True)
class Part:
    """Some steps of the time of a profile, one after the other.

    Args:
        late_s: By rank, how long the others wait for it, at least; of each step.
        spent: By rank, phase and place; of each step, in seconds.
    """

    step_s: float
    late_s: Mapping[int, float]
    spent: Mapping[int, Mapping[Place, float]]

    def in_phase(self, rank: int, phase: str) -> float:
        """Seconds of each step."""
        return sum(seconds for (name, _), seconds in self.spent[rank].items() if name == phase)


@dataclass(frozen=True)
class Straggler:
    """A rank that others wait for.

    Args:
        factor: Its own time by that of the others; at least so much.
        wait_s: What the others wait for it, of each step.
        phase: What takes longer there than elsewhere.
        phase_s: Of each step, there and at the others.
        seldom: Not in most steps: it may have been a pause.
    """

    rank: int
    factor: float
    step_s: float
    wait_s: float
    phase: str
    phase_s: tuple[float, float]
    place: str
    seldom: bool = False


def parts(steps: Sequence[Step], profiles: Mapping[int, Profile]) -> list[Part]:
    """A profile's whole steps in a few parts; none where it has too few steps, or a rank has no profile.

    Args:
        steps: Of a group, as far as they are known.
        profiles: By rank.
    """
    members = steps[-1].most.keys()
    if not members <= profiles.keys():
        return []
    begun_ns = max(profiles[rank].since_ns for rank in members)
    end_ns = min(profiles[rank].until_ns() for rank in members)
    during = [step for step in steps if step.begun_ns >= begun_ns and step.end_ns <= end_ns]
    if len(during) < _PARTS[0]:
        return []
    count = min(len(during), _PARTS[1])
    cuts = [len(during) * n // count for n in range(count + 1)]
    return [_part(during[first:last], profiles) for first, last in pairwise(cuts)]


def _part(run: Sequence[Step], profiles: Mapping[int, Profile]) -> Part:
    spent = {rank: profiles[rank].between(run[0].begun_ns, run[-1].end_ns) for rank in run[0].most}
    return Part(
        step_s=statistics.fmean(step.length_s for step in run),
        late_s={rank: statistics.fmean(excess(step.most, rank) for step in run) for rank in spent},
        spent={
            rank: {which: seconds / len(run) for which, seconds in own.items()}
            for rank, own in spent.items()
        },
    )


def judge(rank: int, found: Sequence[Part], steps: Sequence[Step]) -> Straggler | None:
    """Whether this rank takes longer than the others, and at what.

    Args:
        found: Of its group; not empty.
        steps: Of its group, as far as they are known.
    """
    if in_most(rank, steps):
        # By medians, which a pause in some steps does not change. How late, more steps tell better.
        late_s = statistics.median(latest(rank, steps))
        usual = _judge(rank, found, statistics.median, late_s)
        if usual is not None:
            return usual
    late_s = statistics.fmean(part.late_s[rank] for part in found)
    seldom = _judge(rank, found, statistics.fmean, late_s)
    return replace(seldom, seldom=True) if seldom is not None else None


def _judge(rank: int, found: Sequence[Part], average: Average, late_s: float) -> Straggler | None:
    others = [other for other in found[0].spent if other != rank]

    def own(phase: str) -> float:
        return average(part.in_phase(rank, phase) for part in found)

    def theirs(phase: str) -> float:
        return average(
            statistics.fmean(part.in_phase(other, phase) for other in others) for part in found
        )

    step_s = average(part.step_s for part in found)
    seen_s = max(theirs("waiting") - own("waiting"), 0.0)
    busy_s = step_s - own("waiting")
    wait_s = max(seen_s, late_s)
    factor = busy_s / max(busy_s - wait_s, 0.01 * step_s)
    if wait_s <= 0 or factor < _LEAST_FACTOR:
        return None
    # DDP waits within a backward, where a stack does not show it.
    hidden = {"backward": wait_s - seen_s}
    seen = {which for part in found for spent in part.spent.values() for which in spent}
    phases = {name for name, _ in seen} - {"waiting"}
    elsewhere = {phase: max(theirs(phase) - hidden.get(phase, 0.0), 0.0) for phase in phases}
    phase = max(phases, key=lambda phase: own(phase) - elsewhere[phase])

    def most(place: str) -> tuple[float, float]:
        # Of many lines each may be seen in few parts only.
        spent = [part.spent[rank].get((phase, place), 0.0) for part in found]
        return average(spent), statistics.fmean(spent)

    return Straggler(
        rank=rank,
        factor=factor,
        step_s=step_s,
        wait_s=wait_s,
        phase=phase,
        phase_s=(own(phase), elsewhere[phase]),
        place=max((place for name, place in seen if name == phase and place), key=most, default=""),
    )


def render(found: Straggler, who: str, where: str, before: Moment, after: Moment, pid: int) -> str:
    """Four lines on a straggler.

    Args:
        who: Its host and process.
        where: Its place in the script.
        before, after: The host, at the profile's beginning and end.
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
