"""This host as the kernel shows it: memory and its limits, /dev/shm, who holds a port. Linux's /proc."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from paceline.machine.cores import group_folders, read_text

_LISTENS = "0A"
_PROC = Path("/proc")


def shared_memory_bytes() -> tuple[int, int]:
    """Size of /dev/shm and what is free of it, in bytes; zeros where there is none."""
    try:
        shm = os.statvfs("/dev/shm")
    except OSError:
        return 0, 0
    return shm.f_blocks * shm.f_frsize, shm.f_bavail * shm.f_frsize


def memory_limit() -> tuple[int | None, int]:
    """The lowest memory limit of the groups this process is in, in bytes, and how many it killed.

    None where no group has a limit below the host's memory.
    """
    limits, kills = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")], 0
    for folder in group_folders("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = read_text(folder / name).strip()
            if text.isdigit() and int(text) < min(limits):
                limits.append(int(text))
        for name in ("memory.events", "memory.oom_control"):
            for line in read_text(folder / name).splitlines():
                if line.startswith("oom_kill "):
                    kills = max(kills, int(line.split()[1]))
    return (min(limits) if len(limits) > 1 else None), kills


def owner_of_port(port: int) -> str | None:
    """Who listens on a TCP port here: pid, command and age, or the user; None if nobody does."""
    inodes = {}
    for table in ("tcp", "tcp6"):
        for line in read_text(_PROC / "net" / table).splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                inodes[f"socket:[{fields[9]}]"] = fields[7]
    if not inodes:
        return None
    for process in _PROC.glob("[0-9]*"):
        if not inodes.keys().isdisjoint(_links(process / "fd")):
            return f"pid {process.name} ({_command(process)}), which began {_age(process)} ago"
    return f"a process of user {next(iter(inodes.values()))}, which this user may not see"


def _links(folder: Path) -> list[str]:
    found = []
    # The folder may be another user's; a process or a file may be gone by now.
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                found.append(os.readlink(folder / name))
    return found


def _command(process: Path) -> str:
    words = read_text(process / "cmdline").split("\0")
    text = " ".join(words).strip() or read_text(process / "comm").strip()
    return text if len(text) <= 80 else f"{text[:80]} ..."


def _age(process: Path) -> str:
    started = int(read_text(process / "stat").rpartition(")")[2].split()[19])
    up = float(read_text(_PROC / "uptime").split()[0])
    seconds = max(0, int(up - started / os.sysconf("SC_CLK_TCK")))
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds // unit} {name}"
    return f"{seconds} s"


def format_bytes(size: float) -> str:
    """Render bytes as "64 MiB"."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
