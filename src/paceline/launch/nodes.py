"""torch's rendezvous of several nodes, with faster detection of lost nodes.

Subclasses of `torch.distributed.elastic.rendezvous.dynamic_rendezvous`, which takes 43 s to notice a lost
node.
Changes: a node is dead when its heartbeat has not changed for 3 s of *this* node's clock (torch compares the
clocks of two hosts); a later round is complete as soon as all living nodes are back, without a last call;
each round has a new store for the ranks; the first round begins without torch's random pause, and up to
16 nodes read the state at least ten times a second while they meet; more nodes read it less often. The state
in the store is JSON: torch unpickles it, and everybody who reaches the store can write it, because torch does
not authenticate the nodes. Several nodes with static or etcd rendezvous use torch's own.

Added: nodes that the user numbered keep their numbers; a node with another torch, paceline or script is
refused; while nodes are missing, a line every 10 s says which; clocks that differ by more than a minute are
named.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
)
from torch.distributed.elastic.rendezvous import registry as torch_registry
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousSettings,
    RendezvousTimeout,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from paceline import torch_private
from paceline.errors import ConfigError, LaunchFailed
from paceline.job.network import Route, address_from_here, route_to
from paceline.job.store_server import FIRST_REPORT_S, REPORT_S, listen_for, store_on
from paceline.launch.endpoint import Endpoint, meet_at
from paceline.launch.node_exchange import NodeExchange
from paceline.launch.node_facts import NodeFacts, NodeTable, describe, difference, order
from paceline.launch.rendezvous import READ_TIMEOUT_S, STORE_TIMEOUT, StaticHost

_MODULE = torch_private.RENDEZVOUS
_EXECUTOR = f"{_MODULE}._DistributedRendezvousOpExecutor"
_HANDLER = f"{_MODULE}.DynamicRendezvousHandler"
_RANDOM_DELAY = f"{_MODULE}._delay"
# Without a warning: a job of one node imports this file too, and needs none of them.
_found: list[Any] = [
    torch_private.look_up(path)
    for path in (
        f"{_MODULE}._Action",
        f"{_MODULE}._RendezvousState",
        f"{_MODULE}._NodeDesc",
        _EXECUTOR,
        f"{_MODULE}._remove_participant_epilogue",
    )
]
_Action, _State, _NodeDesc, _OpExecutor, _remove_epilogue = _found

# All nodes write their heartbeats under one key, so many nodes must write less often.
_MANY_NODES = 64
_HEARTBEAT_S = 1
_HEARTBEAT_OF_MANY_S = 5
_CACHED_S = 1.0  # a newer state is not read again
# Each poll of a node reads the state of all, and nodes that join at one time overwrite each other's state and
# try again. So both are spread over a time that grows with the number of nodes.
_POLL_S = 0.1
_FIRST_POLL_S = 0.02  # the pauses double up to _POLL_S: nodes that start together meet at once
_NODES_OF_A_POLL = 16
_JOIN_S_PER_NODE = 0.02
_ATTEMPTS = 3
_CLOCK_OFFSET_S = 60


def _encode(state: Any) -> bytes:
    nodes = {
        "participants": [[*_fields(n), rank] for n, rank in state.participants.items()],
        "wait_list": [_fields(n) for n in state.wait_list],
        "redundancy_list": [_fields(n) for n in state.redundancy_list],
        "last_heartbeats": [
            [*_fields(n), at.isoformat()] for n, at in state.last_heartbeats.items()
        ],
    }
    deadline = state.deadline and state.deadline.isoformat()
    plain = {"round": state.round, "complete": state.complete, "closed": state.closed}
    return json.dumps(plain | {"deadline": deadline} | nodes).encode()


def _decode(data: bytes) -> Any:
    state = _State()
    try:
        read = json.loads(data)
        state.round = int(read["round"])
        state.complete, state.closed = bool(read["complete"]), bool(read["closed"])
        state.deadline = read["deadline"] and _time(read["deadline"])
        state.participants = {_node(*node): int(rank) for *node, rank in read["participants"]}
        state.wait_list = {_node(*node) for node in read["wait_list"]}
        state.redundancy_list = {_node(*node) for node in read["redundancy_list"]}
        state.last_heartbeats = {_node(*node): _time(at) for *node, at in read["last_heartbeats"]}
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise RendezvousStateError(
            "the state of the nodes in the store was not written by this version of paceline run"
        ) from error
    return state


def _fields(node: Any) -> list[Any]:
    return [node.addr, node.pid, node.local_id]


def _node(address: object, pid: int, local_id: int) -> Any:
    return _NodeDesc(str(address), int(pid), int(local_id))


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)


class StateHolder:
    """The state that the nodes share, and the nodes that this one considers dead.

    It has the methods of torch's `_RendezvousStateHolder`.

    Attributes:
        state: As of the last `sync`.
        dead: Nodes whose heartbeat has not changed for too long.
        clock_offsets_s: By node, how far its clock is ahead of this one's, to about the time of a heartbeat.
    """

    def __init__(self, backend: RendezvousBackend, settings: RendezvousSettings) -> None:
        self.state: Any = _State()
        self.dead: set[Any] = set()
        self.clock_offsets_s: dict[Any, float] = {}
        self._backend = backend
        self._token: Any = None
        self._is_dirty = False
        self._synced_at = -math.inf
        self._options = settings
        self._window_s = (
            settings.keep_alive_interval * settings.keep_alive_max_attempt
        ).total_seconds()
        # Between two looks at the state, which is looked at once in each interval.
        self._usual_s = settings.keep_alive_interval.total_seconds() + 1.5 * _CACHED_S
        self._seen: dict[Any, tuple[Any, float]] = {}
        self._looked_at = 0.0

    def mark_dirty(self) -> None:
        """Write the state at the next `sync`."""
        self._is_dirty = True

    def sync(self) -> bool | None:
        """Write the state, or read it if it is older than a second.

        Returns:
            Whether it was written; None if it was not changed. If another node wrote first, `state` is what
            that node wrote.

        Raises:
            RendezvousStateError: something else is in its place.
        """
        has_set: bool | None = None
        answer: tuple[bytes, Any] | None
        if self._is_dirty:
            written = self._backend.set_state(_encode(self.state), self._token)
            answer, has_set = (written[:2], written[2]) if written else (None, False)
        elif time.monotonic() - self._synced_at <= _CACHED_S:
            return None
        else:
            answer = self._backend.get_state()
        self.state = _State() if answer is None else _decode(answer[0])
        self._token = answer and answer[1]
        self._is_dirty = False
        self._synced_at = time.monotonic()
        self._remove_dead()
        return has_set

    def sync_now(self) -> None:
        """Read the state again, however new it is."""
        self._synced_at = -math.inf
        self.sync()

    def _remove_dead(self) -> None:
        now = time.monotonic()
        state = self.state
        beats = state.last_heartbeats
        # After a pause of this process no node is called dead: the others may have paused too.
        paused = now - self._looked_at > max(self._window_s / 2, self._usual_s)
        self._looked_at = now
        seen, self._seen = self._seen, {}
        for node, beat in beats.items():
            last = seen.get(node)
            if last is not None and last[0] != beat:
                self.clock_offsets_s[node] = (beat - datetime.now(UTC)).total_seconds()
            if paused or last is None or last[0] != beat:
                last = (beat, now)
            self._seen[node] = last
        dead = [node for node, (_, at) in self._seen.items() if now - at > self._window_s]
        self.dead = (self.dead - beats.keys()) | set(dead)
        for node in dead:
            del beats[node]
            state.participants.pop(node, None)
            state.wait_list.discard(node)
            state.redundancy_list.discard(node)
        if dead:
            _remove_epilogue(state, self._options)


class _Executor(_OpExecutor or object):  # type: ignore[misc]
    """Polls more often than once a second, and ends a round when all living nodes have come."""

    survivors: Callable[[], set[Any]]
    in_order: Callable[[Sequence[Any]], list[Any]]
    waiting: Callable[[Any], None]
    holder: StateHolder

    def _record(self, *args: Any, **kwargs: Any) -> None:
        """No event for each exchange of the state: torch inspects the stack for it, which takes 10 ms."""

    def _mark_rendezvous_complete(self) -> None:
        mark: Any = torch_private.find(f"{_EXECUTOR}._mark_rendezvous_complete")
        mark(self)
        participants = self.holder.state.participants
        for number, node in enumerate(self.in_order(list(participants))):
            participants[node] = number

    def run(
        self,
        state_handler: Callable[[Any, float], Any],
        deadline: float,
        update_deadline: Callable[[timedelta], float] | None = None,
    ) -> None:
        def handler(context: Any, deadline: float) -> Any:
            pause_s = _FIRST_POLL_S
            while True:
                action = state_handler(context, deadline)
                if action != _Action.SYNC:
                    return action
                if self._all_are_back(context):
                    return _Action.MARK_RENDEZVOUS_COMPLETE
                self.waiting(context.state)
                time.sleep(pause_s * max(1, context.settings.max_nodes / _NODES_OF_A_POLL))
                pause_s = min(2 * pause_s, _POLL_S)
                self.holder.sync_now()
                context.state = self.holder.state
                torch_private.set_attribute(f"{_EXECUTOR}._state", self, context.state)

        super().run(handler, deadline, update_deadline)

    def _all_are_back(self, context: Any) -> bool:
        state, survivors = context.state, self.survivors()
        return (
            not state.complete
            and not state.wait_list
            and bool(survivors)
            and context.node in state.participants
            and survivors <= state.participants.keys()
            and len(state.participants) >= context.settings.min_nodes
        )


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """What a launcher says of its node.

    Attributes:
        endpoint: where the nodes meet.
        facts: of this node, without its address.
        ports: first and last port that the launcher may use; None: the kernel chooses.
        say: prints a line for the user.
    """

    endpoint: Endpoint
    facts: NodeFacts
    ports: tuple[int, int] | None
    say: Callable[[str], None]


class NodeRendezvous(DynamicRendezvousHandler):
    """torch's rendezvous of several nodes, with a new store for the ranks in each round.

    Raises:
        LaunchFailed: this node differs from those that are here.
    """

    def __init__(
        self,
        settings: RendezvousSettings,
        backend: RendezvousBackend,
        store: TCPStore,
        local_addr: str | None,
        options: NodeOptions,
    ) -> None:
        generator: Any = torch_private.find(f"{_HANDLER}._node_desc_generator")
        self._node = node = generator.generate(local_addr)
        self._holder = StateHolder(backend, settings)
        holder: Any = self._holder
        super().__init__(node, settings, backend.name, store, holder)
        executor = _Executor(node, self._holder, settings)
        executor.holder = self._holder
        executor.survivors = lambda: self._met - self._holder.dead
        executor.in_order = lambda nodes: order(nodes, self._table.of(nodes))
        executor.waiting = self._report_waiting
        torch_private.set_attribute(f"{_HANDLER}._op_executor", self, executor)
        self._lock: Any = torch_private.attribute(f"{_HANDLER}._heartbeat_lock", self)
        self._rendezvous_store = store
        self._options = options
        self._met: set[Any] = set()
        self._table = NodeTable(PrefixStore(f"paceline/{settings.run_id}/nodes", store))
        self._next_report = time.monotonic() + FIRST_REPORT_S
        self._facts = dataclasses.replace(options.facts, address=node.addr)
        self._refuse_difference(self._table.publish(node, self._facts))

    def _refuse_difference(self, first: NodeFacts) -> None:
        found = difference(first, self._facts)
        if found is None:
            return
        what, fix = found
        self._table.refuse(what)
        raise LaunchFailed(
            f"this node cannot take part: {what}.",
            where=f"host {self._facts.host}, rendezvous at {self._options.endpoint}",
            why="all nodes must have the same program, versions and --nnodes.",
            fix=fix,
        )

    def _report_waiting(self, state: Any) -> None:
        """Print which nodes are here and which are missing, every 10 s."""
        now = time.monotonic()
        if now < self._next_report:
            return
        self._next_report = now + REPORT_S
        nodes = order(list(state.participants), self._table.of(list(state.participants)))
        low, high = self.settings.min_nodes, self.settings.max_nodes
        here, missing = describe(self._table.of(nodes), len(nodes), high, low)
        if self._node in state.redundancy_list:
            here = f"{here}, and no more may take part"
            missing = "this node waits until one leaves. If they are another job, give this one another port"
        elif self._node in state.wait_list:
            missing = "this node joins at their next restart"
        text = f"still waiting: {here}; {missing}"
        if refused := self._table.refused():
            text += f". A node was refused at {refused}"
        host = self._options.endpoint.host
        route = route_to(host)
        if (
            route is not None
            and host not in (route.address, "localhost")
            and "resolves" in route.why
        ):
            text += (
                f". On this host {host} is this host itself: if that is wrong, correct /etc/hosts"
            )
        self._options.say(text)

    def next_rendezvous(self) -> RendezvousInfo:
        """See torch. Collective: one agent of each node."""
        for name in ("_bootstrap_store_info", "_shared_tcp_store_server"):
            torch_private.set_attribute(f"{_HANDLER}.{name}", self, None)
        self._next_report = time.monotonic() + FIRST_REPORT_S
        if self.settings.max_nodes > _MANY_NODES and self.round == 0:
            time.sleep(random.uniform(0, self.settings.max_nodes * _JOIN_S_PER_NODE))
        info = super().next_rendezvous()
        self._met = set(self._holder.state.participants)
        self._refuse_equal_numbers()
        return info

    def _refuse_equal_numbers(self) -> None:
        by_number: dict[int, list[NodeFacts]] = {}
        for facts in self._table.of(list(self._met)).values():
            if facts.number is not None:
                by_number.setdefault(facts.number, []).append(facts)
        for number, nodes in by_number.items():
            if len(nodes) > 1:
                raise LaunchFailed(
                    f"two nodes have the number {number}.",
                    where=", ".join(sorted(f"{node.host} ({node.address})" for node in nodes)),
                    fix="give each node its own --node-rank, from 0 to the number of nodes minus 1.",
                )

    def exchange(self, node: int, nodes: int) -> NodeExchange:
        """The exchange between the launchers of this round."""
        prefix = f"paceline/{self.get_run_id()}/{self.round}"
        return NodeExchange(PrefixStore(prefix, self._rendezvous_store), node, nodes)

    @property
    def round(self) -> int:
        """The number of rounds before this one."""
        return int(self._holder.state.round)

    def wrong_clocks(self) -> list[str]:
        """A sentence for each node whose clock differs from this one's by more than a minute."""
        with self._lock:
            offsets = dict(self._holder.clock_offsets_s)
        facts = self._table.of(list(offsets))
        return [
            f"the clock of {facts.get(node, node.addr)} is {abs(offset):.0f} s "
            f"{'ahead of' if offset > 0 else 'behind'} the clock of this node: run chrony or ntpd on both"
            for node, offset in offsets.items()
            if abs(offset) > _CLOCK_OFFSET_S and node in self._met
        ]

    def node_waits(self) -> bool:
        """Whether a node waits to join, by the newest state."""
        with self._lock:
            self._holder.sync_now()
            return bool(self._holder.state.wait_list)

    def lost(self) -> list[str]:
        """The nodes of this round that are dead."""
        dead = order(list(self._met & self._holder.dead), {})
        facts = self._table.of(dead)
        return [str(facts.get(node, node.addr)) for node in dead]

    def is_excluded(self) -> bool:
        """Whether the others continued without this node, because it did not respond."""
        return self._node not in self._holder.state.participants

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> TCPStore:
        if self._options.ports is None:
            return store_on(listen_for(master_addr, master_port), STORE_TIMEOUT)
        first, last = self._options.ports
        for port in range(first, last + 1):
            with contextlib.suppress(OSError):
                return store_on(listen_for(master_addr, port), STORE_TIMEOUT)
        raise LaunchFailed(
            f"no port of --port-range {first}-{last} is free on this host.",
            where=f"host {self._facts.host}",
            fix="give a larger range, or end what listens there: `ss -ltnp`.",
        )


def rendezvous_of_nodes(
    parameters: RendezvousParameters, options: NodeOptions | None
) -> RendezvousHandler:
    """The rendezvous of several nodes: `NodeRendezvous` for c10d over TCP, otherwise torch's own.

    Raises:
        ConfigError: wrong options.
        LaunchFailed: the endpoint cannot be reached, or this node differs from the others.
    """
    is_c10d = parameters.backend == "c10d"
    is_tcp = parameters.get("store_type", "tcp").strip().lower() == "tcp"
    is_whole = is_c10d and is_tcp and torch_private.has_all(torch_private.RENDEZVOUS_OF_TORCH)
    if options is None or not is_whole:
        handler = torch_registry.get_rendezvous_handler(parameters)
        if isinstance(handler, StaticTCPRendezvous) and handler.rank == 0:
            return StaticHost(handler)
        return handler
    # `next_rendezvous` spreads many nodes over a time that depends on their number.
    torch_private.wrap(_RANDOM_DELAY, lambda delay: lambda seconds: None)
    timeouts = {
        name: timedelta(seconds=seconds)
        for name in ("join", "last_call", "close", "heartbeat")
        if (seconds := parameters.get_as_int(f"{name}_timeout")) is not None
    }
    timeout = RendezvousTimeout(**timeouts)
    store = meet_at(
        options.endpoint,
        timeout_s=timeout.join.total_seconds(),
        read_timeout=timedelta(seconds=_positive(parameters, "read_timeout", READ_TIMEOUT_S)),
        say=options.say,
    )
    many = parameters.max_nodes > _MANY_NODES
    interval_s = _positive(
        parameters, "keep_alive_interval", _HEARTBEAT_OF_MANY_S if many else _HEARTBEAT_S
    )
    settings = RendezvousSettings(
        parameters.run_id,
        parameters.min_nodes,
        parameters.max_nodes,
        timeout,
        keep_alive_interval=timedelta(seconds=interval_s),
        keep_alive_max_attempt=_positive(parameters, "keep_alive_max_attempt", _ATTEMPTS),
    )
    backend = C10dRendezvousBackend(store, parameters.run_id)
    given = parameters.local_addr
    address = address_from_here(given) if given else _address(route_to(options.endpoint.host))
    return NodeRendezvous(settings, backend, store, address, options)


def _address(route: Route | None) -> str | None:
    return None if route is None else route.address


def _positive(parameters: RendezvousParameters, key: str, default: int) -> int:
    value = parameters.get_as_int(key)
    if value is None:
        return default
    if value <= 0:
        raise ConfigError(
            f"--rdzv-conf {key} must be a positive number, got {value}.",
            fix=f"give a positive number, or leave out {key}.",
        )
    return value
