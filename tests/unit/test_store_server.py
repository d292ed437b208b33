"""Where the store of a job listens, and what those say that wait for it."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore

from paceline.errors import CollectiveTimeout, ConfigError
from paceline.job import environment, network, rendezvous, store_server
from paceline.job.network import address_from_here
from paceline.job.store_server import listen, listen_for, store_on, wait_served
from paceline.machine import network_interfaces

NAMES = {"debian": "127.0.1.1"}


@pytest.fixture(autouse=True)
def _names(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.getaddrinfo

    def getaddrinfo(host: str, *args: Any, **more: Any) -> Any:
        if host == "nosuch" and host not in NAMES:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real(NAMES.get(host, host), *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "debian"])
def test_the_store_listens_on_one_interface(host: str) -> None:
    listener = listen_for(host, 0)
    found = listener.getsockname()[0]
    store = store_on(listener, timedelta(seconds=10))
    assert found in (_addresses() if host == "debian" else ("127.0.0.1", "::1"))
    store.set("key", "value")
    assert store.get("key") == b"value"
    # Ranks on this host find it by the same name.
    assert wait_served(host, store.port, 0.1, lambda *words: None) is None
    other = TCPStore(address_from_here(host), store.port, is_master=False)
    assert other.get("key") == b"value"


def _addresses() -> list[str]:
    """Where a name that maps to a loopback address may listen: on an interface, if there is one."""
    outside = [a for name, own in network_interfaces().items() if name != "lo" for a in own]
    return outside or ["127.0.1.1"]


@pytest.mark.parametrize("host", ["nosuch", "0.0.0.0", "::", "0"])
def test_the_store_never_listens_on_all_interfaces(host: str) -> None:
    with pytest.raises(ConfigError, match=r"nosuch does not resolve|means all interfaces"):
        listen(host, 0) if host != "nosuch" else listen_for(host, 0)


def test_a_name_that_is_made_a_moment_later_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_server, "FIRST_REPORT_S", 0.0)
    said: list[str] = []

    def say(reason: str, fix: str) -> None:
        said.append(reason)
        NAMES["nosuch"] = "127.0.1.1"

    try:
        with listen_for("nosuch", 0, 10, say) as listener:
            assert listener.getsockname()[0] in _addresses()
    finally:
        del NAMES["nosuch"]
    assert "the name nosuch does not resolve" in said[0]


def test_those_who_wait_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_server, "FIRST_REPORT_S", 0.0)
    said: list[tuple[str, str]] = []
    failure = wait_served("nosuch", 1, 0.1, lambda *words: said.append(words))
    assert failure is not None
    assert failure == said[0]
    assert f"the name nosuch does not resolve on {socket.gethostname()}" in failure[0]
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    failure = wait_served("127.0.0.1", port, 0.0, lambda *words: None)
    assert failure is not None
    assert f"no process of the job listens on port {port}" in failure[0]


def test_a_rank_whose_master_does_not_resolve_names_it() -> None:
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    info = environment.read({**variables, "MASTER_ADDR": "nosuch", "MASTER_PORT": "29500"})
    with pytest.raises(CollectiveTimeout, match=r"did not answer .* the name nosuch does not"):
        rendezvous.connect_store(info, timeout_s=0.1)
    assert network.addresses_of("nosuch") == []
