"""Finds a rank that makes the others wait in every step, and says why: evidence in, text out. Pure.

1. The times at which ranks enter collectives show which rank the others wait for. Steps take
   equally long on all ranks, since ranks wait for each other; only the times of arrival differ.
2. Stack samples of all ranks show in which phase the late rank spends more time than the others.
3. What the host did meanwhile says whether the cause is the rank's code or its host.

`clock/checks/stragglers.py` decides, as it does from the times of the step clock; this file reduces its
evidence to the same form. Everything is a median over the steps of one window, so pauses in some of them
change nothing.
"""

from __future__ import annotations

import operator
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from paceline.clock.checks import stragglers
from paceline.clock.checks.stragglers import Straggler
from paceline.clock.finding import CURES
from paceline.errors import name_ranks
from paceline.watch.processes import HostSample
from paceline.watch.report import render
from paceline.watch.sampling import WAITING

# A rank that is slow in every tenth step only is found by comparing blocks of ten steps.
_STEPS_PER_BLOCK = (1, 10)
_LEAST_BLOCKS, _MOST_BLOCKS = 20, 64  # that are judged
_LEAST_PROFILED, _WANTED_PROFILED = 5, 8  # blocks in a profile
_LEAST_DELAY = 0.1  # share of the time without a core, above which the host counts as too small
_REPEATING = 0.7  # share of the collectives that repeat with the period
_PATTERN = 512  # collectives in which the period is searched
_SMALL = 0.01  # of the largest tensor: barriers and logged numbers are not part of the pattern

Key = tuple[str, int]  # a group's name, and the number of a collective in it
PhasePlace = tuple[str, str]  # a phase, and the line of the script
# By rank and collective: when the rank entered it, in ns since the epoch, and its number of elements.
Arrivals = Mapping[int, Mapping[Key, tuple[int, int]]]


@dataclass(frozen=True)
class Block:
    """One or more training steps, as far as the collectives of a group show them.

    Args:
        begin_ns, end_ns: Since the epoch.
        longest_wait_s: By rank, its longest wait for the others at one collective of a step: a lower bound
            of its total wait. For several steps it is the mean.
        summed_wait_s: The same for the sum of its waits at all collectives of a step: an upper bound, since
            an asynchronous collective passes a delay on to the next.
    """

    begin_ns: int
    end_ns: int
    steps: int
    longest_wait_s: Mapping[int, float]
    summed_wait_s: Mapping[int, float]

    @property
    def step_s(self) -> float:
        """Length of a step in seconds."""
        return (self.end_ns - self.begin_ns) / 1e9 / self.steps


@dataclass(frozen=True)
class Suspect:
    """Ranks that the others seem to wait for, the slowest first, and the blocks of a group that show it."""

    ranks: Sequence[int]
    blocks: Sequence[Block]

    @property
    def profile_s(self) -> float:
        """Seconds that a profile needs for enough whole blocks."""
        block_s = [block.step_s * block.steps for block in self.blocks]
        return (_WANTED_PROFILED + 1) * statistics.median(block_s)


@dataclass(frozen=True)
class Profile:
    """Samples of the stack of one rank's main thread.

    Args:
        begin_ns: Since the epoch.
        spent: (phase, place, seconds) in order of time.
    """

    begin_ns: int
    spent: Sequence[tuple[str, str, float]]

    @property
    def end_ns(self) -> float:
        """Since the epoch."""
        return self.begin_ns + sum(seconds for _, _, seconds in self.spent) * 1e9

    def between(self, begin_ns: int, end_ns: int) -> dict[PhasePlace, float]:
        """Seconds by phase and place within this time."""
        found: dict[PhasePlace, float] = defaultdict(float)
        now_ns = float(self.begin_ns)
        for phase, place, seconds in self.spent:
            next_ns = now_ns + seconds * 1e9
            if next_ns > begin_ns and now_ns < end_ns:
                found[phase, place] += (min(next_ns, end_ns) - max(now_ns, begin_ns)) / 1e9
            now_ns = next_ns
        return found


def find_suspects(arrivals: Arrivals) -> list[Suspect]:
    """Ranks that the others seem to wait for, without those that wait for another in a smaller group."""
    found: list[Suspect] = []
    explained: set[int] = set()
    groups = {group for entered in arrivals.values() for group, _ in entered}
    steps_of = [steps for group in groups if (steps := read_steps(arrivals, group))]
    for steps in sorted(steps_of, key=lambda steps: len(steps[-1].longest_wait_s)):
        suspect = _suspect(steps)
        if suspect is not None and not explained.issuperset(suspect.ranks):
            late = [rank for rank in suspect.ranks if rank not in explained]
            found.append(Suspect(late, suspect.blocks))
            explained |= steps[-1].longest_wait_s.keys()
    return found


def _suspect(steps: Sequence[Block]) -> Suspect | None:
    for size in _STEPS_PER_BLOCK:
        blocks = merge(steps, size)[-_MOST_BLOCKS:]
        if len(blocks) < _LEAST_BLOCKS:
            continue
        step_s = statistics.median(block.step_s for block in blocks)
        if late := stragglers.find_late([block.summed_wait_s for block in blocks], step_s):
            return Suspect(late, blocks)
    return None


def read_steps(arrivals: Arrivals, group: str) -> list[Block]:
    """The steps of a group: the periods of the pattern that its collectives make."""
    by_rank = {
        rank: {number: at for (name, number), at in entered.items() if name == group}
        for rank, entered in arrivals.items()
    }
    by_rank = {rank: entered for rank, entered in by_rank.items() if entered}
    if len(by_rank) < 2:
        return []
    elements = {number: size for number, (_, size) in next(iter(by_rank.values())).items()}
    # Split where collectives are missing: a flight recorder keeps a limited number.
    runs: list[list[int]] = []
    for number in sorted(set.intersection(*map(set, by_rank.values()))):
        if not runs or runs[-1][-1] != number - 1:
            runs.append([])
        runs[-1].append(number)
    least = _SMALL * max((elements[number] for run in runs for number in run), default=0)
    steps: list[Block] = []
    for run in runs:
        large = [index for index, number in enumerate(run) if elements[number] >= least]
        if period := _period([elements[run[index]] for index in large]):
            cuts = large[(len(large) - 1) % period :: period]
            at_ns = [{rank: entered[n][0] for rank, entered in by_rank.items()} for n in run]
            steps += [_read_step(at_ns[first : last + 1]) for first, last in pairwise(cuts)]
    return steps


def _period(sizes: Sequence[int]) -> int:
    """After how many collectives their sizes repeat; 0 if they do not."""
    sizes = sizes[-_PATTERN:]
    best, period = _REPEATING, 0
    for length in range(1, len(sizes) // 3 + 1):
        repeating = sum(map(operator.eq, sizes, sizes[length:])) / (len(sizes) - length)
        # A multiple of the period fits as well, so a longer one has to explain more.
        if repeating > best + 0.02 * (period > 0):
            best, period = repeating, length
        if best > 0.98:
            break
    return period


def _read_step(arrivals: Sequence[Mapping[int, int]]) -> Block:
    """One step. The first of `arrivals` is the last collective of the previous step."""
    longest_s, summed_s = dict.fromkeys(arrivals[0], 0.0), dict.fromkeys(arrivals[0], 0.0)
    for at_ns in arrivals[1:]:
        last_ns = max(at_ns.values())
        for rank, own_ns in at_ns.items():
            waited_s = (last_ns - own_ns) / 1e9
            longest_s[rank] = max(longest_s[rank], waited_s)
            summed_s[rank] += waited_s
    begin_ns, end_ns = max(arrivals[0].values()), max(arrivals[-1].values())
    length_s = (end_ns - begin_ns) / 1e9
    summed_s = {rank: min(waited_s, length_s) for rank, waited_s in summed_s.items()}
    return Block(begin_ns, end_ns, 1, longest_s, summed_s)


def merge(steps: Sequence[Block], size: int) -> list[Block]:
    """Blocks of `size` steps each, up to the last; values per step."""
    blocks = []
    for first in range(len(steps) % size, len(steps), size):
        part = steps[first : first + size]
        if all(one.end_ns == next_.begin_ns for one, next_ in pairwise(part)):
            ranks = part[0].longest_wait_s
            longest_s = {r: statistics.fmean(s.longest_wait_s[r] for s in part) for r in ranks}
            summed_s = {r: statistics.fmean(s.summed_wait_s[r] for s in part) for r in ranks}
            blocks.append(Block(part[0].begin_ns, part[-1].end_ns, size, longest_s, summed_s))
    return blocks


def profiled_blocks(suspect: Suspect, profiles: Mapping[int, Profile]) -> list[Block]:
    """The blocks that lie within the profiles of all ranks; none if they are too few."""
    members = suspect.blocks[-1].longest_wait_s
    if not members.keys() <= profiles.keys():
        return []
    begin_ns = max(profiles[rank].begin_ns for rank in members)
    end_ns = min(profiles[rank].end_ns for rank in members)
    found = [b for b in suspect.blocks if b.begin_ns >= begin_ns and b.end_ns <= end_ns]
    return found if len(found) >= _LEAST_PROFILED else []


def find_straggler(
    suspect: Suspect, rank: int, profiles: Mapping[int, Profile], blocks: Sequence[Block]
) -> tuple[Straggler, str] | None:
    """How much slower this suspect is, in which phase and at which line of the script; None if it is not.

    Args:
        profiles: By rank.
        blocks: Those that `profiled_blocks` found in them.
    """
    spent = {
        member: _seconds_per_step(profiles[member], blocks) for member in blocks[0].longest_wait_s
    }
    others = [member for member in spent if member not in suspect.ranks]

    def median_s(members: Sequence[int], phase: str) -> float:
        return statistics.median(
            statistics.median(
                sum(times[number] for (name, _), times in spent[member].items() if name == phase)
                for member in members
            )
            for number in range(len(blocks))
        )

    step_s = statistics.median(block.step_s for block in blocks)
    waiting_s = median_s([rank], WAITING)
    seen_s = max(median_s(others, WAITING) - waiting_s, 0.0)
    wait_s = max(
        stragglers.waited_for_s([block.longest_wait_s for block in suspect.blocks], rank), seen_s
    )
    phases_s = {}
    for phase in {name for own in spent.values() for name, _ in own} - {WAITING}:
        # DDP waits inside a backward, where no stack shows it.
        hidden_s = wait_s - seen_s if phase == "backward" else 0.0
        phases_s[phase] = median_s([rank], phase), max(median_s(others, phase) - hidden_s, 0.0)
    found = stragglers.judge_late(
        [rank], step_s=step_s, wait_s=wait_s, own_s=step_s - waiting_s, phases_s=phases_s
    )
    if found is None:
        return None
    # Of several lines each may be seen in few blocks only, so the median may be 0 for all.
    places = {
        place: (statistics.median(times), sum(times))
        for (name, place), times in spent[rank].items()
        if name == found.phase and place
    }
    return found, max(places, key=lambda place: places[place], default="")


def _seconds_per_step(profile: Profile, blocks: Sequence[Block]) -> dict[PhasePlace, list[float]]:
    """By phase and place: the seconds per step in each block."""
    found: dict[PhasePlace, list[float]] = defaultdict(lambda: [0.0] * len(blocks))
    for number, block in enumerate(blocks):
        for where, seconds in profile.between(block.begin_ns, block.end_ns).items():
            found[where][number] += seconds / block.steps
    return found


def describe(
    found: Straggler, process: str, where: str, before: HostSample, after: HostSample, pid: int
) -> str:
    """Four lines about a straggler.

    Args:
        process: Its host and pid, as text.
        where: Its place in the script, as text.
        before, after: The host at the beginning and the end of the profile.
    """
    why, fix = _why_and_fix(found, before, after, pid)
    lines = [
        found.title(f"{name_ranks(found.ranks)} ({process})"),
        f"{found.comparison}{': ' if where else ''}{where}",
    ]
    return render("slow", lines, why, fix)


def _why_and_fix(
    found: Straggler, before: HostSample, after: HostSample, pid: int
) -> tuple[str, str]:
    """The cause: the host, if it explains much of the lost share of time; otherwise the code, or both."""
    cure = CURES[found.phase]
    lost = found.wait_s / found.step_s
    passed_s = after.time_s - before.time_s

    def rate(name: str, number: int) -> float:
        then, now = getattr(before, name), getattr(after, name)
        return float(now[number] - then[number]) / passed_s if number in then.keys() & now else 0.0

    others = [other for other in after.delay_s if other != pid]
    throttled = (after.throttled_s - before.throttled_s) / passed_s
    if throttled > 0.1:
        return (
            f"the CPU limit of the control group stopped ranks for {min(throttled, 1):.0%} of the time.",
            "raise the limit, or start fewer ranks or threads (OMP_NUM_THREADS).",
        )
    delay = rate("delay_s", pid)
    others_delay = statistics.fmean(rate("delay_s", other) for other in others)
    if delay - others_delay > lost / 3:
        outside_job = after.names.keys() - after.job
        use = sorted(((rate("cpu_s", n), n) for n in outside_job), reverse=True)
        largest = [
            f"pid {number} ({after.names[number]}) uses {cores:.1f} cores"
            for cores, number in use[:2]
            if cores > 0.2
        ]
        why = f"its host had no free core for it {delay:.0%} of the time"
        return (
            f"{'; '.join([why, *largest])}.",
            "end the other processes, give the ranks cores of their own, or use fewer threads.",
        )
    faults = rate("major_faults", pid)
    if faults > 20 + 2 * statistics.fmean(rate("major_faults", other) for other in others):
        return (
            f"its host read {faults:.0f} pages of its memory per second from a disk.",
            "check that the host has enough memory for the job and its files.",
        )
    if delay > _LEAST_DELAY:
        return (
            "its code takes longer, and its host has too few cores: it waited for a free core "
            f"{delay:.0%} of the time, the other ranks {others_delay:.0%}.",
            f"{cure}; and start fewer ranks or threads, or use a host with more cores.",
        )
    return (
        f"its code, not its host: it used {min(rate('cpu_s', pid), 99.0):.1f} cores, and waited for a free "
        f"core {delay:.0%} of the time.",
        f"{cure}.",
    )
