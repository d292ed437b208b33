"""torch's rendezvous of several nodes, with faster detection of lost nodes.

A front to `torch.distributed.elastic.rendezvous.dynamic_rendezvous`, which takes 43 s to notice a lost node.
Changes: a node is dead when its heartbeat has not changed for 3 s of *this* node's clock (torch compares the
clocks of two hosts); a later round is complete as soon as all living nodes are back, without a last call;
each round has a new store for the ranks; the state is read ten times a second while nodes meet.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousSettings,
)

from paceline import torch_private
from paceline.launch.node_exchange import NodeExchange

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
_Action, _remove_epilogue = _found[0], _found[3]
_StateHolderBase: Any = _found[1] or object
_ExecutorBase: Any = _found[2] or object

# All nodes write their heartbeats under one key, so many nodes must write less often.
_MANY_NODES = 64
_HEARTBEAT_S = 1
_HEARTBEAT_OF_MANY_S = 5
_POLL_S = 0.1
_ATTEMPTS = 3


def available() -> bool:
    """Whether the installed torch has what this file needs; a missing name gives one warning."""
    return None not in [torch_private.find(name) for name in _NAMES]


def heartbeat_s(max_nodes: int) -> int:
    """The default of seconds between heartbeats of a node."""
    return _HEARTBEAT_S if max_nodes <= _MANY_NODES else _HEARTBEAT_OF_MANY_S


class StateHolder(_StateHolderBase):  # type: ignore[misc]
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
        now = time.monotonic()
        beats = self._state.last_heartbeats
        # After a pause of this process no node is called dead: the others may have paused too.
        paused = now - self._looked_at > self._window_s / 2
        self._looked_at = now
        self._seen = {
            node: before
            if not paused and (before := self._seen.get(node, (None, 0.0)))[0] == beat
            else (beat, now)
            for node, beat in beats.items()
        }
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


class _Executor(_ExecutorBase):  # type: ignore[misc]
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
    """torch's rendezvous of several nodes, with a new store for the ranks in each round.

    Args:
        serve: Serves a store on this host, given its address as the others see it.
    """

    def __init__(
        self,
        node: Any,
        settings: RendezvousSettings,
        backend: RendezvousBackend,
        store: TCPStore,
        serve: Callable[[str, int], TCPStore],
    ) -> None:
        self._holder = StateHolder(backend, settings)
        super().__init__(node, settings, backend.name, store, self._holder)
        executor = _Executor(node, self._holder, settings)
        executor.survivors = lambda: self._met - self._holder.dead
        self._op_executor = executor
        self._rendezvous_store = store
        self._serve = serve
        self._met: set[Any] = set()

    @classmethod
    def of(
        cls,
        settings: RendezvousSettings,
        local_addr: str | None,
        backend: RendezvousBackend,
        store: TCPStore,
        serve: Callable[[str, int], TCPStore],
    ) -> NodeRendezvous:
        """The rendezvous of a new node."""
        node = cls._node_desc_generator.generate(local_addr)
        return cls(node, settings, backend, store, serve)

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
        return self._serve(master_addr, master_port)


def settings_of(
    run_id: str, nodes: tuple[int, int], timeout: Any, interval_s: int | None, attempts: int | None
) -> RendezvousSettings:
    """torch's settings, with our defaults."""
    return RendezvousSettings(
        run_id,
        nodes[0],
        nodes[1],
        timeout,
        keep_alive_interval=timedelta(seconds=interval_s or heartbeat_s(nodes[1])),
        keep_alive_max_attempt=attempts or _ATTEMPTS,
    )
