"""Collects what a straggler is found by, on this node: when ranks enter collectives, and profiles of them.

About once a second each rank tells when it entered its latest collectives (probe.py). Where one seems to be
late in step after step, all of them sample their stacks for a moment. What is said is straggler.py's.
"""

from __future__ import annotations

import os
import socket
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.launch.local_ranks import Crew
from paceline.launch.rank import Rank
from paceline.watch import processes
from paceline.watch.lateness import Key, Step, in_most, suspects
from paceline.watch.rank_state import helpers_of, read_place
from paceline.watch.straggler import Profile, Straggler, judge, parts, render

_ASK_S = 1.0
_SELDOM_S = 3.0  # where a step has few collectives
_FEW = 8
_KEPT = 1024  # collectives
_PROFILE_STEPS = 24, 8  # where it is late now and then, and in most steps
_PROFILE_S = (0.4, 300.0)
_LATEST = 20  # steps that tell how long one is
_LONG = 4.0  # times the usual length; of a longer one so much counts
_LATE_S = 2.0
# Between two profiles of one suspect, in s and by how much it grows: after one that told nothing, and after
# others.
_RESTS, _REST_MOST_S = ((0.3, 1.25), (1.0, 2.0)), 600.0


@dataclass(frozen=True)
class _Suspicion:
    """A profile that is being made."""

    rank: int
    number: int
    seconds: float
    deadline: float
    before: processes.Moment


class Pace:
    """Looks for a rank that the others wait for, in one round after the other."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._said: set[tuple[int, str]] = set()
        self._asked = 0
        self.begin()

    def begin(self) -> None:
        """A round begins."""
        self._enters: dict[int, dict[Key, tuple[int, int]]] = {}
        self._taken: dict[tuple[int, str], int] = {}
        self._number = self._entered = 0
        self._ask_next = self._ask_last = 0.0
        self._suspicion: _Suspicion | None = None
        self._seldom: dict[int, str] = {}  # by suspect: at what it was, but not in most steps
        self._rest: dict[int, tuple[float, float]] = {}  # by suspect: until when, and how long

    def look(self, now: float, alive: Sequence[Rank], entered: int) -> bool:
        """Look at what the ranks have told, say who is slow, and ask again; whether to look again soon.

        Args:
            now: Monotonic, in seconds.
            alive: The ranks of this node that run.
            entered: How many collectives they have entered, together.
        """
        if len(alive) < 2:
            return False
        fresh = [self._take(rank, do) for rank in alive for do in ("pace", "profile")]
        if self._suspicion is not None:
            if now > self._suspicion.deadline or _answered(
                alive, "profile", self._suspicion.number
            ):
                suspicion, self._suspicion = self._suspicion, None
                self._conclude(suspicion, now, alive)
        elif any(fresh):
            for suspect, steps in suspects(self._enters):
                if now >= self._rest.get(suspect, (0.0, 0.0))[0]:
                    self._profile(suspect, _length_s(suspect, steps), now, alive)
                    break
        if now >= self._ask_next and _answered(alive, "pace", self._number):
            self._ask(now, alive, entered)
        return self._suspicion is not None or now == self._ask_last

    def _ask(self, now: float, alive: Sequence[Rank], entered: int) -> None:
        few = entered - self._entered < _FEW * len(alive)
        if entered == self._entered or (few and now < self._ask_last + _SELDOM_S):
            return
        self._ask_next, self._ask_last, self._entered = now + _ASK_S, now, entered
        self._number = self._new_number()
        for rank in alive:
            rank.ask(self._number, "pace", since=self._since(rank))

    def _new_number(self) -> int:
        self._asked += 1
        return self._asked

    def _since(self, rank: Rank) -> int:
        entered = self._enters.get(rank.rank)
        return max(at_ns for at_ns, _ in entered.values()) if entered else 0

    def _take(self, rank: Rank, do: str) -> bool:
        """Take in an answer; whether there was a new one."""
        told = rank.told.get(do, {})
        if self._taken.get((rank.rank, do), 0) == told.get("id", 0):
            return False
        self._taken[rank.rank, do] = told["id"]
        entered = self._enters.setdefault(rank.rank, {})
        for group, number, at_ns, elements in told.get("entered", ()):
            entered[group, number] = (at_ns, elements)
        for key in list(entered)[:-_KEPT]:
            del entered[key]
        return True

    def _profile(self, rank: int, seconds: float, now: float, alive: Sequence[Rank]) -> None:
        before = processes.moment([rank.pid for rank in alive])
        number = self._new_number()
        self._suspicion = _Suspicion(rank, number, seconds, now + seconds + _LATE_S, before)
        for one in alive:
            one.ask(number, "profile", seconds=seconds, since=self._since(one))

    def _conclude(self, suspicion: _Suspicion, now: float, alive: Sequence[Rank]) -> None:
        profiles = {
            rank.rank: Profile(told["since_ns"], told["spent"])
            for rank in alive
            if (told := rank.told.get("profile", {})).get("id") == suspicion.number
            and "spent" in told
        }
        steps = dict(suspects(self._enters)).get(suspicion.rank)
        found = parts(steps, profiles) if steps else []
        longer_s = 2 * suspicion.seconds
        if steps and not found and len(profiles) == len(alive) and longer_s <= _PROFILE_S[1]:
            self._profile(suspicion.rank, longer_s, now, alive)
            return
        straggler = judge(suspicion.rank, found, steps) if steps and found else None
        certain = self._is_certain(suspicion.rank, straggler)
        self._postpone(suspicion.rank, now, useful=bool(found) and certain)
        if straggler and certain and (straggler.rank, straggler.phase) not in self._said:
            self._said.add((straggler.rank, straggler.phase))
            self._say(straggler, suspicion, alive)

    def _is_certain(self, rank: int, straggler: Straggler | None) -> bool:
        """What was not so in most steps comes seldom, or was a pause: then another phase is next."""
        before = self._seldom.pop(rank, "")
        if straggler is not None and straggler.seldom:
            self._seldom[rank] = straggler.phase
            return straggler.phase == before
        return True

    def _say(self, found: Straggler, suspicion: _Suspicion, alive: Sequence[Rank]) -> None:
        pid = next(rank.pid for rank in alive if rank.rank == found.rank)
        cwd = os.getcwd()
        script = read_place(found.place, cwd).script
        where = "{}:{}".format(*script[0][:2]) if script else ""
        if script and script[0][2].isidentifier():
            where = f"{script[0][2]}() at {where}"
        if found.phase == "data" and (helpers := helpers_of(pid, cwd)):
            where += f", waiting for a loader's worker: {'; '.join(helpers[:2])}"
        who = f"host {socket.gethostname()}, pid {pid}"
        after = processes.moment([rank.pid for rank in alive])
        self._crew.say(render(found, who, where, suspicion.before, after, pid))

    def _postpone(self, suspect: int, now: float, *, useful: bool) -> None:
        """The next profile of a suspect: soon after one that told nothing, else ever more seldom."""
        _, rest_s = self._rest.get(suspect, (0.0, 0.0))
        least_s, growth = _RESTS[useful]
        rest_s = min(max(rest_s * growth, least_s), _REST_MOST_S)
        self._rest[suspect] = (now + rest_s, rest_s)


def _length_s(rank: int, steps: Sequence[Step]) -> float:
    """Of a profile with a few steps; where pauses are many, or it is late now and then, it is longer."""
    lengths = [step.length_s for step in steps[-_LATEST:]]
    most_s = _LONG * statistics.median(lengths)
    usual_s = statistics.fmean(min(length_s, most_s) for length_s in lengths)
    count = _PROFILE_STEPS[in_most(rank, steps)]
    return min(max(count * usual_s, _PROFILE_S[0]), _PROFILE_S[1])


def _answered(alive: Sequence[Rank], do: str, number: int) -> bool:
    """Whether all have; one that is stopped, or whose interpreter is held, has not."""
    return all(rank.told.get(do, {}).get("id", 0) == number for rank in alive)
