"""A round of ranks, and the rendezvous of a job on one host.

A round is the time between two restarts. Each round has a new store for its ranks, which listens on one
interface: restarted ranks must not read the addresses of dead ones. nodes.py has the rendezvous of several
nodes. This file does not import torch, because the ranks of one host are started before.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from paceline.job.store_server import cannot_listen, listen, store_on
from paceline.launch.node_exchange import NodeExchange

STORE_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True, kw_only=True)
class Round:
    """A round of ranks, as one node sees it.

    Attributes:
        number: Of rounds before this one. Equal on all nodes.
        node: Number of this node, from 0 to `nodes` - 1.
        first_rank: Rank of local rank 0; the other ranks of the node follow.
        address: Of the store of the ranks.
        exchange: With the launchers of other nodes; None if there is one node.
    """

    number: int
    node: int
    nodes: int
    first_rank: int
    world_size: int
    address: str
    port: int
    exchange: NodeExchange | None = None


@dataclass(frozen=True)
class Change:
    """Why a round has to end, although no rank of this node has failed.

    Attributes:
        joins: Whether a node joins. Otherwise nodes were lost.
        has_begun: Whether other nodes have begun the next round already.
        lost: The addresses of lost nodes.
    """

    text: str
    joins: bool = False
    has_begun: bool = False
    lost: tuple[str, ...] = ()


class RendezvousLost(Exception):
    """The rendezvous cannot be reached, is closed, or was not complete in time; the text says which."""


class RendezvousClosed(RendezvousLost):
    """The job has ended on another node."""


class Rendezvous:
    """The rendezvous of a job on one host, and what a rendezvous of several nodes adds.

    Args:
        host: The address that the store listens on and that the ranks connect to.
        port: 0 lets the kernel choose a free one.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, *, ranks: int = 1) -> None:
        self._host, self._port, self._ranks = host, port, ranks
        self._rounds = 0
        self._listener: socket.socket | None = None
        self._store: Any = None

    def next_round(self) -> Round:
        """Agree on the next round.

        Raises:
            ConfigError: this node has to serve the store and cannot.
            LaunchFailed: this node cannot take part.
            RendezvousLost: see there.

        Collective: the launcher of each node.
        """
        self._store = None  # closes the port of the last round
        try:
            self._listener = listen(self._host, self._port)
        except OSError as error:
            raise cannot_listen(
                f"the store of the job cannot listen on {self._host}:{self._port}",
                self._port,
                error,
                fix="omit the port, so that the kernel chooses a free one; or choose another.",
            ) from error
        self._rounds += 1
        address, port = self._listener.getsockname()[:2]
        return Round(
            number=self._rounds - 1,
            node=0,
            nodes=1,
            first_rank=0,
            world_size=self._ranks,
            address=address,
            port=port,
        )

    def serve(self) -> None:
        """Serve the store of the round; call it when the ranks have been started.

        Their connections wait until then, so the ranks and this launcher import torch at the same time.
        """
        if self._listener is not None:
            listener, self._listener = self._listener, None
            with quiet_torch():
                self._store = store_on(listener, STORE_TIMEOUT)

    def change(self) -> Change | None:
        """What has changed among the nodes since the round began; None if it may go on.

        Raises:
            RendezvousLost: the rendezvous cannot be reached.
        """
        return None

    def close(self, *, job_ended: bool) -> None:
        """Release the store. With `job_ended`, also refuse nodes that come later."""
        self._store = None
        if self._listener is not None:
            self._listener.close()


@contextlib.contextmanager
def quiet_torch() -> Iterator[None]:
    """Import torch here for the first time, and it does not print if the process that serves a store ends."""
    chosen = "TORCH_CPP_LOG_LEVEL" in os.environ
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    try:
        yield
    finally:
        if not chosen:
            del os.environ["TORCH_CPP_LOG_LEVEL"]
