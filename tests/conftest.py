"""Hygiene: what a test leaves behind fails it."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

SHM = Path("/dev/shm")
_SET_BY_OTHERS = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}  # pytest; torch's compiler
_OURS = ("torch_", "paceline")  # the others there have names that tell nothing of whose they are


def _children() -> set[int]:
    """Live child processes, but for those that serve the whole session (fork server, its tracker)."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        text = (task / "children").read_text() if (task / "children").exists() else ""
        found |= {int(pid) for pid in text.split()}
    return {pid for pid in found if not _serves_the_session(pid)}


def _serves_the_session(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z" or b"forkserver" in command or b"resource_tracker" in command


def _listening() -> set[str]:
    """Local addresses that this process listens on."""
    inodes = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(fd)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if Path(table).exists():
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in inodes:
                    found.add(fields[1])
    return found


def _shared_memory() -> set[str]:
    if not SHM.exists():
        return set()
    return {
        path.name
        for path in SHM.iterdir()
        if path.name.startswith(_OURS) and not _in_use(path.name)
    }


def _in_use(name: str) -> bool:
    """Whether a file of torch's names a process that lives, and is another's."""
    pids = [part for part in name.split("_") if part.isdigit()]
    return bool(pids) and int(pids[0]) != os.getpid() and Path(f"/proc/{pids[0]}").exists()


def _state() -> dict[str, set[Any]]:
    return {
        "threads": {t for t in threading.enumerate() if t.is_alive()},
        "processes": _children(),
        "ports": _listening(),
        "shared memory": _shared_memory(),
        "process group": {"default"} if dist.is_initialized() else set(),
        "torch threads": {torch.get_num_threads()},
    }


@pytest.fixture(autouse=True)
def _leaves_nothing() -> Iterator[None]:
    environ, before = dict(os.environ), _state()
    yield
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":
            thread.join(timeout=5)  # of torch's loader; it ends a moment after its workers
    after = _state()
    if after != before:
        gc.collect()  # sockets of stores close with their objects
        after = _state()
    left: dict[str, set[Any]] = {name: after[name] - before[name] for name in before}
    changed = {k for k in environ.keys() | os.environ.keys() if environ.get(k) != os.environ.get(k)}
    left["environment"] = changed - _SET_BY_OTHERS
    os.environ.clear()
    os.environ.update(environ)
    torch.set_num_threads(min(before["torch threads"]))
    assert not any(left.values()), f"left behind: { {k: v for k, v in left.items() if v} }"
