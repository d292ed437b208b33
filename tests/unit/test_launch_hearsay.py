"""What launchers tell each other of a failure, and who was first by it."""

from __future__ import annotations

import dataclasses
import math
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore, PrefixStore

from paceline.launch import node_exchange
from paceline.launch.messages import Shape, render_failure
from paceline.launch.node_exchange import Hearsay, Tick, apart
from paceline.watch.crash import Error, Fact, FirstFailure, find_first_failure
from paceline.watch.rank_state import Call, State, Where

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


def _meet(
    store: HashStore, facts: list[list[Fact]], skews: list[float], late: int = 1
) -> list[FirstFailure]:
    """Each node's verdict. Times of facts are from now; the clock of each node has its skew.

    The launcher of node `late` is the last to come to the store.
    """
    now = time.time()
    nodes = [
        Hearsay(store, number, len(facts), lambda skew=skew: time.time() + skew)  # type: ignore[misc]
        for number, skew in enumerate(skews)
    ]
    skewed = [
        [dataclasses.replace(fact, time=fact.time and now + skew + fact.time) for fact in each]
        for each, skew in zip(facts, skews, strict=True)
    ]
    for node in sorted(nodes, key=lambda node: node.node == late):
        node.begin()

    def verdict(number: int) -> FirstFailure:
        nodes[number].tell(skewed[number])
        found, silent = nodes[number].hear(lambda: False)
        assert silent == 0
        assert all(fact.within_s < 0.5 for fact in found), found
        judged = find_first_failure([*skewed[number], *found])
        assert judged is not None
        return judged

    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(verdict, range(len(nodes))))


def test_the_cause_is_the_same_on_all_nodes() -> None:
    facts = [[fact(0, -1.2, LOST), fact(1, -1.3, LOST)], [fact(2, -1.5), fact(3, -1.4, LOST)]]
    for verdict in _meet(HashStore(), facts, [0.0, -93.0]):
        assert (verdict.original.rank, verdict.followers, verdict.certain) == (2, (0, 1, 3), True)


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("skews", [(0.0, 3.0), (0.0, -3.0), (3.0, 0.0), (1e9, 0.0, -3.0)])
def test_the_earliest_wins_whatever_the_clocks(skews: tuple[float, ...], late: int) -> None:
    other = dataclasses.replace(ERROR, message="another")
    facts = [[fact(0, -2.0, other)], [fact(1, -4.0), fact(3, 0.0, None, None)], [fact(2, -1.0)]]
    for verdict in _meet(HashStore(), facts[: len(skews)], list(skews), late):
        assert verdict.original.rank == 1
        assert [rank.rank for rank in verdict.others] == [0]
        assert all(verdict.tells_apart(rank) for rank in verdict.others)


# What three launchers have counted: the second has a clock that is 3 s ahead, the third came later.
RECORDED: list[list[Tick]] = [
    [(1, 100.000, 100.001), (4, 100.020, 100.021), (6, 100.030, 100.031)],
    [(2, 103.010, 103.011), (5, 103.025, 103.026)],
    [(9, 50.0, 50.1)],
]


@pytest.mark.parametrize(
    ("ours", "theirs", "ahead", "within"),
    [
        (0, 1, 3.0, 0.006),
        (1, 0, -3.0, 0.006),
        (0, 2, 50.1 - 100.030, math.inf),
        (2, 0, 100.030 - 50.1, math.inf),
    ],
)
def test_counts_say_how_far_clocks_are_apart(
    ours: int, theirs: int, ahead: float, within: float
) -> None:
    assert apart(RECORDED[ours], RECORDED[theirs]) == pytest.approx((ahead, within))


def test_what_clocks_cannot_tell_apart_is_said_so() -> None:
    other = dataclasses.replace(ERROR, message="another")
    late = dataclasses.replace(fact(2, 7.010, other), within_s=0.006, elsewhere=True)
    verdict = find_first_failure(
        [fact(0, 7.0), late, dataclasses.replace(late, rank=3, time=7.005)]
    )
    assert verdict is not None
    said = render_failure(verdict, Shape(world_size=4, restarts=0, max_restarts=0)).splitlines()
    assert said[-2:] == [
        "  rank 3 failed at the same time, as far as the clocks of two hosts can tell: ValueError: another.",
        "  rank 2 failed later: ValueError: another.",
    ]
    # And one that only lost a peer never wins, however clocks are.
    victim = dataclasses.replace(fact(1, 6.999, LOST), within_s=0.006, elsewhere=True)
    verdict = find_first_failure([fact(0, 7.0), victim])
    assert verdict is not None
    assert (verdict.original.rank, verdict.followers) == (0, (1,))


def test_equal_errors_of_all_nodes_are_one() -> None:
    facts = [[fact(0, -2.0)], [fact(1, -1.9), fact(2, -1.8)]]
    for verdict in _meet(HashStore(), facts, [0.0, 0.0]):
        assert (verdict.original.rank, verdict.alike) == (0, (0, 1, 2))


def test_a_rank_that_was_done_on_another_node_is_who_left() -> None:
    facts = [[fact(0, -60.0, None, 0)], [fact(1, -2.0, LOST)]]
    for verdict in _meet(HashStore(), facts, [0.0, -90.0]):
        assert (verdict.original.rank, verdict.followers) == (0, (1,))


def test_a_node_waits_for_the_others_while_they_go_on() -> None:
    store = HashStore()
    nodes = [Hearsay(store, number, 3) for number in range(3)]
    assert [node.all_done() for node in nodes] == [False, False, True]
    assert nodes[0].all_done()
    assert not Hearsay(PrefixStore("gone", store), 0, 2).all_done()


def test_who_serves_the_store_is_the_last_to_leave() -> None:
    store = HashStore()
    both = [Hearsay(store, node, 2) for node in (0, 1)]
    assert not both[1].all_done()
    with ThreadPoolExecutor() as pool:
        staying = pool.submit(both[0].stay, 30, lambda: False)
        time.sleep(0.2)
        assert not staying.done()  # the other has ended, but does not know of us yet
        assert both[1].all_done()
        both[1].stay(30, lambda: False)
        staying.result(timeout=2)


def test_a_node_stays_until_the_others_are_done_but_not_for_long() -> None:
    store = HashStore()
    with ThreadPoolExecutor() as pool:
        staying = pool.submit(Hearsay(store, 0, 2).stay, 30, lambda: False)
        time.sleep(0.2)
        assert not staying.done()
        Hearsay(store, 1, 2).stay(30, lambda: False)
        staying.result(timeout=2)
    Hearsay(PrefixStore("hurry", store), 0, 2).stay(600, lambda: True)
    Hearsay(PrefixStore("alone", store), 0, 2).stay(0.1, lambda: False)


def test_the_traceback_stays_with_its_launcher() -> None:
    here, there = _meet(HashStore(), [[fact(0, -2.0)], [fact(1, -1.9, LOST)]], [0.0, 0.0])
    shape = Shape(world_size=2, restarts=0, max_restarts=0)
    assert "Traceback" in render_failure(here, shape)
    assert "another node" not in render_failure(here, shape)
    assert render_failure(there, shape).splitlines() == [
        "paceline: rank 0 of 2 failed: ValueError: bad \udc80",
        "  where: rank 0, another node, host h0, pid 0, exit code 1, train.py:7 in main",
        "  fix:   see what the launcher on host h0 says of it.",
        "  rank 1 only followed: it lost its peer.",
    ]


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", "[" * 10_000, '{"ticks": [7], "facts": []}'),
        *('{"ticks": [[1, 2, 3]], "facts": [{}]}', '{"ticks": [[1e999, 2, 3]], "facts": []}'),
    ],
)
def test_what_cannot_be_read_is_passed_over(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(node_exchange, "_LEAVE_S", 0.01)
    store = HashStore()
    for key in ("told", "heard", *(f"turn{turn}" for turn in range(node_exchange._TURNS - 1))):
        store.set(f"{key}/1", text)
    node = Hearsay(store, 0, 2)
    node.begin()
    assert node.hear(lambda: False) == ([], 0)


def test_what_was_told_counts_though_the_store_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(*args: object) -> None:
        raise RuntimeError("Broken pipe")

    store = HashStore()
    other, node = (Hearsay(store, number, 2, lambda n=number: 90.0 * n) for number in (1, 0))  # type: ignore[misc]
    other.begin()
    other.tell([fact(1, 80.0)])
    node.begin()
    monkeypatch.setattr(node, "_take_turns", ends)
    found, silent = node.hear(lambda: False)
    # All that is known of its clock is that it came before.
    assert [(fact.rank, fact.time, fact.within_s) for fact in found] == [(1, -10.0, math.inf)]
    assert silent == 0


def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_exchange, "_ANSWER_S", 0.05)
    monkeypatch.setattr(node_exchange, "_LEAVE_S", 0.05)
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
