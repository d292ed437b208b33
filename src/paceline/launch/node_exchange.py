"""What the launchers of several nodes tell each other: one record per node in the rendezvous store, as JSON.

After a failure each launcher publishes how its ranks ended, because a failing rank makes ranks of other nodes
fail. In a hang each publishes the state of its ranks. The clocks of hosts are not compared: if ranks of
two nodes failed independently, both failures are printed. torch does not authenticate the store, so records
that cannot be parsed, or have other types, are ignored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from paceline.credentials import redact
from paceline.watch.crash import RankOutcome
from paceline.watch.rank_state import RankState
from paceline.watch.wire import UNREADABLE, from_json

_LONGEST_PAUSE_S = 2.5  # between two syncs with the store
# The other launchers notice a failure with their next sync, and answer at once.
_ANSWER_S = 2.0
_LEAVE_S = 1.0
_WAIT_S = 0.02
_NODES_OF_A_WAIT = 16  # with more, each syncs less often
_UPDATE_S = 2.0  # for the store to take a record
_STATES_BYTES = 4 << 20  # torch's store closes a connection that sends more than 8 MiB
STORE_S = 60.0  # for any call of the store; torch limits only some of them


@dataclass(frozen=True, kw_only=True)
class NodeRecord:
    """What a node tells the others about itself.

    Attributes:
        round: That its ranks are in; -1 before the first one.
        failed: Whether one of its ranks has failed.
        done: Whether its ranks have ended well.
        left: Whether it does not need the store any more.
        outcomes: How its ranks ended; None while they run.
        has_read: Whether it has read the outcomes of the other nodes.
        request: The number of the latest request for the states of all ranks that it has made or joined.
        answered: The number of the latest request that it has answered, under a key of its own.
    """

    round: int = -1
    failed: bool = False
    done: bool = False
    left: bool = False
    outcomes: tuple[RankOutcome, ...] | None = None
    has_read: bool = False
    request: int = 0
    answered: int = 0


class Heartbeats:
    """Which nodes are dead, by the values of their heartbeats.

    Args:
        interval_s: Between two heartbeats.
        window_s: A node without a new one for so long is dead.
    """

    def __init__(self, interval_s: float, window_s: float) -> None:
        self.dead: set[str] = set()
        self._window_s = window_s
        self._pause_s = max(window_s / 2, 2.5 * interval_s)
        self._seen: dict[str, tuple[bytes, float]] = {}
        self._updated_at = 0.0

    def update(self, beats: Mapping[str, bytes]) -> None:
        """Note the newest heartbeat of each node."""
        now = time.monotonic()
        # After a pause of this process no node is called dead: the others may have paused too.
        paused = now - self._updated_at > self._pause_s
        self._updated_at = now
        for node, beat in beats.items():
            last = self._seen.get(node)
            if paused or last is None or last[0] != beat:
                self._seen[node] = (beat, now)
        self.dead = {n for n in beats if now - self._seen[n][1] > self._window_s}


class NodeRecords:
    """The records of the nodes, and their heartbeats. A thread writes and reads them.

    Only this thread calls the store: torch's client waits without a limit for a host that was cut off, and
    the main thread must still forward signals.

    Args:
        store: A `torch.distributed.Store`.
        name: Of this node.
        interval_s: Between two heartbeats.
        window_s: A node without a new heartbeat for so long is dead.

    Attributes:
        own: The record of this node. The thread writes it with its next sync.
        nodes: Names of the nodes whose records are read.
        others: Their latest records.
        state: The latest value of the key `state`.
        lost: Whether the connection to the store was lost.
        sync_count: Number of syncs so far.
    """

    def __init__(
        self, store: Any, name: str, *, interval_s: float = 1.0, window_s: float = 3.0
    ) -> None:
        self.name = name
        self.own = NodeRecord()
        self.nodes: frozenset[str] = frozenset()
        self.others: dict[str, NodeRecord] = {}
        self.state = b""
        self.lost = False
        self.sync_count = 0
        self.pause_s = min(interval_s / 2, _LONGEST_PAUSE_S)
        self._store = store
        self._heartbeats = Heartbeats(interval_s, window_s)
        self._written: NodeRecord | None = None
        self._version = 0  # of the own record
        self._versions: dict[str, bytes] = {}  # of the others
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._tasks = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="paceline-nodes", daemon=True)
        self._thread.start()

    @property
    def dead(self) -> set[str]:
        """Those of `nodes` that have no new heartbeat."""
        return self._heartbeats.dead

    def call(self, method: str, *args: Any, timeout_s: float = STORE_S) -> Any:
        """Call a method of the store.

        Raises:
            RuntimeError: the store is lost, or does not answer.
        """
        return self._do(lambda: getattr(self._store, method)(*args), timeout_s)

    def sync(self, *, timeout_s: float = 0.5) -> None:
        """Write the own record and read the others now; if the store does not answer, give up."""
        with contextlib.suppress(RuntimeError):
            self._do(self._sync, timeout_s)

    def update(self, **changes: Any) -> None:
        """Change the own record."""
        self.own = dataclasses.replace(self.own, **changes)
        self.sync(timeout_s=_UPDATE_S)

    def close(self) -> None:
        """End the thread."""
        self._tasks.put(None)
        self._thread.join(_UPDATE_S)  # it may wait for a host that was cut off

    def _do(self, task: Callable[[], Any], timeout_s: float) -> Any:
        future: Future[Any] = Future()
        self._tasks.put((future, task))
        try:
            return future.result(timeout_s)
        except TimeoutError as error:
            future.cancel()  # tasks that nobody awaits must not delay later ones
            raise RuntimeError(f"the store did not answer within {timeout_s:g} s") from error

    def _serve(self) -> None:
        next_sync = time.monotonic()
        while True:
            wait_s = next_sync - time.monotonic()
            if wait_s <= 0:
                next_sync = time.monotonic() + self.pause_s
                self._run(Future(), self._sync)
                continue
            with contextlib.suppress(queue.Empty):
                task = self._tasks.get(timeout=wait_s)
                if task is None:
                    return
                self._run(*task)

    def _run(self, future: Future[Any], task: Callable[[], Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(task())
        except Exception as error:
            self.lost = True
            future.set_exception(error)

    def _sync(self) -> None:
        own = self.own
        if own is not self._written:
            self._store.set(f"record/{self.name}", json.dumps(dataclasses.asdict(own)))
            self._written = own
            self._version += 1
        self.sync_count += 1
        self._store.set(f"beat/{self.name}", f"{self.sync_count} {self._version}")
        if self._store.check(["state"]):
            self.state = self._store.get("state")
        names = sorted(self.nodes - {self.name})
        keys = [f"beat/{name}" for name in names]
        if names and self._store.check(keys):
            beats = dict(zip(names, self._store.multi_get(keys), strict=True))
            self._heartbeats.update(beats)
            for name, beat in beats.items():
                version = beat.partition(b" ")[2]
                if self._versions.get(name) != version:
                    self._versions[name] = version
                    self.others[name] = _read_record(self._store.get(f"record/{name}"))


def _read_record(data: bytes) -> NodeRecord:
    try:
        record: NodeRecord = from_json(NodeRecord, json.loads(data))
        return record
    except UNREADABLE:
        return NodeRecord()


class NodeExchange:
    """The exchange of one round of ranks.

    Args:
        number: Of the round.
        nodes: Names of its nodes, in their order.
    """

    def __init__(self, records: NodeRecords, number: int, nodes: Sequence[str]) -> None:
        self._records = records
        self._number = number
        self.node = nodes.index(records.name)
        self._others = [name for name in nodes if name != records.name]
        records.nodes = records.nodes | set(nodes)
        records.own = NodeRecord(round=number)
        self._answers: dict[str, tuple[int, list[RankState]]] = {}  # by node: request, and states

    @property
    def pause_s(self) -> float:
        """Longest time until the launcher of another node sees a change."""
        return self._records.pause_s

    def _record(self, name: str) -> NodeRecord:
        """The record of a node in this round; an empty one if it has written none yet."""
        record = self._records.others.get(name, NodeRecord())
        return record if record.round == self._number else NodeRecord()

    def other_node_failed(self) -> bool:
        """Whether another node has failed."""
        return any(self._record(name).failed for name in self._others)

    def announce_failure(self) -> None:
        """Tell the other nodes that a rank has failed."""
        self._records.update(failed=True)

    def exchange_outcomes(
        self, outcomes: Sequence[RankOutcome], skip_grace: Callable[[], bool]
    ) -> tuple[list[RankOutcome], int]:
        """Publish how the ranks of this node ended, and get those of the others.

        Returns:
            Outcomes of other nodes' ranks, and the number of nodes that did not answer in time.
        """
        self.publish_outcomes(outcomes)
        answer_s = _ANSWER_S + self._records.pause_s
        self._wait(lambda record: record.outcomes is not None, answer_s, skip_grace)
        answers = [self._record(name).outcomes for name in self._others]
        found = [outcome for answer in answers if answer is not None for outcome in answer]
        self._records.update(has_read=True)
        # The store may end with this process.
        self._wait(lambda record: record.has_read or record.outcomes is None, _LEAVE_S, skip_grace)
        return [dataclasses.replace(each, elsewhere=True) for each in found], answers.count(None)

    def publish_outcomes(self, outcomes: Sequence[RankOutcome]) -> None:
        """Publish how the ranks of this node ended."""
        self._records.update(outcomes=tuple(map(_brief, outcomes)))

    def publish_done(self) -> bool:
        """Publish that the ranks of this node have ended; returns whether those of all nodes have."""
        if not self._records.own.done:
            self._records.update(done=True)
        self._records.sync()
        return self.others_done

    @property
    def others_done(self) -> bool:
        """Whether the ranks of all other nodes have ended well."""
        return all(self.is_done(name) for name in self._others)

    def is_done(self, name: str) -> bool:
        """Whether the ranks of another node have ended well."""
        return self._record(name).done

    def any_done(self) -> bool:
        """Whether the ranks of another node have ended."""
        return any(self.is_done(name) for name in self._others)

    def wait_all_done(self, timeout_s: float, skip_grace: Callable[[], bool]) -> None:
        """Wait until the ranks of all living nodes have ended: the store may end with this process."""
        deadline = time.monotonic() + timeout_s
        self._records.update(done=True)
        self._wait(lambda record: record.done or record.failed, timeout_s, skip_grace)
        # The host of the store ends last, when the other launchers no longer need the store.
        self._records.update(left=True)
        left_s = deadline - time.monotonic()
        self._wait(lambda record: record.left or record.failed, left_s, skip_grace)

    def states_requested(self) -> bool:
        """Whether another launcher has asked for the states of all ranks."""
        return self._newest_request() > self._records.own.request

    def request_states(self) -> None:
        """Ask all launchers for the states of their ranks, or join the request of another launcher."""
        self._records.sync()
        # Two requests at once are one: each launcher awaits answers to its own number.
        own, newest = self._records.own.request, self._newest_request()
        self._records.update(request=newest if newest > own else own + 1)

    def _newest_request(self) -> int:
        return max(self._record(name).request for name in self._others)

    def publish_states(self, states: Sequence[RankState]) -> None:
        """Publish the states of this node's ranks."""
        brief = [dataclasses.replace(state, raised=redact(state.raised)) for state in states]
        data = _to_json(brief)
        if len(data) > _STATES_BYTES:  # the open calls are what a hang is found by
            data = _to_json([_only_open(state) for state in brief])
        if len(data) > _STATES_BYTES:
            data = _to_json([dataclasses.replace(state, calls=()) for state in brief])
        with contextlib.suppress(RuntimeError):
            key = self._states_key(self._records.name)
            self._records.call("set", key, data, timeout_s=_UPDATE_S)
            self._records.update(answered=self._records.own.request)

    def collect_states(self) -> tuple[list[RankState], bool]:
        """The states of other nodes' ranks, and whether all nodes have answered."""
        self._records.sync()
        request = self._records.own.request
        with contextlib.suppress(RuntimeError):  # the next turn tries again
            for name in self._others:
                answered = self._record(name).answered
                if answered >= request and self._answers.get(name, (0, []))[0] < answered:
                    key = self._states_key(name)
                    data = self._records.call("get", key, timeout_s=_UPDATE_S)
                    self._answers[name] = (answered, _read_states(data))
        found = [states for number, states in self._answers.values() if number >= request]
        return [state for states in found for state in states], len(found) == len(self._others)

    def _states_key(self, name: str) -> str:
        return f"states/{self._number}/{name}"

    def _wait(
        self,
        ready: Callable[[NodeRecord], bool],
        timeout_s: float,
        skip_grace: Callable[[], bool],
    ) -> None:
        """Wait until the records of all living nodes are so."""
        deadline = time.monotonic() + timeout_s
        pause_s = _WAIT_S * max(1.0, len(self._others) / _NODES_OF_A_WAIT)
        while not self._records.lost and time.monotonic() < deadline and not skip_grace():
            living = [name for name in self._others if name not in self._records.dead]
            if all(ready(self._record(name)) for name in living):
                return
            time.sleep(pause_s)
            self._records.sync()


def _to_json(states: Sequence[RankState]) -> str:
    return json.dumps([dataclasses.asdict(state) for state in states])


def _only_open(state: RankState) -> RankState:
    return dataclasses.replace(state, calls=tuple(c for c in state.calls if not c.completed))


def _read_states(data: bytes) -> list[RankState]:
    try:
        return list(from_json(tuple[RankState, ...], json.loads(data)))
    except UNREADABLE:
        return []


def _brief(outcome: RankOutcome) -> RankOutcome:
    # Only the launcher on a rank's own host prints its traceback.
    error = outcome.error
    if error is not None:
        error = dataclasses.replace(error, message=redact(error.message), causes="", traceback="")
    return dataclasses.replace(outcome, error=error, abort_message="")
