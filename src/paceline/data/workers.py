"""Loader workers: processes that read ahead. A front to torch's `DataLoader`.

Workers start as the platform starts them (on Linux with Python 3.11 to 3.13: a fork), because datasets
that lie in memory are then shared, transforms need not be picklable, and a start takes milliseconds;
`torch.multiprocessing.set_start_method` chooses otherwise. A fork copies this process with its groups
connected, so three hazards are met here: a worker ends with the thread that started it, or it would
hold a dead rank's connections open and its peers would wait; it never collects what it inherited, or
it would tear down a model's communication threads; and torch itself keeps it to one thread.

Failures come back as values, so that the message is ours and the type is kept.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from paceline import log
from paceline.data.samples import where
from paceline.errors import DataError, PacelineError
from paceline.job.job import Job
from paceline.job.preemption import notice
from paceline.machine import usable_cores

_PREFETCH = 2
_DYING_S = 1.0
_PR_SET_PDEATHSIG = 1

_pools: weakref.WeakSet[Workers] = weakref.WeakSet()


@dataclass(frozen=True)
class Failure:
    """What a worker sends where it would raise: the error, and the worker's traceback as text."""

    error: PacelineError
    original: BaseException | None
    text: str

    @classmethod
    def of(cls, error: PacelineError) -> Failure:
        """Made in the worker, in the `except` block."""
        text = "".join(traceback.format_exception(error.__cause__ or error))
        original = error.__cause__
        try:
            pickle.loads(pickle.dumps(original))
        except Exception:
            original = None  # its text has to do
        error.facts["original"] = original
        return cls(error, original, text)

    def throw(self) -> None:
        """Raise it here, with the worker's traceback as a note."""
        self.error.add_note(f"in the loader worker:\n{self.text.rstrip()}")
        raise self.error from self.original


class Workers:
    """A pool of loader workers on one rank.

    Args:
        work: what each worker holds: map-style (called with each task) or iterable.
        tasks: True if `work` is map-style.
    """

    def __init__(self, job: Job, work: Any, workers: int, *, tasks: bool) -> None:
        self._job = job
        self._work = work
        self._num_workers = workers
        self._tasks = _Tasks() if tasks else None
        self._loader: DataLoader[Any] | None = None
        self._results: Iterator[Any] | None = None
        self._processes: list[BaseProcess] = []
        self._death: DataError | None = None

    def start(self, tasks: Iterable[Any] = ()) -> None:
        """Begin with these tasks; what was still under way is dropped, the processes are kept."""
        if self._tasks is not None:
            self._tasks.pending = iter(tasks)
        else:
            self.close()  # an iterable's workers hold their place in it
        if self._loader is None:
            self._loader = DataLoader(
                self._work,
                batch_size=None,
                sampler=self._tasks,
                num_workers=self._num_workers,
                collate_fn=_as_it_is,
                pin_memory=self._job.device.type == "cuda",
                worker_init_fn=_begin,
                multiprocessing_context=_start_method(),
                persistent_workers=True,
                prefetch_factor=_PREFETCH,
                # The default draws a seed from torch's global generator, which is the training's.
                generator=torch.Generator(),
            )
        _pools.add(self)
        before = set(multiprocessing.active_children())
        self._results = iter(self._loader)
        started = set(multiprocessing.active_children()) - before
        _explain_deaths()
        for process in started:
            # What DataLoader does to those that do not end by themselves. They pass over one SIGTERM.
            process.terminate = process.kill  # type: ignore[method-assign]
        # Names end in a number that counts up, of growing length.
        self._processes += sorted(started, key=lambda process: (len(process.name), process.name))

    def get(self) -> Any:
        """The next result, in the order of the tasks; waits for it.

        Raises:
            DataError: a worker died.
            PacelineError: what a worker sent as a failure.
            StopIteration: an iterable has ended in all workers.
        """
        assert self._results is not None
        try:
            result = next(self._results)
        except StopIteration:
            raise
        except (RuntimeError, OSError, EOFError) as error:
            # A tensor whose worker dies before it was fetched fails as a connection does, maybe a
            # moment before the process is gone.
            wait([process.sentinel for process in self._processes], timeout=_DYING_S)
            if death := self.death():
                raise death from error
            raise
        if isinstance(result, Failure):
            result.throw()
        return result

    def death(self) -> DataError | None:
        """The error that says which worker died, and probably why; None if all live.

        The pool is of no use after a death, and its other workers are ended.
        """
        if self._death is None:
            for number, process in enumerate(self._processes):
                if process.exitcode is not None:
                    self._death = self._died(number, process.exitcode)
                    self._end_others()
                    break
        return self._death

    def _end_others(self) -> None:
        # The dead one may have held a lock of the queue that the others wait for at their end.
        self.kill()

    def kill(self) -> None:
        """End the processes at once."""
        for process in self._processes:
            with contextlib.suppress(
                RuntimeError, DataError
            ):  # the SIGCHLD handler, on what we end
                process.kill()

    def _died(self, worker: int, code: int) -> DataError:
        how, why, fix = _explained(code)
        return DataError(
            f"loader worker {worker} {how}.",
            where=where(self._job.rank, self._job.world_size, worker),
            why=why,
            fix=fix,
            rank=self._job.rank,
            worker=worker,
            exit_code=code,
        )

    def close(self) -> None:
        """End the processes."""
        if self._results is not None:
            # DataLoader does this when its iterator is collected, and offers no other way; after an
            # error, a traceback keeps the iterator alive.
            self._results._shutdown_workers()  # type: ignore[attr-defined]
        self._results = None
        self._loader = None
        for process in self._processes:
            if process.exitcode is not None and process.exitcode < 0:
                _sweep(process.pid)
        self._processes.clear()
        self._death = None


@atexit.register
def _kill_all() -> None:
    """At the end of the interpreter multiprocessing sends one SIGTERM to its children, and waits."""
    for pool in list(_pools):
        pool.kill()


def _sweep(pid: int | None) -> None:
    """Remove the shared memory of a worker that was killed between making it and sending it off."""
    for path in Path("/dev/shm").glob(f"torch_{pid}_*"):
        path.unlink(missing_ok=True)


def _explain_deaths() -> None:
    """Have a worker's death told in our words wherever torch's SIGCHLD handler raises it.

    That is any place in the main thread, not only where it waits for data.
    """
    inner = signal.getsignal(signal.SIGCHLD)
    main = threading.current_thread() is threading.main_thread()
    if not main or not callable(inner) or getattr(inner, "explains_deaths", False):
        return

    def handler(number: int, frame: FrameType | None) -> None:
        try:
            inner(number, frame)
        except RuntimeError as error:
            for pool in list(_pools):
                if death := pool.death():
                    raise death from error
            raise

    handler.explains_deaths = True  # type: ignore[attr-defined]
    signal.signal(signal.SIGCHLD, handler)


class Threads:
    """Leaves cores to the loader workers while they run, where the user has not chosen threads."""

    def __init__(self, job: Job, workers: int) -> None:
        self._job = job
        self._workers = workers
        self._before: int | None = None

    def lower(self, *, say: bool = True) -> None:
        """Compute with the cores that the workers leave, at least one."""
        if not self._job.threads_chosen or self._before is not None:
            return
        left = max(1, usable_cores() // self._job.local_world_size - self._workers)
        before = torch.get_num_threads()
        if left < before:
            self._before = before
            torch.set_num_threads(left)
            if say:
                text = "threads per rank lowered from %d to %d, beside %d loader workers."
                log.logger.info(text, before, left, self._workers)

    def restore(self) -> None:
        """Compute with as many threads as before."""
        if self._before is not None:
            torch.set_num_threads(self._before)
            self._before = None


class _Tasks:
    """A sampler that gives the tasks of the present run; DataLoader asks it anew for each."""

    def __init__(self) -> None:
        self.pending: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.pending

    def __getstate__(self) -> dict[str, Any]:
        return {"pending": iter(())}  # where workers are spawned, they get no tasks by this way


def _start_method() -> str | None:
    """None leaves the choice to the platform, or to the user of `set_start_method`.

    A rank that `paceline.spawn` started has inherited the fork server's method, and did not choose it:
    datasets of a notebook cannot be pickled for it.
    """
    inherited = multiprocessing.parent_process() is not None
    return "fork" if inherited and sys.platform == "linux" else None


def _as_it_is(result: Any) -> Any:
    return result


def _begin(worker: int) -> None:
    """Run in each worker, first."""
    del worker
    notice.outlive()
    gc.freeze()
    if sys.platform == "linux":
        parent = multiprocessing.parent_process()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if parent is not None and os.getppid() != parent.pid:
            os._exit(1)  # it ended before it could be watched


def worker_number() -> int | None:
    """The number of the loader worker that this process is, None in any other."""
    info = get_worker_info()
    return None if info is None else info.id


def refuse_unsendable(batch: Any, *, rank: int, world_size: int, worker: int | None) -> None:
    """Raise where a batch cannot leave its worker, which torch would answer by waiting for ever.

    Raises:
        DataError: the batch holds something that cannot be pickled.
    """
    try:
        _Probe(io.BytesIO()).dump(batch)
    except Exception as error:
        raise DataError(
            f"a batch cannot be sent from a loader worker: {type(error).__name__}: {error}",
            where=where(rank, world_size, worker),
            why="batches travel between processes pickled, tensors through shared memory.",
            fix="return tensors and plain values, or use workers=0.",
            rank=rank,
            worker=worker,
        ) from error


class _Probe(pickle.Pickler):
    """Pickles all but tensors, whose storage would be moved to shared memory for nothing."""

    def reducer_override(self, value: Any) -> Any:
        return (int, ()) if isinstance(value, torch.Tensor) else NotImplemented


def _explained(code: int) -> tuple[str, str, str]:
    """How a process with this exit code ended, the probable cause, and what to do."""
    if code >= 0:
        return (
            f"ended with exit code {code}",
            "the dataset, or a library under it, ended its process.",
            "use workers=0 to see it happen.",
        )
    how = f"was killed by {signal.Signals(-code).name}"
    if -code == signal.SIGBUS:
        return (
            how,
            "most often shared memory (/dev/shm) is full: batches travel through it.",
            "give the container more (`docker run --shm-size=8g`), or use fewer workers.",
        )
    if -code == signal.SIGKILL:
        return (
            how,
            "most often the kernel or the scheduler, because memory ran out.",
            "use fewer workers or smaller samples, or ask for more memory.",
        )
    if -code == signal.SIGSEGV:
        return how, "a library under the dataset crashed.", "use workers=0 to see it happen."
    return how, "", ""
