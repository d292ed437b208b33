"""A test that leaves threads, processes, ports, files or variables behind fails."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

import paceline

SHM = Path("/dev/shm")
GPU_TESTS = Path(__file__).with_name("gpu")
_SET_BY_OTHERS = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}  # pytest; torch's compiler
_OWNED = re.compile(r"(?:torch_|paceline-)(\d+)[_-]")  # with the pid of the process that made it


def pytest_configure(config: pytest.Config) -> None:
    """Hide the GPUs of this host, which ranks would use, unless only `tests/gpu` runs."""
    paths = [Path(word.split("::")[0]).resolve() for word in config.args]
    if not all(path.is_relative_to(GPU_TESTS) for path in paths):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _children() -> set[int]:
    """Live child processes, except the fork server and its tracker, which serve the whole session."""
    found = set()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # it has just ended
            command = " ".join(child.cmdline())
            serves_session = "forkserver" in command or "resource_tracker" in command
            if child.status() != psutil.STATUS_ZOMBIE and not serves_session:
                found.add(child.pid)
    return found


def _listening() -> set[str]:
    """Addresses that this process listens on."""
    connections = psutil.Process().net_connections("tcp")
    return {str(c.laddr) for c in connections if c.status == psutil.CONN_LISTEN}


def _shared_memory() -> set[str]:
    """Files of torch and Paceline, unless they belong to another process that lives."""
    found = set()
    for path in SHM.iterdir() if SHM.exists() else ():
        owner = _OWNED.match(path.name)
        if owner and (int(owner[1]) == os.getpid() or not psutil.pid_exists(int(owner[1]))):
            found.add(path.name)
    return found


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


@pytest.fixture
def job() -> Iterator[paceline.Job]:
    """A job of this process alone."""
    with paceline.join(seed=7) as job:
        yield job
