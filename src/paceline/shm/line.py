"""The operations of a group in the order of issue, and who carries them on.

A call that blocks carries its line on itself. An asynchronous one tries for a moment, which is enough where
the others have come already; what is left is carried on by whoever waits for it, and by a thread, so that
groups started in different orders get through.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import CollectiveTimeout, PacelineError, PeerFailed, RankDisagreement, place
from paceline.shm.rounds import Mismatch, Rounds, Steps

_LEFT, _FAILED = 1, 2  # in `Segment.gone`; the second plus the rank that it failed because of
_SPINS = 40  # looks before a rank sleeps, at most, where each has a core: about 0.3 ms
_SOON_S = 0.3e-3
_DOZE_S = (2e-3, 20e-3)  # first, later
_AWAY_S = (0.05e-3, 0.5e-3)
_LOOK_S = 0.05  # how often a waiting rank asks whether the others live


class Operation(dist.Work):
    """One collective of a group, finished or not. What torch calls a work."""

    def __init__(
        self, line: Line, steps: Steps, outputs: Sequence[torch.Tensor], timeout_s: float
    ) -> None:
        super().__init__()
        self.done = False
        self.error: BaseException | None = None
        self.steps = steps
        self.timeout_s = timeout_s
        self.issued = time.monotonic()
        self.number = 0
        self._line = line
        self._outputs = list(outputs)
        self._source: Any = None
        self._future: Any = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the result is there. Raises what `Line` raises."""
        if not self.done:
            self._line.finish(self, timeout.total_seconds())
        if self.error is not None:
            raise self.error
        return True

    def get_future(self) -> Any:
        """A future of the output tensors; DDP waits for nothing else."""
        with self._line.lock:
            if self._future is None:
                future: torch.futures.Future[Any] = torch.futures.Future()
                if self.is_success():
                    future.set_result(self._outputs)
                    self._future = future
                else:  # only an exception raised in a callback reaches those who wait in C++
                    self._source, self._future = future, future.then(self._give)
        if self.done:
            self.settle()
        return self._future

    def entry(self, created_ns: int) -> dict[str, Any]:
        """This operation as an entry of torch's flight recorder."""
        frame = getattr(self.steps, "gi_frame", None)
        kind = frame.f_locals.get("kind") if frame is not None else None
        return {
            "profiling_name": f"shm:{kind or getattr(self.steps, '__name__', 'collective')}",
            "collective_seq_id": self.number,
            "input_sizes": [list(output.shape) for output in self._outputs],
            "input_dtypes": [str(output.dtype).removeprefix("torch.") for output in self._outputs],
            "retired": self.done,
            "time_created_ns": created_ns,
        }

    def settle(self) -> None:
        """Set the future, if somebody asked for one."""
        if self._source is not None:  # who asks from now on sees that it is done
            with self._line.lock:
                source, self._source = self._source, None
            if source is not None:
                source.set_result(None)

    def _give(self, _: Any) -> list[torch.Tensor]:
        if self.error is not None:
            raise self.error
        return self._outputs

    def is_completed(self) -> bool:
        """Whether it is over, well or not."""
        if not self.done:
            self._line.advance()
        return self.done

    def is_success(self) -> bool:
        """Whether it is over and the result is there."""
        return self.done and self.error is None

    def exception(self) -> BaseException | None:
        """What went wrong, if something did."""
        return self.error

    def result(self) -> list[torch.Tensor]:
        """The output tensors."""
        return self._outputs

    def synchronize(self) -> None:
        """Wait, as CPU tensors are ready when an operation is over."""
        self.wait()


class Line:
    """The operations of one group that are not over, first issued first.

    Raises, in `start` and `finish`, each also a RuntimeError:
        PeerFailed: a rank died, left, or gave up.
        CollectiveTimeout: a rank did not come in time.
        RankDisagreement: the ranks called different collectives, or with different tensors.
    After any of these the group stays broken and every operation raises it.

    Collective: none; the operations are.
    """

    def __init__(self, rounds: Rounds, ranks: Sequence[int], *, spin: bool) -> None:
        self.lock = threading.Lock()
        self._rounds = rounds
        self._segment = rounds.segment
        self._ranks = ranks
        self._since = 0.0  # when this rank began to wait for the others, if it does
        self._most = self._spins = _SPINS if spin else 1
        self._waiting: deque[Operation] = deque()
        self.entered = 0  # how many were issued; read by the launcher's probe, as `unfinished` is
        # Number, when it was issued, elements: when each rank came tells who is late (launch/pace.py).
        self.recent: deque[tuple[int, float, int]] = deque(maxlen=256)
        self._over: deque[Operation] = deque()
        self._mode = torch.inference_mode()  # one for all, as making one takes longer than entering
        self._error: BaseException | None = None
        self._wake = threading.Event()
        self._closed = False
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        _lines.add(self)

    def start(
        self, steps: Steps, outputs: Sequence[torch.Tensor], timeout_s: float, *, blocking: bool
    ) -> Operation:
        """Issue an operation; it is over on return if `blocking`, else perhaps."""
        operation = Operation(self, steps, outputs, timeout_s)
        with self.lock:
            if self._error is not None:
                raise self._error
            alone = not self._waiting
            self.entered = operation.number = self.entered + 1
            self._waiting.append(operation)
            size = outputs[0].numel() if outputs else 0
            self.recent.append((self.entered, operation.issued, size))
        if blocking or alone:
            self._carry(operation, brief=not blocking)
        if not operation.done:
            self._call_thread()
        elif operation.error is not None:
            raise operation.error
        return operation

    @property
    def waiting(self) -> int:
        """How many operations are not over."""
        return len(self._waiting)

    def unfinished(self) -> list[dict[str, Any]]:
        """The operations that are not over, as torch's flight recorder would have them."""
        now, now_ns = time.monotonic(), time.time_ns()
        return [one.entry(now_ns - int((now - one.issued) * 1e9)) for one in tuple(self._waiting)]

    def finish(self, operation: Operation, timeout_s: float) -> None:
        """Carry the line on until `operation` is over."""
        if timeout_s > 0:
            operation.timeout_s = time.monotonic() - operation.issued + timeout_s
        self._carry(operation, brief=False)

    def _carry(self, operation: Operation, *, brief: bool) -> None:
        looks, looked = 0, time.monotonic()
        while not operation.done:
            if self.advance():
                looks = 0
                continue
            looks += 1
            if looks <= self._spins:
                continue
            if brief:
                return
            self._doze(looks > self._spins + 10)
            if (now := time.monotonic()) - looked > _LOOK_S:
                looked = now
                self._look_around(now)

    def advance(self) -> bool:
        """Carry the line on as far as it goes without waiting; whether the ranks met."""
        # Inference mode takes tensors of every mode; callbacks, below, must not run in it.
        with self.lock, self._mode:
            before = self._rounds.turn
            while self._waiting:
                head = self._waiting[0]
                try:
                    next(head.steps)
                    break
                except StopIteration:
                    self._end(head)
                except Mismatch as error:
                    self._break(self._disagreement(error.args[0]), self._segment.rank)
                except BaseException as error:  # an interrupt, too, leaves the ranks out of step
                    self._break(error, self._rounds.culprit(error))
                    if not isinstance(error, Exception):
                        raise
            met = self._rounds.turn != before
            if met or self._since == 0:
                self._learn()
        while self._over:
            self._over.popleft().settle()
        return met

    def _learn(self) -> None:
        """Look longer where the others came soon, for less time where that did not pay."""
        now = time.monotonic()
        if self._since:
            soon = now - self._since < _SOON_S
            self._spins = min(self._most, 2 * self._spins) if soon else self._spins // 2 or 1
        self._since = now if self._waiting else 0.0

    def _doze(self, long: bool) -> None:
        if self._rounds.away:
            time.sleep(_AWAY_S[long])
        else:
            self._segment.doze(self._segment.posted[self._segment.rank], _DOZE_S[long])

    def _end(self, operation: Operation) -> None:
        self._waiting.popleft()
        operation.done = True
        self._over.append(operation)

    def _break(self, error: BaseException, culprit: int) -> None:
        """With the lock held: this group is of no use any more."""
        self._error = error
        self._segment.gone[self._segment.rank] = _FAILED + culprit
        while self._waiting:
            self._waiting[0].error = error
            self._waiting[0].steps.close()
            self._end(self._waiting[0])
        self._rounds.gave_up(error, culprit)

    def _look_around(self, now: float) -> None:
        """Give the line up where a rank is gone, or late."""
        with self.lock:
            if not self._waiting:
                return
            head, segment = self._waiting[0], self._segment
            turn = segment.posted[segment.rank]
            missing = [r for r in range(segment.size) if segment.posted[r] < turn]
            for rank in missing:
                gone = segment.gone[rank]
                condition = segment.condition(rank)
                # It may have come, finished and left between our two looks.
                if (gone or condition == "dead") and segment.posted[rank] < turn:
                    self._break(self._failure(rank, gone, condition), rank)
                    break
            else:
                waited_s = now - head.issued
                late = waited_s > head.timeout_s + self._rounds.patience_s * (missing == [0])
                if missing and late:
                    self._break(self._lateness(missing, waited_s), missing[0])
                elif error := self._rounds.look(missing, late=late):
                    self._break(error, self._rounds.culprit(error))
        self.advance()

    def _failure(self, rank: int, gone: int, condition: str) -> PeerFailed:
        who = self._ranks[rank]
        if gone >= _FAILED:
            culprit = self._ranks[gone - _FAILED]
            did = "gave this group up" + (f" because of rank {culprit}" if culprit != who else "")
        elif gone == _LEFT:
            did = "left this group"
        else:
            did = f"died (process {self._segment.pid(rank)})"
        return PeerFailed(
            f"rank {who} {did} while this rank waited for it.",
            where=self._where(),
            rank=who,
            cause_known=False,
        )

    def _lateness(self, missing: Sequence[int], waited_s: float) -> CollectiveTimeout:
        names = [
            f"rank {self._ranks[r]} ({self._segment.condition(r)}, process {self._segment.pid(r)})"
            for r in missing
        ]
        return CollectiveTimeout(
            f"after a timeout of {waited_s:.0f} s in a collective, these did not come: {', '.join(names)}.",
            where=self._where(),
            missing=[self._ranks[r] for r in missing],
            waited_s=waited_s,
            cause_known=False,
        )

    def _disagreement(self, said: Sequence[str]) -> PacelineError:
        texts = [f"rank {self._ranks[r]} {text}" for r, text in enumerate(said)]
        return RankDisagreement(
            f"ranks called different collectives: {'; '.join(texts)}.",
            where=self._where(),
            fix="call the same collectives in the same order with the same shapes on all ranks.",
            values=list(said),
            cause_known=False,
        )

    def _where(self) -> str:
        return place(self._ranks[self._segment.rank], len(self._ranks), detail="backend shm")

    def _call_thread(self) -> None:
        with self.lock:
            if self._thread is None and not self._closed:
                # It must not keep a group alive that nobody uses.
                self._thread = threading.Thread(
                    target=_serve,
                    args=(weakref.ref(self), self._wake),
                    name="paceline-shm",
                    daemon=True,
                )
                self._thread.start()
        self._wake.set()

    def serve(self) -> bool:
        """For the thread: carry on until all is over. Whether there may be more."""
        self._wake.clear()
        looks, looked = 0, time.monotonic()
        while self._waiting and not self._closed:
            looks = 0 if self.advance() else looks + 1
            if looks:
                self._doze(looks > 10)
            if (now := time.monotonic()) - looked > _LOOK_S:
                looked = now
                self._look_around(now)
        return not self._closed

    def close(self) -> None:
        """Take no part any more; those that still wait for this rank are told so."""
        if os.getpid() != self._pid:
            return  # a forked child has the memory but is no rank
        rank = self._segment.rank
        # A signal's handler may have interrupted the thread that holds the lock.
        held = self.lock.acquire(timeout=1)
        if not self._closed and self._error is None:
            error = PeerFailed("this rank left.", where=self._where(), rank=self._ranks[rank])
            if held:
                self._break(error, rank)
            self._error = error
            self._segment.gone[rank] = _LEFT
        self._closed = True
        self._segment.ring(always=True)
        if held:
            self.lock.release()
        self._wake.set()
        while self._over:
            self._over.popleft().settle()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)

    def __del__(self) -> None:
        self.close()


def _serve(line: weakref.ref[Line], wake: threading.Event) -> None:
    while True:
        wake.wait()
        found = line()
        if found is None or not found.serve():
            return
        del found


_lines: weakref.WeakSet[Line] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A thread that asks for the lock of an interpreter that has gone aborts the process."""
    for line in list(_lines):
        line.close()
