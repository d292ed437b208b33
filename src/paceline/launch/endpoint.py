"""The store of the rendezvous of several nodes: who serves it, and the wait until it is there.

The store is served by the node with `is_host` or node rank 0, or else by the node that owns the address of
the endpoint; host names are not compared. The other nodes wait for it. If they cannot connect, for example
because the name does not resolve or a firewall drops packets, they print why, and a fix.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import TCPStore

from paceline.errors import LaunchFailed, render
from paceline.job.network import address_from_here, is_loopback, owns, route_to
from paceline.job.store_server import (
    Say,
    cannot_listen,
    listen,
    listen_for,
    store_on,
    wait_served,
)
from paceline.launch.options import Endpoint
from paceline.machine import mtu_of

# Larger than any packet (at most 64 KiB), so that both directions need packets of full size.
_PROBE_BYTES = 1 << 17
_PROBE_S = 5.0


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
        LaunchFailed: the store was not there in time, or only small packets reach it.

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
    store = _connected(endpoint, read_timeout)
    if not _exchanges(store, _PROBE_BYTES, read_timeout):
        _refuse_lost_packets(endpoint, read_timeout)
        store = _connected(endpoint, read_timeout)
    return store


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


def _connected(endpoint: Endpoint, timeout: timedelta) -> TCPStore:
    # torch looks up the name of the other end's address in DNS first, which may take seconds.
    host = address_from_here(endpoint.host)
    return TCPStore(host, endpoint.port, is_master=False, timeout=timeout)


def _exchanges(store: TCPStore, size: int, timeout: timedelta) -> bool:
    """Whether the store takes and returns so many bytes within 5 s; afterwards it has this timeout."""
    key = f"paceline/probe/{socket.gethostname()}/{os.getpid()}"
    store.set_timeout(timedelta(seconds=_PROBE_S))
    try:
        store.set(key, "x" * size)
        store.get(key)
        store.delete_key(key)
    except RuntimeError:
        return False
    store.set_timeout(timeout)
    return True


def _refuse_lost_packets(endpoint: Endpoint, timeout: timedelta) -> None:
    """Raise if small messages pass: a too large MTU loses large packets silently.

    Raises:
        LaunchFailed: only small messages pass.
    """
    # Many nodes at once may keep the endpoint busy for longer, so only a difference between sizes counts.
    if not _exchanges(_connected(endpoint, timeout), 1, timeout):
        return
    used = route_to(endpoint.host)
    where, interface = f"host {socket.gethostname()}", "INTERFACE"
    if used is not None:
        interface = used.interface
        where += f", interface {interface}, MTU {mtu_of(interface)}"
    raise LaunchFailed(
        f"small packets reach {endpoint}, and large ones are lost.",
        where=where,
        why="usually the MTU of an interface is larger than the network between the hosts allows.",
        fix=f"lower it on both hosts: `ip link set {interface} mtu 1400`; then find the largest that "
        "passes.",
    )
