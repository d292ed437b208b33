"""The rendezvous of several nodes: the rules of their state, heartbeats, facts, and launchers that meet."""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import LaunchFailed
from paceline.launch.node_exchange import Heartbeats
from paceline.launch.nodes import (
    NodeFacts,
    NodeRendezvous,
    State,
    describe,
    difference,
    facts_of_this_node,
    next_state,
    order,
)
from paceline.launch.options import read_options
from paceline.launch.rendezvous import RendezvousClosed, RendezvousLost, Round

FIRST = NodeFacts(
    host="a",
    address="10.0.0.1",
    number=None,
    nodes="2",
    ranks=1,
    script="train.py",
    digest="1",
)
RUNS = State(1, complete=True, nodes=("a", "b"))


@pytest.mark.parametrize(
    ("state", "options", "expected"),
    [
        # The first round waits for the last call, or until no more nodes may come.
        (State(), {}, State(nodes=("me",))),
        (State(nodes=("a",)), {}, State(nodes=("a", "me"))),
        (State(nodes=("a", "me")), {"last": True}, State(complete=True, nodes=("a", "me"))),
        (State(nodes=("a", "b")), {}, State(complete=True, nodes=("a", "b", "me"))),
        (State(nodes=("a", "b", "c")), {}, State(nodes=("a", "b", "c"))),
        # A dead node does not count.
        (State(nodes=("a", "b")), {"dead": {"a"}}, State(nodes=("b", "me"))),
        # A round runs: the node joins it, or waits until a node leaves.
        (RUNS, {}, dataclasses.replace(RUNS, waiting=("me",))),
        (RUNS, {"sizes": (1, 2)}, RUNS),
        (RUNS, {"dead": {"a", "b"}}, State(2, nodes=("me",))),
        # The round of this node has ended: it opens the next one, and the others are expected.
        (
            State(1, complete=True, nodes=("a", "b", "me"), waiting=("c",)),
            {"after": 2, "dead": {"b"}},
            State(2, nodes=("me",), expected=("a", "c")),
        ),
        # It begins when all living ones are back; no other node takes their places.
        (
            State(2, nodes=("a",), expected=("me",)),
            {"after": 2},
            State(2, complete=True, nodes=("a", "me")),
        ),
        (
            State(2, nodes=("a",), expected=("b", "me")),
            {"after": 2},
            State(2, nodes=("a", "me"), expected=("b",)),
        ),
        (
            State(2, nodes=("a", "me"), expected=("b",)),
            {"after": 2, "dead": {"b"}},
            State(2, complete=True, nodes=("a", "me")),
        ),
        (
            State(2, nodes=("a",), expected=("b",)),
            {"sizes": (1, 2)},
            State(2, nodes=("a",), expected=("b",)),
        ),
    ],
)
def test_what_a_node_makes_of_the_state(
    state: State, options: dict[str, Any], expected: State
) -> None:
    found = next_state(
        state,
        "me",
        after=options.get("after", 0),
        dead=frozenset(options.get("dead", ())),
        sizes=options.get("sizes", (2, 3)),
        last_call_over=options.get("last", False),
    )
    assert found == expected


@pytest.mark.parametrize("beats", [1, 2, 3])
def test_a_node_is_dead_after_so_many_missing_heartbeats(
    monkeypatch: pytest.MonkeyPatch, beats: int
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    heartbeats = Heartbeats(1.0, float(beats))
    heartbeats.update({"a": b"1", "b": b"1"})
    for number in range(1, beats + 2):  # an update is a little later than a heartbeat
        now = 100.0 + 1.05 * number
        heartbeats.update({"a": b"1", "b": b"%d" % (number + 1)})
    assert heartbeats.dead == {"a"}
    now += 100.0  # this launcher was stopped: the others may have been, too
    heartbeats.update({"a": b"1", "b": b"9"})
    assert heartbeats.dead == set()


def _meet(port: int, words: Sequence[str] = (), *, count: int, say: list[str]) -> list[Any]:
    """As many launchers; each result is the rendezvous and its first round, or an error."""

    def one(number: int) -> Any:
        options = read_options(
            [*words, "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", __file__]
        )
        try:
            found = NodeRendezvous(options, say.append)
            return found, found.next_round()
        except LaunchFailed as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def test_launchers_meet_restart_and_close() -> None:
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    met = _meet(port, ["--nnodes=3", "--nproc-per-node=2"], count=3, say=said)
    rounds: list[Round] = [each[1] for each in met]
    assert sorted((r.node, r.first_rank, r.number) for r in rounds) == [
        (0, 0, 0),
        (1, 2, 0),
        (2, 4, 0),
    ]
    assert {(r.nodes, r.world_size) for r in rounds} == {(3, 6)}
    assert len({(r.address, r.port) for r in rounds}) == 1
    first, *others = [each[0] for each in met]
    assert first.change() is None
    with ThreadPoolExecutor(3) as pool:
        again = list(pool.map(lambda each: each.next_round(), [first, *others]))
    assert {r.number for r in again} == {1}
    assert again[0].port != rounds[0].port  # each round has a new store
    first.close(job_ended=True)
    for other in others:
        with pytest.raises(RendezvousClosed):
            other.next_round()
        other.close(job_ended=True)


def _join(port: int, words: Sequence[str]) -> NodeRendezvous:
    options = ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", __file__]
    return NodeRendezvous(read_options([*words, *options]), [].append)


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def test_a_node_that_found_no_place_does_not_close_the_job_of_the_others(port: int) -> None:
    words = ["--nnodes=1:2", "--rdzv-conf=join_timeout=1"]
    members = [each[0] for each in _meet(port, words, count=2, say=[])]
    late = _join(port, words)
    with pytest.raises(RendezvousLost, match="not enough nodes came in time"):
        late.next_round()
    late.close(job_ended=True)
    with ThreadPoolExecutor(2) as pool:
        assert {r.number for r in pool.map(lambda each: each.next_round(), members)} == {1}
    for member in members:
        member.close(job_ended=True)


def test_ranks_that_run_are_not_ended_because_the_job_is_closed(port: int) -> None:
    met = _meet(port, ["--nnodes=2", "--rdzv-conf=keep_alive_interval=0.2"], count=2, say=[])
    host, other = sorted((each[0] for each in met), key=lambda each: each._current.node)
    other.close(job_ended=True)
    time.sleep(2)  # it is dead now
    assert host.change() is None
    host.close(job_ended=True)


def test_a_script_that_is_a_pipe_or_a_folder_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for a writer
    for script in (tmp_path, tmp_path / "pipe"):
        options = read_options(["--nnodes=2", "--host=10.0.0.1", str(script)])
        found = facts_of_this_node(options, "10.0.0.1")
        assert (found.script, found.digest) == (script.name, "")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"torch": "2.11.0"}, "torch is 2.11.0 on b (10.0.0.2), and"),
        ({"paceline": "0.0"}, "paceline is 0.0 on b (10.0.0.2), and"),
        ({"python": "3.9"}, "Python is 3.9 on b (10.0.0.2), and"),
        ({"nodes": "4"}, "--nnodes is 4 on b (10.0.0.2), and 2 on a (10.0.0.1)"),
        ({"script": "b.py"}, "script is b.py on b (10.0.0.2), and train.py on a (10.0.0.1)"),
        ({"digest": "2"}, "train.py on b (10.0.0.2) is not the train.py of a (10.0.0.1)"),
    ],
)
def test_nodes_that_differ(change: dict[str, Any], said: str) -> None:
    other = dataclasses.replace(FIRST, host="b", address="10.0.0.2")
    assert difference(FIRST, other) is None
    found = difference(FIRST, dataclasses.replace(other, **change))
    assert found is not None
    assert found[0].startswith(said)
    assert found[1]


def test_nodes_are_in_the_order_of_their_numbers_then_of_their_addresses() -> None:
    addresses = {"w": "10.0.0.10", "x": "10.0.0.9", "y": "gpu-b", "z": "10.0.0.2"}
    facts = {n: dataclasses.replace(FIRST, address=address) for n, address in addresses.items()}
    assert order(list("wxyz"), facts) == ["y", "z", "x", "w"]
    numbered = {n: dataclasses.replace(f, number=i) for i, (n, f) in enumerate(facts.items())}
    assert order(list("zyxw"), numbered) == list("wxyz")


def test_missing_nodes_are_numbered_where_the_user_did() -> None:
    here = {str(n): dataclasses.replace(FIRST, number=n) for n in (0, 3)}
    assert describe(here, 2, 4, 4) == (
        "2 of 4 nodes are here (node 0: a 10.0.0.1, node 3: a 10.0.0.1)",
        "missing: nodes 1, 2",
    )
    assert describe({"a": FIRST}, 1, 3, 3) == (
        "1 of 3 nodes is here (a 10.0.0.1)",
        "2 nodes are missing",
    )
    assert describe({"a": FIRST}, 1, 4, 2) == (
        "1 of at least 2 nodes is here (a 10.0.0.1)",
        "1 node is missing",
    )
