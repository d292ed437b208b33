"""The key-value store of Hydra (PMI-1), played by a thread at the other end of a socket pair."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from paceline.errors import CollectiveTimeout, LauncherError
from paceline.job import pmi
from paceline.job.environment import RankInfo, read

RANK = {"PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
ANSWERS = {
    "init": "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0",
    "get_my_kvsname": "cmd=my_kvsname kvsname=kvs_7_0",
    "put": "cmd=put_result rc=0 msg=success",
    "barrier_in": "cmd=barrier_out",
    "get": "cmd=get_result rc=0 msg=success value={}",
}


class Mpiexec:
    """Answers the requests of one rank; an empty answer is none, and None ends the connection."""

    def __init__(self, values: dict[str, str], answers: dict[str, str | None]) -> None:
        self.values = values
        self.answers = ANSWERS | answers
        self.requests: list[str] = []
        self.rank, self._own = socket.socketpair()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with self._own, self._own.makefile("rw") as lines:
            for line in lines:
                words = dict(word.partition("=")[::2] for word in line.split())
                self.requests.append(words["cmd"])
                if words["cmd"] == "put":
                    self.values[words["key"]] = words["value"]
                answer = self.answers[words["cmd"]]
                if answer is None:
                    return
                if answer:
                    lines.write(answer.format(self.values.get(words.get("key", ""))) + "\n")
                    lines.flush()

    def close(self) -> None:
        self.rank.close()
        self._thread.join()


Start = Callable[..., Mpiexec]


@pytest.fixture
def mpiexec(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setattr(pmi, "_known", None)
    started: list[Mpiexec] = []
    values: dict[str, str] = {}

    def start(**answers: str | None) -> Mpiexec:
        started.append(Mpiexec(values, answers))
        return started[-1]

    yield start
    for each in started:
        each.close()


def told(rank: int, handle: object, host: str = "node7") -> RankInfo:
    environ = {**RANK, "PMI_RANK": str(rank), "PMI_FD": str(handle), "PMI_HOSTNAME": host}
    return pmi.with_master(read(environ), environ, timeout_s=0.2)


def test_rank_0_tells_its_host_once(mpiexec: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = mpiexec(), mpiexec()
    rank0 = told(0, first.rank.fileno())
    monkeypatch.setattr(pmi, "_known", None)  # rank 1 is another process
    rank1 = told(1, second.rank.fileno(), "node8")
    assert rank0.master is not None
    assert rank0.master.startswith("node7:295")
    assert (rank1.master, rank1.job_key) == (rank0.master, "kvs_7_0")
    assert first.requests == ["init", "get_my_kvsname", "put", "barrier_in", "get"]
    assert second.requests == ["init", "get_my_kvsname", "barrier_in", "get"]
    assert told(1, second.rank.fileno()) == rank1  # a later join
    assert len(second.requests) == 4


def test_the_socket_stays_blocking_for_the_mpi_library(mpiexec: Start) -> None:
    rank = mpiexec().rank
    socket.setdefaulttimeout(30)
    try:
        told(1, rank.fileno())
    finally:
        socket.setdefaulttimeout(None)
    assert os.get_blocking(rank.fileno())


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ({"init": "cmd=response_to_init rc=-1"}, "mpiexec answered 'cmd=response_to_init rc=-1'"),
        ({"get_my_kvsname": "cmd=what"}, "answered 'cmd=what' to 'cmd=get_my_kvsname'"),
        ({"get": None}, "mpiexec closed it after 'cmd=get kvsname=kvs_7_0"),
        ({"init": ""}, "no answer to 'cmd=init pmi_version=1 pmi_subversion=1' within 0.2 s"),
    ],
)
def test_a_store_that_does_not_work(
    mpiexec: Start, answers: dict[str, str | None], why: str
) -> None:
    with pytest.raises(LauncherError, match="do not know the host of rank 0") as caught:
        told(1, mpiexec(**answers).rank.fileno())
    assert why in str(caught.value)
    assert "mpirun -genv MASTER_ADDR <host of rank 0>" in str(caught.value)


def test_a_socket_that_is_none(mpiexec: Start) -> None:
    ended = mpiexec(init=None)
    ended.rank.shutdown(socket.SHUT_RDWR)
    with open(os.devnull, "r+b") as file:
        free = os.dup(file.fileno())
        os.close(free)
        cases = {
            "x": "invalid literal",
            free: "Bad file descriptor",
            file.fileno(): "it is not a socket",
            ended.rank.fileno(): "Broken pipe",
        }
        for handle, why in cases.items():
            with pytest.raises(LauncherError) as caught:
                told(1, handle)
            assert f"PMI_FD={handle}: " in str(caught.value)
            assert why in str(caught.value)


def test_a_rank_that_does_not_come_to_the_barrier(mpiexec: Start) -> None:
    with pytest.raises(
        CollectiveTimeout, match=r"a rank of 2 did not join within 0\.2 s"
    ) as caught:
        told(0, mpiexec(barrier_in="").rank.fileno())
    assert caught.value.missing == []
