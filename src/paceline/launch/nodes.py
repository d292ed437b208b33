"""The rendezvous of several nodes: the launchers agree, through a store, on the nodes of each round.

The state that they share is one JSON text, which each changes with `compare_set`: `next_state` has the rules.
Each node changes its heartbeat twice a second (node_exchange.py). A node is dead when its heartbeat has not
changed for 3 s of *this* node's clock; clocks of hosts are not compared. torch does not authenticate the
store, so nothing that comes from it is unpickled, and what cannot be read counts as a lost rendezvous.

A node with another torch, paceline, script or `--nnodes` than the first one is refused. While nodes are
missing, a line every 10 s says which.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import ipaddress
import json
import os
import platform
import random
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.distributed import PrefixStore, Store, TCPStore

import paceline
from paceline.errors import LaunchFailed
from paceline.job.network import address_from_here, route_to
from paceline.job.store_server import FIRST_REPORT_S, REPORT_S, listen_for, store_on
from paceline.launch.endpoint import connect_store_at
from paceline.launch.node_exchange import STORE_S, NodeExchange, NodeRecords
from paceline.launch.options import LaunchOptions
from paceline.launch.rendezvous import (
    STORE_TIMEOUT,
    Change,
    Rendezvous,
    RendezvousClosed,
    RendezvousLost,
    Round,
)
from paceline.watch.wire import UNREADABLE, from_json

_MANY_NODES = 64  # with more, heartbeats are rarer, and nodes join at different times
_HEARTBEAT_S = 1.0
_HEARTBEAT_OF_MANY_S = 5.0
_BEATS = 3  # a node without a heartbeat for so many intervals is dead
_JOIN_S_PER_NODE = 0.02
_FIRST_POLL_S = 0.02  # the pauses double up to _POLL_S: nodes that start together do not wait
_POLL_S = 0.1
_NODES_OF_A_POLL = 16  # with more, each polls less often
_SILENT_S = 60.0  # a rendezvous that does not answer for so long is lost
_CLOSE_S = 5.0
_TURN_S = 1.0  # longest time between two calls of `change`, unless the launcher was stopped
_LABELS = {
    "nodes": "--nnodes",
    "torch": "torch",
    "paceline": "paceline",
    "python": "Python",
    "script": "script",
    "digest": "content of the script",
}
_SAME_ENVIRONMENT = "install the same environment on all nodes, or use one image for them."
_SAME_SCRIPT = (
    "copy the same script to all nodes; if two jobs share this endpoint, give each its own port."
)
_FIXES = {"nodes": "give all nodes the same --nnodes."}
_FIXES |= dict.fromkeys(("torch", "paceline", "python"), _SAME_ENVIRONMENT)
_FIXES |= dict.fromkeys(("script", "digest"), _SAME_SCRIPT)


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """What the launcher of a node tells the others.

    Attributes:
        address: At which the other nodes reach it.
        number: Of the node, if the user numbered the nodes.
        ranks: How many it has.
        script: Name of the script's file, or of its module.
        digest: Of the script's content; empty for a module.
    """

    host: str
    address: str
    number: int | None
    nodes: str
    ranks: int
    script: str
    digest: str
    torch: str = torch.__version__
    paceline: str = paceline.__version__
    python: str = ".".join(platform.python_version_tuple()[:2])

    def __str__(self) -> str:
        prefix = "" if self.number is None else f"node {self.number}: "
        return f"{prefix}{self.host} {self.address}"


def facts_of_this_node(options: LaunchOptions, address: str) -> NodeFacts:
    """The facts of this node."""
    script, digest = options.script, ""
    if options.is_python and not options.args.module:
        # Reading a pipe would leave nothing for the rank, and a folder has no bytes.
        if Path(script).is_file():
            digest = hashlib.sha256(Path(script).read_bytes()).hexdigest()[:16]
        script = Path(script).name
    return NodeFacts(
        host=socket.gethostname(),
        address=address,
        number=options.node_rank,
        nodes=options.nnodes,
        ranks=options.nproc,
        script=script,
        digest=digest,
    )


def difference(first: NodeFacts, mine: NodeFacts) -> tuple[str, str] | None:
    """What differs between two nodes that must be equal, and the fix; None if nothing does."""
    for name, label in _LABELS.items():
        theirs, ours = getattr(first, name), getattr(mine, name)
        if theirs != ours:
            here, there = f"{mine.host} ({mine.address})", f"{first.host} ({first.address})"
            if name == "digest":
                return f"{mine.script} on {here} is not the {first.script} of {there}", _FIXES[name]
            return f"{label} is {ours} on {here}, and {theirs} on {there}", _FIXES[name]
    return None


def order(nodes: Sequence[str], facts: Mapping[str, NodeFacts]) -> list[str]:
    """The nodes in the order of their numbers; those without one by address, as numbers."""

    def key(node: str) -> tuple[int, int, int, str]:
        known = facts.get(node)
        number = len(nodes) if known is None or known.number is None else known.number
        try:
            address = ipaddress.ip_address(known.address if known is not None else "")
        except ValueError:
            return number, 0, 0, node
        return number, address.version, int(address), node

    return sorted(nodes, key=key)


@dataclass(frozen=True)
class State:
    """What the launchers agree on.

    Attributes:
        round: Number of rounds before this one.
        complete: Whether the ranks of the round have been started, or are about to.
        closed: Whether the job has ended.
        nodes: Names of the launchers that take part; in their order, once it is complete.
        expected: Nodes of the last round, and those that waited for this one, that have not come yet.
        waiting: Nodes that wait for the next round.
    """

    round: int = 0
    complete: bool = False
    closed: bool = False
    nodes: tuple[str, ...] = ()
    expected: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()


def next_state(
    state: State,
    node: str,
    *,
    after: int,
    dead: Set[str],
    sizes: tuple[int, int],
    last_call_over: bool,
) -> State:
    """What a node that asks for a round makes of the state; the same state if it has to wait.

    Args:
        after: The lowest number of the round that it asks for.
        sizes: The least and the most nodes of a round.
        last_call_over: Whether the first round begins without more nodes.
    """
    low, high = sizes
    if state.complete:
        living = [each for each in state.nodes if each not in dead]
        if node in state.nodes and state.round >= after:
            return state
        if node in state.nodes or not living:
            back = {*living, *state.waiting} - dead - {node}
            return State(state.round + 1, nodes=(node,), expected=tuple(sorted(back)))
        if node not in state.waiting and len(living) < high:
            return replace(state, waiting=(*state.waiting, node))
        return state
    nodes = [each for each in state.nodes if each not in dead]
    expected = [each for each in state.expected if each not in dead and each != node]
    reserved = len(nodes) + len(expected)
    if node not in nodes and (node in state.expected or reserved < high):
        nodes.append(node)
    # Without a last call a later round begins as soon as all living nodes are back.
    all_here = not expected and (state.round > 0 or last_call_over)
    complete = node in nodes and len(nodes) >= low and (len(nodes) == high or all_here)
    return replace(
        state,
        nodes=tuple(nodes),
        expected=() if complete else tuple(expected),
        complete=complete,
        # Not all that were expected have found a place.
        waiting=tuple(expected) if complete else (),
    )


@contextlib.contextmanager
def _reached() -> Iterator[None]:
    """Turn the errors of torch's store, and of values that cannot be read, into ours."""
    try:
        yield
    except (RuntimeError, *UNREADABLE) as error:
        raise RendezvousLost("the connection to the rendezvous was lost") from error


class NodeRendezvous(Rendezvous):
    """The rendezvous of several nodes. Its store is served by one of the launchers, see endpoint.py.

    Args:
        say: Prints a line for the user.

    Raises:
        ConfigError: this node has to serve the store and cannot.
        LaunchFailed: the store was not there in time, or this node differs from those that are here.

    Collective: the launcher of each node.
    """

    def __init__(self, options: LaunchOptions, say: Callable[[str], None]) -> None:
        super().__init__()
        assert options.endpoint is not None
        self._endpoint, self._say = options.endpoint, say
        self._sizes = (options.min_nodes, options.max_nodes)
        self._options = options
        self._served = connect_store_at(
            options.endpoint,
            timeout_s=options.rendezvous.join_timeout_s,
            read_timeout=STORE_TIMEOUT,
            say=say,
        )
        shared: Store = PrefixStore(f"paceline/{options.run_id}", self._served)
        is_many = options.max_nodes > _MANY_NODES
        given_s = options.rendezvous.keep_alive_interval_s
        interval_s = given_s or (_HEARTBEAT_OF_MANY_S if is_many else _HEARTBEAT_S)
        attempts = options.rendezvous.keep_alive_max_attempt or _BEATS
        self._window_s = window_s = attempts * interval_s
        self._after = 0
        self._known: dict[str, NodeFacts] = {}
        self._current: Round | None = None
        self._sync_count = 0  # that `change` has seen
        self._silent_s, self._changed_at = 0.0, time.monotonic()
        route = route_to(options.endpoint.host)
        address = address_from_here(options.args.local_addr) if options.args.local_addr else ""
        address = address or (route.address if route is not None else socket.gethostname())
        self._facts = facts_of_this_node(options, address)
        self._name = f"{self._facts.host}-{os.getpid()}-{secrets.token_hex(4)}"
        self._records = NodeRecords(shared, self._name, interval_s=interval_s, window_s=window_s)
        try:
            with _reached():
                self._records.sync(timeout_s=STORE_S)
                first = self._publish()
            self._refuse_difference(first)
        except BaseException:
            self._records.close()
            raise

    def _publish(self) -> NodeFacts:
        """Publish the facts of this node; returns those of the first one, which may be this one."""
        text = json.dumps(dataclasses.asdict(self._facts))
        self._records.call("set", f"facts/{self._name}", text)
        return _read_facts(self._records.call("compare_set", "first", "", text)) or self._facts

    def _refuse_difference(self, first: NodeFacts) -> None:
        found = difference(first, self._facts)
        if found is None:
            return
        what, fix = found
        with _reached():
            self._records.call("set", "refused", f"{time.strftime('%H:%M:%S')}: {what}")
        raise LaunchFailed(
            f"this node cannot take part: {what}.",
            where=f"host {self._facts.host}, rendezvous at {self._endpoint}",
            why="all nodes must have the same program, versions and --nnodes.",
            fix=fix,
        )

    def next_round(self) -> Round:
        """See the base class."""
        self._store = None
        if self._after == 0 and self._sizes[1] > _MANY_NODES:
            # All change one state: together, most of their attempts would fail.
            time.sleep(random.uniform(0, self._sizes[1] * _JOIN_S_PER_NODE))
        with _reached():
            while True:
                state = self._enter_round()
                self._after = state.round + 1
                if (found := self._begin(state)) is not None:
                    self._current, self._silent_s = found, 0.0
                    self._changed_at = time.monotonic()
                    return found

    def _enter_round(self) -> State:
        """Take part in the next round, and wait until it is complete."""
        began = time.monotonic()
        enough_at: float | None = None  # when there were nodes enough for the first round
        next_report = began + FIRST_REPORT_S
        pause_s = _FIRST_POLL_S
        while True:
            state, text = self._read()
            if state.closed:
                raise RendezvousClosed("another node has ended the job")
            now = time.monotonic()
            enough = not state.complete and len(state.nodes) >= self._sizes[0]
            enough_at = (enough_at or now) if enough else None
            last_call_s = self._options.rendezvous.last_call_timeout_s
            wanted = next_state(
                state,
                self._name,
                after=self._after,
                dead=self._records.dead,
                sizes=self._sizes,
                last_call_over=enough_at is not None and now - enough_at > last_call_s,
            )
            if wanted != state:
                if wanted.complete:
                    wanted = replace(
                        wanted, nodes=tuple(order(wanted.nodes, self._of(wanted.nodes)))
                    )
                self._change_state(text, wanted)
                pause_s = _FIRST_POLL_S
                continue
            if state.complete and self._name in state.nodes and state.round >= self._after:
                return state
            if now - began > self._options.rendezvous.join_timeout_s:
                raise RendezvousLost("not enough nodes came in time")
            if now >= next_report:
                next_report = now + REPORT_S
                self._report_waiting(state)
            time.sleep(pause_s * max(1, self._sizes[1] / _NODES_OF_A_POLL))
            pause_s = min(2 * pause_s, _POLL_S)

    def _begin(self, state: State) -> Round | None:
        """The round that is complete, with its store; None if the node that should serve it is dead."""
        facts = self._of(state.nodes)
        node = state.nodes.index(self._name)
        key = f"store/{state.round}"
        if node == 0:
            self._store = self._serve_ranks()
            self._records.call("set", key, str(self._store.port))
        deadline = time.monotonic() + STORE_S
        while not self._records.call("check", [key]):
            now, _ = self._read()
            is_dead = state.nodes[0] in self._records.dead
            if is_dead or now.round != state.round or time.monotonic() > deadline:
                return None
            time.sleep(_FIRST_POLL_S)
        each = [facts[name] for name in state.nodes]
        exchange = NodeExchange(self._records, state.round, state.nodes)
        return Round(
            number=state.round,
            node=node,
            nodes=len(each),
            first_rank=sum(other.ranks for other in each[:node]),
            world_size=sum(other.ranks for other in each),
            address=each[0].address,
            port=int(self._records.call("get", key)),
            exchange=exchange if len(each) > 1 else None,
        )

    def _serve_ranks(self) -> TCPStore:
        try:
            store: TCPStore = store_on(listen_for(self._facts.address, 0), STORE_TIMEOUT)
        except OSError as error:
            raise LaunchFailed(
                f"the store of the ranks cannot listen on {self._facts.address}: {error}.",
                where=f"host {self._facts.host}",
                fix="give an address of this host as --local-addr.",
            ) from error
        return store

    def serve(self) -> None:
        """The ranks of several nodes start after their store."""

    def change(self) -> Change | None:
        """See the base class; does not wait for the store."""
        if self._current is None:
            return None
        exchange = self._current.exchange
        if self._is_lost():
            if exchange is not None and exchange.others_done:
                return None  # nothing is left to agree on: the ranks here end by themselves
            raise RendezvousLost("the connection to the rendezvous was lost")
        state = decode_state(self._records.state) if self._records.state else State()
        self._records.nodes = _names(state)
        if state.round < self._current.number or state.closed:
            return (
                None  # an older state; or no restart is possible: ranks that still run may end well
            )
        if state.round == self._current.number:
            if {*state.waiting} - self._records.dead:
                return Change("a node joins", joins=True)
            lost = [node for node in state.nodes if node in self._records.dead]
            if exchange is not None:
                lost = [node for node in lost if not exchange.is_done(node)]
            names = [str(self._known.get(node, node)) for node in lost]
            if not names:
                return None
            text = f"{', '.join(names)}: no heartbeat for {self._window_s:g} s"
            addresses = (self._known[node].address for node in lost if node in self._known)
            return Change(text, lost=tuple(addresses))
        if self._name in (*state.nodes, *state.expected):
            return Change("other nodes have begun a restart", joins=True, has_begun=True)
        return Change("this node did not respond, and the others continued")

    def _is_lost(self) -> bool:
        """Whether the connection to the rendezvous is broken, or has been silent for a minute."""
        # The time of long turns is left out: this launcher was stopped then, as by SIGSTOP.
        now = time.monotonic()
        self._silent_s += min(now - self._changed_at, _TURN_S)
        self._changed_at = now
        if self._sync_count != self._records.sync_count:
            self._sync_count, self._silent_s = self._records.sync_count, 0.0
        return self._records.lost or self._silent_s > _SILENT_S

    def close(self, *, job_ended: bool) -> None:
        """See the base class."""
        with contextlib.suppress(RendezvousLost), _reached():
            # A node that waits for a place, or was left behind, must not end the job of the others.
            while job_ended and not self._records.lost:
                state, text = self._read(timeout_s=_CLOSE_S)
                is_member = self._name in (*state.nodes, *state.expected)
                job_ended = is_member and not self._change_state(text, replace(state, closed=True))
        self._records.close()
        self._store = None

    def _read(self, timeout_s: float = STORE_S) -> tuple[State, str]:
        """The state, as text too."""
        initial = _encode(State())
        data = self._records.call("compare_set", "state", "", initial, timeout_s=timeout_s)
        state = decode_state(data)
        self._records.nodes = _names(state)
        return state, data.decode()

    def _change_state(self, before: str, wanted: State) -> bool:
        """Change the state, if no other node has changed it since; returns whether it is so now."""
        text = _encode(wanted)
        return bool(self._records.call("compare_set", "state", before, text) == text.encode())

    def _of(self, nodes: Sequence[str]) -> dict[str, NodeFacts]:
        """The facts of those of these nodes that have published them."""
        for node in nodes:
            key = f"facts/{node}"
            if node not in self._known and self._records.call("check", [key]):
                found = _read_facts(self._records.call("get", key))
                if found is not None:
                    self._known[node] = found
        return {node: self._known[node] for node in nodes if node in self._known}

    def _report_waiting(self, state: State) -> None:
        """Print which nodes are here and which are missing."""
        facts = self._of(order(state.nodes, self._of(state.nodes)))
        low, high = self._sizes
        here, missing = describe(facts, len(state.nodes), high, low)
        if self._name in state.waiting:
            missing = "this node joins at their next restart"
        elif self._name not in state.nodes:
            here = f"{here}, and no more may take part"
            missing = "this node waits until one leaves. If they are another job, give this one another port"
        text = f"still waiting: {here}; {missing}"
        if self._records.call("check", ["refused"]):
            refused = self._records.call("get", "refused").decode(errors="replace")
            text += f". A node was refused at {refused}"
        self._say(text)


def _names(state: State) -> frozenset[str]:
    return frozenset((*state.nodes, *state.expected, *state.waiting))


def _encode(state: State) -> str:
    return json.dumps(dataclasses.asdict(state))


def decode_state(data: bytes) -> State:
    """The state in the store.

    Raises:
        RendezvousLost: something else is in its place.
    """
    try:
        read = json.loads(data)
        state: State = from_json(
            State, {field.name: read[field.name] for field in dataclasses.fields(State)}
        )
    except UNREADABLE as error:
        raise RendezvousLost(
            "the state of the nodes in the store was not written by this version of paceline"
        ) from error
    return state


def _read_facts(data: bytes) -> NodeFacts | None:
    # Another version of paceline may have other fields.
    empty = {"number": None, "ranks": 0}
    names = [field.name for field in dataclasses.fields(NodeFacts)]
    try:
        read = dict.fromkeys(names, "") | empty | json.loads(data)
        facts: NodeFacts = from_json(NodeFacts, {name: read[name] for name in names})
        return facts
    except UNREADABLE:
        return None


def describe(
    here: Mapping[str, NodeFacts], present: int, wanted: int, at_least: int
) -> tuple[str, str]:
    """How many nodes are here, and which are missing, in two phrases."""
    shown = [str(facts) for facts in here.values()]
    names = ", ".join(shown[:8]) + (", ..." if len(shown) > 8 else "")
    count = f"{present} of {wanted} nodes"
    if at_least != wanted:
        count = f"{present} of at least {at_least} nodes"
    are = "is" if present == 1 else "are"
    numbers = {facts.number for facts in here.values()}
    missing = [n for n in range(wanted) if n not in numbers]
    if None not in numbers and at_least == wanted and missing:
        which = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        return f"{count} {are} here ({names})", f"missing: node{'s' * (len(missing) > 1)} {which}"
    left = max(0, at_least - present)
    return f"{count} {are} here ({names})", f"{left} node{' is' if left == 1 else 's are'} missing"
