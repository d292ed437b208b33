"""Facts about this host that belong to a known message: who uses a port, how much memory there is."""

from __future__ import annotations

import re

from paceline.machine import format_bytes, owner_of_port, read_memory

_PORT = re.compile(r"\bport:? ?(\d{1,5})\b")
# An address with its port; not a time of day, nor a line of a file.
_ADDRESS = re.compile(r"(?<!\.cpp)(?<!\.hpp)(?<!\.py)(?<=[\w\]]):(\d{4,5})\b(?!:)")


def facts(name: str | None, line: str) -> str:
    """The sentence that the function called `name` returns for a line of a log; empty if `name` is None."""
    if name is None:
        return ""
    return {"port_owner": _port_owner, "memory": _memory, "shared_memory": _shared_memory}[name](
        line
    )


def _port_owner(line: str) -> str:
    numbers = [int(number) for number in _PORT.findall(line) or _ADDRESS.findall(line)]
    for port in numbers:
        owner = owner_of_port(port)
        if owner is not None:
            return f"On this host, port {port} is now used by {owner}."
    return f"On this host, no process listens on port {numbers[0]} now." if numbers else ""


def _shared_memory(line: str) -> str:
    memory = read_memory()
    size, free = format_bytes(memory.shm_bytes), format_bytes(memory.shm_free_bytes)
    return f"/dev/shm of this host has {size}, {free} free."


def _memory(line: str) -> str:
    memory = read_memory()
    if memory.limit_bytes is None:
        return ""
    kills = memory.kills or 0
    return (
        f"The memory limit on this host is {format_bytes(memory.limit_bytes)}; the kernel has killed "
        f"{kills} process{'' if kills == 1 else 'es'} because of it since the group was created."
    )
