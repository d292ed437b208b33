"""A fact about this host that belongs to a known message: who uses a port."""

from __future__ import annotations

import re

from paceline.machine import owner_of_port

_PORT = re.compile(r"\bport:? ?(\d{1,5})\b")
# An address with its port; not a time of day, nor a line of a file.
_ADDRESS = re.compile(r"(?<!\.cpp)(?<!\.hpp)(?<!\.py)(?<=[\w\]]):(\d{4,5})\b(?!:)")


def port_owner(line: str) -> str:
    """A sentence about which process of this host uses the port that a line of a log names."""
    numbers = [int(number) for number in _PORT.findall(line) or _ADDRESS.findall(line)]
    for port in numbers:
        owner = owner_of_port(port)
        if owner is not None:
            return f"On this host, port {port} is now used by {owner}."
    return f"On this host, no process listens on port {numbers[0]} now." if numbers else ""
