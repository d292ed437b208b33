"""Where the nodes of a job meet, and a store that is bound by us and new in each round.

A front to `torch.distributed.elastic.rendezvous`. torch keeps one store over restarts, so that restarted
ranks read the addresses of dead ones, and its stores listen on all interfaces. Static and etcd
rendezvous over several nodes are torch's own. torch authenticates none of this, and its state between
nodes is pickled: run it in networks that you trust.
"""

from __future__ import annotations

import gc
import ipaddress
import socket
import time
import weakref
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous import registry as torch_registry
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousTimeout
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from paceline.errors import ConfigError
from paceline.launch import nodes

_STORE_TIMEOUT = timedelta(seconds=60)
_REBIND_S = 10.0
_READ_TIMEOUT_S = 60
_C10D_PORT = 29400
_BACKLOG = 4096
ANY = ""


class LocalRendezvous(RendezvousHandler):
    """One node, which meets nobody: each round is a new store on this node's `host`.

    Args:
        host: The address to listen on; where ranks will look for it.
        port: 0 lets the kernel choose one, which cannot be taken.
    """

    def __init__(self, host: str, port: int, run_id: str) -> None:
        self._host = host
        self._port = port
        self._run_id = run_id
        self._round = 0
        self._last: weakref.ref[TCPStore] | None = None

    def get_backend(self) -> str:
        """See torch."""
        return "local"

    @property
    def use_agent_store(self) -> bool:
        """See torch."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """See torch."""
        if self._port and self._last is not None:
            self._wait_gone(self._last)
        store = bind_store(self._host, self._host, self._port)
        self._last = weakref.ref(store)
        self._round += 1
        return RendezvousInfo(
            PrefixStore(f"paceline/agent/{self._round}", store),
            rank=0,
            world_size=1,
            bootstrap_store_info=RendezvousStoreInfo(self._host, store.port),
        )

    def _wait_gone(self, store: weakref.ref[TCPStore]) -> None:
        # A port that the user chose is free again only when the last round's store is gone.
        deadline = time.monotonic() + _REBIND_S
        while store() is not None and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.01)

    def is_closed(self) -> bool:
        """See torch."""
        return False

    def set_closed(self) -> None:
        """See torch."""

    def num_nodes_waiting(self) -> int:
        """See torch."""
        return 0

    def get_run_id(self) -> str:
        """See torch."""
        return self._run_id

    def shutdown(self) -> bool:
        """See torch."""
        return True


def bind_store(interface: str, host: str, port: int) -> TCPStore:
    """Serve a store on one interface alone; its clients will look for it as `host`.

    Raises:
        ConfigError: the address is not this host's, or the port is taken.
    """
    try:
        listener = _listen(interface, port)
    except OSError as error:
        raise ConfigError(
            f"the store of the job cannot listen on {host}:{port}: {error.strerror}.",
            why="the port is taken, or the address is not one of this host.",
            fix="leave the port out, so that a free one is taken; or choose another.",
        ) from error
    bound = listener.getsockname()[1]
    return TCPStore(
        host,
        bound,
        is_master=True,
        timeout=_STORE_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _listen(interface: str, port: int) -> socket.socket:
    if interface == ANY:
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
            )
        return socket.create_server(("", port), backlog=_BACKLOG)
    family, _, _, _, address = socket.getaddrinfo(interface, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family, backlog=_BACKLOG)


def _interface(host: str) -> str:
    """What to listen on so that others find it under `host`."""
    address = _address_of(host)
    if address is None or (address.is_loopback and not is_loopback(host)):
        # Many hosts map their own name to 127.0.1.1, where no other host would find it.
        return ANY
    return str(address)


def _address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    return ipaddress.ip_address(str(found[0][4][0]).partition("%")[0])


def is_loopback(host: str) -> bool:
    """Whether this names the loopback itself, and not only leads there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def local_address(endpoint: str) -> str | None:
    """This host's address on the network that leads to `endpoint`; None where that is unclear."""
    host, port = parse_rendezvous_endpoint(endpoint, _C10D_PORT)
    if is_loopback(host):
        return "127.0.0.1"
    address = _address_of(host)
    if address is None:
        return None
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((str(address), port or _C10D_PORT))  # sends nothing
        except OSError:
            return None
        found = str(probe.getsockname()[0])
    return None if ipaddress.ip_address(found).is_loopback else found


def handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """The rendezvous of several nodes: ours for c10d over TCP, otherwise torch's.

    Raises:
        ConfigError: an unknown backend, or an endpoint that cannot be used.
    """
    is_tcp = parameters.get("store_type", "tcp").strip().lower() == "tcp"
    if parameters.backend != "c10d" or not is_tcp or not nodes.available():
        return torch_registry.get_rendezvous_handler(parameters)
    store = _meeting_store(parameters)
    backend = C10dRendezvousBackend(store, parameters.run_id)
    timeouts = {
        name: timedelta(seconds=seconds)
        for name in ("join", "last_call", "close", "heartbeat")
        if (seconds := parameters.get_as_int(f"{name}_timeout")) is not None
    }
    settings = nodes.settings_of(
        parameters.run_id,
        (parameters.min_nodes, parameters.max_nodes),
        RendezvousTimeout(**timeouts),
        _whole(parameters, "keep_alive_interval"),
        _whole(parameters, "keep_alive_max_attempt"),
    )
    return nodes.FreshRendezvous.of(
        settings,
        parameters.local_addr,
        backend,
        store,
        lambda host, port: bind_store(_interface(host), host, port),
    )


def _whole(parameters: RendezvousParameters, key: str) -> int | None:
    value = parameters.get_as_int(key)
    if value is not None and value <= 0:
        raise ConfigError(f"--rdzv-conf {key} must be a positive number, and is {value}.")
    return value


def _meeting_store(parameters: RendezvousParameters) -> TCPStore:
    """The store under the endpoint: served by the node that can bind it, joined by the others."""
    host, port = parse_rendezvous_endpoint(parameters.endpoint, _C10D_PORT)
    timeout = timedelta(seconds=_whole(parameters, "read_timeout") or _READ_TIMEOUT_S)
    is_host = parameters.get_as_bool("is_host")
    if is_host is not False:
        listener = _claim(host, port, must=bool(is_host))
        if listener is not None:
            bound = listener.getsockname()[1]
            return TCPStore(
                host,
                bound,
                is_master=True,
                timeout=timeout,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
    return TCPStore(host, port, is_master=False, timeout=timeout)


def _claim(host: str, port: int, *, must: bool) -> socket.socket | None:
    # Being able to bind the address is what makes a node the host of it; that two agents of one host
    # both try is ordinary. A host behind a virtual address cannot bind it, so it listens everywhere.
    interface = _interface(host)
    if interface == ANY and not must and not _is_own_name(host):
        return None
    try:
        return _listen(interface, port)
    except OSError:
        if not must:
            return None
    try:
        return _listen(ANY, port)
    except OSError as error:
        raise ConfigError(
            f"is_host is set, and {host}:{port} cannot be listened on: {error.strerror}."
        ) from error


def _is_own_name(host: str) -> bool:
    return host in (socket.gethostname(), socket.getfqdn())
