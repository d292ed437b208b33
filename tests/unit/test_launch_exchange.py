"""The exchange between node launchers, and the verdict that each reaches by it."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest
from torch.distributed import HashStore

from paceline.launch import node_exchange
from paceline.launch.hang_watch import HangWatch
from paceline.launch.messages import JobInfo, render_failure
from paceline.launch.node_exchange import NodeExchange, NodeRecord, NodeRecords
from paceline.watch.crash import Error, FirstFailure, RankOutcome, find_first_failure
from paceline.watch.hang import diagnose
from paceline.watch.rank_state import Call, RankState, StackSummary

ERROR = Error(
    type="ValueError",
    kinds=("builtins.ValueError", "builtins.Exception"),
    message="bad \udc80",
    traceback="Traceback\nValueError: bad\n",
    module="__main__",
    place="train.py:7 in main",
)
OTHER = dataclasses.replace(ERROR, message="another")
LOST = dataclasses.replace(
    ERROR, type="RuntimeError", module="torch.distributed.c10d", lost_peer=True
)
INFO = JobInfo(world_size=4, restarts=0, max_restarts=0)


def outcome(
    rank: int, time: float, error: Error | None = ERROR, code: int | None = 1
) -> RankOutcome:
    return RankOutcome(
        rank=rank, host=f"h{rank}", pid=rank, time=time, returncode=code, error=error
    )


_opened: list[NodeRecords] = []


@pytest.fixture(autouse=True)
def _close_all() -> Iterator[None]:
    yield
    while _opened:
        _opened.pop().close()


def _records(store: Any, name: str, window_s: float = 60.0) -> NodeRecords:
    _opened.append(NodeRecords(store, name, interval_s=0.1, window_s=window_s))
    return _opened[-1]


def _nodes(count: int, store: Any = None) -> list[NodeExchange]:
    """The exchange of each node of a job."""
    names = [str(number) for number in range(count)]
    store = HashStore() if store is None else store
    return [NodeExchange(_records(store, name), 0, names) for name in names]


def _write(node: NodeExchange, text: str) -> None:
    """As if another node had written this record."""
    node._records.others["1"] = node_exchange._read_record(text.encode())


def _verdicts(outcomes: list[list[RankOutcome]]) -> list[FirstFailure]:
    """The verdict of each node."""
    nodes = _nodes(len(outcomes))

    def verdict(number: int) -> FirstFailure:
        nodes[number].announce_failure()
        found, silent = nodes[number].exchange_outcomes(outcomes[number], lambda: False)
        assert silent == 0
        judged = find_first_failure([*outcomes[number], *found])
        assert judged is not None
        return judged

    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(verdict, range(len(nodes))))


@pytest.mark.parametrize("skew_s", [0.0, -93.0, 1e9])
def test_all_nodes_name_the_same_cause_whatever_their_clocks(skew_s: float) -> None:
    there = [outcome(2, skew_s - 1.5), outcome(3, skew_s - 1.4, LOST)]
    for verdict in _verdicts([[outcome(0, -1.2, LOST), outcome(1, -1.3, LOST)], there]):
        assert (verdict.original.rank, verdict.followers, verdict.certain) == (2, (0, 1, 3), True)


@pytest.mark.parametrize("skew_s", [0.0, 3.0, -3.0])
def test_failures_of_two_nodes_are_both_printed(skew_s: float) -> None:
    outcomes = [
        [outcome(0, 2.0, OTHER)],
        [outcome(1, 1.0 + skew_s), outcome(3, skew_s, None, None)],
    ]
    for verdict in _verdicts(outcomes):
        original, (other,) = verdict.original, verdict.others
        assert {original.rank, other.rank} == {0, 1}
        text = render_failure(verdict, INFO)
        assert f"rank {original.rank} of 4 failed: {original.how}" in text
        assert text.splitlines()[-1] == (
            f"  rank {other.rank} failed too, perhaps earlier (the clocks of the hosts are not "
            f"compared): {other.how}."
        )


def test_equal_errors_of_all_nodes_are_one() -> None:
    for verdict in _verdicts([[outcome(0, -2.0)], [outcome(1, -1.9), outcome(2, -1.8)]]):
        assert (verdict.original.rank, verdict.ranks) == (0, (0, 1, 2))


def test_a_rank_that_ended_well_on_another_node_is_named() -> None:
    for verdict in _verdicts([[outcome(0, -60.0, None, 0)], [outcome(1, -92.0, LOST)]]):
        assert (verdict.original.rank, verdict.followers) == (0, (1,))


def test_a_node_waits_until_the_ranks_of_all_nodes_are_done() -> None:
    nodes = _nodes(3)
    assert [node.publish_done() for node in nodes] == [False, False, True]
    assert nodes[0].publish_done()
    assert not _nodes(2)[0].publish_done()


def test_the_host_of_the_store_leaves_last_but_does_not_wait_for_ever() -> None:
    host, other = _nodes(2)
    polled = threading.Event()

    def may_go() -> bool:
        polled.set()
        return False

    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(host.wait_all_done, 30, may_go)
        assert polled.wait(10)
        assert other.publish_done()
        polled.clear()
        assert polled.wait(10)  # the other has ended, but does not know of the host yet
        assert not waiting.done()
        other.wait_all_done(30, lambda: False)
        waiting.result(timeout=10)
    _nodes(2)[0].wait_all_done(600, lambda: True)
    _nodes(2)[0].wait_all_done(0.1, lambda: False)


def test_a_dead_node_is_not_awaited() -> None:
    store = HashStore()
    records = _records(store, "0", window_s=0.3)
    store.set("beat/1", "1 1")
    store.set("record/1", "{}")
    NodeExchange(records, 0, ["0", "1"]).wait_all_done(600, lambda: False)


def test_a_host_that_is_cut_off_does_not_block_the_main_thread() -> None:
    class Cut(HashStore):
        cut, healed = threading.Event(), threading.Event()

        def set(self, key: str, value: str) -> None:
            if self.cut.is_set():
                self.healed.wait(60)  # as torch's client, for a quarter of an hour
            super().set(key, value)

    store = Cut()
    node, _ = _nodes(2, store)
    assert not node.publish_done()
    store.cut.set()
    began = time.monotonic()
    node.announce_failure()
    assert not node.other_node_failed()
    with pytest.raises(RuntimeError, match="did not answer"):
        node._records.call("set", "key", "value", timeout_s=0.1)
    for _ in range(100):
        node._records.sync(timeout_s=0.001)
    assert time.monotonic() - began < 10
    syncs = node._records.sync_count
    store.healed.set()
    # Calls that nobody awaited any more do not delay this one.
    node._records.call("set", "key", "value")
    assert node._records.sync_count - syncs < 10


def test_the_traceback_stays_with_its_launcher() -> None:
    here, there = _verdicts([[outcome(0, -2.0)], [outcome(1, -1.9, LOST)]])
    info = JobInfo(world_size=2, restarts=0, max_restarts=0)
    assert "Traceback" in render_failure(here, info)
    assert "another node" not in render_failure(here, info)
    assert render_failure(there, info).splitlines() == [
        "paceline: rank 0 of 2 failed: ValueError: bad \udc80",
        "  where: rank 0, another node, host h0, pid 0, exit code 1, train.py:7 in main",
        "  fix:   see the output of the launcher on host h0.",
        "  rank 1 failed as a consequence: it lost its peer.",
    ]


def test_credentials_in_errors_stay_in_their_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789")
    error = dataclasses.replace(ERROR, message="403 for 0123456789 and password='abcdefghi'")
    _, there = _verdicts([[outcome(0, -2.0, error)], [outcome(1, -1.9, LOST)]])
    assert there.original.error is not None
    assert there.original.error.message == "403 for *** and password=***"


@pytest.mark.parametrize("text", ["", "{}", "[" * 10_000, "[7]", "[{}]", '{"round": 1e999}'])
def test_records_that_cannot_be_read_are_ignored(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(node_exchange, "_ANSWER_S", 0.01)
    monkeypatch.setattr(node_exchange, "_LEAVE_S", 0.01)
    node, _ = _nodes(2)
    _write(node, text)
    assert node.exchange_outcomes([], lambda: False) == ([], 1)


def _with_one_wrong_type(value: Any) -> Iterator[Any]:
    """Copies of a JSON value in which one part is of a type that another part has."""
    yield from ([], {}, [[]], {"a": {}}, "1", 7, 0.5, None, True, 10**400)
    if isinstance(value, dict):
        yield from ({**value, k: wrong} for k in value for wrong in _with_one_wrong_type(value[k]))
        yield {**value, "more": 0}
    if isinstance(value, list):
        for n in range(len(value)):
            yield from ([*value[:n], w, *value[n + 1 :]] for w in _with_one_wrong_type(value[n]))


def test_outcomes_of_wrong_types_are_ignored() -> None:
    mine, (node, _) = outcome(0, 2.0, LOST), _nodes(2)
    there = NodeRecord(round=0, outcomes=(outcome(1, 1.0),))
    for wrong in _with_one_wrong_type(dataclasses.asdict(there)):
        _write(node, json.dumps(wrong))
        found, _ = node.exchange_outcomes([mine], lambda: True)
        judged = find_first_failure([mine, *found])
        assert judged is not None
        assert render_failure(judged, INFO)
        if found:
            assert isinstance(found[0].rank, int)


def test_outcomes_count_if_the_store_ends_afterwards() -> None:
    class Ending(HashStore):
        def set(self, key: str, value: str) -> None:
            if 'has_read": true' in value:
                raise RuntimeError("Broken pipe")
            super().set(key, value)

    node, other = _nodes(2, Ending())
    other.publish_outcomes([outcome(1, 80.0)])
    found, silent = node.exchange_outcomes([], lambda: False)
    assert [(each.rank, each.time, each.elsewhere) for each in found] == [(1, 80.0, True)]
    assert silent == 0


def test_no_node_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_exchange, "_ANSWER_S", 0.05)
    monkeypatch.setattr(node_exchange, "_LEAVE_S", 0.05)
    nodes = _nodes(3)
    assert not nodes[1].other_node_failed()
    nodes[0].announce_failure()
    assert nodes[0].exchange_outcomes([outcome(0, 1.0)], lambda: False) == ([], 2)
    nodes[1]._records.sync()
    assert nodes[1].other_node_failed()
    assert not NodeExchange(nodes[1]._records, 1, ["0", "1", "2"]).other_node_failed()


def test_states_of_ranks_arrive_whole() -> None:
    node, other = _nodes(2)
    assert not other.states_requested()
    node.request_states()
    other._records.sync()
    assert (node.states_requested(), other.states_requested()) == (False, True)
    assert node.collect_states() == ([], False)
    other.request_states()
    assert not other.states_requested()
    call = Call(name="all_reduce", number=4, members=(0, 1), tensor_text="f32[3]", since_s=2.0)
    where = StackSummary(script=(("train.py", 3, "step"),), torch_call="recv", lock=True)
    state = RankState(
        rank=1, host="b", pid=7, where=where, calls=(call,), last_numbers={"0 gloo": 4}
    )
    other.publish_states([state])
    assert node.collect_states() == ([state], True)
    # An answer to an earlier request does not count.
    node.request_states()
    assert node.collect_states() == ([], False)
    mine = dataclasses.replace(state, rank=0, last_numbers={})
    for wrong in _with_one_wrong_type(json.loads(json.dumps([dataclasses.asdict(state)]))):
        node.request_states()
        other.request_states()
        other.publish_states([state])
        other._records.call("set", "states/0/1", json.dumps(wrong))
        states, has_all = node.collect_states()
        assert has_all
        diagnose([mine, *states], 2, 1.0)


def test_states_that_are_too_large_for_the_store_keep_the_calls_that_are_open() -> None:
    node, other = _nodes(2)
    node.request_states()
    other.request_states()
    members = tuple(range(20_000))
    calls = [Call(name="all_reduce", number=n, members=members, completed=True) for n in range(40)]
    left = Call(name="broadcast", number=40, members=members)
    other.publish_states([RankState(rank=1, host="b", pid=7, calls=(*calls, left))])
    ((state,), has_all) = node.collect_states()
    assert has_all
    assert state.calls == (left,)


def test_a_hang_is_printed_before_the_failure_of_another_node_ends_the_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, there = _nodes(2)
    call = Call(name="all_reduce", number=4, members=(0, 1), tensor_text="f32[3]", since_s=12.0)
    waiting = RankState(
        rank=0,
        host="a",
        pid=6,
        calls=(call,),
        last_numbers={call.group_and_backend: call.number},
        idle_s=12.0,
    )
    ended = RankState(rank=1, host="b", pid=7, state="", returncode=0)

    ranks: Any = Mock(any_ended_badly=False, done=False, ranks=[Mock(rank=0)])
    watch = HangWatch(ranks, after_s=10.0, ends=True)
    watch._begin([rank.pid for rank in ranks.ranks])
    watch.exchange = here
    monkeypatch.setattr(watch, "_state", lambda rank, now: waiting)
    here.request_states()
    assert watch._conclude(time.monotonic(), 2) is None  # it waits for the states of node 1
    there.request_states()
    there.publish_states([ended])
    there.announce_failure()  # node 1 has judged first, and ends its ranks
    watch.conclude_pending(2)
    (said,) = (call.args[0] for call in ranks.show.call_args_list)
    assert said.startswith("hang: rank 0 (host a, pid 6) has waited 12 s in all_reduce #4")
    assert "has not entered it: ended with exit code 0" in said
    watch._others_until = 1.0
    ranks.ranks = [Mock(rank=0)]  # those of the next round, which have not been checked
    assert watch.conclude_pending(2) is None
