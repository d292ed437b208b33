"""What the launchers of several nodes tell each other, and what must be equal."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from paceline.launch.node_facts import (
    NodeFacts,
    NodeTable,
    describe,
    difference,
    facts_of_this_node,
    order,
)

FIRST = NodeFacts(
    host="a", address="10.0.0.1", number=None, nodes="2", script="train.py", digest="1"
)


def test_a_script_that_is_a_pipe_or_a_folder_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for a writer
    for script in (tmp_path, tmp_path / "pipe"):
        found = facts_of_this_node(number=0, nodes="2", script=str(script), is_file=True)
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


def test_the_first_node_is_what_the_others_are_compared_with() -> None:
    store = HashStore()
    second = dataclasses.replace(FIRST, host="b", number=1)
    assert NodeTable(store).publish("n0", FIRST) == FIRST
    table = NodeTable(store)
    assert table.publish("n1", second) == FIRST
    assert table.of(["n0", "n1", "n2"]) == {"n0": FIRST, "n1": second}
    assert table.refused() == ""
    table.refuse("it differs")
    assert NodeTable(store).refused().endswith(": it differs")


def test_facts_of_another_version_are_compared_where_they_can_be() -> None:
    store = HashStore()
    store.set("first", '{"paceline": "9.9", "host": "a", "address": "10.0.0.1", "new": 1}')
    first = NodeTable(store).publish("n1", dataclasses.replace(FIRST, nodes=None))  # type: ignore[arg-type]
    assert first.paceline == "9.9"


@pytest.mark.parametrize("wrong", [{"number": "1"}, {"host": {}}, {"address": [1]}, {"nodes": 2}])
def test_facts_of_wrong_types_are_ignored(wrong: dict[str, Any]) -> None:
    store = HashStore()
    store.set(repr("n0"), json.dumps(dataclasses.asdict(FIRST) | wrong))
    table = NodeTable(store)
    table.publish("n1", FIRST)
    assert table.of(["n0", "n1"]) == {"n1": FIRST}


@dataclasses.dataclass(frozen=True, order=True)
class Node:
    """As torch's descriptor of a node."""

    addr: str


def test_nodes_are_in_the_order_of_their_numbers_then_of_their_addresses() -> None:
    nodes = [Node(address) for address in ("10.0.0.10", "10.0.0.9", "gpu-b", "10.0.0.2")]
    by_address = [node.addr for node in order(nodes, {})]
    assert by_address == ["gpu-b", "10.0.0.2", "10.0.0.9", "10.0.0.10"]


def test_numbers_of_the_user_count_first() -> None:
    nodes = [Node("10.0.0.1"), Node("10.0.0.2")]
    facts = {
        node: dataclasses.replace(FIRST, number=number)
        for node, number in zip(nodes, (1, 0), strict=True)
    }
    assert order(nodes, facts) == nodes[::-1]


def test_missing_nodes_are_numbered_where_the_user_did() -> None:
    here = {n: dataclasses.replace(FIRST, number=n) for n in (0, 3)}
    assert describe(here, 2, 4, 4) == (
        "2 of 4 nodes are here (node 0: a 10.0.0.1, node 3: a 10.0.0.1)",
        "missing: nodes 1, 2",
    )
    assert describe({0: FIRST}, 1, 3, 3) == (
        "1 of 3 nodes is here (a 10.0.0.1)",
        "2 nodes are missing",
    )
    assert describe({0: FIRST}, 1, 4, 2) == (
        "1 of at least 2 nodes is here (a 10.0.0.1)",
        "1 node is missing",
    )
