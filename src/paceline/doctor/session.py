"""One examination: ranks meet, exchange facts through the store, measure links and an all-reduce.

The network is measured before there is a process group, since a group is what a wrong network breaks.
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
from paceline.doctor.links import Listener, address_towards, measure, rounds
from paceline.errors import PacelineError
from paceline.job import environment, rendezvous
from paceline.job.environment import RankInfo
from paceline.job.job import Job
from paceline.launch.spawning import spawn

_TIMEOUT_S = 60.0
_GROUP_TIMEOUT_S = 15.0
_DEADLINE_S = 20.0
_TENSOR_BYTES = 16 << 20
_ROUNDS = 5


def examine(folder: Path | None) -> Facts:
    """Facts of all ranks, of the links between hosts and of an all-reduce; equal on all ranks.

    But for "speaks", which one rank has, so that one report is printed.

    Without a launcher this process is examined, and two new ranks of this host reduce.

    Raises:
        LauncherError: the launcher's variables are partial or contradict each other.
        CollectiveTimeout: a rank did not come.

    Collective: all ranks.
    """
    place = environment.read(os.environ)
    facts = gather(place, folder)
    if place.world_size == 1:
        alone = {"ranks": [facts], "links": [], "reduce": [_reduce_alone()], "shared": None}
        return alone | {"speaks": True}
    store = dist.PrefixStore("doctor", rendezvous.meet(place, timeout_s=_TIMEOUT_S))
    ranks = _exchange(store, place, "facts", facts)
    hosts = [f["rank"] for f in ranks if f["local_rank"] == 0]
    links = _exchange(store, place, "links", _links(store, place, ranks, hosts))
    shared = _shared(store, place, folder) if folder is not None else None
    reduce = _exchange(store, place, "reduce", _reduce_in_group(store, place))
    found = {
        "ranks": ranks,
        "links": [link for each in links for link in each],
        "reduce": reduce,
        "shared": shared,
    }
    _exchange(store, place, "end", None)  # the store may live in rank 0
    return found | {"speaks": place.rank == 0}


def _exchange(store: dist.Store, place: RankInfo, name: str, value: Any) -> list[Any]:
    store.set(f"{name}/{place.rank}", json.dumps(value))
    return [json.loads(store.get(f"{name}/{rank}")) for rank in range(place.world_size)]


def _links(store: dist.Store, place: RankInfo, ranks: list[Facts], hosts: list[int]) -> list[Facts]:
    """What this host's first rank finds of the way to each other host."""
    if len(hosts) < 2:
        return []
    key = secrets.token_hex(32)
    key = _exchange(store, place, "key", key)[0]
    assert place.master is not None
    name, _, port = place.master.rpartition(":")
    try:
        mine, master = address_towards(name, int(port))
    except OSError:
        mine = master = ""
    seen = _exchange(store, place, "address", [mine, master])
    if place.rank not in hosts:
        return []
    # The master's host is listened to where the others see it, not where it sees itself.
    address = next(seen[h][1] for h in hosts if h != 0) if place.rank == 0 else mine
    listener = Listener(address, key)
    links = []
    try:
        store.set(f"ends/{place.rank}", json.dumps(listener.ends))
        for number, peer in enumerate(rounds(len(hosts), hosts.index(place.rank))):
            rank = hosts[peer]
            ends = json.loads(store.get(f"ends/{rank}"))
            link = measure(ends, key, ranks[rank]["host"])
            links.append(link | {"from": place.rank, "to": rank, "ends": ends})
            store.set(f"round/{number}/{place.rank}", "")
            store.wait([f"round/{number}/{host}" for host in hosts], timedelta(seconds=_TIMEOUT_S))
    finally:
        listener.close()
    return links


def _shared(store: dist.Store, place: RankInfo, folder: Path) -> list[bool]:
    """Whether each rank sees in the folder what rank 0 has written."""
    name = _exchange(store, place, "token", f".paceline-doctor-{secrets.token_hex(8)}")[0]
    mark = folder / name
    try:
        if place.rank == 0:
            with contextlib.suppress(OSError):  # that it cannot be written to is a fact already
                mark.touch()
        _exchange(store, place, "written", None)
        return _exchange(store, place, "seen", mark.exists())
    finally:
        if place.rank == 0:
            with contextlib.suppress(OSError):
                mark.unlink()


def _reduce_alone() -> Facts:
    try:
        return spawn(_reduce_of_job, nproc=2, device="cpu", timeout_s=_GROUP_TIMEOUT_S)[0]  # type: ignore[no-any-return]
    except PacelineError as error:
        return {"error": str(error)}


def _reduce_of_job(job: Job) -> Facts:
    return _timed_reduce(job.rank, job.world_size, torch.device("cpu"))


def _reduce_in_group(store: dist.Store, place: RankInfo) -> Facts:
    """An all-reduce over Gloo, and over NCCL where each rank has a GPU."""
    found = _try(store, place, "gloo", torch.device("cpu"))
    index = place.local_rank if torch.cuda.device_count() > 1 else 0
    usable = index < torch.cuda.device_count() and dist.is_nccl_available()
    if all(_exchange(store, place, "gpu", usable and "error" not in found)):
        found["gpu"] = _try(store, place, "nccl", torch.device("cuda", index))
    return found


def _try(store: dist.Store, place: RankInfo, backend: str, device: torch.device) -> Facts:
    found: Facts = {"error": f"it did not end within {_DEADLINE_S:.0f} s"}

    def attempt() -> None:
        try:
            with _group(store, place, backend, device):
                found.update(_timed_reduce(place.rank, place.world_size, device), error="")
        except (RuntimeError, ValueError) as error:
            found["error"] = str(error)

    # Gloo waits for peers that have given up, far beyond its timeout.
    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(_DEADLINE_S)
    return {name: value for name, value in found.items() if value != ""}


@contextlib.contextmanager
def _group(
    store: dist.Store, place: RankInfo, backend: str, device: torch.device
) -> Iterator[None]:
    """A group as a plain script would make it, in the environment as it is."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=_GROUP_TIMEOUT_S)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(backend, store),
        rank=place.rank,
        world_size=place.world_size,
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
