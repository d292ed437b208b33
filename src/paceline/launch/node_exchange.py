"""Key-value exchange between the node launchers, one per restart, through the rendezvous store: JSON.

After a failure each launcher publishes how its ranks ended, because a failing rank makes ranks of other nodes
fail. In a hang each publishes the state of its ranks. The clocks of hosts are not compared: if ranks of
two nodes failed independently, both failures are printed. torch does not authenticate the store, so values
that cannot be parsed, or have other types, are ignored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args, get_origin, get_type_hints

from paceline.credentials import redact
from paceline.watch.crash import RankOutcome
from paceline.watch.rank_state import RankState

_POLL_S = 0.5
# The other launchers notice a failure within one poll, and answer at once.
_ANSWER_S = 2.0
_LEAVE_S = 1.0
_WAIT_S = 0.02
_FAILED = "failed"
_DONE = "done"
_LEFT = "left"
_STATE_REQUESTS = "state requests"
# Errors of `json.loads` and `from_json`.
UNREADABLE = (ValueError, KeyError, TypeError, OverflowError, RecursionError)


class NodeExchange:
    """The exchange of one round of ranks.

    Args:
        store: A `torch.distributed.Store`. It is never read with a blocking call, because
            heartbeats go through the same client.
        node: The number of this node, from 0 to `nodes` - 1.
    """

    def __init__(self, store: Any, node: int, nodes: int) -> None:
        self._store = store
        self.node = node
        self._others = [n for n in range(nodes) if n != node]
        self._next_poll = 0.0
        self._request = 0
        self._done = False

    def other_node_failed(self) -> bool:
        """Whether another node has failed; reads the store at most twice a second."""
        now = time.monotonic()
        if now < self._next_poll:
            return False
        self._next_poll = now + _POLL_S
        return self._has(_FAILED)

    def announce_failure(self) -> None:
        """Tell the other nodes that a rank has failed."""
        with contextlib.suppress(RuntimeError):  # here and below: the host of the store has ended
            self._store.set(_FAILED, "")

    def exchange_outcomes(
        self, outcomes: Sequence[RankOutcome], skip_grace: Callable[[], bool]
    ) -> tuple[list[RankOutcome], int]:
        """Publish how the ranks of this node ended, and get those of the others.

        Returns:
            Outcomes of other nodes' ranks, and the number of nodes that did not answer within 2 s.
        """
        found: list[RankOutcome] = []
        silent = len(self._others)
        with contextlib.suppress(RuntimeError):
            self.publish_outcomes(outcomes)
            self._wait("outcomes", self._others, _ANSWER_S, skip_grace)
            answered = [node for node in self._others if self._has(f"outcomes/{node}")]
            found = [outcome for node in answered for outcome in self._read_outcomes(node)]
            silent -= len(answered)
            self._store.set(f"read/{self.node}", "")
            # The store may end with this process.
            self._wait("read", answered, _LEAVE_S, skip_grace)
        return found, silent

    def publish_outcomes(self, outcomes: Sequence[RankOutcome]) -> None:
        """Publish how the ranks of this node ended."""
        with contextlib.suppress(RuntimeError):
            value = json.dumps([dataclasses.asdict(_brief(outcome)) for outcome in outcomes])
            self._store.set(f"outcomes/{self.node}", value)

    def publish_done(self) -> bool:
        """Publish that the ranks of this node have ended; returns whether those of all nodes have.

        Raises:
            RuntimeError: the host of the store has ended.
        """
        count = self._store.add(_DONE, 0 if self._done else 1)
        self._done = True
        return bool(count > len(self._others))

    def any_done(self) -> bool:
        """Whether the ranks of a node have ended."""
        with contextlib.suppress(RuntimeError):
            return bool(self._store.add(_DONE, 0) > 0)
        return False

    def wait_all_done(self, timeout_s: float, skip_grace: Callable[[], bool]) -> None:
        """Wait until the ranks of all nodes have ended, because the store may end with this process."""
        deadline = time.monotonic() + timeout_s

        def may_wait() -> bool:
            time.sleep(_WAIT_S)
            return time.monotonic() < deadline and not skip_grace()

        with contextlib.suppress(RuntimeError):
            while not self.publish_done() and may_wait():
                pass
            # The host of the store ends last, when the other launchers no longer need the store.
            count = self._store.add(_LEFT, 1)
            while count <= len(self._others) and may_wait():
                count = self._store.add(_LEFT, 0)

    def states_requested(self) -> bool:
        """Whether another launcher has asked for the states of all ranks."""
        with contextlib.suppress(RuntimeError):
            return bool(self._store.add(_STATE_REQUESTS, 0) > self._request)
        return False

    def request_states(self, *, new: bool) -> None:
        """Ask all launchers for the states of their ranks, or join the request of another launcher."""
        with contextlib.suppress(RuntimeError):
            self._request = self._store.add(_STATE_REQUESTS, int(new))

    def publish_states(self, states: Sequence[RankState]) -> None:
        """Publish the states of this node's ranks."""
        brief = [dataclasses.replace(state, raised=redact(state.raised)) for state in states]
        answer = {"request": self._request, "states": [dataclasses.asdict(s) for s in brief]}
        with contextlib.suppress(RuntimeError):
            self._store.set(f"states/{self.node}", json.dumps(answer))

    def collect_states(self) -> tuple[list[RankState], bool]:
        """The states of other nodes' ranks, and whether all nodes have answered."""
        found: list[RankState] = []
        complete = True
        for node in self._others:
            try:
                key = f"states/{node}"
                answer = json.loads(self._store.get(key)) if self._has(key) else {}
                if answer.get("request", -1) >= self._request:
                    found += from_json(tuple[RankState, ...], answer["states"])
                else:
                    complete = False
            except (*UNREADABLE, AttributeError, RuntimeError):
                complete = False
        return found, complete

    def _wait(
        self, what: str, nodes: list[int], timeout_s: float, skip_grace: Callable[[], bool]
    ) -> None:
        deadline = time.monotonic() + timeout_s
        keys = [f"{what}/{node}" for node in nodes]
        while (
            keys
            and not self._store.check(keys)
            and time.monotonic() < deadline
            and not skip_grace()
        ):
            time.sleep(_WAIT_S)

    def _has(self, key: str) -> bool:
        with contextlib.suppress(RuntimeError):
            return bool(self._store.check([key]))
        return False

    def _read_outcomes(self, node: int) -> list[RankOutcome]:
        try:
            read = json.loads(self._store.get(f"outcomes/{node}"))
            outcomes = from_json(tuple[RankOutcome, ...], read)
        except UNREADABLE:
            return []
        return [dataclasses.replace(outcome, elsewhere=True) for outcome in outcomes]


def _brief(outcome: RankOutcome) -> RankOutcome:
    # Only the launcher on a rank's own host prints its traceback.
    error = outcome.error
    if error is not None:
        error = dataclasses.replace(error, message=redact(error.message), causes="", traceback="")
    return dataclasses.replace(outcome, error=error, abort_message="")


def from_json(kind: Any, value: Any) -> Any:
    """A value of this type, such as a dataclass, from what `json.loads` returned.

    Raises:
        TypeError: the value, or a part of it, is of another type, or a field is missing.
        KeyError: there is no such field.
        OverflowError: an integer is too large for a float.
    """
    arguments = get_args(kind)
    if hasattr(kind, "__dataclass_fields__") and isinstance(value, dict):
        kinds = get_type_hints(kind)
        return kind(**{name: from_json(kinds[name], part) for name, part in value.items()})
    if type(None) in arguments:
        return value if value is None else from_json(arguments[0], value)
    if get_origin(kind) is tuple and isinstance(value, list):
        parts = arguments if arguments[-1] is not ... else arguments[:1] * len(value)
        if len(parts) == len(value):
            return tuple(map(from_json, parts, value))
    if get_origin(kind) is Mapping and isinstance(value, dict):
        return {name: from_json(arguments[1], part) for name, part in value.items()}
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise TypeError(f"{value!r} is no {kind}")
    return value
