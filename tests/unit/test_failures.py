"""Messages between ranks through the store: who came is never called missing; idle ranks write nothing."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.errors import StepError
from paceline.job import current_step, failures
from paceline.job.failures import ExceptHook, Peers
from paceline.metrics.step_loss import StepLoss


class CountingStore(dist.Store):
    """Counts the calls by name, and the keys that a call of `check` looks for."""

    def __init__(self, inner: dist.Store) -> None:
        super().__init__()
        self.inner = inner
        self.calls: Counter[str] = Counter()
        self.keys_in_a_check = 0  # the most

    def clone(self) -> CountingStore:
        return CountingStore(self.inner)

    def __getattribute__(self, name: str) -> Any:
        if name not in ("set", "get", "add", "multi_get", "compare_set", "delete_key"):
            return super().__getattribute__(name)
        self.calls[name] += 1
        return getattr(self.inner, name)

    def check(self, keys: list[str]) -> bool:
        self.keys_in_a_check = max(self.keys_in_a_check, len(keys))
        return self.inner.check(keys)


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


@pytest.fixture
def connect(store: dist.Store) -> Iterator[Callable[..., Peers]]:
    opened: list[Peers] = []

    def open_peers(rank: int = 0, world_size: int = 2, client: Any = store) -> Peers:
        opened.append(Peers(client, rank, world_size))
        return opened[-1]

    yield open_peers
    for peers in opened:
        peers.close()


def test_a_rank_that_came_and_passed_on_between_two_looks_is_heard(
    connect: Any, store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def passes_meanwhile(rank: int) -> Any:
        store.set(f"loss/{rank}", "2.5")
        return failures._Progress(1, 7, 7, "")

    peers = connect()
    monkeypatch.setattr(failures, "_GRACE_S", 0.0)
    monkeypatch.setattr(peers, "_progress_of", passes_meanwhile)
    assert peers.exchange("loss", 1.5, _passed(7), timeout_s=20) == ([1.5, 2.5], {})


def _passed(step: int) -> Callable[[Any], bool]:
    return lambda other: other.passed >= step


def test_a_rank_that_passed_or_does_not_come_is_missing(connect: Any) -> None:
    ahead, asks = connect(rank=1, world_size=3), connect(world_size=3)
    ahead.new_loop()
    ahead.passed = 7
    assert asks.exchange("loss", 1.5, _passed(7), timeout_s=20) == ([], {1: 7})
    assert asks.exchange("late", 1.5, _passed(9), timeout_s=0.1) == ([], {1: 7, 2: 0})
    asks.new_loop()
    with pytest.raises(StepError, match="rank 1 went on after step 7"):
        asks.leave_loop(6, updated=True)


@pytest.mark.parametrize("size", [4, 16])
def test_the_store_does_not_look_for_each_rank_in_each_poll(store: dist.Store, size: int) -> None:
    clients = [CountingStore(store) for _ in range(size)]
    ranks = [Peers(client, rank, size) for rank, client in enumerate(clients)]

    def exchange(peers: Peers) -> Any:
        if peers._rank == size - 1:
            time.sleep(0.3)  # the others poll
        return peers.exchange("loss", peers._rank, _passed(3), timeout_s=20)

    try:
        with ThreadPoolExecutor(size) as pool:
            results = list(pool.map(exchange, ranks))
    finally:
        for peers in ranks:
            peers.close()
    assert results == [(list(range(size)), {})] * size
    assert all(client.keys_in_a_check == 1 for client in clients[:-1])


def test_values_that_all_ranks_have_read_are_deleted(
    connect: Any, store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        current_step, "step", 0
    )  # an earlier test of this process may have taken steps
    ranks = [connect(rank=rank, world_size=3) for rank in range(3)]

    def exchange_often(peers: Peers) -> list[Any]:
        return [
            peers.exchange_in_step(call, [peers._rank, number], timeout_s=20)
            for number in range(10)
            for call in ("loss", "save")
        ]

    with ThreadPoolExecutor(len(ranks)) as pool:
        results = list(pool.map(exchange_often, ranks))
    expected = [([[rank, number] for rank in range(3)], {}) for number in range(10) for _ in "ab"]
    assert results == [expected] * 3
    left = {
        (call, number)
        for call in ("loss", "save")
        for number in range(1, 11)
        for rank in range(3)
        if store.check([f"{call}/0/0/0/{number}/{rank}"])
        or store.check([f"{call}/0/0/0/{number}/all"])
    }
    assert left == {("loss", 10), ("save", 10)}


@pytest.mark.parametrize("step_now", [3, 5])
def test_a_rank_that_is_late_to_read_the_loss_of_an_ended_step_is_awaited(
    connect: Any, monkeypatch: pytest.MonkeyPatch, step_now: int
) -> None:
    """After the loop, and in a later step."""
    passed = 3 if step_now == 3 else 4
    early, late = connect(), connect(rank=1)
    losses = []
    for peers in (early, late):
        peers.passed = passed
        job: Any = SimpleNamespace(
            peers=peers, timeout_s=20, data=SimpleNamespace(reporters=(0, 1)), where=lambda: ""
        )
        losses.append(StepLoss(job, 3, torch.tensor(1.0), 2))
    looks = []

    def comes_at_the_second_look(rank: int) -> Any:
        looks.append(rank)
        if len(looks) == 2:
            coming.append(pool.submit(float, losses[1]))
        return failures._Progress(0, passed, passed, "")

    monkeypatch.setattr(current_step, "step", step_now)
    monkeypatch.setattr(failures, "_GRACE_S", 0.0)
    monkeypatch.setattr(early, "_progress_of", comes_at_the_second_look)
    coming: list[Any] = []
    with ThreadPoolExecutor(1) as pool:
        assert float(losses[0]) == 0.5
        assert coming[0].result() == 0.5


def test_an_inner_loop_uses_no_name_of_the_outer_one(
    connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = connect(world_size=1)
    names = set()

    def step(number: int, body: Callable[[], object] = lambda: None) -> None:
        monkeypatch.setattr(current_step, "step", number)
        for when in (body, lambda: None):
            when()
            peers.exchange_in_step("save", None, timeout_s=20)
            names.add(peers._posted["save"])
        peers.end_step(number)

    def inner() -> None:
        peers.new_loop()
        for number in range(1, 8):
            step(number)

    peers.new_loop()
    for number in range(1, 10):
        step(number, inner if number in (3, 5) else lambda: None)
    assert len(names) == 2 * (9 + 7 + 7)


def test_ranks_answer_while_one_asks_and_are_quiet_afterwards(
    connect: Any, store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "_IDLE_S", 0.02)
    monkeypatch.setattr(failures, "_ANSWER_S", 0.02)
    monkeypatch.setattr(failures, "_GRACE_S", 0.0)
    client = CountingStore(store)
    answers = CountingStore(store)
    monkeypatch.setattr(client, "clone", lambda: answers)
    connect(rank=1, client=client).passed = 4
    assert connect().exchange("loss", 0.0, _passed(4), timeout_s=20) == ([], {1: 4})
    assert answers.calls["set"]
    _wait_for_looks(answers, 2)  # the first may have begun while the question was open
    written = answers.calls["set"]
    _wait_for_looks(answers, 3)
    assert answers.calls["set"] == written


def _wait_for_looks(answers: CountingStore, more: int) -> None:
    until = answers.calls["add"] + more
    while answers.calls["add"] < until:
        time.sleep(0.001)


def test_the_hook_passes_over_an_error_that_ended_no_job(
    connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[BaseException] = []
    ended: list[int] = []
    monkeypatch.setattr("sys.excepthook", lambda kind, error, trace: shown.append(error))
    monkeypatch.setattr("os._exit", ended.append)
    first = connect()
    before = sys.excepthook
    failures.install_excepthook(first, before)
    hook = sys.excepthook
    assert isinstance(hook, ExceptHook)
    fatal, later = ValueError("fatal"), KeyError("later")
    failures.detach_excepthook(fatal)
    assert hook.peers is None
    hook(KeyError, later, None)
    assert (shown, ended) == ([later], [])
    wrapped = RuntimeError("wrapped")
    wrapped.__cause__ = fatal
    hook(RuntimeError, wrapped, None)
    assert ended == [1]
    second = connect(rank=1)
    failures.install_excepthook(second, hook)
    assert sys.excepthook is hook
    assert hook.peers is second
    failures.uninstall_excepthook()
    assert sys.excepthook is before
