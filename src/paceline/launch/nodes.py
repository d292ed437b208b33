"""torch's rendezvous of several nodes, with faster detection of lost nodes.

A front to `torch.distributed.elastic.rendezvous.dynamic_rendezvous`, which takes 43 s to notice a lost node.
Changes: a node is dead when its heartbeat has not changed for 3 s of *this* node's clock (torch compares the
clocks of two hosts); a later round is complete as soon as all living nodes are back, without a last call;
each round has a new store for the ranks; the state is read ten times a second while nodes meet. Several nodes
with static or etcd rendezvous use torch's own. torch does not authenticate the nodes and exchanges pickled
state between them: use several nodes in trusted networks only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous import registry as torch_registry
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousSettings,
    RendezvousTimeout,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from paceline import torch_private
from paceline.errors import ConfigError
from paceline.launch.node_exchange import NodeExchange
from paceline.launch.rendezvous import (
    C10D_PORT,
    READ_TIMEOUT_S,
    endpoint_store,
    interface_of,
    serve_store,
)

_MODULE = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
_NAMES = tuple(
    f"{_MODULE}.{name}"
    for name in (
        "_Action",
        "_BackendRendezvousStateHolder",
        "_DistributedRendezvousOpExecutor",
        "_remove_participant_epilogue",
    )
)
# Without a warning: a job of one node imports this file too, and needs none of them.
_found: list[Any] = [torch_private.look_up(name) for name in _NAMES]
_Action, _StateHolder, _OpExecutor, _remove_epilogue = _found

# All nodes write their heartbeats under one key, so many nodes must write less often.
_MANY_NODES = 64
_HEARTBEAT_S = 1
_HEARTBEAT_OF_MANY_S = 5
_POLL_S = 0.1
_ATTEMPTS = 3


class StateHolder(_StateHolder or object):  # type: ignore[misc]
    """The shared state, and the nodes that this one considers dead.

    Attributes:
        dead: Nodes whose heartbeat has not changed for too long.
    """

    def __init__(self, backend: RendezvousBackend, settings: RendezvousSettings) -> None:
        super().__init__(backend, settings)
        self.dead: set[Any] = set()
        self._window_s = (
            settings.keep_alive_interval * settings.keep_alive_max_attempt
        ).total_seconds()
        self._seen: dict[Any, tuple[Any, float]] = {}
        self._looked_at = 0.0

    def sync_now(self) -> None:
        """Read the state again, however new it is."""
        self._last_sync_time = -1
        self.sync()

    def _sanitize(self) -> None:
        """Remove dead nodes from the state; torch's method compares the clocks of hosts."""
        now = time.monotonic()
        beats = self._state.last_heartbeats
        # After a pause of this process no node is called dead: the others may have paused too.
        paused = now - self._looked_at > self._window_s / 2
        self._looked_at = now
        seen, self._seen = self._seen, {}
        for node, beat in beats.items():
            last = seen.get(node)
            if paused or last is None or last[0] != beat:
                last = (beat, now)
            self._seen[node] = last
        dead = [node for node, (_, at) in self._seen.items() if now - at > self._window_s]
        self._dead_nodes = dead
        self.dead = (self.dead - beats.keys()) | set(dead)
        for node in dead:
            del beats[node]
            self._state.participants.pop(node, None)
            self._state.wait_list.discard(node)
            self._state.redundancy_list.discard(node)
        if dead:
            _remove_epilogue(self._state, self._settings)


class _Executor(_OpExecutor or object):  # type: ignore[misc]
    """Polls more often than once a second, and ends a round when all living nodes have come."""

    survivors: Callable[[], set[Any]]

    def run(
        self,
        state_handler: Callable[[Any, float], Any],
        deadline: float,
        update_deadline: Callable[[timedelta], float] | None = None,
    ) -> None:
        def handler(context: Any, deadline: float) -> Any:
            while True:
                action = state_handler(context, deadline)
                if action != _Action.SYNC:
                    return action
                if self._all_are_back(context):
                    return _Action.MARK_RENDEZVOUS_COMPLETE
                time.sleep(_POLL_S)
                holder = self._state_holder
                assert isinstance(holder, StateHolder)
                holder.sync_now()
                self._state = context.state = holder.state

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


class NodeRendezvous(DynamicRendezvousHandler):
    """torch's rendezvous of several nodes, with a new store for the ranks in each round."""

    def __init__(
        self,
        settings: RendezvousSettings,
        backend: RendezvousBackend,
        store: TCPStore,
        local_addr: str | None,
    ) -> None:
        node = self._node_desc_generator.generate(local_addr)
        self._holder = StateHolder(backend, settings)
        super().__init__(node, settings, backend.name, store, self._holder)
        executor = _Executor(node, self._holder, settings)
        executor.survivors = lambda: self._met - self._holder.dead
        self._op_executor = executor
        self._rendezvous_store = store
        self._met: set[Any] = set()

    def next_rendezvous(self) -> RendezvousInfo:
        """See torch. Collective: one agent of each node."""
        self._bootstrap_store_info = None
        self._shared_tcp_store_server = None
        info = super().next_rendezvous()
        self._met = set(self._holder.state.participants)
        return info

    def exchange(self, node: int, nodes: int) -> NodeExchange:
        """The exchange between the launchers of this round."""
        prefix = f"paceline/{self.get_run_id()}/{self.round}"
        return NodeExchange(PrefixStore(prefix, self._rendezvous_store), node, nodes)

    @property
    def round(self) -> int:
        """The number of rounds before this one."""
        return int(self._holder.state.round)

    def node_waits(self) -> bool:
        """Whether a node waits to join, by the newest state."""
        with self._heartbeat_lock:
            self._holder.sync_now()
            return bool(self._holder.state.wait_list)

    def lost(self) -> list[str]:
        """Addresses of the nodes of this round that are dead."""
        return sorted(node.addr for node in self._met & self._holder.dead)

    def is_excluded(self) -> bool:
        """Whether the others continued without this node, because it did not respond."""
        return self._this_node not in self._holder.state.participants

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> TCPStore:
        return serve_store(interface_of(master_addr), master_addr, master_port)


def rendezvous_of_nodes(parameters: RendezvousParameters) -> RendezvousHandler:
    """The rendezvous of several nodes: `NodeRendezvous` for c10d over TCP, otherwise torch's own.

    Raises:
        ConfigError: wrong options.
    """
    is_tcp = parameters.get("store_type", "tcp").strip().lower() == "tcp"
    if parameters.backend != "c10d" or not is_tcp or not _available():
        return torch_registry.get_rendezvous_handler(parameters)
    host, port = parse_rendezvous_endpoint(parameters.endpoint, C10D_PORT)
    store = endpoint_store(
        host,
        port,
        is_host=parameters.get_as_bool("is_host"),
        timeout=timedelta(seconds=_positive(parameters, "read_timeout", READ_TIMEOUT_S)),
    )
    timeouts = {
        name: timedelta(seconds=seconds)
        for name in ("join", "last_call", "close", "heartbeat")
        if (seconds := parameters.get_as_int(f"{name}_timeout")) is not None
    }
    many = parameters.max_nodes > _MANY_NODES
    interval_s = _positive(
        parameters, "keep_alive_interval", _HEARTBEAT_OF_MANY_S if many else _HEARTBEAT_S
    )
    settings = RendezvousSettings(
        parameters.run_id,
        parameters.min_nodes,
        parameters.max_nodes,
        RendezvousTimeout(**timeouts),
        keep_alive_interval=timedelta(seconds=interval_s),
        keep_alive_max_attempt=_positive(parameters, "keep_alive_max_attempt", _ATTEMPTS),
    )
    backend = C10dRendezvousBackend(store, parameters.run_id)
    return NodeRendezvous(settings, backend, store, parameters.local_addr)


def _available() -> bool:
    """Whether the installed torch has what this file needs; a missing name gives one warning."""
    return None not in [torch_private.find(name) for name in _NAMES]


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
