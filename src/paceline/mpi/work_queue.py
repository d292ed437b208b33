"""The unfinished operations of one MPI group: how they progress, and how they fail.

Progress
    An operation is a few non-blocking MPI requests, such as one `Iallreduce`. The calling thread starts them
    at once, so requests start in the order of the calls on every rank. MPI works on requests only while the
    process is in a call of MPI, so some thread must test them. A thread that waits for an operation tests all
    requests of its group. A background thread does so while an asynchronous operation is unfinished, such as
    an all-reduce of DDP, which waits in C++. A blocking call of MPI could not end after a timeout.

Failure
    MPI reports no rank that died, left or does not come. A rank whose operation failed, or that left with
    unfinished operations, writes why to the store, which a waiting rank reads four times a second. Ranks that
    wait then raise PeerFailed. A rank that was killed writes nothing: the others wait until the timeout.

    After a failure the ranks are no longer in step: every later operation raises the same error. Requests
    that have started cannot be withdrawn. Their memory is kept until the process ends. A rank whose group has
    failed does not finalize MPI, because that would wait for requests of other ranks.
"""

from __future__ import annotations

import functools
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline.clock.step_clock import COMMUNICATION, clock
from paceline.credentials import redact
from paceline.errors import CollectiveTimeout, PeerFailed
from paceline.log import logger
from paceline.mpi import world
from paceline.shm.queued_work import Queue, QueuedWork

WriteResults = Callable[[], None] | None

# MPI's names of the dtypes that it can reduce.
_TYPES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.uint8: "UINT8_T",
}

_SPIN_S = 0.5  # a waiting thread polls without sleeping for this time, as MPI itself does
_SLEEP_S = 1e-3
_THREAD_SLEEP_S = 50e-6  # of the background thread, which must not slow down the main thread
_CHECK_PEERS_S = 0.25  # interval at which a waiting rank uses the store


class Work(QueuedWork):
    """One operation of a group.

    Attributes:
        requests: The requests of MPI that are not finished.
        write: Writes the results. To be called when they are finished; None if MPI has written them.

    `bytes` and `numbers` make the arguments of mpi4py from flat tensors in host memory. mpi4py gets an
    address only, so the work keeps the tensors until the requests are finished. (`Tensor.numpy()` would make
    the storage not resizable, but FSDP2 resizes its storages. DLPack takes as long as a small all-reduce.)
    """

    write: WriteResults = None

    def __init__(
        self, queue: RequestQueue, name: str, outputs: Sequence[torch.Tensor], timeout_s: float
    ) -> None:
        super().__init__(queue, name, outputs, timeout_s)
        self.requests: list[Any] = []
        self._buffers: list[torch.Tensor] = []

    def bytes(self, flat: torch.Tensor) -> list[Any]:
        """The memory of a tensor of any dtype, to be copied."""
        return self._message(flat, "BYTE")

    def numbers(self, flat: torch.Tensor) -> list[Any]:
        """The memory of a tensor with a dtype that MPI can reduce."""
        return self._message(flat, _TYPES[flat.dtype])

    def _message(self, flat: torch.Tensor, type_name: str) -> list[Any]:
        self._buffers.append(flat)
        MPI = world.library()
        return [MPI.buffer.fromaddress(flat.data_ptr(), flat.nbytes), getattr(MPI, type_name)]

    def test(self) -> bool:
        """Whether all requests are finished. Lets MPI work on them."""
        while self.requests and self.requests[-1].Test():
            self.requests.pop()
        return not self.requests

    def write_results(self) -> None:
        """Write the results, and free the memory."""
        if self.write is not None:
            self.write()
        self.write, self._buffers = None, []


# Starts the requests of an operation, whose name it has, and returns what writes the results.
Start = Callable[[Work], WriteResults]


class RequestQueue(Queue[Work]):
    """The unfinished works of one group.

    `submit` and `wait_for` raise, all as RuntimeErrors too:
        PeerFailed: a rank has written that it failed, or the store has ended.
        CollectiveTimeout: an operation was not finished within the timeout.
        mpi4py's MPI.Exception: MPI reports an error, such as different sizes.
    """

    backend = "mpi"

    def __init__(self, store: dist.Store, rank: int, ranks: Sequence[int]) -> None:
        # A signal handler may close the queue while this thread holds the lock.
        super().__init__(rank, ranks, threading.RLock(), [])
        self._store = store

    def submit(
        self,
        start: Start,
        outputs: Sequence[torch.Tensor],
        timeout_s: float,
        *,
        blocking: bool,
    ) -> Work:
        """Start an operation. If `blocking`, it is finished on return."""
        work = Work(self, start.__name__, outputs, timeout_s)
        with self.lock:
            self._add(work)
            try:
                with self._inference_mode:
                    work.write = start(work)
            except BaseException as error:
                self._fail(error)
        self._complete_futures()
        if blocking:
            with clock.during(COMMUNICATION):
                self._run(work)
        else:
            self.advance()
        if work.error is not None:
            raise work.error
        if not work.done:
            self._wake_thread()
        return work

    def _run(self, work: Work | None = None) -> None:
        began = checked = time.monotonic()
        while (self._works and not self._closed) if work is None else not work.done:
            if self.advance():
                continue
            now = time.monotonic()
            if now - checked > _CHECK_PEERS_S:
                checked = now
                self.check_peers()
            elif work is None:
                time.sleep(_THREAD_SLEEP_S)
            elif now - began < _SPIN_S:
                os.sched_yield()
            else:
                time.sleep(_SLEEP_S)

    def advance(self) -> bool:
        """End the works whose requests are finished. Returns whether there was one."""
        ended = False
        with self.lock:
            for work in tuple(self._works):
                try:
                    # A signal handler may close the queue during the test.
                    if not work.test() or work.done:
                        continue
                    with self._inference_mode:
                        work.write_results()
                    self._end(work)
                    ended = True
                except BaseException as error:
                    self._fail(error)
                    if not isinstance(error, Exception):
                        raise
        self._complete_futures()
        return ended

    def _fail(self, error: BaseException) -> None:
        """Fail all works, and all operations from now on. The caller holds the lock."""
        if self._error is None:
            self._error = error
        works = tuple(self._works)
        world.group_failed(works)
        for work in works:
            self._end(work, self._error)
        self._tell_failure(redact(str(error) or type(error).__name__).splitlines()[0])

    def close(self, why: str = "") -> bool:
        """Leave the group. Returns True on the first call, if nothing failed and nothing is unfinished.

        Args:
            why: Given if a failure is the reason: ranks that wait for this rank raise PeerFailed.
        """
        if os.getpid() != self._pid:
            return False  # a forked child is no process of MPI
        with self.lock:
            clean = not self._works and self._error is None
            if self._error is None:
                self._error = PeerFailed(
                    why or "this rank has left the group.", where=self._where()
                )
                if why or self._works:
                    self._fail(self._error)
            self._closed = True
        self._complete_futures()
        self._end_thread()
        return clean

    # What the ranks tell each other. The callers hold the lock.

    @functools.cached_property
    def _client(self) -> dist.Store:
        # The main thread may be in a blocking call of the store, which holds its client's lock.
        client: dist.Store = self._store.clone()  # type: ignore[attr-defined] # missing in torch's stubs
        return client

    def check_peers(self) -> None:
        """Fail if another rank has failed, an operation has timed out, or the store has ended."""
        with self.lock:
            if not self._works:
                return
            try:
                error = self._peer_failure() or self._timeout()
            except dist.DistError as lost:
                error = PeerFailed(
                    "the job's store has ended, and with it the rank or launcher that holds it.",
                    where=self._where(),
                    why=str(lost).splitlines()[0],
                    rank=0,
                    cause_known=False,
                )
            if error is not None:
                self._fail(error)
        self._complete_futures()

    def _tell_failure(self, why: str) -> None:
        failure = json.dumps({"rank": self._ranks[self._rank], "why": why})
        try:
            self._client.compare_set("failed", "", failure)  # the first failure stays
        except RuntimeError:
            logger.debug("the store has ended, so the other ranks cannot read: %s", why)

    def _peer_failure(self) -> PeerFailed | None:
        if not self._client.check(["failed"]):
            return None
        failure = json.loads(self._client.get("failed"))
        return PeerFailed(
            f"rank {failure['rank']} left this group after an error while this rank waited for it: "
            f"{failure['why']}",
            where=self._where(),
            rank=failure["rank"],
            cause_known=False,
        )

    def _timeout(self) -> CollectiveTimeout | None:
        work = min(self._works, key=lambda work: work.issued + work.timeout_s)
        waited_s = time.monotonic() - work.issued
        if waited_s <= work.timeout_s:
            return None
        return CollectiveTimeout(
            f"`{work.name}` timed out after {waited_s:.0f} s.",
            where=self._where(),
            why="another rank has not come; MPI does not tell which one.",
            fix="start the job with `paceline run`, which shows where each rank waits.",
            missing=[],
            waited_s=waited_s,
            cause_known=False,
        )
