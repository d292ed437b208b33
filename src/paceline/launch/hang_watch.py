"""Collects the states of the ranks of this node for `watch/hang.py`, and prints the hangs that it finds.

Reads the beats of the ranks (watch/probe.py) and their process states twice a second. It asks all ranks for
their stacks and collectives only if one of them makes no progress.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.launch.local_ranks import LocalRanks, Question, Rank
from paceline.launch.node_exchange import NodeExchange
from paceline.torch_private import NAMES
from paceline.watch import processes
from paceline.watch.hang import Diagnosis, diagnose
from paceline.watch.rank_state import (
    LATE_BEAT_S,
    RankState,
    read_beat,
    read_calls,
    read_dump,
    read_place,
    read_stack,
)

_HANG_AFTER_S = 10.0  # without --hang-after
_HANG_AFTER_MEDIANS = 10  # or this many median times between two collectives, if that is longer
_INTERVAL_S = 0.5  # between two checks
_SOON_S = 0.05  # the same, while answers are awaited
_ANSWER_S = 0.8  # for the answers of the ranks
_OTHERS_S = 2.5  # for the answers of the other nodes' launchers
_ENDING_S = 15.0  # the longest usual exit of a process; after it the kernel holds the process
_KEPT = 20  # latest times between two collectives
_STOPPED = ("T", "t", "Z")  # states of a process that runs no code; see `Process`


@dataclass
class Activity:
    """The recent activity of one rank."""

    counts: tuple[int, int] = (0, 0)  # collectives entered, and completed
    progress_at: float = 0.0  # monotonic: when a collective was last entered or completed
    beat: dict[str, Any] = field(default_factory=dict)
    state: str = ""  # as `processes.read_state`
    exiting_at: float | None = None  # monotonic: when its process began to exit


class HangWatch:
    """Detects hangs among the ranks of this node.

    Args:
        after_s: Seconds without progress before a hang is reported; None for 10 s or, if that is longer, ten
            median times between two collectives; 0 for never.
        ends: Whether a hang ends the round.
    """

    def __init__(self, local_ranks: LocalRanks, *, after_s: float | None, ends: bool) -> None:
        self._local_ranks = local_ranks
        self._after_s = after_s
        self._ends = ends
        self._missing: set[str] = set()  # names of torch that were reported
        # With several nodes, each launcher has the states of all ranks.
        self.exchange: NodeExchange | None = None
        self._next = 0.0
        self._checked_at = time.monotonic()
        self._begin([])

    def _begin(self, pids: list[int]) -> None:
        """Forget the ranks of the previous round."""
        self._pids = pids
        self._question: Question | None = None  # None if no answers are awaited
        self._answers: dict[int, dict[str, Any]] = {}  # to the latest question, by rank
        self._ask_next = self._others_until = 0.0
        self._activities: dict[int, Activity] = {}
        self._reported: set[tuple[object, ...]] = set()  # keys of diagnoses
        self._gaps_s: deque[float] = deque(maxlen=_KEPT)  # times between two collectives
        # When the latest progress was seen, once a collective is completed: the time before the first one is
        # that of the start.
        self._progress_at: float | None = None
        self._alarmed = False

    def check(self, world_size: int) -> Diagnosis | None:
        """Check the ranks and report a hang. Returns the hang if it has to end the round."""
        now = time.monotonic()
        if now < self._next:
            return None
        self._next = now + _INTERVAL_S
        self._leave_out_pause(now)
        pids = [rank.pid for rank in self._local_ranks.ranks]
        if pids != self._pids:
            self._begin(pids)
        alive = [rank for rank in self._local_ranks.ranks if rank.returncode is None]
        progressed = [self._read(rank, now) for rank in alive]
        if any(progressed):
            self._note_progress(now)
        if self._after_s == 0:
            return None
        if self._question is not None:
            if self._question.is_open(now):
                self._next = now + _SOON_S
                return None
            self._answers, self._question = self._question.answers, None
            return self._conclude(now, world_size)
        if self._others_until:
            return self._conclude(now, world_size)
        asked = self.exchange is not None and self.exchange.states_requested()
        if asked or (now >= self._ask_next and self._suspicious(alive, now)):
            if self.exchange is not None:
                self.exchange.request_states()
            self._ask_next = now + self.patience_s
            self._next = now + _SOON_S
            able = [r for r in alive if self._activities[r.local_rank].state not in _STOPPED]
            self._question = Question(able, now=now, within_s=_ANSWER_S)
        return None

    def _leave_out_pause(self, now: float) -> None:
        """After a pause of the launcher itself, as by SIGSTOP, its ranks must not look idle."""
        pause_s = max(now - self._checked_at - 2 * _INTERVAL_S, 0.0)
        self._checked_at = now
        for activity in self._activities.values():
            activity.progress_at += pause_s
            if activity.exiting_at is not None:
                activity.exiting_at += pause_s

    def conclude_pending(self, world_size: int) -> Diagnosis | None:
        """Judge a hang for which `check` still waits for the states of other nodes; None if there is none.

        Takes no new samples. Call it before the round ends.
        """
        # A node that ends its ranks for a hang has read the states of all nodes, so they are in the store.
        same = self._pids == [rank.pid for rank in self._local_ranks.ranks]
        return self._conclude(time.monotonic(), world_size) if self._others_until and same else None

    @property
    def patience_s(self) -> float:
        """Seconds without progress before a hang is reported; 0 for never."""
        if self._after_s is not None:
            return self._after_s
        return max(
            _HANG_AFTER_S, _HANG_AFTER_MEDIANS * statistics.median_low(self._gaps_s or [0.0])
        )

    def _note_progress(self, now: float) -> None:
        if any(activity.counts[1] for activity in self._activities.values()):
            if self._progress_at is not None:
                self._gaps_s.append(now - self._progress_at)
            self._progress_at = now
        if self._alarmed:
            self._alarmed = False
            # The same hang may happen again; a notice is given once.
            self._reported = {(alarm, *key) for alarm, *key in self._reported if not alarm}
            self._local_ranks.say("the ranks make progress again")

    def _read(self, rank: Rank, now: float) -> bool:
        """Read the beat and the process state of a rank; returns whether it has made progress since then."""
        activity = self._activities.setdefault(rank.local_rank, Activity(progress_at=now))
        progressed = False
        beat = read_beat(rank.probe_text())
        if "error" in beat:
            raise RuntimeError(beat["error"])
        if beat:
            activity.beat = beat
            counts = (beat["entered"], beat["completed"])
            if counts != activity.counts:
                activity.counts, activity.progress_at = counts, now
                progressed = True
        activity.state = processes.read_state(rank.pid)
        if activity.exiting_at is None and activity.state == "Z" and processes.is_ending(rank.pid):
            activity.exiting_at = now
        return progressed

    def _suspicious(self, alive: Sequence[Rank], now: float) -> bool:
        activities = [self._activities[rank.local_rank] for rank in alive]
        if any(
            activity.exiting_at is not None and now - activity.exiting_at < _ENDING_S
            for activity in activities
        ):
            return False  # its exit code will be known soon
        idle = [
            activity for activity in activities if now - activity.progress_at >= self.patience_s
        ]
        if any(activity.counts[0] > activity.counts[1] for activity in idle):
            return True
        # Some ranks may load or compute without a collective, but not all of them.
        return bool(idle) and len(idle) == len(alive)

    def _conclude(self, now: float, world_size: int) -> Diagnosis | None:
        states = [self._state(rank, now) for rank in self._local_ranks.ranks]
        is_first_node = self.exchange is None or self.exchange.node == 0
        if self.exchange is not None:
            if not self._others_until:
                self.exchange.publish_states(states)
                self._others_until = now + _OTHERS_S + self.exchange.pause_s
            others, complete = self.exchange.collect_states()
            if not complete and now < self._others_until:
                self._next = now + _SOON_S
                return None
            self._others_until = 0.0
            states += others
        diagnosis = diagnose(states, world_size, self.patience_s - _INTERVAL_S)
        if diagnosis is None:
            return None
        ours = any(rank.rank in diagnosis.culprits for rank in self._local_ranks.ranks)
        if not (is_first_node or ours):
            return None
        if diagnosis.key not in self._reported:
            self._reported.add(diagnosis.key)
            self._local_ranks.show(diagnosis.text)
        if not diagnosis.alarm:
            return None
        self._alarmed = True
        return diagnosis if self._ends and ours else None

    def _state(self, rank: Rank, now: float) -> RankState:
        host, pid = socket.gethostname(), rank.pid
        if rank.returncode is not None:
            return RankState(
                rank=rank.rank, host=host, pid=pid, state="", returncode=rank.returncode
            )
        activity, cwd = self._activities[rank.local_rank], os.getcwd()
        answer = self._answers.get(rank.rank, {})
        late = now - activity.beat.get("time", now) > LATE_BEAT_S
        # The stacks of faulthandler prove that the GIL is held; a beat may be late for other reasons.
        can_run = activity.state not in (*_STOPPED, "D")
        dump = read_dump(rank.probe_text()) if late and can_run else []
        reported: dict[str, Any] = {
            "where": read_place(activity.beat.get("place", ""), cwd),
        }
        answered = "threads" in answer
        if answered:
            for name in NAMES:
                if name.path in answer["missing"] and name.path not in self._missing:
                    self._missing.add(name.path)
                    self._local_ranks.say(f"torch has no {name.path}: {name.without}")
            main = answer["threads"][0]
            reported |= {
                "where": read_stack(main["stack"], cwd),
                "call": main.get("call", ""),
                "peer": main.get("peer"),
                "last_numbers": answer["last_numbers"],
                "raised": _raised_text(answer, cwd),
                "in_step": main["in_step"],
                "optimizer_steps": answer["optimizer_steps"],
                "step": answer["step"],
                "stage": answer["stage"],
                "calls": read_calls(
                    # The collectives of a group that was aborted are never completed.
                    [entry for entry in answer["entries"] if entry["group"] in answer["groups"]],
                    answer["groups"],
                    time.time(),
                    answer["axes"],
                ),
            }
        elif dump:
            reported["where"] = read_stack(dump, cwd)
        return RankState(
            rank=rank.rank,
            host=host,
            pid=pid,
            state=activity.state,
            idle_s=now - activity.progress_at,
            holds_gil=bool(dump),
            in_unreported_collective=not answered
            and not late
            and activity.counts[0] > activity.counts[1],
            answered=answered,
            workers=processes.describe_workers(pid, cwd) if reported["where"].loader else (),
            kernel_function=processes.kernel_function(pid) if activity.state == "D" else "",
            **reported,
        )


def _raised_text(answer: dict[str, Any], cwd: str) -> str:
    texts = (answer.get("raised") or {}).get("texts", [])
    return "\n".join(texts).replace(f" at {cwd.rstrip('/')}/", " at ")
