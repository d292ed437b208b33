"""Where the ranks of MPICH and Intel MPI meet if they are on several hosts: rank 0 tells the others.

Hydra, the launcher of these libraries, tells a rank nothing about the other hosts. It keeps a key-value store
for the ranks of a job (PMI-1): lines of text over a socket that each rank inherits. The MPI library of the
rank uses the same socket when it starts, earlier or later; no answer is left unread between two uses.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import select
import socket
from collections.abc import Mapping

from paceline.errors import CollectiveTimeout, LauncherError, rank_location
from paceline.job.environment import RankInfo, computed_port, unknown_host
from paceline.job.network import is_loopback

_SOCKET = "PMI_FD"
# What mpiexec calls the host of this rank: of MPICH since 4.1, and of older ones.
_HOST = ("PMI_HOSTNAME", "MPIR_CVAR_CH3_INTERFACE_HOSTNAME")
_KEY = "paceline"
_joins = itertools.count()


def with_master(info: RankInfo, environ: Mapping[str, str], *, timeout_s: float) -> RankInfo:
    """The same, with the address of rank 0 if Hydra started the ranks on several hosts.

    Raises:
        LauncherError: Hydra does not offer its store, or does not do what it is asked.
        CollectiveTimeout: a rank did not come.

    Collective: all ranks, if Hydra started them on several hosts.
    """
    if info.launcher != "mpi" or info.one_host or info.master is not None:
        return info
    if _SOCKET not in environ:
        raise unknown_host(hydra=True)
    job, host = _tell(info, _own_name(environ), int(environ[_SOCKET]), timeout_s)
    return dataclasses.replace(info, master=f"{host}:{computed_port(job)}", job_key=job)


def _own_name(environ: Mapping[str, str]) -> str:
    names = [environ[name] for name in _HOST if name in environ]
    return next((name for name in names if not is_loopback(name)), socket.gethostname())


def _tell(info: RankInfo, host: str, handle: int, timeout_s: float) -> tuple[str, str]:
    """The name of the job, and the host of rank 0."""
    with socket.socket(fileno=os.dup(handle)) as connection:
        store = _Store(connection, info, timeout_s)
        store.ask("cmd=init pmi_version=1 pmi_subversion=1")
        job = store.ask("cmd=get_my_kvsname")["kvsname"]
        key = f"{_KEY}{next(_joins)}"  # a key can be written once
        if info.rank == 0:
            store.ask(f"cmd=put kvsname={job} key={key} value={host}")
        store.ask("cmd=barrier_in")  # only then the key is on all hosts
        return job, store.ask(f"cmd=get kvsname={job} key={key}")["value"]


class _Store:
    def __init__(self, connection: socket.socket, info: RankInfo, timeout_s: float) -> None:
        self._connection = connection
        self._info = info
        self._timeout_s = timeout_s

    def ask(self, request: str) -> dict[str, str]:
        """The words of the answer to a request."""
        self._connection.sendall(f"{request}\n".encode())
        line = b""
        while not line.endswith(b"\n"):
            # A timeout of the socket would make it non-blocking for the MPI library too.
            if not select.select([self._connection], [], [], self._timeout_s)[0]:
                raise self._absent()
            part = self._connection.recv(4096)
            if not part:
                break
            line += part
        answer = dict(word.partition("=")[::2] for word in line.decode().split())
        if answer.get("rc", "0") != "0" or not line.endswith(b"\n"):
            raise LauncherError(
                f"mpiexec answered {line.decode().strip()!r} to {request!r}.",
                where=rank_location(self._info.rank, self._info.world_size),
                why="it does not keep the store of PMI-1 for its ranks, or has ended.",
                fix=unknown_host(hydra=True).fix,
                variables=[_SOCKET],
            )
        return answer

    def _absent(self) -> CollectiveTimeout:
        return CollectiveTimeout(
            f"a rank of {self._info.world_size} did not come within {self._timeout_s:g} s.",
            where=rank_location(self._info.rank, self._info.world_size),
            why="the rank ended before it called `join`, or has not called it yet.",
            fix="see the logs of the other ranks; call `join` before slow preparations, or raise "
            "`timeout_s`.",
            missing=[],
            waited_s=self._timeout_s,
        )
