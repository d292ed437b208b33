"""Collects the evidence for `watch/straggler.py` on this node, and prints the stragglers that it finds.

About once a second each rank reports when it entered its latest collectives (watch/probe.py). If one of them
seems to be late in every step, all ranks sample their stacks for some steps. There is one request at a time,
so a rank that cannot answer is not asked again.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

from paceline.clock.checks.stragglers import Straggler
from paceline.launch.local_ranks import LocalRanks, Question, Rank
from paceline.watch.processes import HostSample, describe_workers, sample_host
from paceline.watch.rank_state import read_place
from paceline.watch.straggler import (
    Key,
    Profile,
    Suspect,
    describe,
    find_straggler,
    find_suspects,
    profiled_blocks,
)

_INTERVAL_S = 1.0  # between two requests
_FEW = 8  # collectives of each rank since the last request: then the interval is longer
_LONG_INTERVAL_S = 3.0
_KEPT = 1024  # collectives of each rank: 20 steps of up to 51
_PROFILE_S = 0.4, 300.0  # length of a profile: shortest and longest
_ANSWER_S = 2.0  # for the answers of the ranks
_REST_S = 1.0, 600.0  # pause between two profiles of one suspect: doubles, up to the second number


class StragglerWatch:
    """Looks for ranks of this node that the others wait for."""

    def __init__(self, local_ranks: LocalRanks) -> None:
        self._local_ranks = local_ranks
        self._reported: set[tuple[int, str]] = set()  # rank and phase
        self.begin()

    def begin(self) -> None:
        """Forget the ranks of the previous round."""
        self._arrivals: dict[int, dict[Key, tuple[int, int]]] = {}
        self._question: Question | None = None  # "arrivals" or "profile"
        self._profile_s = self._asked_at = 0.0
        self._entered = 0
        self._suspect = -1  # the rank that is profiled
        self._host: HostSample | None = None  # at the beginning of the profile
        self._rest: dict[int, tuple[float, float]] = {}  # by suspect: until when, and how long

    def check(self, now: float, alive: Sequence[Rank], entered: int) -> bool:
        """Handle answers, report a straggler, and ask again. Returns whether to call it again soon.

        Args:
            now: Monotonic, in seconds.
            alive: The ranks of this node that still run.
            entered: The number of collectives that they have entered together.
        """
        if len(alive) < 2:
            return False
        if self._question is not None:
            if not self._question.answered:
                return now < self._question.deadline
            self._handle_answers(self._question, now, alive)
        elif entered > self._entered:
            few = entered - self._entered < _FEW * len(alive)
            interval_s = _LONG_INTERVAL_S if few else _INTERVAL_S
            if now >= self._asked_at + interval_s:
                self._entered = entered
                self._ask("arrivals", now, alive, 0.0)
        return self._question is not None

    def _ask(self, do: str, now: float, alive: Sequence[Rank], lasts_s: float, **more: Any) -> None:
        self._asked_at = now
        known = [self._arrivals.get(rank.rank, {}).values() for rank in alive]
        since = min(max((at_ns for at_ns, _ in arrivals), default=0) for arrivals in known)
        within_s = lasts_s + _ANSWER_S
        self._question = Question(alive, do, now=now, within_s=within_s, since=since, **more)

    def _handle_answers(self, question: Question, now: float, alive: Sequence[Rank]) -> None:
        self._question, answers = None, question.answers
        for rank, answer in answers.items():
            arrivals = self._arrivals.setdefault(rank, {})
            for group, number, at_ns, elements in answer.get("arrivals", ()):
                arrivals[group, number] = (at_ns, elements)
            for key in list(arrivals)[:-_KEPT]:
                del arrivals[key]
        suspects = find_suspects(self._arrivals)
        if question.do == "profile":
            profiles = {
                rank: Profile(answer["begin_ns"], answer["spent"])
                for rank, answer in answers.items()
                if "spent" in answer
            }
            suspect = next((each for each in suspects if self._suspect in each.ranks), None)
            self._judge(suspect, profiles, now, alive)
            return
        for rank, suspect in ((rank, each) for each in suspects for rank in each.ranks):
            if now >= self._rest.get(rank, (0.0, 0.0))[0]:
                self._suspect = rank
                self._profile(suspect.profile_s, now, alive)
                break

    def _judge(
        self,
        suspect: Suspect | None,
        profiles: dict[int, Profile],
        now: float,
        alive: Sequence[Rank],
    ) -> None:
        """Report the suspect as a straggler, or profile it for longer; None if it is not late any more."""
        found = None
        if suspect is not None:
            if blocks := profiled_blocks(suspect, profiles):
                found = find_straggler(suspect, self._suspect, profiles, blocks)
            elif 2 * self._profile_s <= _PROFILE_S[1]:
                self._profile(2 * self._profile_s, now, alive)
                return
        _, rest_s = self._rest.get(self._suspect, (0.0, _REST_S[0] / 2))
        rest_s = min(2 * rest_s, _REST_S[1])
        self._rest[self._suspect] = (now + rest_s, rest_s)
        if found is not None:
            straggler, place = found
            if (self._suspect, straggler.phase) not in self._reported:
                self._reported.add((self._suspect, straggler.phase))
                self._report(straggler, place, alive)

    def _profile(self, seconds: float, now: float, alive: Sequence[Rank]) -> None:
        self._profile_s = min(max(seconds, _PROFILE_S[0]), _PROFILE_S[1])
        self._host = sample_host([rank.pid for rank in alive])
        self._ask("profile", now, alive, self._profile_s, seconds=self._profile_s)

    def _report(self, found: Straggler, place: str, alive: Sequence[Rank]) -> None:
        assert self._host is not None
        pid = next(rank.pid for rank in alive if rank.rank in found.ranks)
        cwd = os.getcwd()
        where = read_place(place, cwd).function_at_line
        if found.phase == "data" and (workers := describe_workers(pid, cwd)):
            where += f", waiting for a loader worker: {'; '.join(workers[:2])}"
        after = sample_host([rank.pid for rank in alive])
        process = f"host {socket.gethostname()}, pid {pid}"
        self._local_ranks.show(describe(found, process, where, self._host, after, pid))
        for rank in alive:  # rank 0 leaves it out of its advice; the answers are not read
            rank.send({"do": "slow_ranks", "id": -1, "ranks": list(found.ranks)})
