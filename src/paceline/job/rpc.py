"""`rpc`: remote calls between the ranks of a job. A front to `torch.distributed.rpc`.

It gives RPC the job's store, names, network interface and timeouts. Calls, remote references and distributed
autograd are torch's own.
"""

# mypy: disable-error-code="no-untyped-call"
# torch's functions of RPC have no annotations.

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import rpc as torch_rpc
from torch.distributed.rpc.backend_registry import construct_rpc_backend_options

from paceline.errors import ConfigError, PacelineError, PeerFailed, name_ranks
from paceline.job.collectives import gather
from paceline.job.job import Job

_SCHEME = "paceline-job"
_PING_S = 2.0  # how long a rank that is alive may need to answer, once a call has failed
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
        PeerFailed: a call failed, or the end of the block, because the process of another rank has ended.

    Collective: all ranks, in the same order as the job's other collectives.
    """
    names = [f"rank{rank}" for rank in range(job.world_size)]
    _refuse_wrong_use(job, timeout_s, num_worker_threads)
    fix = "call it on every rank; a rank that only answers calls has an empty block."
    gather(job, None, call="paceline.rpc", fix=fix)
    _start(job, names, timeout_s, num_worker_threads, device_maps)
    # Not a `finally`: after an error the job reports it to the other ranks before their calls break.
    remove = job.on_leave(lambda: _end(job, names, timeout_s))
    try:
        yield names
    except RuntimeError as error:
        _reraise(job, names, error)
    remove()
    _end(job, names, timeout_s)


def _refuse_wrong_use(job: Job, timeout_s: float, num_worker_threads: int) -> None:
    job.refuse_if_left()
    is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if not is_number or not 0 < timeout_s < math.inf:
        raise ConfigError(f"timeout_s must be a number of seconds above 0, got {timeout_s!r}.")
    if not isinstance(num_worker_threads, int) or num_worker_threads < 1:
        raise ConfigError(f"num_worker_threads must be at least 1, got {num_worker_threads!r}.")
    if not torch_rpc.is_available():
        raise ConfigError("this build of torch has no RPC.", fix="install a build for Linux.")
    if _running is not None:
        raise ConfigError(
            "RPC runs already in this process.",
            where=job.where(),
            why="torch has one RPC agent per process; after an error it ends with the job.",
            fix="use one `with paceline.rpc(job)` block at a time; after an error leave the job first.",
        )


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


def _end(job: Job, names: list[str], timeout_s: float) -> None:
    global _running
    all_came = False
    try:
        if not job.failed:
            # Torch's own wait cannot tell a rank that works from one that has ended.
            job.wait_for_all_ranks("the end of paceline.rpc")
            all_came = True
    except RuntimeError as error:
        _reraise(job, names, error)
    finally:
        _running = None
        torch_rpc.shutdown(graceful=all_came, timeout=timeout_s)


def _reraise(job: Job, names: list[str], error: RuntimeError) -> NoReturn:
    """Raise the failure of a rank that caused `error`, if there is one; else `error`."""
    if isinstance(error, PacelineError):
        raise error
    others = [rank for rank in range(job.world_size) if rank != job.rank]
    pings = [torch_rpc.rpc_async(names[rank], os.getpid, timeout=_PING_S) for rank in others]
    gone = [rank for rank, ping in zip(others, pings, strict=True) if not _answers(ping)]
    if not gone:
        raise error
    try:
        job.reraise(error)
    except PeerFailed:
        raise
    except RuntimeError:
        raise PeerFailed(
            f"{name_ranks(gone)} does not answer remote calls any more.",
            where=job.where(),
            why=f"the process has ended, or is stopped ({str(error).splitlines()[0]}).",
            fix=f"see the output of rank {gone[0]}.",
            rank=gone[0],
        ) from error


def _answers(ping: Any) -> bool:
    try:
        ping.wait()
    except RuntimeError:
        return False
    return True
