"""What is so on the hosts of a job, without judgement: facts that JSON can represent.

The ranks join, exchange the facts of their hosts through the store, connect to each other with plain sockets,
and do one all-reduce. The sockets come first, because a broken network breaks the process group.
"""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import paceline
from paceline import store_exchange
from paceline.credentials import public_variables
from paceline.errors import PacelineError
from paceline.job import environment, rendezvous
from paceline.job.environment import FIREWALL_PORTS, RankInfo
from paceline.job.job import Job
from paceline.job.network import addresses_of, source_address
from paceline.job.store_server import listen
from paceline.launch.spawning import spawn
from paceline.machine import network_interfaces, read_memory, read_text

Facts = dict[str, Any]

_VARIABLES = ("NCCL_", "TORCH_", "GLOO_", "OMP_", "CUDA_", "MASTER_", "PYTORCH_", "PACELINE_")
_TIMEOUT_S = 60.0
_CONNECT_S = 3.0
_GROUP_TIMEOUT_S = 15.0
_DEADLINE_S = 20.0
_TENSOR_BYTES, _PART_BYTES = 16 << 20, 1 << 20
_ROUNDS = 3


def examine() -> Facts:
    """Facts of all ranks, of the links between hosts and of an all-reduce. All ranks must call it.

    They are equal on all ranks, except "prints", which is true on the rank that prints the report. Without a
    launcher the facts are those of this process, and two new ranks on this host do the all-reduce.

    Raises:
        ConfigError: the launcher's variables are incomplete or contradict each other.
        CollectiveTimeout: a rank did not come.
    """
    info = environment.read(os.environ)
    facts = facts_of(info)
    if info.world_size == 1:
        return {"ranks": [facts], "links": [], "reduce": [_reduce_alone()], "prints": True}
    store = dist.PrefixStore("doctor", rendezvous.connect_store(info, timeout_s=_TIMEOUT_S))
    ranks = _exchange(store, info, "facts", facts)
    links = _exchange(store, info, "links", _links(store, info, ranks))
    reduce = _exchange(store, info, "reduce", _reduce_in_group(store, info))
    _exchange(store, info, "end", None)  # the store may live in rank 0
    found = {"ranks": ranks, "links": [link for each in links for link in each], "reduce": reduce}
    return found | {"prints": info.rank == 0}


def _exchange(store: dist.Store, info: RankInfo, name: str, value: Any) -> list[Any]:
    return store_exchange.gather(store, name, value, info.rank, info.world_size)


def facts_of(info: RankInfo) -> Facts:
    """Facts of this rank, and of its host if this is the host's first rank."""
    facts: Facts = {
        "rank": info.rank,
        "local_rank": info.local_rank,
        "local_world_size": info.local_world_size,
        "host": socket.gethostname(),
        "variables": public_variables(_VARIABLES),
        "device": _device(info),
    }
    if info.local_rank == 0:
        memory = read_memory()
        facts |= {
            "versions": _versions(),
            "shm_size": memory.shm_bytes,
            "shm_free": memory.shm_free_bytes,
            "gpus": torch.cuda.device_count(),
            "interfaces": network_interfaces(),
            "addresses": addresses_of(socket.gethostname()),
        }
    return facts


def _versions() -> dict[str, str]:
    nccl = ""
    if torch.cuda.is_available() and dist.is_nccl_available():
        version: Any = torch.cuda.nccl.version
        nccl = ".".join(str(number) for number in version())
    driver = read_text(Path("/proc/driver/nvidia/version")).partition("Module ")[2].split()
    return {
        "paceline": paceline.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "nccl": nccl or "none",
        "driver": driver[0] if driver else "none",
        "byte order": sys.byteorder,
    }


def _device(info: RankInfo) -> Facts | None:
    """The GPU that this rank would use."""
    count = torch.cuda.device_count()
    if count == 0:
        return None
    index = info.local_rank if count > 1 else 0
    if index >= count:
        return {"index": index, "missing": True}
    try:
        properties: Any = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError as error:  # used by another process alone, or broken
        return {"index": index, "missing": True, "error": str(error).partition("\n")[0]}
    return {
        "index": index,
        "missing": False,
        "uuid": str(properties.uuid),
        "name": properties.name,
        "used": total - free,
        "total": total,
    }


def _links(store: dist.Store, info: RankInfo, ranks: list[Facts]) -> list[Facts]:
    """The links from this host to each other host, tried by its first rank."""
    hosts = [facts["rank"] for facts in ranks if facts["local_rank"] == 0]
    if len(hosts) < 2:
        return []
    assert info.master is not None
    name, _, port = info.master.rpartition(":")
    master = next(iter(addresses_of(name)), "")
    mine = source_address(master, int(port)) or "" if master else ""
    seen = _exchange(store, info, "address", [mine, master])
    # Rank 0 listens on the address that the others use; there, its own name may resolve to loopback.
    address = next(seen[h][1] for h in hosts if h != 0) if info.rank == 0 else mine
    with contextlib.ExitStack() as stack:
        ports: Facts = {}
        if info.rank in hosts:
            ports = {kind: _listen(address, kind, stack) for kind in ("fixed", "ephemeral")}
        endpoints = _exchange(store, info, "endpoints", {"address": address, **ports})
        links: list[Facts] = []
        if info.rank in hosts:
            peers = [host for host in hosts if host != info.rank]
            with ThreadPoolExecutor(max_workers=16) as threads:
                links = list(threads.map(lambda peer: connect(endpoints[peer]), peers))
            for link, peer in zip(links, peers, strict=True):
                resolved = addresses_of(ranks[peer]["host"])
                link |= {"from": info.rank, "to": peer, "resolved": resolved}
        _exchange(store, info, "connected", None)
    return links


def _listen(address: str, kind: str, stack: contextlib.ExitStack) -> int | None:
    """Listen until the stack is closed; the port, or None if that is impossible.

    The kernel completes connections to a listening socket, so nobody has to accept them: no byte is read.
    """
    low, high = FIREWALL_PORTS
    for port in range(low, high + 1) if kind == "fixed" else [0]:
        with contextlib.suppress(OSError):
            if address:  # the empty address would be all interfaces
                listening = stack.enter_context(listen(address, port))
                return int(listening.getsockname()[1])
    return None


def connect(endpoint: Facts) -> Facts:
    """Connect to both ports of a host: an error for each, empty if it works; and the address used here."""
    link: Facts = {"endpoint": endpoint}
    for kind in ("fixed", "ephemeral"):
        if endpoint[kind] is None:
            link[kind] = "the peer could not listen there"
            continue
        address = (endpoint["address"], endpoint[kind])
        try:
            with socket.create_connection(address, _CONNECT_S) as connection:
                link |= {kind: "", "from_address": connection.getsockname()[0]}
        except OSError as error:
            link[kind] = str(error) or type(error).__name__
    return link


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
    half = tensor.to(torch.float16)

    def reduce_in_half() -> None:  # as torch's fp16_compress_hook does
        dist.all_reduce(half.copy_(tensor))
        tensor.copy_(half)

    return {
        "right": right,
        "world_size": world_size,
        "bytes": _TENSOR_BYTES,
        "seconds": _median_s(lambda: dist.all_reduce(tensor), device),
        "part_bytes": _PART_BYTES,
        "part_seconds": _median_s(lambda: dist.all_reduce(tensor[: _PART_BYTES // 4]), device),
        "fp16_seconds": _median_s(reduce_in_half, device),
    }


def _median_s(call: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return sorted(times)[_ROUNDS // 2]
