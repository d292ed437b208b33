"""Where the store of a job listens, and what those say that wait for it."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import pytest

from paceline.errors import CollectiveTimeout
from paceline.job import environment, network, rendezvous, store_server
from paceline.job.store_server import listen_for, store_on, wait_served

NAMES = {"me": "127.0.0.1", "debian": "127.0.1.1", "virtual": "192.0.2.7"}


@pytest.fixture(autouse=True)
def _names(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.getaddrinfo

    def getaddrinfo(host: str, *args: Any, **more: Any) -> Any:
        if host == "nosuch":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real(NAMES.get(host, host), *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "127.0.0.1"),
        # No other host can reach these, or this host has not the address: all interfaces.
        ("debian", None),
        ("virtual", None),
        ("nosuch", None),
    ],
)
def test_the_store_listens_where_other_hosts_can_reach_it(host: str, address: str | None) -> None:
    listener = listen_for(host, 0)
    found = listener.getsockname()[0]
    assert found == address if address else found in ("::", "0.0.0.0")
    store = store_on(listener, timedelta(seconds=10))
    store.set("key", "value")
    assert store.get("key") == b"value"


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
        rendezvous.meet(info, timeout_s=0.1)
    assert network.addresses_of("nosuch") == []
