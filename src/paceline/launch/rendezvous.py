"""The stores of a job, and the rendezvous of one node. nodes.py has the rendezvous of several nodes.

A front to `torch.distributed.elastic.rendezvous`. torch keeps one store over restarts, so that restarted
ranks read the addresses of dead ones, and its stores listen on all interfaces. Here each round has a new
store, which listens on one interface if possible.
"""

from __future__ import annotations

import gc
import ipaddress
import socket
import time
import weakref
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from paceline.errors import ConfigError

_STORE_TIMEOUT = timedelta(seconds=60)
_REBIND_S = 10.0
READ_TIMEOUT_S = 60
C10D_PORT = 29400
_BACKLOG = 4096
_ANY_INTERFACE = ""


class LocalRendezvous(StaticTCPRendezvous):
    """The rendezvous of a job on one node: each round has a new store on `host`.

    Args:
        host: The address that the store listens on and that the ranks connect to.
        port: 0 lets the kernel choose a free one.
    """

    def __init__(self, host: str, port: int, run_id: str) -> None:
        super().__init__(host, port, 0, 1, run_id, READ_TIMEOUT_S)
        self._host = host
        self._port = port
        self._round = 0
        self._last: weakref.ref[TCPStore] | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """See torch."""
        if self._port and self._last is not None:
            self._wait_gone(self._last)
        store = serve_store(self._host, self._host, self._port)
        self._last = weakref.ref(store)
        self._round += 1
        return RendezvousInfo(
            PrefixStore(f"paceline/agent/{self._round}", store),
            rank=0,
            world_size=1,
            bootstrap_store_info=RendezvousStoreInfo(self._host, store.port),
        )

    def _wait_gone(self, store: weakref.ref[TCPStore]) -> None:
        # A chosen port is free again when the store of the last round is gone.
        deadline = time.monotonic() + _REBIND_S
        while store() is not None and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.01)


def _store(host: str, listener: socket.socket, timeout: timedelta) -> TCPStore:
    return TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def serve_store(interface: str, host: str, port: int) -> TCPStore:
    """Serve a store on one interface; its clients connect to `host`.

    Raises:
        ConfigError: the address is not of this host, or the port is taken.
    """
    try:
        listener = _listen(interface, port)
    except OSError as error:
        raise ConfigError(
            f"the store of the job cannot listen on {host}:{port}: {error.strerror}.",
            why="the port is taken, or the address is not one of this host.",
            fix="omit the port, so that the kernel chooses a free one; or choose another.",
        ) from error
    return _store(host, listener, _STORE_TIMEOUT)


def _listen(interface: str, port: int) -> socket.socket:
    if interface == _ANY_INTERFACE:
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
            )
        return socket.create_server(("", port), backlog=_BACKLOG)
    family, _, _, _, address = socket.getaddrinfo(interface, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family, backlog=_BACKLOG)


def interface_of(host: str) -> str:
    """The address to listen on, so that other hosts can connect to `host`."""
    address = _address_of(host)
    if address is None or (address.is_loopback and not is_loopback(host)):
        # Many hosts map their own name to 127.0.1.1, which no other host can reach.
        return _ANY_INTERFACE
    return str(address)


def _address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    return ipaddress.ip_address(str(found[0][4][0]).partition("%")[0])


def is_loopback(host: str) -> bool:
    """Whether this is `localhost` or a loopback address. Other names that resolve to one do not count."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def local_address(endpoint: str) -> str | None:
    """This host's address on the network that leads to `endpoint`; None if that is unclear."""
    host, port = parse_rendezvous_endpoint(endpoint, C10D_PORT)
    if is_loopback(host):
        return "127.0.0.1"
    address = _address_of(host)
    if address is None:
        return None
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((str(address), port or C10D_PORT))  # UDP: no packet is sent
        except OSError:
            return None
        found = str(probe.getsockname()[0])
    return None if ipaddress.ip_address(found).is_loopback else found


def endpoint_store(host: str, port: int, *, is_host: bool | None, timeout: timedelta) -> TCPStore:
    """The store at the endpoint of the nodes: the node that can bind the address serves it.

    Args:
        is_host: Whether this node has to serve it; None if that is unknown.
    """
    if is_host is not False:
        listener = _claim(host, port, must=bool(is_host))
        if listener is not None:
            return _store(host, listener, timeout)
    return TCPStore(host, port, is_master=False, timeout=timeout)


def _claim(host: str, port: int, *, must: bool) -> socket.socket | None:
    # Two launchers of one host may both try. A host behind a virtual address cannot bind it, so with `must`
    # it listens on all interfaces.
    interface = interface_of(host)
    may_be_other = interface == _ANY_INTERFACE and not must
    if may_be_other and host not in (socket.gethostname(), socket.getfqdn()):
        return None
    try:
        return _listen(interface, port)
    except OSError:
        if not must:
            return None
    try:
        return _listen(_ANY_INTERFACE, port)
    except OSError as error:
        raise ConfigError(
            f"is_host is set, and this host cannot listen on {host}:{port}: {error.strerror}.",
            fix="choose a free port in --rdzv-endpoint, or set is_host on the node that has this address.",
        ) from error
