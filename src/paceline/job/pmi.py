"""Where the ranks of MPICH and Intel MPI meet if they are on several hosts: rank 0 tells the others.

Hydra, the launcher of these libraries, tells a rank nothing about the other hosts. It keeps a key-value store
for the ranks of a job (PMI-1): lines of text over a socket that each rank inherits. The MPI library of the
rank uses the same socket when it starts, earlier or later; no answer is left unread between two uses.
"""

from __future__ import annotations

import dataclasses
import os
import select
import socket
import stat
from collections.abc import Mapping

from paceline.errors import CollectiveTimeout, LauncherError, rank_location
from paceline.job import environment
from paceline.job.environment import RankInfo, computed_port
from paceline.job.network import is_loopback

_SOCKET = "PMI_FD"
# What mpiexec calls the host of this rank: of MPICH since 4.1, and of older ones.
_HOST = ("PMI_HOSTNAME", "MPIR_CVAR_CH3_INTERFACE_HOSTNAME")
_KEY = "paceline"

# The name of the job, and the host of rank 0. A key of the store can be written once: later joins use this.
_known: tuple[str, str] | None = None


def with_master(info: RankInfo, environ: Mapping[str, str], *, timeout_s: float) -> RankInfo:
    """The same, with the address of rank 0 if Hydra started the ranks on several hosts.

    Raises:
        LauncherError: Hydra does not offer its store, or does not do what it is asked.
        CollectiveTimeout: a rank did not come.

    Collective: all ranks, if Hydra started them on several hosts.
    """
    global _known
    if info.launcher != "mpi" or info.one_host or info.master is not None:
        return info
    if _SOCKET not in environ:
        raise _unknown_host(f"mpiexec does not set {_SOCKET}, the socket of its store (PMI-1)")
    if _known is None:
        try:
            store = _KeyValueStore(int(environ[_SOCKET]), timeout_s)
            _known = _exchange_host(store, info, _own_name(environ), timeout_s)
        except (OSError, ValueError) as error:
            raise _unknown_host(
                f"the store of mpiexec (PMI-1) fails at {_SOCKET}={environ[_SOCKET]}: {error}"
            ) from error
    job, host = _known
    return dataclasses.replace(info, master=f"{host}:{computed_port(job)}", job_key=job)


def _own_name(environ: Mapping[str, str]) -> str:
    names = [environ[name] for name in _HOST if name in environ]
    return next((name for name in names if not is_loopback(name)), socket.gethostname())


def _exchange_host(
    store: _KeyValueStore, info: RankInfo, host: str, timeout_s: float
) -> tuple[str, str]:
    """The name of the job, and the host of rank 0, which rank 0 writes to the store."""
    store.ask("cmd=init pmi_version=1 pmi_subversion=1")
    job = store.ask("cmd=get_my_kvsname", "kvsname")
    if info.rank == 0:
        store.ask(f"cmd=put kvsname={job} key={_KEY} value={host}")
    try:
        store.ask("cmd=barrier_in")  # only then the key is on all hosts
    except TimeoutError as error:
        raise CollectiveTimeout(
            f"a rank of {info.world_size} did not join within {timeout_s:g} s.",
            where=rank_location(info.rank, info.world_size),
            why="the rank ended before it called `join`, or has not called it yet; mpiexec does not tell "
            "which one.",
            fix="see the logs of the other ranks; call `join` before slow preparations, or raise "
            "`timeout_s`.",
            missing=[],
            waited_s=timeout_s,
        ) from error
    return job, store.ask(f"cmd=get kvsname={job} key={_KEY}", "value")


class _KeyValueStore:
    """The rank's side of PMI-1. The MPI library uses the same socket, so no option of it may change."""

    def __init__(self, handle: int, timeout_s: float) -> None:
        if not stat.S_ISSOCK(os.fstat(handle).st_mode):
            raise ValueError("it is not a socket")
        self._handle = handle
        self._timeout_s = timeout_s

    def ask(self, request: str, word: str = "cmd") -> str:
        """This word of the answer to a request.

        Raises:
            TimeoutError: no answer came.
            OSError: the socket is closed.
            ValueError: the answer reports an error, or is none of PMI-1.
        """
        os.write(self._handle, f"{request}\n".encode())
        line = b""
        while not line.endswith(b"\n"):
            if not select.select([self._handle], [], [], self._timeout_s)[0]:
                raise TimeoutError(f"no answer to {request!r} within {self._timeout_s:g} s")
            part = os.read(self._handle, 4096)
            if not part:
                raise ConnectionError(f"mpiexec closed it after {request!r}")
            line += part
        answer = dict(each.partition("=")[::2] for each in line.decode().split())
        if answer.get("rc", "0") != "0" or word not in answer:
            raise ValueError(f"mpiexec answered {line.decode().strip()!r} to {request!r}")
        return answer[word]


def _unknown_host(why: str) -> LauncherError:
    return environment.unknown_host(f"{why}.", option="-genv {} {}")
