"""What the launchers of several nodes tell each other, through the store where they met: JSON.

Of a hang, where all ranks are. Of a failure, what became of them: a rank that fails makes ranks of other
nodes fail, and only its own launcher knows that it was first. Clocks of hosts differ, so nodes are put in the
order in which their launchers came to the store, which counts them. torch authenticates nobody there: what
cannot be read is passed over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import Store

from paceline.launch.evidence import Call, State, Where
from paceline.launch.verdict import Error, Fact

_POLL_S = 0.5
# A launcher that has failed is heard of by the others within a poll, and they answer at once.
_ANSWER_S = 2.0
_LEAVE_S = 1.0
_APART_S = 1e-3
_COUNT = "failures"
_ASKED = "asked"


class Hearsay:
    """The news of one round.

    Args:
        store: Asked without waiting, since the heartbeats of torch's rendezvous use its client too.

    Collective: none.
    """

    def __init__(self, store: Store, node: int, nodes: int) -> None:
        self._store = store
        self.node = node
        self._others = [n for n in range(nodes) if n != node]
        self._next = 0.0
        self._number, self._came_at = 0, 0.0
        self._question = 0

    def pending(self) -> bool:
        """Whether another node has failed; asked of the store now and then. Collective: none."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + _POLL_S
        return self._knows(_COUNT)

    def begin(self) -> None:
        """Note that this node has failed, or has heard of a failure, now. Collective: none."""
        self._came_at = time.time()
        with contextlib.suppress(RuntimeError):  # here and below: the store's host is gone
            self._number = self._store.add(_COUNT, 1)

    def tell(self, facts: Sequence[Fact]) -> None:
        """Tell what became of the ranks of this node. Collective: none."""
        told = {
            "number": self._number,
            "came_at": self._came_at or time.time(),
            "facts": [dataclasses.asdict(_brief(fact)) for fact in facts],
        }
        with contextlib.suppress(RuntimeError):
            self._store.set(f"told/{self.node}", json.dumps(told))

    def hear(self, hurry: Callable[[], bool]) -> tuple[list[Fact], int]:
        """What other nodes have told, by our clock, and how many told nothing.

        Collective: one launcher of each node, though none waits long for another.
        """
        found: dict[int, list[Fact]] = {}
        with contextlib.suppress(RuntimeError):
            self._wait("told", self._others, _ANSWER_S, hurry)
            for node in self._others:
                if self._knows(f"told/{node}"):
                    found[node] = self._read(self._store.get(f"told/{node}"))
            self._store.set(f"heard/{self.node}", "")
            # The store may end with this process.
            self._wait("heard", list(found), _LEAVE_S, hurry)
        return [fact for facts in found.values() for fact in facts], len(self._others) - len(found)

    def is_asked(self) -> bool:
        """Whether another launcher wants to know where all ranks are. Collective: none."""
        with contextlib.suppress(RuntimeError):
            return self._store.add(_ASKED, 0) > self._question
        return False

    def ask(self, *, anew: bool) -> None:
        """Ask where all ranks are, or take up that question. Collective: none."""
        with contextlib.suppress(RuntimeError):
            self._question = self._store.add(_ASKED, int(anew))

    def show(self, states: Sequence[State]) -> None:
        """Answer the question for this node. Collective: none."""
        shown = {"question": self._question, "states": [dataclasses.asdict(s) for s in states]}
        with contextlib.suppress(RuntimeError):
            self._store.set(f"states/{self.node}", json.dumps(shown))

    def shown(self) -> tuple[list[State], bool]:
        """The states of other nodes' ranks, and whether all nodes have answered. Collective: none."""
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

    def _wait(self, what: str, nodes: list[int], limit_s: float, hurry: Callable[[], bool]) -> None:
        deadline = time.monotonic() + limit_s
        keys = [f"{what}/{node}" for node in nodes]
        while keys and not self._store.check(keys) and time.monotonic() < deadline and not hurry():
            time.sleep(0.02)

    def _knows(self, key: str) -> bool:
        with contextlib.suppress(RuntimeError):
            return self._store.check([key])
        return False

    def _read(self, text: bytes) -> list[Fact]:
        try:
            told = json.loads(text)
            later_s = (told["number"] - self._number) * _APART_S
            shift_s = self._came_at + later_s - told["came_at"]
            return [_fact(fact, shift_s) for fact in told["facts"]]
        except (ValueError, KeyError, TypeError):
            return []


def _brief(fact: Fact) -> Fact:
    # The launcher of its host shows the traceback.
    error = fact.error and dataclasses.replace(fact.error, traceback="")
    return dataclasses.replace(fact, error=error, gave_up="")


def _state(told: dict[str, Any]) -> State:
    script = tuple(tuple(frame) for frame in told["where"]["script"])
    calls = tuple(Call(**call | {"members": tuple(call["members"])}) for call in told["calls"])
    read = {"where": Where(**told["where"] | {"script": script}), "calls": calls}
    return State(**told | read | {"helpers": tuple(told["helpers"])})


def _fact(told: dict[str, Any], shift_s: float) -> Fact:
    error = told["error"] and Error(**told["error"] | {"kinds": tuple(told["error"]["kinds"])})
    time_s = told["time"] and told["time"] + shift_s  # 0 where it still runs
    return Fact(**told | {"error": error, "time": time_s, "elsewhere": True})
