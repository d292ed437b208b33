"""One examination: the ranks meet, exchange facts through the store, and measure links and an all-reduce.

The links are measured before there is a process group, because a broken network breaks the group.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.doctor.facts import Facts, gather
from paceline.doctor.links import Listener, measure, rounds
from paceline.errors import PacelineError
from paceline.job import environment, rendezvous, store_exchange
from paceline.job.environment import RankInfo
from paceline.job.job import Job
from paceline.job.network import addresses_of, source_address
from paceline.launch.spawning import spawn

_TIMEOUT_S = 60.0
_GROUP_TIMEOUT_S = 15.0
_DEADLINE_S = 20.0
_TENSOR_BYTES = 16 << 20
_ROUNDS = 5


def examine(folder: Path | None) -> Facts:
    """Facts of all ranks, of the links between hosts and of an all-reduce. All ranks must call it.

    They are equal on all ranks, except "prints", which is true on the rank that prints the report. Without a
    launcher the facts are those of this process, and two new ranks on this host do the all-reduce.

    Raises:
        ConfigError: the launcher's variables are incomplete or contradict each other.
        CollectiveTimeout: a rank did not come.
    """
    info = environment.read(os.environ)
    facts = gather(info, folder)
    if info.world_size == 1:
        alone = {"ranks": [facts], "links": [], "reduce": [_reduce_alone()], "shared": None}
        return alone | {"prints": True}
    store = dist.PrefixStore("doctor", rendezvous.meet(info, timeout_s=_TIMEOUT_S))
    ranks = _exchange(store, info, "facts", facts)
    hosts = [f["rank"] for f in ranks if f["local_rank"] == 0]
    links = _exchange(store, info, "links", _links(store, info, ranks, hosts))
    shared = _shared(store, info, folder) if folder is not None else None
    reduce = _exchange(store, info, "reduce", _reduce_in_group(store, info))
    found = {
        "ranks": ranks,
        "links": [link for each in links for link in each],
        "reduce": reduce,
        "shared": shared,
    }
    _exchange(store, info, "end", None)  # the store may live in rank 0
    return found | {"prints": info.rank == 0}


def _exchange(store: dist.Store, info: RankInfo, name: str, value: Any) -> list[Any]:
    return store_exchange.gather(store, name, value, info.rank, info.world_size)


def _links(store: dist.Store, info: RankInfo, ranks: list[Facts], hosts: list[int]) -> list[Facts]:
    """The links from this host to each other host, measured by its first rank."""
    if len(hosts) < 2:
        return []
    key = secrets.token_hex(32)
    key = _exchange(store, info, "key", key)[0]
    assert info.master is not None
    name, _, port = info.master.rpartition(":")
    master = next(iter(addresses_of(name)), "")
    mine = source_address(master, int(port)) or "" if master else ""
    seen = _exchange(store, info, "address", [mine, master])
    if info.rank not in hosts:
        return []
    # Rank 0 listens on the address that the others use; there, its own name may resolve to loopback.
    address = next(seen[h][1] for h in hosts if h != 0) if info.rank == 0 else mine
    listener = Listener(address, key)
    links = []
    try:
        store.set(f"endpoint/{info.rank}", json.dumps(listener.endpoint))
        for number, peer in enumerate(rounds(len(hosts), hosts.index(info.rank))):
            rank = hosts[peer]
            endpoint = json.loads(store.get(f"endpoint/{rank}"))
            link = measure(endpoint, key, ranks[rank]["host"])
            links.append(link | {"from": info.rank, "to": rank, "endpoint": endpoint})
            store.set(f"round/{number}/{info.rank}", "")
            store.wait([f"round/{number}/{host}" for host in hosts], timedelta(seconds=_TIMEOUT_S))
    finally:
        listener.close()
    return links


def _shared(store: dist.Store, info: RankInfo, folder: Path) -> list[bool]:
    """Whether each rank sees the file that rank 0 wrote to the folder."""
    own = f".paceline-doctor-{secrets.token_hex(8)}"
    name = _exchange(store, info, "token", own)[0]
    # Other users of the host can write to the store: rank 0 makes and removes its own file only.
    mark = folder / (own if info.rank == 0 else name)
    try:
        if info.rank == 0:
            with contextlib.suppress(OSError):  # the facts of rank 0 have this error already
                mark.touch()
        _exchange(store, info, "written", None)
        return _exchange(store, info, "seen", mark.exists())
    finally:
        if info.rank == 0:
            with contextlib.suppress(OSError):
                mark.unlink()


def _reduce_alone() -> Facts:
    try:
        return spawn(_reduce_of_job, nproc=2, device="cpu", timeout_s=_GROUP_TIMEOUT_S)[0]  # type: ignore[no-any-return]
    except (PacelineError, RuntimeError, OSError) as error:
        return {"error": str(error)}


def _reduce_of_job(job: Job) -> Facts:
    return _timed_reduce(job.rank, job.world_size, torch.device("cpu"))


def _reduce_in_group(store: dist.Store, info: RankInfo) -> Facts:
    """An all-reduce over Gloo, and over NCCL where each rank has a GPU."""
    found = _try(store, info, "gloo", torch.device("cpu"))
    index = info.local_rank if torch.cuda.device_count() > 1 else 0
    usable = index < torch.cuda.device_count() and dist.is_nccl_available()
    if all(_exchange(store, info, "gpu", usable and "error" not in found)):
        found["gpu"] = _try(store, info, "nccl", torch.device("cuda", index))
    return found


def _try(store: dist.Store, info: RankInfo, backend: str, device: torch.device) -> Facts:
    found: Facts = {"error": f"the all-reduce did not end within {_DEADLINE_S:.0f} s"}

    def attempt() -> None:
        try:
            with _group(store, info, backend, device):
                found.update(_timed_reduce(info.rank, info.world_size, device))
                del found["error"]
        except (RuntimeError, ValueError) as error:
            found["error"] = str(error)

    # Gloo waits for peers that have ended, far beyond its timeout.
    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(_DEADLINE_S)
    return dict(found)  # the thread may still run


@contextlib.contextmanager
def _group(store: dist.Store, info: RankInfo, backend: str, device: torch.device) -> Iterator[None]:
    """A process group as a plain script makes it, in the unchanged environment."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=_GROUP_TIMEOUT_S)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(backend, store),
        rank=info.rank,
        world_size=info.world_size,
        timeout=timeout,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def _timed_reduce(rank: int, world_size: int, device: torch.device) -> Facts:
    tensor = torch.full((_TENSOR_BYTES // 4,), float(rank + 1), device=device)
    want = world_size * (world_size + 1) / 2
    dist.all_reduce(tensor)
    right = bool((tensor == want).all())
    times = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        dist.all_reduce(tensor)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    seconds = sorted(times)[_ROUNDS // 2]
    return {"right": right, "world_size": world_size, "seconds": seconds, "bytes": _TENSOR_BYTES}
