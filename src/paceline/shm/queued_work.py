"""`QueuedWork`, one operation of a group, and `Queue`, the base of the queues of `shm` and `mpi`.

A queue holds the unfinished works of a group. Whoever waits for a work runs the queue until the work is done.
A background thread runs it for works that no thread waits for, such as those of DDP. It starts with the first
asynchronous work that is not done at once, and sleeps while the queue is empty.

A subclass says how works are issued and advance. `_end` and `_complete_futures` end a work in two steps:
the first needs the lock, and the second must not have it, because callbacks of a future may submit a work.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import MutableSequence, Sequence
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from paceline.clock.step_clock import COMMUNICATION, clock
from paceline.errors import rank_location


class QueuedWork(dist.Work):
    """One operation in a queue.

    Attributes:
        name: Such as "all_reduce".
        done: Whether it is finished, with or without an error.
        error: The error of a failed work.
        timeout_s: Counted from `issued`, which is a time of `time.monotonic`.
        number: Counted from 1 in each group.
    """

    def __init__(
        self, queue: Queue[Any], name: str, outputs: Sequence[torch.Tensor], timeout_s: float
    ) -> None:
        super().__init__()
        self.name = name
        self.done = False
        self.error: BaseException | None = None
        self.timeout_s = timeout_s
        self.issued = time.monotonic()
        self.number = 0
        self._queue = queue
        self._outputs = list(outputs)
        # The second future is completed by a callback of the first, see `get_future`.
        self._trigger: torch.futures.Future[Any] | None = None
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the result is there. Raises what the `wait_for` of its queue raises."""
        if not self.done:
            self._queue.wait_for(self, timeout.total_seconds())
        if self.error is not None:
            raise self.error
        return True

    def get_future(self) -> Any:
        """A future of the output tensors. DDP waits only for this future."""
        with self._queue.lock:
            if self._future is None:
                future: torch.futures.Future[Any] = torch.futures.Future()
                if self.is_success():
                    future.set_result(self._outputs)
                    self._future = future
                else:  # C++ code gets an error only if a callback raises it
                    self._trigger, self._future = future, future.then(self._result_or_error)
        if self.done:
            self.complete_future()
        return self._future

    def complete_future(self) -> None:
        """Complete the future, if `get_future` was called."""
        if self._trigger is not None:
            with self._queue.lock:
                trigger, self._trigger = self._trigger, None
            if trigger is not None:
                trigger.set_result(None)

    def _result_or_error(self, _: Any) -> list[torch.Tensor]:
        if self.error is not None:
            raise self.error
        return self._outputs

    def is_completed(self) -> bool:
        """Whether it is finished, with or without an error."""
        if not self.done:
            self._queue.advance()
        return self.done

    def is_success(self) -> bool:
        """Whether it is finished without an error."""
        return self.done and self.error is None

    def exception(self) -> BaseException | None:
        """The error, if it failed."""
        return self.error

    def result(self) -> list[torch.Tensor]:
        """The output tensors."""
        return self._outputs

    def synchronize(self) -> None:
        """The same as `wait`, because results are written before a work is done."""
        self.wait()

    def recorder_entry(self, created_ns: int) -> dict[str, Any]:
        """This work as an entry of torch's flight recorder."""
        return {
            "profiling_name": f"{self._queue.backend}:{self.name}",
            "collective_seq_id": self.number,
            "is_p2p": False,
            # torch's name for the shapes; a work knows only those of its outputs.
            "input_sizes": [list(output.shape) for output in self._outputs],
            "input_dtypes": [str(output.dtype).removeprefix("torch.") for output in self._outputs],
            "retired": self.done,
            "time_created_ns": created_ns,
        }


W = TypeVar("W", bound=QueuedWork)


class Queue(Generic[W]):
    """The unfinished works of one group.

    Attributes:
        lock: held while works advance, and to read or change the queue.
        num_issued: the number of works issued.
    """

    backend: str

    def __init__(
        self, rank: int, ranks: Sequence[int], lock: Any, works: MutableSequence[W]
    ) -> None:
        self.lock = lock
        self.num_issued = 0
        self._rank, self._ranks = rank, ranks
        self._works = works
        self._ended: deque[W] = deque()  # their futures are not completed yet
        self._inference_mode = torch.inference_mode()  # one object, because creating one is slow
        self._error: BaseException | None = None
        self._closed = False
        self._pid = os.getpid()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        _queues.add(self)

    def _add(self, work: W) -> None:
        """Number a work and append it. The caller holds the lock."""
        if self._error is not None:
            # It is raised again and again: the frames of earlier calls would stay alive.
            raise self._error.with_traceback(None)
        self._works.append(work)
        self.num_issued = work.number = self.num_issued + 1

    def _end(self, work: W, error: BaseException | None = None) -> None:
        """Remove a work that is finished, or has failed. The caller holds the lock."""
        self._works.remove(work)
        work.error, work.done = error, True
        self._ended.append(work)

    def _complete_futures(self) -> None:
        """Complete the futures of works that have ended. The caller does not hold the lock."""
        while True:
            try:
                work = self._ended.popleft()
            except IndexError:  # perhaps because another thread is here, too
                return
            work.complete_future()

    @property
    def num_waiting(self) -> int:
        """The number of unfinished works."""
        return len(self._works)

    def waiting(self) -> list[dict[str, Any]]:
        """The unfinished works, as entries of torch's flight recorder."""
        now, now_ns = time.monotonic(), time.time_ns()
        return [
            work.recorder_entry(now_ns - int((now - work.issued) * 1e9))
            for work in tuple(self._works)
        ]

    def submit(
        self, to_run: Any, outputs: Sequence[torch.Tensor], timeout_s: float, *, blocking: bool
    ) -> W:
        """Issue a collective. If `blocking`, it is finished on return."""
        raise NotImplementedError

    def wait_for(self, work: W, timeout_s: float) -> None:
        """Run the queue until `work` is finished."""
        if timeout_s > 0:
            work.timeout_s = time.monotonic() - work.issued + timeout_s
        with clock.during(COMMUNICATION):
            self._run(work)

    def advance(self) -> bool:
        """Run the queue as far as it goes without waiting. Returns whether there was progress."""
        raise NotImplementedError

    def _run(self, work: W | None = None) -> None:
        """Run the queue until `work` is finished; without `work`, until it is empty or closed."""
        raise NotImplementedError

    def _where(self) -> str:
        return rank_location(
            self._ranks[self._rank], len(self._ranks), detail=f"backend {self.backend}"
        )

    def _wake_thread(self) -> None:
        with self.lock:
            if self._thread is None and not self._closed:
                # The thread holds only a weak reference to the queue, so that unused groups are freed.
                self._thread = threading.Thread(
                    target=_run_in_background,
                    args=(weakref.ref(self), self._wake),
                    name=f"paceline-{self.backend}",
                    daemon=True,
                )
                self._thread.start()
        self._wake.set()

    def run_until_empty(self) -> bool:
        """Run the queue until it is empty, in the background thread. Returns False once it is closed."""
        self._wake.clear()
        self._run()
        return not self._closed

    def close(self) -> Any:
        """Leave the group."""
        raise NotImplementedError

    def _end_thread(self) -> None:
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)

    def __del__(self) -> None:
        if not self._closed:
            self.close()


def _run_in_background(queue: weakref.ref[Queue[Any]], wake: threading.Event) -> None:
    while True:
        wake.wait()
        found = queue()
        if found is None or not found.run_until_empty():
            return
        del found


_queues: weakref.WeakSet[Queue[Any]] = weakref.WeakSet()


@atexit.register
def close_all() -> None:
    """Stop the threads before the interpreter ends. Later, a thread that needs its lock would abort."""
    for queue in list(_queues):
        queue.close()
