"""The unfinished operations of a group, and the thread that completes them.

An operation is a generator. Before it first yields it starts all its MPI requests, so that operations start
in the order of their calls. Then it yields until the requests are finished. MPI makes progress only inside
its calls. A thread that waits therefore polls; a background thread polls for works that no thread waits for,
such as those of DDP.

MPI does not report ranks that died or left. A rank whose operation failed, or that left before its operations
were finished, writes a mark into the store, and ranks that wait look for it. A rank that was killed, or left
with nothing unfinished, writes none: ranks that wait for it wait until the timeout.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline.clock.step_clock import COMMUNICATION, clock
from paceline.errors import CollectiveTimeout, PeerFailed, name_ranks
from paceline.log import logger
from paceline.mpi import world
from paceline.shm.queued_work import Queue, QueuedWork

Operation = Generator[None, None, None]

_FAILED = "failed"  # key: which rank has failed, and why
_YIELD_S = 0.5  # a waiting thread polls without sleeping for this time, as MPI itself does
_SLEEP_S = 1e-3
_THREAD_SLEEP_S = 50e-6  # of the background thread, which must not slow down the main thread
_CHECK_PEERS_S = 0.25  # interval at which a waiting rank reads the store
_ARRIVED_S = (
    0.5  # after this time a waiting rank writes how many collectives it has entered into the store
)


class Work(QueuedWork):
    """One operation of a group.

    Attributes:
        peer: of a send or receive the other rank of the group, negative for any; None for a collective.
        source: of a receive from any rank, returns the one that sent.
    """

    peer: int | None = None
    source: Callable[[], int] | None = None

    def _source_rank(self) -> int:
        return self.source() if self.source is not None else -1


class RequestQueue(Queue):
    """The unfinished works of one group.

    `submit` and `finish` raise, all as RuntimeErrors too:
        PeerFailed: a rank has left a mark that it failed.
        CollectiveTimeout: an operation was not finished within the timeout.
        mpi4py's MPI.Exception: MPI reports an error, such as different sizes.
    After any of these the ranks are no longer in step, so every later operation raises the same error.
    """

    backend = "mpi"
    _works: list[QueuedWork]

    def __init__(self, store: dist.Store, rank: int, ranks: Sequence[int]) -> None:
        # A signal handler may close the queue while this thread holds the lock.
        super().__init__(rank, ranks, threading.RLock(), [])
        self._store = store
        self._own_store: dist.Store | None = None
        self._arrived = 0  # how many collectives this rank has entered, as written into the store

    def submit(
        self,
        operation: Operation,
        outputs: Sequence[torch.Tensor],
        timeout_s: float,
        *,
        blocking: bool,
        peer: int | None = None,
    ) -> Work:
        """Start an operation. If `blocking`, it is finished on return.

        Args:
            peer: of a send or receive, see `Work`.
        """
        work = Work(self, operation, outputs, timeout_s)
        work.peer, work.is_p2p = peer, peer is not None
        works: list[QueuedWork] = []
        with self.lock, self._inference_mode:
            if self._error is not None:
                # It is raised again and again: the frames of earlier calls would stay alive.
                raise self._error.with_traceback(None)
            try:
                next(operation, None)  # wrong arguments raise here, before any request is started
                self._add(work)
            except BaseException as error:
                if isinstance(error, Exception) and not isinstance(
                    error, world.library().Exception
                ):
                    raise
                # Of several requests, some may have been started: their buffers are in the frames.
                _unfinished.append(error.__traceback__)
                world.mark_broken()
                failed, works = error, self._fail(error)
            else:
                failed = None
        for each in works:
            each.complete_future()
        if failed is not None:
            raise failed
        if blocking:
            with clock.during(COMMUNICATION):
                self._run(work)
            if work.error is not None:
                raise work.error
        elif not self.advance() or not work.done:
            self._wake_thread()
        return work

    def _run(self, work: QueuedWork | None = None) -> None:
        began = checked = time.monotonic()
        while (self._works and not self._closed) if work is None else not work.done:
            if self.advance():
                continue
            now = time.monotonic()
            if work is None:
                time.sleep(_THREAD_SLEEP_S)
            elif now - began < _YIELD_S:
                os.sched_yield()
            else:
                time.sleep(_SLEEP_S)
            if now - checked > _CHECK_PEERS_S:
                checked = now
                self.check_peers()

    def advance(self) -> bool:
        """Complete the works whose requests are finished. Returns whether there was one."""
        finished: list[QueuedWork] = []
        with self.lock, self._inference_mode:
            for work in tuple(self._works):
                if work.done:  # a signal handler has closed the queue
                    continue
                try:
                    next(work.collective)
                except StopIteration:
                    if not work.done:
                        self._works.remove(work)
                        work.done = True
                        finished.append(work)
                except BaseException as error:
                    finished += self._fail(error)
                    if not isinstance(error, Exception):
                        raise
                    break
        for work in finished:  # callbacks of futures run without the lock
            work.complete_future()
        return bool(finished)

    def _fail(self, error: BaseException) -> list[QueuedWork]:
        """Fail all works and this group. The caller holds the lock and completes the futures."""
        if self._error is None:
            self._error = error
        works, self._works = self._works, []
        if works:
            world.mark_broken()
        _unfinished.extend(work.collective for work in works)
        for work in works:
            work.error, work.done = self._error, True
        self._mark((str(error) or type(error).__name__).splitlines()[0])
        return works

    def _client(self) -> dist.Store:
        # The main thread may be in a blocking call of the store, which holds its client's lock.
        if self._own_store is None:
            self._own_store = self._store.clone()  # type: ignore[attr-defined] # missing in torch's stubs
        return self._own_store

    def _mark(self, why: str) -> None:
        mark = json.dumps({"rank": self._ranks[self._rank], "why": why})
        try:
            self._client().compare_set(_FAILED, "", mark)
        except RuntimeError:
            logger.debug("the store has ended, so the other ranks cannot read: %s", why)

    def check_peers(self) -> None:
        """Fail if another rank has marked that it failed, or after the timeout."""
        with self.lock:
            if not self._works:
                return
            now = time.monotonic()
            first = min(self._works, key=lambda work: work.issued + work.timeout_s)
            waited_s, longest_s = now - first.issued, now - self._works[0].issued
            try:
                store = self._client()
                error = self._peer_failure(store)
                if error is None and waited_s > first.timeout_s:
                    error = self._timeout(store, first, waited_s)
                elif (
                    longest_s > min(_ARRIVED_S, first.timeout_s / 2)
                    and self._arrived < self.entered
                ):
                    store.set(f"arrived/{self._rank}", str(self.entered))
                    self._arrived = self.entered
            except dist.DistError as lost:
                error = PeerFailed(
                    "the job's store has ended, and with it the rank or launcher that holds it.",
                    where=self._where(),
                    why=str(lost).splitlines()[0],
                    rank=0,
                    cause_known=False,
                )
            works = self._fail(error) if error is not None else []
        for each in works:
            each.complete_future()

    def _peer_failure(self, store: dist.Store) -> BaseException | None:
        if not store.check([_FAILED]):
            return None
        mark = json.loads(store.get(_FAILED))
        return PeerFailed(
            f"rank {mark['rank']} left this group after an error while this rank waited for it: "
            f"{mark['why']}",
            where=self._where(),
            rank=mark["rank"],
            cause_known=False,
        )

    def _timeout(self, store: dist.Store, work: QueuedWork, waited_s: float) -> CollectiveTimeout:
        peer = work.peer if isinstance(work, Work) else None
        if peer is not None:
            missing = [self._ranks[peer]] if peer >= 0 else []
            other = name_ranks(missing) if missing else "any rank"
            what = f"a send to or receive from {other} timed out after {waited_s:.0f} s."
        else:
            missing = []
            for rank, name in enumerate(self._ranks):
                key = f"arrived/{rank}"
                arrived = int(store.get(key)) if store.check([key]) else 0
                if rank != self._rank and arrived < work.number:
                    missing.append(name)
            what = (
                f"an operation timed out after {waited_s:.0f} s; ranks that have not reached it: "
                f"{name_ranks(missing) if missing else 'none'}."
            )
        return CollectiveTimeout(
            what,
            where=self._where(),
            missing=missing,
            waited_s=waited_s,
            cause_known=False,
        )

    def close(self, why: str = "") -> bool:
        """Leave the group. Returns whether all its works were finished.

        Args:
            why: given if a failure is the reason: ranks that wait for this rank raise PeerFailed.
        """
        if os.getpid() != self._pid:
            return False  # a forked child is no process of MPI
        with self.lock:
            clean = not self._works and self._error is None
            works: list[QueuedWork] = []
            if self._error is None:
                error = PeerFailed(why or "this rank has left the group.", where=self._where())
                if why or self._works:
                    works = self._fail(error)
                self._error = error
            self._closed = True
        for work in works:
            work.complete_future()
        self._end_thread()
        return clean


_unfinished: list[Any] = []  # operations and tracebacks: MPI may still write to the memory of these
