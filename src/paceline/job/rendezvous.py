"""Rendezvous: all ranks connect to one torch `Store`. A front to `torch.distributed.TCPStore`.

torchrun and `paceline run` host the store in the launcher; a user's MASTER_ADDR names one. Without either,
rank 0 serves it on the loopback, on a port that all ranks of the host compute from what names their job.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from datetime import timedelta

import torch.distributed as dist

from paceline.errors import (
    CollectiveTimeout,
    PeerFailed,
    name_ranks,
    rank_location,
    render,
)
from paceline.job.environment import RankInfo, computed_port
from paceline.job.network import address_from_here
from paceline.job.store_server import (
    LOOPBACK,
    Say,
    cannot_listen,
    listen_for,
    store_on,
    wait_served,
)
from paceline.log import logger
from paceline.machine import launching_process

_MISSING = "missing"  # the key of the ranks that did not come; [] if all came
_GRACE_S = 0.5  # for ranks to read who is missing before the store ends with rank 0
# Below the ports that the kernel gives to connections.
_LOCAL_PORTS = (20000, 29499)
_joins = itertools.count()
# Kept until the process ends, for a second join: if rank 0 served another store at the same address, a faster
# rank would connect to the old one.
_stores: dict[tuple[str, int], dist.Store] = {}


def connect_store(
    info: RankInfo, *, timeout_s: float, store: dist.Store | None = None
) -> dist.Store:
    """Connect to the job's store and wait for all ranks. No other join or restart uses the same keys.

    Args:
        store: A store that all ranks are connected to already.

    Raises:
        ConfigError: the address is in use or cannot be bound here.
        CollectiveTimeout: a rank did not come.
        PeerFailed: rank 0 ended before all ranks had joined.

    Collective: all ranks.
    """
    host, port, job = _store_address(info)
    # An agent may keep its store over restarts; without a prefix a restarted rank reads the addresses of dead
    # ones (seen with torchrun of torch 2.13). The same holds for a second join of a process. The computed
    # ports of two jobs may be equal, and then their ranks must not mix.
    prefix = f"paceline{job}/{info.restarts}"
    if (join := next(_joins)) > 0:
        prefix += f"/again {join}"
    store = store or _stores.get((host, port))
    if store is None:
        hosted_by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        connect = _serve if info.rank == 0 and not hosted_by_launcher else _connect
        store = _stores[host, port] = connect(info, host, port, timeout_s)
    prefixed = dist.PrefixStore(prefix, store)
    if info.rank == 0:
        _wait_for_ranks(prefixed, info, timeout_s)
        prefixed.set(_MISSING, "[]")
    else:
        _wait_for_rank0(prefixed, info, timeout_s)
    return prefixed


def _store_address(info: RankInfo) -> tuple[str, int, str]:
    """The host and port of the store, and a prefix of its keys that names the job."""
    if info.master is not None:
        host, _, port = info.master.rpartition(":")
        return host, int(port), f"/{info.job_key}" if info.job_key else ""
    job = f"{info.launcher} {info.job_key or launching_process('hydra_')} {info.restarts}"
    return LOOPBACK, computed_port(job, _LOCAL_PORTS), f"/{job}"


def _serve(info: RankInfo, host: str, port: int, timeout_s: float) -> dist.Store:
    say = _say_waiting(info, host, port)
    try:
        listener = listen_for(host, port, timeout_s, say)
    except OSError as error:
        raise cannot_listen(
            f"rank 0 cannot listen on {host}:{port}",
            port,
            error,
            fix="set MASTER_ADDR to this host and MASTER_PORT to another port, or use `paceline run`, which "
            "chooses one.",
        ) from error
    store: dist.Store = store_on(listener, timedelta(seconds=timeout_s))
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
    return dist.TCPStore(
        address_from_here(host),
        port,
        is_master=False,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )


def _wait_for_ranks(store: dist.Store, info: RankInfo, timeout_s: float) -> None:
    keys = [f"joined/{rank}" for rank in range(1, info.world_size)]
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        missing = [rank for rank, key in enumerate(keys, start=1) if not store.check([key])]
        store.set(_MISSING, json.dumps(missing))
        time.sleep(_GRACE_S)
        raise _absent(info, missing, timeout_s) from error


def _wait_for_rank0(store: dist.Store, info: RankInfo, timeout_s: float) -> None:
    try:
        store.set(f"joined/{info.rank}", "")
        # Rank 0 writes which ranks are missing; its wait may have begun only when this rank came.
        store.wait([_MISSING], timedelta(seconds=timeout_s + _GRACE_S))
        missing = json.loads(store.get(_MISSING))
    except dist.DistNetworkError as error:
        raise PeerFailed(
            "rank 0 ended before all ranks had joined.",
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
