"""Which interface of this host leads to the other hosts of a job. Uses no torch.

Gloo and TensorPipe take the address that the host's own name resolves to; on Debian and Ubuntu that is
127.0.1.1, which no other host can reach. So each node looks up the route to the host of the rendezvous,
and pins the backends to its interface.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.machine import network_interfaces

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")

_ANY_PORT = 9  # a UDP socket that is connected sends nothing
# TEST-NET-1 (RFC 5737): no host has it, so the route to it is the default route.
_ELSEWHERE = "192.0.2.1"


@dataclass(frozen=True)
class Route:
    """The way from this host to the host of the rendezvous.

    Attributes:
        interface: its name, such as `eth0`.
        address: the address of this host on it.
        why: why this one, as the end of a sentence that begins with the interface.
    """

    interface: str
    address: str
    why: str


def addresses_of(host: str) -> list[str]:
    """The addresses that a name resolves to here, without doubles; empty if it does not resolve."""
    with contextlib.suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found))
    return []


def is_loopback(host: str) -> bool:
    """Whether this is `localhost` or a loopback address. Other names that resolve to one do not count."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def names_this_host(host: str) -> bool:
    """Whether a host name resolves to loopback addresses only, which lead to this host."""
    addresses = addresses_of(host)
    return not is_loopback(host) and bool(addresses) and all(map(is_loopback, addresses))


def owns(host: str) -> bool:
    """Whether `host` is this host: a name or address that resolves to an address of an interface here.

    A name that resolves to a loopback address is this host: /etc/hosts of Debian and Ubuntu maps a host's
    own name to 127.0.1.1.
    """
    own = {address for found in network_interfaces().values() for address in found}
    return any(address in own or is_loopback(address) for address in addresses_of(host))


def source_address(address: str, port: int = _ANY_PORT) -> str | None:
    """The address that this host uses to reach `address`; None without a route."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port))
        except OSError:
            return None
        return str(probe.getsockname()[0]).partition("%")[0]


def route_to(host: str) -> Route | None:
    """The interface for a job with its rendezvous at `host`; None if no interface leads there.

    If `host` is the loopback, so is the interface. If the name of `host` resolves to a loopback address only,
    it is this host, and nothing says which network the others are on: the default route is taken.
    """
    by_address = {
        address: name for name, found in network_interfaces().items() for address in found
    }
    addresses = addresses_of(host)
    outside = [address for address in addresses if not is_loopback(address)]
    for address in outside or addresses[:1]:
        if address in by_address and (outside or is_loopback(host)):
            return Route(by_address[address], address, f"has the address of {host}")
        source = source_address(address) if outside else None
        if source in by_address:
            return Route(by_address[source], source, f"leads to {host}")
    if outside or not addresses:
        return None
    source = source_address(_ELSEWHERE)
    if source in by_address:
        why = f"has the default route; {host} resolves to {addresses[0]}, which does not tell the network"
        return Route(by_address[source], source, why)
    for address, name in by_address.items():
        if not ipaddress.ip_address(address).is_loopback:
            why = f"is up; {host} resolves to {addresses[0]}, and there is no default route"
            return Route(name, address, why)
    return None


def own_address(host: str) -> str | None:
    """The address of this host at which others reach it by the name `host`; None if that does not resolve.

    Many hosts map their own name to 127.0.1.1, which no other host can reach, and a host behind a virtual
    address cannot bind it: then it is the address of the interface that `route_to` finds.
    """
    addresses = addresses_of(host)
    route = route_to(host) if addresses and not is_loopback(host) else None
    return next(iter(addresses), None) if route is None else route.address


def address_from_here(host: str) -> str:
    """Where this host connects to reach `host`: its name, or `own_address` if that is this host."""
    return own_address(host) or host if names_this_host(host) else host


def interface_variables(route: Route, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that pin Gloo, NCCL and TensorPipe to the interface; those that are set stay as they are.

    On the loopback only that of Gloo: the others do not resolve this host's name there.
    """
    names = VARIABLES[:1] if is_loopback(route.address) else VARIABLES
    return {name: route.interface for name in names if name not in environ}
