"""The store of the rendezvous of several nodes: who serves it, and the wait until it is there.

The store is served by the node with `is_host` or node rank 0, or else by the node that owns the address of
the endpoint; host names are not compared. The other nodes wait for it. If they cannot connect, for example
because the name does not resolve or a firewall drops packets, they print why, and a fix.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import TCPStore

from paceline.errors import LaunchFailed, render
from paceline.job.network import address_from_here, is_loopback, owns
from paceline.job.store_server import (
    Say,
    cannot_listen,
    listen,
    listen_for,
    store_on,
    wait_served,
)
from paceline.launch.options import Endpoint


def connect_store_at(
    endpoint: Endpoint,
    *,
    timeout_s: float,
    read_timeout: timedelta,
    say: Callable[[str], None],
) -> TCPStore:
    """Serve the store of the nodes, or connect to it as soon as it is there.

    Args:
        timeout_s: how long to wait for the node that serves the store.
        read_timeout: of the store.
        say: prints a line for the user.

    Raises:
        ConfigError: this node has to serve the store and cannot.
        LaunchFailed: the store was not there in time.

    Collective: the launcher of each node.
    """

    def say_waiting(reason: str, fix: str) -> None:
        say(render(f"still waiting for the rendezvous at {endpoint}: {reason}", fix=fix))

    listener = _claim(endpoint, timeout_s, say_waiting)
    if listener is not None:
        served: TCPStore = store_on(listener, read_timeout)
        return served
    failure = wait_served(endpoint.host, endpoint.port, timeout_s, say_waiting)
    if failure is not None:
        reason, fix = failure
        raise LaunchFailed(
            f"rendezvous failed: {reason}.",
            where=f"host {socket.gethostname()}, rendezvous at {endpoint}",
            fix=fix,
        )
    # torch looks up the name of the other end's address in DNS first, which may take seconds.
    host = address_from_here(endpoint.host)
    return TCPStore(host, endpoint.port, is_master=False, timeout=read_timeout)


def _claim(endpoint: Endpoint, timeout_s: float, say: Say) -> socket.socket | None:
    host, port = endpoint.host, endpoint.port
    if is_loopback(host) and endpoint.is_host is None:
        # All launchers are on this host: the first of them serves.
        with contextlib.suppress(OSError):
            return listen(host, port)
        return None
    if not (owns(host) if endpoint.is_host is None else endpoint.is_host):
        return None
    try:
        return listen_for(host, port, timeout_s, say)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and not endpoint.one_launcher and not endpoint.is_host:
            return None
        raise cannot_listen(
            f"this host has to serve the rendezvous, and cannot listen on {endpoint}",
            port,
            error,
            fix="choose another port for this job, the same on all nodes; or end the process that has it.",
        ) from error
