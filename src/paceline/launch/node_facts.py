"""What each launcher tells the others before the nodes meet, and what must be equal on all of them.

The facts travel as JSON through the store of the nodes. The first node that writes its facts sets what the
others are compared with, so a node that joins later is compared too.
"""

from __future__ import annotations

import dataclasses
import hashlib
import ipaddress
import json
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed import Store

import paceline
from paceline.launch.node_exchange import UNREADABLE, from_json

_FIRST = "first"
_REFUSED = "refused"
_LABELS = {
    "nodes": "--nnodes",
    "torch": "torch",
    "paceline": "paceline",
    "python": "Python",
    "script": "script",
    "digest": "content of the script",
}
_SAME_ENVIRONMENT = "install the same environment on all nodes, or use one image for them."
_SAME_SCRIPT = (
    "copy the same script to all nodes; if two jobs share this endpoint, give each its own port."
)
_FIXES = {
    "nodes": "give all nodes the same --nnodes.",
    "torch": _SAME_ENVIRONMENT,
    "paceline": _SAME_ENVIRONMENT,
    "python": _SAME_ENVIRONMENT,
    "script": _SAME_SCRIPT,
    "digest": _SAME_SCRIPT,
}


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """What the launcher of a node tells the others.

    Attributes:
        address: at which the other nodes reach it; empty until it is known.
        number: of the node, if the user numbered the nodes.
        script: name of the script's file, or of its module.
        digest: of the script's content; empty for a module.
    """

    host: str
    address: str = ""
    number: int | None
    nodes: str
    script: str
    digest: str
    torch: str = torch.__version__
    paceline: str = paceline.__version__
    python: str = ".".join(platform.python_version_tuple()[:2])

    def __str__(self) -> str:
        prefix = "" if self.number is None else f"node {self.number}: "
        return f"{prefix}{self.host} {self.address}"


def facts_of_this_node(*, number: int | None, nodes: str, script: str, is_file: bool) -> NodeFacts:
    """The facts of this node."""
    digest = ""
    if is_file:
        # Reading a pipe would leave nothing for the rank, and a folder has no bytes.
        if Path(script).is_file():
            digest = hashlib.sha256(Path(script).read_bytes()).hexdigest()[:16]
        script = Path(script).name
    return NodeFacts(
        host=socket.gethostname(), number=number, nodes=nodes, script=script, digest=digest
    )


def difference(first: NodeFacts, mine: NodeFacts) -> tuple[str, str] | None:
    """What differs between two nodes that must be equal, and the fix; None if nothing does."""
    for name, label in _LABELS.items():
        theirs, ours = getattr(first, name), getattr(mine, name)
        if theirs != ours:
            here, there = f"{mine.host} ({mine.address})", f"{first.host} ({first.address})"
            if name == "digest":
                return f"{mine.script} on {here} is not the {first.script} of {there}", _FIXES[name]
            return f"{label} is {ours} on {here}, and {theirs} on {there}", _FIXES[name]
    return None


class NodeTable:
    """The facts of all nodes, in the store where they meet. Nodes are named by torch's descriptors."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[str, NodeFacts] = {}

    def publish(self, node: object, facts: NodeFacts) -> NodeFacts:
        """Publish the facts of this node; returns those of the first node, which may be this one."""
        text = json.dumps(dataclasses.asdict(facts))
        self._store.set(repr(node), text)
        return _read(self._store.compare_set(_FIRST, "", text)) or facts

    def refuse(self, why: str) -> None:
        """Tell the other nodes why this one does not take part."""
        self._store.set(_REFUSED, f"{time.strftime('%H:%M:%S')}: {why}")

    def refused(self) -> str:
        """When and why a node did not take part; empty if none was refused."""
        return (
            self._store.get(_REFUSED).decode(errors="replace")
            if self._store.check([_REFUSED])
            else ""
        )

    def of(self, nodes: Sequence[Any]) -> dict[Any, NodeFacts]:
        """The facts of these nodes; without those that have published none."""
        for node in nodes:
            name = repr(node)
            if name not in self._known and self._store.check([name]):
                facts = _read(self._store.get(name))
                if facts is not None:
                    self._known[name] = facts
        return {node: self._known[repr(node)] for node in nodes if repr(node) in self._known}


def order(nodes: Sequence[Any], facts: Mapping[Any, NodeFacts]) -> list[Any]:
    """The nodes in the order of their numbers; those without one by address, as numbers."""

    def key(node: Any) -> tuple[Any, ...]:
        known = facts.get(node)
        number = known.number if known is not None and known.number is not None else len(nodes)
        try:
            address = ipaddress.ip_address(node.addr)
        except ValueError:
            return number, 0, 0, node.addr, node
        return number, address.version, int(address), "", node

    return sorted(nodes, key=key)


def describe(
    here: Mapping[Any, NodeFacts], present: int, wanted: int, at_least: int
) -> tuple[str, str]:
    """How many nodes are here, and which are missing, in two phrases."""
    shown = [str(facts) for facts in here.values()]
    names = ", ".join(shown[:8]) + (", ..." if len(shown) > 8 else "")
    count = f"{present} of {wanted} nodes"
    if at_least != wanted:
        count = f"{present} of at least {at_least} nodes"
    are = "is" if present == 1 else "are"
    numbers = {facts.number for facts in here.values()}
    missing = [n for n in range(wanted) if n not in numbers]
    if None not in numbers and at_least == wanted and missing:
        which = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        return f"{count} {are} here ({names})", f"missing: node{'s' * (len(missing) > 1)} {which}"
    left = max(0, at_least - present)
    return f"{count} {are} here ({names})", f"{left} node{' is' if left == 1 else 's are'} missing"


def _read(data: bytes) -> NodeFacts | None:
    # Another version of paceline may have other fields.
    names = [field.name for field in dataclasses.fields(NodeFacts)]
    try:
        read = dict.fromkeys(names, "") | {"number": None} | json.loads(data)
        facts: NodeFacts = from_json(NodeFacts, {name: read[name] for name in names})
        return facts
    except UNREADABLE:
        return None
