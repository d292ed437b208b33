"""What this host can say to a known message now: who holds a port, how much memory there is."""

from __future__ import annotations

import re

from paceline.machine.host import format_bytes, memory_limit, owner_of_port, shared_memory_bytes

_PORT = re.compile(r"port:? ?(\d{1,5})\b|[\w\]]:(\d{1,5})\b")


def facts(name: str | None, line: str) -> str:
    """The sentence of the function that an entry names; empty where there is nothing to say."""
    return (
        {"port_owner": _port_owner, "memory": _memory, "shared_memory": _shared_memory}[name](line)
        if name
        else ""
    )


def _port_owner(line: str) -> str:
    numbers = [int(a or b) for a, b in _PORT.findall(line)]
    for port in numbers:
        owner = owner_of_port(port)
        if owner is not None:
            return f"On this host port {port} is held now by {owner}."
    return f"On this host nobody listens on port {numbers[0]} now." if numbers else ""


def _shared_memory(line: str) -> str:
    size, free = shared_memory_bytes()
    return f"/dev/shm of this host has {format_bytes(size)}, {format_bytes(free)} free."


def _memory(line: str) -> str:
    limit, kills = memory_limit()
    if limit is None:
        return ""
    return (
        f"On this host the limit is {format_bytes(limit)}, and {kills} process"
        f"{' was' if kills == 1 else 'es were'} killed for it since it began."
    )
