"""How ranks meet: one torch `Store` for the job, bound to the job's interface.

A front to `torch.distributed.TCPStore`. torchrun and `paceline run` host the store in the launcher; a
user's MASTER_ADDR names one; ranks of one host without either find it through a file that rank 0
writes. torch's own server listens on all interfaces, so ours is given a socket that is bound already.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from paceline.environment import Place
from paceline.errors import CollectiveTimeout, ConfigError, place


def meet(where: Place, *, timeout_s: float) -> dist.Store:
    """Connect to the job's store; keys are private to this attempt of the job.

    Raises:
        ConfigError: the address is in use or cannot be bound here.
        CollectiveTimeout: rank 0 did not come.

    Collective: all ranks, once.
    """
    timeout = timedelta(seconds=timeout_s)
    if where.master is None:
        store = _meet_by_file(where, timeout)
    else:
        host, _, port = where.master.rpartition(":")
        hosted_by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if where.rank == 0 and not hosted_by_launcher:
            store = serve(host, int(port), where.world_size, timeout)
        else:
            store = _connect(where, host, int(port), timeout)
    # An agent may keep its store over restarts; without a prefix a restarted rank reads the addresses
    # of dead ones (seen on torch 2.13 with plain torchrun).
    return dist.PrefixStore(f"paceline/{where.restarts}", store)


def serve(host: str, port: int, world_size: int, timeout: timedelta) -> dist.TCPStore:
    """Host a store on this host's address `host` alone; port 0 lets the kernel choose.

    Collective: none.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"rank 0 cannot listen on {host}:{port}: {error.strerror}.",
            why="another job may hold the port, or the address is not this host's.",
            fix="choose another MASTER_PORT, or let `paceline run` choose one.",
            host=host,
            port=port,
        ) from error
    listener.listen(1024)
    # The store owns the descriptor from here on.
    return dist.TCPStore(
        host,
        listener.getsockname()[1],
        world_size,
        True,
        timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _connect(where: Place, host: str, port: int, timeout: timedelta) -> dist.TCPStore:
    try:
        return dist.TCPStore(host, port, where.world_size, False, timeout, wait_for_workers=False)
    except dist.DistNetworkError as error:
        raise CollectiveTimeout(
            f"rank 0's store at {host}:{port} did not answer within {timeout.total_seconds():g} s.",
            where=place(where.rank, where.world_size),
            why="rank 0 did not start, or its port cannot be reached from this host.",
            fix="see the log of rank 0; open the port in the firewall; check MASTER_ADDR.",
            missing=[0],
            waited_s=timeout.total_seconds(),
        ) from error


def _meet_by_file(where: Place, timeout: timedelta) -> dist.Store:
    notice = _private_folder() / f"{where.launcher}-{where.job_key}-{where.restarts}"
    if where.rank == 0:
        store = serve("127.0.0.1", 0, where.world_size, timeout)
        scratch = notice.with_name(f"{notice.name}.{os.getpid()}")
        scratch.write_text(f"{store.port} {os.getpid()}")
        scratch.replace(notice)
        _wait_for_all(store, where)
        notice.unlink()
        return store
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            port, _, pid = notice.read_text().partition(" ")
            # A notice whose writer is gone was left by an earlier job that was killed.
            if Path(f"/proc/{pid}").exists() or not Path("/proc").exists():
                store = _connect(where, "127.0.0.1", int(port), timeout)
                _wait_for_all(store, where)
                return store
        time.sleep(0.01)
    raise CollectiveTimeout(
        f"rank 0 did not open a store within {timeout.total_seconds():g} s.",
        where=place(where.rank, where.world_size),
        fix="see the log of rank 0.",
        missing=[0],
        waited_s=timeout.total_seconds(),
    )


def _wait_for_all(store: dist.Store, where: Place) -> None:
    store.set(f"met/{where.rank}", "")
    store.wait([f"met/{rank}" for rank in range(where.world_size)])


def _private_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"{folder} is not a private folder of this user, so ranks will not meet there.",
            fix=f"remove {folder}, or set TMPDIR.",
        )
    return folder
