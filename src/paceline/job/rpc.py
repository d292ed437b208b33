"""`rpc`: remote calls between the ranks of a job. A front to `torch.distributed.rpc`.

It gives RPC the job's store, names, network interface and timeouts. Calls, remote references and distributed
autograd are torch's own.
"""

# mypy: disable-error-code="no-untyped-call"
# torch's functions of RPC have no annotations.

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed import rpc as torch_rpc
from torch.distributed.rpc.backend_registry import construct_rpc_backend_options

from paceline.errors import ConfigError
from paceline.job.arguments import require_integers, require_positive
from paceline.job.collectives import gather
from paceline.job.job import Job

_SCHEME = "paceline-job"
_END_S = 1.0  # after an error, how long the job waits for remote functions that run here
_running: Job | None = None


@contextlib.contextmanager
def rpc(
    job: Job,
    *,
    timeout_s: float = 60.0,
    num_worker_threads: int = 16,
    device_maps: Mapping[str, Mapping[Any, Any]] | None = None,
) -> Iterator[list[str]]:
    """Run `torch.distributed.rpc` between all ranks of the job; rank 2 has the name "rank2".

    Inside the block use `rpc_sync`, `rpc_async`, `remote` and `torch.distributed.autograd` as torch documents
    them. The end of the block waits until all ranks have come to it, however long they still work: until then
    a rank answers the calls of the others. After an error RPC ends with the job, and waits for no rank.

    Every process that can connect to the ports of RPC can run code as the user of the job: RPC has no
    authentication and unpickles what it receives. On one host it listens on the loopback, which all users of
    the host can connect to; else on the interface that the job uses between hosts.

    The ranks are fixed: no rank can join later, and one whose process has ended cannot come back.

    Args:
        timeout_s: how long a call waits for its result, in seconds, if it does not pass its own `timeout`.
            Also limits how long RPC may take to start and to end.
        num_worker_threads: how many calls of others this rank runs at once.
        device_maps: for tensors on GPUs: {"rank1": {"cuda:0": "cuda:1"}} puts tensors of this rank's device
            0 on device 1 of rank 1. Without it a call with GPU tensors is an error.

    Returns:
        The names of all ranks, in rank order.

    Raises:
        ConfigError: a wrong argument, or RPC runs already.
        StepError: some ranks did not call `rpc`.
        PeerFailed: a call failed, or the end of the block, because another rank has failed. If its process
            was killed, the error is torch's own.

    Collective: all ranks, in the same order as the job's other collectives.
    """
    job.refuse_if_left()
    require_positive(timeout_s=timeout_s)
    require_integers(1, num_worker_threads=num_worker_threads)
    if _running is not None:
        raise ConfigError(
            "RPC runs already in this process.",
            where=job.where(),
            why="torch has one RPC agent per process; after an error it ends with the job.",
            fix="use one `with paceline.rpc(job)` block at a time; after an error leave the job first.",
        )
    names = [f"rank{rank}" for rank in range(job.world_size)]
    fix = "call it on every rank; a rank that only answers calls has an empty block."
    gather(job, None, call="paceline.rpc", fix=fix)
    _start(job, names, timeout_s, num_worker_threads, device_maps)
    # Not a `finally`: after an error the job reports it to the other ranks before their calls break.
    remove = job.on_leave(lambda: _end(job, timeout_s))
    try:
        yield names
    except RuntimeError as error:
        job.reraise(error)
    remove()
    _end(job, timeout_s)


def _start(
    job: Job,
    names: list[str],
    timeout_s: float,
    num_worker_threads: int,
    device_maps: Mapping[str, Mapping[Any, Any]] | None,
) -> None:
    global _running
    if job.one_host:
        # TensorPipe otherwise listens at the address of the host's name, which other hosts may reach. It
        # reads this variable once in a process.
        job.set_variable("TP_SOCKET_IFNAME", "lo")
    options = construct_rpc_backend_options(
        torch_rpc.BackendType.TENSORPIPE,  # type: ignore[attr-defined] # torch makes it at run time
        rpc_timeout=timeout_s,
        init_method=f"{_SCHEME}://",
        num_worker_threads=num_worker_threads,
        # Without `shm`: its thread polls, so that a rank without calls uses half a core, and every user of
        # the host can connect to its socket. torch ignores the argument if it does not know it.
        _transports=["ibv", "uv"],
    )
    for name, devices in (device_maps or {}).items():
        options.set_device_map(name, dict(devices))
    _running = job
    try:
        with warnings.catch_warnings():
            # Of torch, about its own use of a Gloo group.
            warnings.filterwarnings("ignore", message="You are using a Backend")
            torch_rpc.init_rpc(
                names[job.rank],
                rank=job.rank,
                world_size=job.world_size,
                rpc_backend_options=options,
            )
    except BaseException as error:
        _running = None
        if isinstance(error, RuntimeError):
            job.reraise(error)
        raise


def _give_store(url: str, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """Torch's rendezvous for RPC: the job's store, through a client that RPC may set a timeout on."""
    job = _running
    assert job is not None
    store: dist.Store = dist.HashStore()
    if job.store is not None:
        store = job.store.clone()  # type: ignore[attr-defined] # missing in torch's stubs
    yield dist.PrefixStore("rpc", store), job.rank, job.world_size


dist.register_rendezvous_handler(_SCHEME, _give_store)


def _end(job: Job, timeout_s: float) -> None:
    global _running
    all_came = False
    try:
        if not job.failed:
            # Torch's own wait cannot tell a rank that works from one that has ended.
            job.wait_for_all_ranks("the end of paceline.rpc")
            all_came = True
    finally:
        _running = None
        if all_came:
            torch_rpc.shutdown(timeout=timeout_s)
        else:
            # It waits for functions that others have called here, which may wait for a rank that has ended.
            ending = threading.Thread(target=torch_rpc.shutdown, args=(False,), daemon=True)
            ending.start()
            ending.join(timeout=_END_S)
