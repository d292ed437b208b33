"""The unfinished collectives of a group, in the order of issue, and the threads that run them.

A blocking call runs the queue until its collective is finished. An asynchronous call runs it for a short
time, which is enough if the other ranks have already called. After that, a background thread and any thread
that waits run the queue. Without the background thread, two groups would deadlock if ranks issue their
collectives in different orders.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence

import torch

from paceline.clock.step_clock import COMMUNICATION, clock
from paceline.errors import (
    CollectiveTimeout,
    PacelineError,
    PeerFailed,
    RankDisagreement,
)
from paceline.shm.collectives import CallMismatch, Collective, Collectives
from paceline.shm.queued_work import Queue, QueuedWork

# Values of `Segment.status`. For a failure, the rank that caused it is added.
_LEFT, _FAILED = 1, 2
_MAX_SPINS = 40  # polls before a rank sleeps, if each rank has a core: about 0.3 ms
_SOON_S = 0.3e-3  # if the other ranks arrive within this time, spinning pays
_SLEEP_S, _LONG_SLEEP_S = 2e-3, 20e-3  # longest sleep: at first, and later
_SHORT_SLEEPS = 10
_CHECK_PEERS_S = 0.05  # interval at which a waiting rank checks whether the others are alive


class CollectiveWork(QueuedWork):
    """A collective in shared memory.

    Attributes:
        collective: The generator that runs it.
    """

    collective: Collective


class WorkQueue(Queue[CollectiveWork]):
    """The unfinished works of one group, in the order of issue.

    `submit` and `wait_for` raise, all as RuntimeErrors too:
        PeerFailed: a rank died, left, or gave up.
        CollectiveTimeout: a rank did not arrive within the timeout.
        RankDisagreement: the ranks called different collectives, or with different tensors.
    After any of these the ranks are no longer in step, so every later collective raises the same error.
    """

    backend = "shm"
    _works: deque[CollectiveWork]

    def __init__(self, collectives: Collectives, ranks: Sequence[int], *, spin: bool) -> None:
        super().__init__(collectives.segment.rank, ranks, threading.Lock(), deque())
        self._collectives = collectives
        self._segment = collectives.segment
        self._waiting_since = 0.0  # since when this rank waits for the others; 0 if it does not
        self._max_spins = self._spins = _MAX_SPINS if spin else 1

    def submit(
        self,
        collective: Collective,
        outputs: Sequence[torch.Tensor],
        timeout_s: float,
        *,
        blocking: bool,
    ) -> CollectiveWork:
        """Issue a collective. If `blocking`, it is finished on return."""
        work = CollectiveWork(self, getattr(collective, "__name__", ""), outputs, timeout_s)
        work.collective = collective
        with self.lock:
            alone = not self._works
            self._add(work)
        if blocking or alone:
            was = clock.begin(COMMUNICATION)
            self._run(work, brief=not blocking)
            clock.end(was)
        if not work.done:
            self._wake_thread()
        elif work.error is not None:
            raise work.error
        return work

    def _run(self, work: CollectiveWork | None = None, *, brief: bool = False) -> None:
        """Run the queue until `work` is finished; without `work`, until it is empty or closed.

        Without `work` it does not spin. With `brief`, it returns when it would have to sleep.
        """
        polls, checked = 0, time.monotonic()
        while (self._works and not self._closed) if work is None else not work.done:
            if self.advance():
                polls = 0
                continue
            polls += 1
            spins = 0 if work is None else self._spins
            if polls <= spins:
                continue
            if brief:
                return
            longest_s = _SLEEP_S if polls <= spins + _SHORT_SLEEPS else _LONG_SLEEP_S
            self._segment.sleep(self._segment.rounds[self._segment.rank], longest_s)
            if (now := time.monotonic()) - checked > _CHECK_PEERS_S:
                checked = now
                self._check_peers(now)

    def advance(self) -> bool:
        """Run the queue as far as it goes without waiting. Returns whether a round was completed."""
        # Inference mode accepts tensors of every mode. Callbacks of futures, below, must not run in it.
        with self.lock, self._inference_mode:
            before = self._collectives.round
            while self._works:
                head = self._works[0]
                try:
                    next(head.collective)
                    break
                except StopIteration:
                    self._end(head)
                except CallMismatch as error:
                    self._fail(self._disagreement(error.args[0]), self._segment.rank)
                except BaseException as error:
                    # After a KeyboardInterrupt, too, the ranks are out of step.
                    self._fail(error, self._segment.rank)
                    if not isinstance(error, Exception):
                        raise
            progressed = self._collectives.round != before
            if progressed or self._waiting_since == 0:
                self._adapt_spinning()
        self._complete_futures()
        return progressed

    def _adapt_spinning(self) -> None:
        """Spin longer if the others arrived soon, otherwise shorter."""
        now = time.monotonic()
        if self._waiting_since:
            soon = now - self._waiting_since < _SOON_S
            self._spins = min(self._max_spins, 2 * self._spins) if soon else self._spins // 2 or 1
        self._waiting_since = now if self._works else 0.0

    def _fail(self, error: BaseException, culprit: int) -> None:
        """Fail all works and this group. The caller holds the lock."""
        self._error = error
        self._segment.status[self._segment.rank] = _FAILED + culprit
        for work in tuple(self._works):
            work.collective.close()
            self._end(work, error)

    def _check_peers(self, now: float) -> None:
        """Fail if a rank that this rank waits for has died or left, or after the timeout."""
        with self.lock:
            if not self._works:
                return
            segment, waited_s = self._segment, now - self._works[0].issued
            round_number = segment.rounds[segment.rank]
            missing = [r for r in range(segment.size) if segment.rounds[r] < round_number]
            for rank in missing:
                status, state = segment.status[rank], segment.process_state(rank)
                # It may have arrived, finished and left after `missing` was computed.
                if (status or state == "dead") and segment.rounds[rank] < round_number:
                    self._fail(self._peer_failure(rank, status), rank)
                    break
            else:
                if missing and waited_s > self._works[0].timeout_s:
                    self._fail(self._timeout(missing, waited_s), missing[0])
        self.advance()

    def _peer_failure(self, rank: int, status: int) -> PeerFailed:
        name = self._ranks[rank]
        if status >= _FAILED:
            culprit = self._ranks[status - _FAILED]
            did = "left this group after an error" + (
                f" because of rank {culprit}" if culprit != name else ""
            )
        elif status == _LEFT:
            did = "left this group"
        else:
            did = f"died (process {self._segment.pid(rank)})"
        return PeerFailed(
            f"rank {name} {did} while this rank waited for it.",
            where=self._where(),
            rank=name,
            cause_known=False,
        )

    def _timeout(self, missing: Sequence[int], waited_s: float) -> CollectiveTimeout:
        segment = self._segment
        names = [
            f"rank {self._ranks[r]} ({segment.process_state(r)}, process {segment.pid(r)})"
            for r in missing
        ]
        return CollectiveTimeout(
            # torch's own suite of backends looks for " timeout ".
            f"the timeout of a collective passed ({waited_s:.0f} s); ranks that have not reached it: "
            f"{', '.join(names)}.",
            where=self._where(),
            missing=[self._ranks[r] for r in missing],
            waited_s=waited_s,
            cause_known=False,
        )

    def _disagreement(self, calls: Sequence[str]) -> PacelineError:
        texts = [f"rank {self._ranks[r]} {call}" for r, call in enumerate(calls)]
        return RankDisagreement(
            f"ranks called different collectives: {'; '.join(texts)}.",
            where=self._where(),
            fix="call the same collectives in the same order with the same shapes on all ranks.",
            values=list(calls),
            cause_known=False,
        )

    def close(self) -> None:
        """Leave the group. Ranks that still wait for this rank raise `PeerFailed`."""
        if os.getpid() != self._pid:
            return  # a forked child has the memory mapped but is not a rank
        rank = self._segment.rank
        # A signal handler may have interrupted the thread that holds the lock.
        held = self.lock.acquire(timeout=1)
        if not self._closed and self._error is None:
            error = PeerFailed(
                "this rank has left the group.", where=self._where(), rank=self._ranks[rank]
            )
            if held:
                self._fail(error, rank)
            self._error = error
            self._segment.status[rank] = _LEFT
        self._closed = True
        self._segment.wake(always=True)
        if held:
            self.lock.release()
        self._complete_futures()
        self._end_thread()
