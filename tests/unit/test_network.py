"""The route of this host to another one, with names and interfaces that the test sets."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from paceline.job import network
from paceline.job.network import Route, interface_variables, route_to

INTERFACES = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.2", "fe80::2"], "ib0": ["192.168.0.2"]}
NAMES = {"node0": "10.0.0.1", "me": "10.0.0.2", "debian": "127.0.1.1", "fast": "192.168.0.9"}
# By network of the target: the address that the kernel would send from.
SOURCES = {"10.0.0": "10.0.0.2", "192.168.0": "192.168.0.2", "192.0.2": "10.0.0.2"}


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch) -> None:
    def getaddrinfo(host: str, *args: Any, **more: Any) -> Any:
        if host not in NAMES and not host[0].isdigit():
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return [(socket.AF_INET, None, None, "", (NAMES.get(host, host), 0))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(network, "network_interfaces", lambda: INTERFACES)
    monkeypatch.setattr(
        network, "source_address", lambda address: SOURCES.get(address.rpartition(".")[0])
    )


@pytest.mark.parametrize(
    ("host", "route"),
    [
        ("node0", Route("eth0", "10.0.0.2", "leads to node0")),
        ("fast", Route("ib0", "192.168.0.2", "leads to fast")),
        ("me", Route("eth0", "10.0.0.2", "has the address of me")),
        ("127.0.0.1", Route("lo", "127.0.0.1", "has the address of 127.0.0.1")),
        ("172.16.0.1", None),  # no route leads there
        ("nowhere", None),
    ],
)
def test_the_interface_that_leads_to_a_host(host: str, route: Route | None) -> None:
    assert route_to(host) == route


def test_a_name_of_debian_gives_the_interface_of_the_default_route(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = route_to("debian")
    assert found is not None
    assert (found.interface, found.address) == ("eth0", "10.0.0.2")
    assert "default route; debian resolves to 127.0.1.1" in found.why
    monkeypatch.setattr(network, "source_address", lambda address: None)
    found = route_to("debian")
    assert found is not None
    assert "there is no default route" in found.why


def test_a_host_owns_the_addresses_of_its_interfaces_and_its_own_name() -> None:
    assert [network.owns(name) for name in ("me", "debian", "node0", "nowhere")] == [
        True,
        True,
        False,
        False,
    ]


def test_variables_that_are_set_stay_as_they_are() -> None:
    route = Route("eth0", "10.0.0.2", "")
    assert interface_variables(route, {"NCCL_SOCKET_IFNAME": "ib"}) == {
        "GLOO_SOCKET_IFNAME": "eth0",
        "TP_SOCKET_IFNAME": "eth0",
    }
    assert interface_variables(Route("lo", "127.0.0.1", ""), {}) == {"GLOO_SOCKET_IFNAME": "lo"}
