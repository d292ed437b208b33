"""What launchers tell each other of a failure, and who was first by it."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore, PrefixStore

from paceline.launch import hearsay
from paceline.launch.evidence import Call, State, Where
from paceline.launch.hearsay import Hearsay
from paceline.launch.report import Shape, render_failure
from paceline.launch.verdict import Error, Fact, Verdict, judge

ERROR = Error(
    type="ValueError",
    kinds=("builtins.ValueError", "builtins.Exception"),
    message="bad \udc80",
    traceback="Traceback\nValueError: bad\n",
    module="__main__",
    place="train.py:7 in main",
)
LOST = dataclasses.replace(
    ERROR, type="RuntimeError", kinds=("builtins.RuntimeError",), module="torch.distributed.c10d"
)


def fact(rank: int, time: float, error: Error | None = ERROR, code: int | None = 1) -> Fact:
    return Fact(rank=rank, host=f"h{rank}", pid=rank, time=time, returncode=code, error=error)


def _meet(store: HashStore, facts: list[list[Fact]], came_at: list[float]) -> list[Verdict]:
    """Each node's verdict; node 0 comes first, and nodes' clocks are what `came_at` says."""
    nodes = [Hearsay(store, number, len(facts)) for number in range(len(facts))]
    for node, at in zip(nodes, came_at, strict=True):
        node.begin()
        node._came_at = at
    gate = threading.Barrier(len(nodes))

    def verdict(number: int) -> Verdict:
        gate.wait(10)
        nodes[number].tell(facts[number])
        found, silent = nodes[number].hear(lambda: False)
        assert silent == 0
        judged = judge([*facts[number], *found])
        assert judged is not None
        return judged

    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(verdict, range(len(nodes))))


def test_the_cause_is_the_same_on_all_nodes() -> None:
    facts = [[fact(0, 100.2, LOST), fact(1, 100.1, LOST)], [fact(2, 7.0), fact(3, 7.2, LOST)]]
    for verdict in _meet(HashStore(), facts, [100.2, 7.0]):
        assert (verdict.original.rank, verdict.followers, verdict.certain) == (2, (0, 1, 3), True)


@pytest.mark.parametrize("clock", [7.0, 1e9])
def test_who_came_first_was_first_whatever_the_clocks(clock: float) -> None:
    other = dataclasses.replace(ERROR, message="another")
    facts = [[fact(0, 100.0)], [fact(1, clock, other), fact(2, 0.0, None, None)]]
    for verdict in _meet(HashStore(), facts, [100.0, clock]):
        assert verdict.original.rank == 0
        assert [later.rank for later in verdict.others] == [1]


def test_equal_errors_of_all_nodes_are_one() -> None:
    for verdict in _meet(HashStore(), [[fact(0, 5.0)], [fact(1, 5.0), fact(2, 5.1)]], [5.0, 5.0]):
        assert (verdict.original.rank, verdict.alike) == (0, (0, 1, 2))


def test_a_rank_that_was_done_on_another_node_is_who_left() -> None:
    store = HashStore()
    done, node = Hearsay(store, 0, 2), Hearsay(store, 1, 2)
    done.tell([fact(0, 3.0, None, 0)])
    node.begin()
    store.set("heard/0", "")
    lost = fact(1, node._came_at, LOST)
    verdict = judge([lost, *node.hear(lambda: False)[0]])
    assert verdict is not None
    assert (verdict.original.rank, verdict.followers) == (0, (1,))


def test_the_traceback_stays_with_its_launcher() -> None:
    here, there = _meet(HashStore(), [[fact(0, 9.0)], [fact(1, 9.1, LOST)]], [9.0, 9.1])
    shape = Shape(world_size=2, restarts=0, max_restarts=0)
    assert "Traceback" in render_failure(here, shape)
    assert "another node" not in render_failure(here, shape)
    assert render_failure(there, shape).splitlines() == [
        "paceline: rank 0 of 2 failed: ValueError: bad \udc80",
        "  where: rank 0, another node, host h0, pid 0, exit code 1, train.py:7 in main",
        "  fix:   see what the launcher on host h0 says of it.",
        "  rank 1 only followed: it lost its peer.",
    ]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"number": 1, "came_at": 1, "facts": [{}]}'])
def test_what_cannot_be_read_is_passed_over(text: str) -> None:
    store = HashStore()
    store.set("told/1", text)
    store.set("heard/1", "")
    node = Hearsay(store, 0, 2)
    node.begin()
    assert node.hear(lambda: False) == ([], 0)


def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hearsay, "_ANSWER_S", 0.05)
    store = HashStore()
    nodes = [Hearsay(PrefixStore("job/0", store), number, 3) for number in range(3)]
    assert not nodes[1].pending()
    nodes[0].begin()
    nodes[0].tell([fact(0, 1.0)])
    assert nodes[0].hear(lambda: False) == ([], 2)
    nodes[1]._next = 0.0
    assert nodes[1].pending()
    assert not Hearsay(PrefixStore("job/1", store), 1, 3).pending()


def test_where_ranks_are_is_told_whole() -> None:
    store = HashStore()
    node, other = Hearsay(store, 0, 2), Hearsay(store, 1, 2)
    assert not other.is_asked()
    node.ask(anew=True)
    assert (node.is_asked(), other.is_asked()) == (False, True)
    assert node.shown() == ([], False)
    other.ask(anew=False)
    assert not other.is_asked()
    call = Call(name="all_reduce", number=4, members=(0, 1), kind="f32[3]", since_s=2.0)
    where = Where(script=(("train.py", 3, "step"),), waits="recv", lock=True)
    state = State(rank=1, host="b", pid=7, where=where, calls=(call,), entered={"0": 4})
    other.show([state])
    assert node.shown() == ([state], True)
    # An answer to an earlier question is none.
    node.ask(anew=True)
    assert node.shown() == ([], False)
    for text in ("", "[]", "7", '{"question": 2, "states": [{}]}'):
        store.set("states/1", text)
        assert node.shown() == ([], False)
