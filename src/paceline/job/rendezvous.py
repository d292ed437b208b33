"""Rendezvous: all ranks connect to one torch `Store`. A front to `torch.distributed.TCPStore`.

torchrun and `paceline run` host the store in the launcher; a user's MASTER_ADDR names one. Without either,
ranks of one host find it through a port file, which rank 0 writes and keeps locked while it waits.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from paceline.errors import (
    CollectiveTimeout,
    PeerFailed,
    name_ranks,
    rank_location,
    render,
)
from paceline.job.environment import RankInfo
from paceline.job.network import address_from_here
from paceline.job.store_server import (
    LOOPBACK,
    Say,
    cannot_listen,
    listen_for,
    serve_here,
    store_on,
    wait_served,
)
from paceline.log import logger
from paceline.machine import launching_process, private_folder, runtime_folder

_MISSING = "missing"  # the key of the ranks that did not come; [] if all came
_SERVED = "served"  # rank 0 serves this store for this join
_GRACE_S = 0.5  # for ranks to read who is missing before the store ends with rank 0
_joins = itertools.count()


def connect_store(
    info: RankInfo, *, timeout_s: float, store: dist.Store | None = None
) -> dist.Store:
    """Connect to the job's store and wait for all ranks. No other join or restart uses the same keys.

    Args:
        store: A store that all ranks are connected to already.

    Raises:
        ConfigError: the address is in use or cannot be bound here.
        CollectiveTimeout: a rank did not come.
        PeerFailed: rank 0 ended before all ranks had met.

    Collective: all ranks.
    """
    timeout = timedelta(seconds=timeout_s)
    join = next(_joins)
    # An agent may keep its store over restarts; without a prefix a restarted rank reads the addresses of dead
    # ones (seen with torchrun of torch 2.13). The same holds for a second join of a process. The computed
    # ports of two jobs may be equal, and then their ranks must not meet.
    job = f"/{info.job_key}" if info.job_key else ""
    prefix = f"paceline{job}/{info.restarts}{f'/again {join}' if join else ''}"
    with contextlib.ExitStack() as until_all_met:
        if store is not None:
            pass
        elif info.master is None and info.rank == 0:
            served: dist.TCPStore = serve_here(timeout)
            until_all_met.enter_context(_port_file(info, served.port))
            store = served
        elif info.master is None:
            store = _connect(info, LOOPBACK, _read_port_file(info, timeout), timeout_s)
        else:
            host, _, port = info.master.rpartition(":")
            hosted_by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            if info.rank == 0 and not hosted_by_launcher:
                store = _serve(info, host, int(port), timeout)
                dist.PrefixStore(prefix, store).set(_SERVED, "")
            else:
                store = _connect(info, host, int(port), timeout_s)
                # Rank 0 may not have closed its store of the last join, on the same port.
                again = join > 0 and not hosted_by_launcher
                while again and not _wait_for_this_join(
                    dist.PrefixStore(prefix, store), info, timeout_s
                ):
                    store = _connect(info, host, int(port), timeout_s)
        prefixed = dist.PrefixStore(prefix, store)
        if info.rank == 0:
            _wait_for_ranks(prefixed, info, timeout_s)
    if info.rank == 0:
        prefixed.set(_MISSING, "[]")
    else:
        _wait_for_rank0(prefixed, info, timeout_s)
    return prefixed


def _serve(info: RankInfo, host: str, port: int, timeout: timedelta) -> dist.Store:
    say = _say_waiting(info, host, port)
    try:
        listener = listen_for(host, port, timeout.total_seconds(), say)
    except OSError as error:
        raise cannot_listen(
            f"rank 0 cannot listen on {host}:{port}",
            port,
            error,
            fix="choose another MASTER_PORT, or let `paceline run` choose one.",
        ) from error
    store: dist.Store = store_on(listener, timeout)
    return store


def _say_waiting(info: RankInfo, host: str, port: int) -> Say:
    def say(reason: str, fix: str) -> None:
        if info.local_rank == 0:
            what = f"still waiting for rank 0 at {host}:{port}: {reason}."
            logger.warning("%s", render(what, fix=fix))

    return say


def _connect(info: RankInfo, host: str, port: int, timeout_s: float) -> dist.Store:
    failure = wait_served(host, port, timeout_s, _say_waiting(info, host, port))
    if failure is not None:
        reason, fix = failure
        raise CollectiveTimeout(
            f"rank 0's store at {host}:{port} did not answer within {timeout_s:g} s: {reason}.",
            where=rank_location(info.rank, info.world_size),
            why="rank 0 did not start, or MASTER_ADDR and MASTER_PORT do not lead to it.",
            fix=fix,
            missing=[0],
            waited_s=timeout_s,
        )
    try:
        return dist.TCPStore(
            address_from_here(host),
            port,
            is_master=False,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except dist.DistNetworkError as error:
        raise CollectiveTimeout(
            f"what answers at {host}:{port} is not rank 0's store.",
            where=rank_location(info.rank, info.world_size),
            why=str(error).splitlines()[0],
            fix="choose a MASTER_PORT that no other program uses.",
            missing=[0],
            waited_s=timeout_s,
        ) from error


def _wait_for_this_join(store: dist.Store, info: RankInfo, timeout_s: float) -> bool:
    """Wait until rank 0 serves this store for this join. False: it was that of the last, and is closed."""
    try:
        store.wait([_SERVED], timedelta(seconds=timeout_s))
    except dist.DistNetworkError:
        return False
    except dist.DistStoreError as error:
        raise _absent(info, [0], timeout_s) from error
    return True


def _wait_for_ranks(store: dist.Store, info: RankInfo, timeout_s: float) -> None:
    keys = [f"met/{rank}" for rank in range(1, info.world_size)]
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        missing = [rank for rank, key in enumerate(keys, start=1) if not store.check([key])]
        store.set(_MISSING, json.dumps(missing))
        time.sleep(_GRACE_S)
        raise _absent(info, missing, timeout_s) from error


def _wait_for_rank0(store: dist.Store, info: RankInfo, timeout_s: float) -> None:
    try:
        store.set(f"met/{info.rank}", "")
        # Rank 0 writes which ranks are missing; its wait may have begun only when this rank came.
        store.wait([_MISSING], timedelta(seconds=timeout_s + _GRACE_S))
        missing = json.loads(store.get(_MISSING))
    except dist.DistNetworkError as error:
        raise PeerFailed(
            "rank 0 ended before all ranks had met.",
            where=rank_location(info.rank, info.world_size),
            fix="see the log of rank 0.",
            rank=0,
        ) from error
    except dist.DistStoreError as error:
        raise _absent(info, [0], timeout_s) from error
    if missing:
        raise _absent(info, missing, timeout_s)


def _absent(info: RankInfo, missing: list[int], timeout_s: float) -> CollectiveTimeout:
    return CollectiveTimeout(
        f"{name_ranks(missing)} of {info.world_size} did not join within {timeout_s:g} s.",
        where=rank_location(info.rank, info.world_size),
        why="the rank ended before it called `join`, has not called it yet, or was never started.",
        fix=f"see the log of rank {missing[0]}; call `join` before slow preparations, or raise "
        "`timeout_s`.",
        missing=missing,
        waited_s=timeout_s,
    )


@contextlib.contextmanager
def _port_file(info: RankInfo, port: int) -> Iterator[None]:
    """Write the file in which the ranks of this job on this host find the store's port."""
    path = _port_file_path(info)
    with _exclusive_lock(path.parent):
        _remove_stale(path.parent)
        handle, scratch = tempfile.mkstemp(dir=path.parent)
        os.write(handle, str(port).encode())
        # The kernel releases the lock when this process ends, however it ends. A pid could not show that:
        # the kernel reuses it, and another container may not see it.
        fcntl.flock(handle, fcntl.LOCK_EX)
        os.replace(scratch, path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def _read_port_file(info: RankInfo, timeout: timedelta) -> int:
    path = _port_file_path(info)
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError), path.open() as file:
            # An unlocked file was left by an earlier job that was killed.
            if _is_locked(file.fileno()):
                return int(file.read())
        time.sleep(0.01)
    raise CollectiveTimeout(
        f"rank 0 did not open a store within {timeout.total_seconds():g} s.",
        where=rank_location(info.rank, info.world_size),
        why=f"rank 0 ended before it joined, or sees another {path.parent} (as in another container).",
        fix="see the log of rank 0; or export MASTER_ADDR=127.0.0.1 and a free MASTER_PORT.",
        missing=[0],
        waited_s=timeout.total_seconds(),
    )


def _is_locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _remove_stale(folder: Path) -> None:
    for path in folder.iterdir():
        with contextlib.suppress(OSError), path.open() as file:
            if not _is_locked(file.fileno()):
                path.unlink()


@contextlib.contextmanager
def _exclusive_lock(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _port_file_path(info: RankInfo) -> Path:
    key = f"{info.launcher} {info.job_key or launching_process('hydra_')} {info.restarts}"
    return _port_folder() / hashlib.sha256(key.encode()).hexdigest()[:32]


def _port_folder() -> Path:
    # The launcher keeps its reports beside this folder, not in it.
    folder = private_folder(runtime_folder()) / "rendezvous"
    folder.mkdir(exist_ok=True)
    return folder
