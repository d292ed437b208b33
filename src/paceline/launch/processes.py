"""What the kernel says of a process: /proc, for the launcher's own ranks and their children.

Facts alone; what they mean is for hang.py.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PROBED = "/memfd:paceline-probe"


@dataclass(frozen=True, kw_only=True)
class Process:
    """One process at one moment.

    Args:
        state: As /proc has it: R runs, S sleeps, D waits for a device, T is stopped, Z is dead.
        cpu_s: Seconds of CPU so far, of all its threads.
        io_bytes: Read and written so far, files and pipes together.

    Collective: none.
    """

    pid: int
    name: str
    state: str
    cpu_s: float
    io_bytes: int


def look(pid: int) -> Process | None:
    """The process now; None if there is none. Collective: none."""
    try:
        head, _, tail = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    except OSError:
        return None
    fields = tail.split()
    io_bytes = 0
    with contextlib.suppress(OSError):  # of another user since
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        io_bytes = sum(int(line.split()[1]) for line in lines[:2])
    return Process(
        pid=pid,
        name=head.partition("(")[2],
        state=fields[0],
        cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS,
        io_bytes=io_bytes,
    )


def children(pid: int) -> list[int]:
    """The processes that this one has started and that have not been waited for. Collective: none."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """All processes below this one. Collective: none."""
    found = children(pid)
    for child in found:
        found += children(child)
    return found


def forks(mark: str, command: str) -> list[int]:
    """Processes that run `command` and were started with `mark` in their environment, by /proc.

    Collective: none.
    """
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            if (
                command.encode() in Path(f"/proc/{entry}/cmdline").read_bytes()
                and mark.encode() in Path(f"/proc/{entry}/environ").read_bytes()
            ):
                found.append(int(entry))
    return sorted(found)


def waits_in(pid: int) -> str:
    """The kernel's function that the process waits in; empty if unknown. Collective: none."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/wchan").read_text().strip("0\n")
    return ""


def probed(pid: int) -> str:
    """What the probe of a rank's forked child wrote (probe.py); empty if it has none.

    Collective: none.
    """
    with contextlib.suppress(OSError):
        for fd in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(fd.path).startswith(_PROBED):
                    return Path(fd.path).read_text(errors="replace")
    return ""
