"""The shared state of the launchers of several nodes: dead nodes, and clocks that are wrong."""

from __future__ import annotations

import dataclasses
import random
import socket
import time
from datetime import UTC, datetime, timedelta

import psutil
import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousSettings,
    RendezvousTimeout,
)

from paceline import torch_private
from paceline.launch.endpoint import Endpoint
from paceline.launch.node_facts import NodeFacts
from paceline.launch.nodes import NodeOptions, StateHolder, rendezvous_of_nodes

SETTINGS = RendezvousSettings(
    run_id="job",
    min_nodes=2,
    max_nodes=2,
    timeout=RendezvousTimeout(),
    keep_alive_interval=timedelta(seconds=1),
    keep_alive_max_attempt=3,
)
OTHER = torch_private.look_up(f"{torch_private.RENDEZVOUS}._NodeDesc")("b", 1, 0)


def _beat(holder: StateHolder, ahead_s: float) -> None:
    holder.sync_now()
    holder.state.last_heartbeats[OTHER] = datetime.now(UTC) + timedelta(seconds=ahead_s)
    holder.mark_dirty()
    holder.sync()


def test_clocks_an_hour_apart_are_noticed_and_no_node_is_dead_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = C10dRendezvousBackend(HashStore(), "job")
    here, there = StateHolder(backend, SETTINGS), StateHolder(backend, SETTINGS)
    for _ in range(2):  # the age of the first heartbeat is not known
        _beat(there, 3600)
        here.sync_now()
    assert here.clock_offsets_s[OTHER] == pytest.approx(3600, abs=5)
    assert here.dead == set()
    # A node is dead when its heartbeat stays the same, whatever time it says.
    now = time.monotonic()
    for later in (1.0, 2.0, 3.0, 4.0):
        monkeypatch.setattr(time, "monotonic", lambda later=later: now + later)
        here.sync_now()
    assert here.dead == {OTHER}


@pytest.mark.parametrize("attempts", [1, 2, 3])
def test_a_node_without_heartbeats_is_dead_after_as_many_intervals_as_the_user_wants(
    monkeypatch: pytest.MonkeyPatch, attempts: int
) -> None:
    settings = dataclasses.replace(SETTINGS, keep_alive_max_attempt=attempts)
    backend = C10dRendezvousBackend(HashStore(), "job")
    here, there = StateHolder(backend, settings), StateHolder(backend, settings)
    for _ in range(2):
        _beat(there, 0)
        here.sync_now()
    now = time.monotonic()
    for number in range(1, attempts + 2):  # a look is a little later than a heartbeat
        monkeypatch.setattr(time, "monotonic", lambda number=number: now + 1.05 * number)
        here.sync_now()
    assert here.dead == {OTHER}


def _one_node() -> tuple[int, NodeOptions]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    return port, NodeOptions(
        endpoint=Endpoint(host="127.0.0.1", port=port, is_host=True, one_launcher=True),
        facts=NodeFacts(host="h", number=0, nodes="1", script="", digest=""),
        ports=None,
        say=lambda text: None,
    )


def test_the_first_round_begins_without_a_random_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr(random, "uniform", lambda *bounds: drawn.append(bounds) or 0.0)
    port, options = _one_node()
    endpoint = f"127.0.0.1:{port}"
    parameters = RendezvousParameters("c10d", endpoint, "job", 1, 1, "127.0.0.1")
    rendezvous = rendezvous_of_nodes(parameters, options)
    info = rendezvous.next_rendezvous()
    rendezvous.shutdown()
    assert (info.rank, info.world_size, drawn) == (0, 1, [])


def test_a_static_rendezvous_listens_on_one_interface() -> None:
    port, options = _one_node()
    parameters = RendezvousParameters("static", f"127.0.0.1:{port}", "job", 1, 1, rank=0)
    info = rendezvous_of_nodes(parameters, options).next_rendezvous()
    assert (info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port) == (
        "127.0.0.1",
        port,
    )
    listening = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"]
    assert [place.ip for place in listening if place.port == port] == ["127.0.0.1"]
