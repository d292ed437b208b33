"""Numbers told through the store: who came is never said to be missing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from paceline.job.peers import Peers


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


@pytest.fixture
def peers(store: dist.Store) -> Iterator[Peers]:
    peers = Peers(store, rank=0, world_size=2)
    yield peers
    peers.close()


def test_a_rank_that_came_and_passed_on_between_two_looks_is_heard(
    peers: Peers, store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def passes_meanwhile(rank: int, loop: int) -> int:
        store.set(f"loss/{rank}", "2.5")
        return 7

    monkeypatch.setattr(peers, "_passed_by", passes_meanwhile)
    assert peers.exchange("loss", 1.5, 7, loop=1, timeout_s=20) == ([1.5, 2.5], {})


def test_a_rank_that_passed_without_telling_is_missing(peers: Peers, store: dist.Store) -> None:
    store.set("at/1", "1 7")
    assert peers.exchange("loss", 1.5, 7, loop=1, timeout_s=20) == ([], {1: 7})


def test_a_rank_that_does_not_come_is_missing_in_the_end(peers: Peers) -> None:
    assert peers.exchange("loss", 1.5, 7, loop=1, timeout_s=0.1) == ([], {1: 0})
