"""The store of a job: the socket that serves it, and how other processes wait until it accepts connections.

A front to `torch.distributed.TCPStore`, whose server would listen on all interfaces: it gets a socket that
listens already. The launcher of `paceline run` and the ranks of other launchers use the same functions.
"""

from __future__ import annotations

import errno
import functools
import ipaddress
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from paceline.errors import ConfigError
from paceline.job.network import (
    address_from_here,
    addresses_of,
    names_this_host,
    own_address,
)
from paceline.machine import owner_of_port

FIRST_REPORT_S = 5.0
REPORT_S = 10.0
_CONNECT_S = 3.0
_FIRST_POLL_S = 0.02  # the pauses double up to _POLL_S: hosts that start together do not wait
_POLL_S = 0.2
_BACKLOG = 4096
LOOPBACK = "127.0.0.1"
Say = Callable[[str, str], None]  # takes the reason of a wait, and a fix


def serve_here(timeout: timedelta) -> Any:
    """Serve a store that only this host can reach, on a port that the kernel chooses."""
    return store_on(listen(LOOPBACK, 0), timeout)


def store_on(listener: socket.socket, timeout: timedelta) -> Any:
    """Serve a `torch.distributed.TCPStore` on a socket that listens already; imports torch."""
    from torch.distributed import TCPStore

    address, port = listener.getsockname()[:2]
    return TCPStore(
        address,
        port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def listen(address: str, port: int) -> socket.socket:
    """Listen on an address of this host; port 0 lets the kernel choose.

    Raises:
        OSError: the port is taken, or the address is not one of this host.
        ConfigError: the address means all interfaces: whoever reaches a store can read and change it.
    """
    family, _, _, _, found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    if ipaddress.ip_address(str(found[0]).partition("%")[0]).is_unspecified:
        raise ConfigError(
            f"{address} means all interfaces, and a store listens on one.",
            where=f"host {socket.gethostname()}",
            why="torch's store has no authentication.",
            fix="give the address of one interface: `ip -br address`.",
        )
    return socket.create_server(found[:2], family=family, backlog=_BACKLOG)


def listen_for(
    host: str, port: int, timeout_s: float = 0.0, say: Say = lambda reason, fix: None
) -> socket.socket:
    """Listen where other hosts connect to if they call this one `host`: see `own_address`.

    Args:
        timeout_s: how long to wait until the name resolves: that of a new pod takes a moment.
        say: called while it waits, as by `wait_served`.

    Raises:
        OSError: the port is taken, or no interface leads to the address of the host.
        ConfigError: the name does not resolve.
    """

    def resolves() -> OSError | None:
        return None if addresses_of(host) else socket.gaierror(socket.EAI_NONAME, "")

    failure = _wait(resolves, functools.partial(_explain, host, port), timeout_s, say)
    address = own_address(host)
    if failure is not None or address is None:
        what, fix = failure or unresolved(host)
        raise ConfigError(f"this host has to serve the store of the job, and {what}.", fix=fix)
    return listen(address, port)


def cannot_listen(what: str, port: int, error: OSError, *, fix: str) -> ConfigError:
    """The error of a process that has to serve the store and cannot; `what` is the start of its text."""
    taken = error.errno == errno.EADDRINUSE
    if error.errno == errno.EADDRNOTAVAIL:
        fix = "give an address that an interface of this host has: `ip -br address`."
    # `create_server` adds the address to its text.
    reason = os.strerror(error.errno) if error.errno else str(error)
    return ConfigError(
        f"{what}: {reason}.",
        where=f"host {socket.gethostname()}",
        why=f"the port is taken by {owner_of_port(port)}." if taken else "",
        fix=fix,
    )


def wait_served(host: str, port: int, timeout_s: float, say: Say) -> tuple[str, str] | None:
    """Wait until a process listens at this host and port.

    Args:
        say: called after 5 s, and then every 10 s, with the reason and a fix.

    Returns:
        The reason and a fix if none did in time.
    """
    connect = functools.partial(_connect, host, port)
    return _wait(connect, functools.partial(_explain, host, port), timeout_s, say)


def _wait(
    attempt: Callable[[], OSError | None],
    explain: Callable[[OSError], tuple[str, str]],
    timeout_s: float,
    say: Say,
) -> tuple[str, str] | None:
    deadline = time.monotonic() + timeout_s
    next_report = time.monotonic() + FIRST_REPORT_S
    pause_s = _FIRST_POLL_S
    while True:
        began = time.monotonic()
        error = attempt()
        if error is None:
            return None
        now = time.monotonic()
        if now >= deadline:
            return explain(error)
        if now >= next_report:
            say(*explain(error))
            next_report = now + REPORT_S
        time.sleep(max(0.0, began + pause_s - time.monotonic()))
        pause_s = min(2 * pause_s, _POLL_S)


def _connect(host: str, port: int) -> OSError | None:
    try:
        with socket.create_connection((address_from_here(host), port), _CONNECT_S):
            return None
    except OSError as error:
        return error
    except UnicodeError:  # of a name that is too long, or has an empty part
        return socket.gaierror(socket.EAI_NONAME, "not a host name")


def unresolved(host: str, reason: str = "") -> tuple[str, str]:
    """What to say if a name does not resolve, and a fix."""
    reason = f" ({reason})" if reason else ""
    return (
        f"the name {host} does not resolve on {socket.gethostname()}{reason}",
        "check the name, add it to /etc/hosts or DNS, or use the address of that host.",
    )


def _explain(host: str, port: int, error: OSError) -> tuple[str, str]:
    """Why this host cannot connect there, and what to do."""
    if isinstance(error, socket.gaierror):
        return unresolved(host, error.strerror or "")
    here = socket.gethostname()
    addresses = addresses_of(host)
    if names_this_host(host):
        return (
            f"the name {host} resolves to {addresses[0]} on {here}, which is {here} itself",
            f"correct /etc/hosts on {here}, or use the address of {host}.",
        )
    if isinstance(error, ConnectionRefusedError):
        return (
            f"{host} answers, and no process of the job listens on port {port}",
            "start the job there too, and see its output. If it runs there already, a firewall rejects the "
            f"port: open TCP port {port}.",
        )
    if isinstance(error, TimeoutError):
        return (
            f"{host} does not answer on port {port}",
            f"if the host is up and the address is right, a firewall drops the packets: open TCP port {port} "
            "there.",
        )
    return (
        f"{error.strerror or error}",
        f"check that {here} has a route to {host} (`ip route get {(addresses or [host])[0]}`).",
    )
