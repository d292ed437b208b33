"""What the launchers of several nodes tell each other, through the store where they met: JSON.

Of a hang, where all ranks are. Of a failure, what became of them: a rank that fails makes ranks of other
nodes fail, and only its own launcher knows that it was first. Clocks of hosts differ, and the store has none;
but it counts. Each launcher has the store count between two looks at its own clock, a few times in turn with
the others: which of two counts was first is known, and so how far two clocks can be apart. torch
authenticates nobody there: what cannot be read is passed over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import Store

from paceline.watch.crash import Error, Fact
from paceline.watch.rank_state import Call, State, Where

_POLL_S = 0.5
# A launcher that has failed is heard of by the others within a poll, and they answer at once.
_ANSWER_S = 2.0
_LEAVE_S = 1.0
_TURNS = 4
_TURN_S = 0.002  # between two looks for the others' turn; about as exact are the clocks then
_SEEN_S = 0.02
_FAILED = "failed"
_DONE = "done"
_LEFT = "left"
_TICKS = "ticks"
_ASKED = "asked"

# What the store counted, and the clock before and after it.
Tick = tuple[int, float, float]


class Hearsay:
    """The news of one round.

    Args:
        store: Asked without waiting, since the heartbeats of torch's rendezvous use its client too.
        clock: Seconds since the epoch, as this host has it.
    """

    def __init__(
        self, store: Store, node: int, nodes: int, clock: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self.node = node
        self._clock = clock
        self._others = [n for n in range(nodes) if n != node]
        self._next = 0.0
        self._ticks: list[Tick] = []
        self._question = 0
        self._done = False

    def pending(self) -> bool:
        """Whether another node has failed; asked of the store now and then."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + _POLL_S
        return self._knows(_FAILED)

    def all_done(self) -> bool:
        """Note that the ranks of this node are done; whether those of all nodes are.

        Raises:
            RuntimeError: the store's host is gone.
        """
        count = self._store.add(_DONE, 0 if self._done else 1)
        self._done = True
        return count > len(self._others)

    def stay(self, most_s: float, hurry: Callable[[], bool]) -> None:
        """Wait until the ranks of all nodes are done, as the store may end with this process.

        Collective: one launcher of each node, though none waits for another for longer than `most_s`.
        """
        deadline = time.monotonic() + most_s

        def patient() -> bool:
            time.sleep(_SEEN_S)
            return time.monotonic() < deadline and not hurry()

        with contextlib.suppress(RuntimeError):
            while not self.all_done() and patient():
                pass
            # Who serves the store goes when the others need it no more.
            count = self._store.add(_LEFT, 1)
            while count <= len(self._others) and patient():
                count = self._store.add(_LEFT, 0)

    def begin(self) -> None:
        """Note that this node has failed, or has heard of a failure, now."""
        with contextlib.suppress(RuntimeError):  # here and below: the store's host is gone
            self._tick()
            self._store.set(_FAILED, "")

    def tell(self, facts: Sequence[Fact]) -> None:
        """Tell what became of the ranks of this node."""
        with contextlib.suppress(RuntimeError):
            self._tick()
            brief = [dataclasses.asdict(_brief(fact)) for fact in facts]
            told = {"ticks": self._ticks, "facts": brief}
            self._store.set(f"told/{self.node}", json.dumps(told))

    def hear(self, hurry: Callable[[], bool]) -> tuple[list[Fact], int]:
        """What other nodes have told, by our clock, and how many told nothing.

        Collective: one launcher of each node, though none waits long for another.
        """
        found: dict[int, tuple[list[Fact], list[Tick]]] = {}
        with contextlib.suppress(RuntimeError):
            self._wait("told", self._others, _ANSWER_S, hurry)
            here = [node for node in self._others if self._knows(f"told/{node}")]
            found = {node: self._read(node) for node in here}
            self._take_turns(here, hurry)
            found = {node: self._read(node) for node in here}
            self._store.set(f"heard/{self.node}", "")
            # The store may end with this process.
            self._wait("heard", here, _LEAVE_S, hurry)
        return _by_our_clock(found, self.node, self._ticks), len(self._others) - len(found)

    def _tick(self) -> None:
        before = self._clock()
        number = self._store.add(_TICKS, 1)
        self._ticks.append((number, before, self._clock()))

    def _take_turns(self, nodes: list[int], hurry: Callable[[], bool]) -> None:
        """Have each node count after each other one has, so that their clocks can be compared."""
        for turn in range(_TURNS):
            self._tick()
            self._store.set(f"turn{turn}/{self.node}", json.dumps(self._ticks))
            self._wait(f"turn{turn}", nodes, _LEAVE_S, hurry, _TURN_S)

    def is_asked(self) -> bool:
        """Whether another launcher wants to know where all ranks are."""
        with contextlib.suppress(RuntimeError):
            return self._store.add(_ASKED, 0) > self._question
        return False

    def ask(self, *, anew: bool) -> None:
        """Ask where all ranks are, or take up that question."""
        with contextlib.suppress(RuntimeError):
            self._question = self._store.add(_ASKED, int(anew))

    def show(self, states: Sequence[State]) -> None:
        """Answer the question for this node."""
        shown = {"question": self._question, "states": [dataclasses.asdict(s) for s in states]}
        with contextlib.suppress(RuntimeError):
            self._store.set(f"states/{self.node}", json.dumps(shown))

    def shown(self) -> tuple[list[State], bool]:
        """The states of other nodes' ranks, and whether all nodes have answered."""
        found: list[State] = []
        complete = True
        for node in self._others:
            try:
                told = (
                    json.loads(self._store.get(key)) if self._knows(key := f"states/{node}") else {}
                )
                if told.get("question", -1) >= self._question:
                    found += [_state(state) for state in told["states"]]
                else:
                    complete = False
            except (ValueError, KeyError, TypeError, AttributeError, RuntimeError):
                complete = False
        return found, complete

    def _wait(
        self,
        what: str,
        nodes: list[int],
        limit_s: float,
        hurry: Callable[[], bool],
        every_s: float = _SEEN_S,
    ) -> None:
        deadline = time.monotonic() + limit_s
        keys = [f"{what}/{node}" for node in nodes]
        while keys and not self._store.check(keys) and time.monotonic() < deadline and not hurry():
            time.sleep(every_s)

    def _knows(self, key: str) -> bool:
        with contextlib.suppress(RuntimeError):
            return self._store.check([key])
        return False

    def _read(self, node: int) -> tuple[list[Fact], list[Tick]]:
        last = f"turn{_TURNS - 1}/{node}"
        try:
            told = json.loads(self._store.get(f"told/{node}"))
            ticks = json.loads(self._store.get(last)) if self._knows(last) else told["ticks"]
            ticks = [(int(n), float(before), float(after)) for n, before, after in ticks]
            return [_fact(fact) for fact in told["facts"]] if ticks else [], ticks
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return [], []


def apart(ours: Sequence[Tick], theirs: Sequence[Tick]) -> tuple[float, float]:
    """How far another clock is ahead of ours, and by how much that may be wrong, in seconds.

    Where all ticks of one were before all of the other there is only a bound, which is then given: the two
    are taken to have come at the same time.

    Source: of two events the earlier one was before the later one by any clock; as in Marzullo, "Maintaining
    the Time in a Distributed System", 1984.
    """
    most = min((t[2] - o[1] for o in ours for t in theirs if o[0] < t[0]), default=math.inf)
    least = max((t[1] - o[2] for o in ours for t in theirs if t[0] < o[0]), default=-math.inf)
    if not (ours and theirs):
        return 0.0, math.inf
    if math.inf in (most, -least):
        return (least if most == math.inf else most), math.inf
    return (most + least) / 2, abs(most - least) / 2


def _by_our_clock(
    found: dict[int, tuple[list[Fact], list[Tick]]], node: int, ours: list[Tick]
) -> list[Fact]:
    """Facts of other nodes; all nodes compare with the same one, so that all find the same order."""
    ticks = {node: ours} | {other: ticks for other, (_, ticks) in found.items() if ticks}
    first = min(ticks)
    ahead = {n: apart(ticks[first], ticks[n]) if n != first else (0.0, 0.0) for n in ticks}
    return [
        dataclasses.replace(
            fact,
            # 0 where it still runs
            time=fact.time and fact.time - ahead[other][0] + ahead[node][0],
            within_s=ahead[other][1] + ahead[node][1],
        )
        for other, (facts, _) in found.items()
        for fact in facts
    ]


def _brief(fact: Fact) -> Fact:
    # The launcher of its host shows the traceback.
    error = fact.error and dataclasses.replace(fact.error, traceback="")
    return dataclasses.replace(fact, error=error, gave_up="")


def _state(told: dict[str, Any]) -> State:
    script = tuple(tuple(frame) for frame in told["where"]["script"])
    calls = tuple(Call(**call | {"members": tuple(call["members"])}) for call in told["calls"])
    read = {"where": Where(**told["where"] | {"script": script}), "calls": calls}
    return State(**told | read | {"workers": tuple(told["workers"])})


def _fact(told: dict[str, Any]) -> Fact:
    error = told["error"] and Error(**told["error"] | {"kinds": tuple(told["error"]["kinds"])})
    return Fact(**told | {"error": error, "time": float(told["time"]), "elsewhere": True})
