"""Loader workers: processes that read ahead. A front to torch's `DataLoader`.

Workers are started by the platform's default method (on Linux with Python 3.11 to 3.13: a fork), because
datasets in memory are then shared, transforms need not be picklable, and a start takes milliseconds;
`torch.multiprocessing.set_start_method` changes it. A fork copies this process with its process groups
connected, which has three hazards. A worker that outlived its rank would keep the rank's connections open,
and its peers would wait: each worker ends with the thread that started it. A garbage collection in the
worker would tear down the model's communication threads: what it inherited is never collected. Many
threads: torch limits workers to one.

Errors come back as values, so that their type and message are kept.
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

from paceline import log, torch_private
from paceline.data.samples import ReadErrors
from paceline.errors import DataError, PacelineError
from paceline.job.job import Job
from paceline.job.preemption import notice
from paceline.machine import usable_cores

_PREFETCH = 2  # batches per worker; torch's default
_DYING_S = 1.0  # how long a worker whose connection broke may take to be gone
_PR_SET_PDEATHSIG = 1  # from linux/prctl.h

_SHUT_DOWN = "torch.utils.data.dataloader._MultiProcessingDataLoaderIter._shutdown_workers"

_pools: weakref.WeakSet[Workers] = weakref.WeakSet()


@dataclass(frozen=True)
class Failure:
    """Sent by a worker in place of raising: the error, and the worker's traceback as text."""

    error: PacelineError
    original: BaseException | None
    text: str

    @classmethod
    def of(cls, error: PacelineError) -> Failure:
        """To be called in the worker, in the `except` block."""
        text = "".join(traceback.format_exception(error.__cause__ or error))
        original = error.__cause__
        try:
            pickle.loads(pickle.dumps(original))
        except Exception:
            original = None  # it cannot be sent; its traceback is
        error.facts["original"] = original
        return cls(error, original, text)

    def throw(self) -> None:
        """Raise the error in this process, with the worker's traceback as a note."""
        self.error.add_note(f"in the loader worker:\n{self.text.rstrip()}")
        raise self.error from self.original


class Workers:
    """The loader workers of one rank.

    Args:
        work: Copied into each worker: a map-style object that is indexed by tasks, or an iterable.
        tasks: Whether `work` is map-style.
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
        """Begin these tasks. Earlier tasks are dropped; the processes stay, unless `work` is iterable."""
        if self._tasks is not None:
            self._tasks.pending = iter(tasks)
        else:
            self.close()  # the workers of an iterable keep its position
        if self._loader is None:
            self._loader = DataLoader(
                self._work,
                batch_size=None,
                sampler=self._tasks,
                num_workers=self._num_workers,
                collate_fn=_unchanged,
                pin_memory=self._job.device.type == "cuda",
                worker_init_fn=_begin,
                multiprocessing_context=_start_method(),
                persistent_workers=True,
                prefetch_factor=_PREFETCH,
                # The default draws a seed from torch's global generator, which belongs to the training.
                generator=torch.Generator(),
            )
        _pools.add(self)
        before = set(multiprocessing.active_children())
        self._results = iter(self._loader)
        started = set(multiprocessing.active_children()) - before
        _explain_deaths()
        for process in started:
            # DataLoader terminates workers that do not end by themselves, but ours ignore one SIGTERM.
            process.terminate = process.kill  # type: ignore[method-assign]
        # By their number: a name ends in it.
        self._processes += sorted(started, key=lambda process: (len(process.name), process.name))

    def get(self) -> Any:
        """Wait for the next result, in the order of the tasks.

        Raises:
            DataError: a worker died.
            PacelineError: the error that a worker sent.
            StopIteration: the iterable has ended in all workers.
        """
        assert self._results is not None
        try:
            result = next(self._results)
        except StopIteration:
            raise
        except (RuntimeError, OSError, EOFError) as error:
            # If a worker dies before its tensor was fetched, a connection error comes first, maybe a
            # moment before the process is gone.
            wait([process.sentinel for process in self._processes], timeout=_DYING_S)
            if death := self.death():
                raise death from error
            raise
        if isinstance(result, Failure):
            result.throw()
        return result

    def death(self) -> DataError | None:
        """The error that names the worker that died and the probable cause; None if all are alive.

        After a death the pool cannot be used, and its other workers are killed: the dead one may have held a
        lock of the queue that they need to end.
        """
        if self._death is None:
            for number, process in enumerate(self._processes):
                if process.exitcode is not None:
                    self._death = self._died(number, process.exitcode)
                    self.kill()
                    break
        return self._death

    def kill(self) -> None:
        """Kill the processes."""
        for process in self._processes:
            # The SIGCHLD handler raises for processes that are killed here too.
            with contextlib.suppress(RuntimeError, DataError):
                process.kill()

    def _died(self, worker: int, code: int) -> DataError:
        how, why, fix = _explained(code)
        return DataError(
            f"loader worker {worker} {how}.",
            where=ReadErrors(self._job.rank, self._job.world_size, worker).where(),
            why=why,
            fix=fix,
            rank=self._job.rank,
            worker=worker,
            exit_code=code,
        )

    def close(self) -> None:
        """End the processes."""
        if self._results is not None:
            shut_down = torch_private.find(_SHUT_DOWN)
            if shut_down is not None:
                shut_down(self._results)
            else:
                self.kill()
        self._results = None
        self._loader = None
        for process in self._processes:
            if process.exitcode is not None and process.exitcode < 0:
                _sweep(process.pid)
        self._processes.clear()
        self._death = None


@atexit.register
def _kill_all() -> None:
    """multiprocessing only sends one SIGTERM, which workers ignore, and waits for them at exit."""
    for pool in list(_pools):
        pool.kill()


def _sweep(pid: int | None) -> None:
    """Remove the shared memory of a worker that was killed between creating it and sending it."""
    for path in Path("/dev/shm").glob(f"torch_{pid}_*"):
        path.unlink(missing_ok=True)


def _explain_deaths() -> None:
    """Replace the error that torch's SIGCHLD handler raises when a worker dies by ours.

    The handler raises anywhere in the main thread, not only where it waits for data.
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
    """Lowers torch's number of threads while loader workers run, unless the user has chosen it."""

    def __init__(self, job: Job, workers: int) -> None:
        self._job = job
        self._workers = workers
        self._before: int | None = None

    def lower(self, *, quiet: bool = False) -> None:
        """Use the cores that the workers leave, at least one; logs it unless `quiet`."""
        if not self._workers or not self._job.threads_chosen or self._before is not None:
            return
        left = max(1, usable_cores() // self._job.local_world_size - self._workers)
        before = torch.get_num_threads()
        if left < before:
            self._before = before
            torch.set_num_threads(left)
            if not quiet:
                text = "lowered threads per rank from %d to %d because of %d loader workers."
                log.logger.info(text, before, left, self._workers)

    def restore(self) -> None:
        """Set the number of threads as it was before."""
        if self._before is not None:
            torch.set_num_threads(self._before)
            self._before = None


class _Tasks:
    """A sampler that gives the tasks of the current run; DataLoader iterates over it once per run."""

    def __init__(self) -> None:
        self.pending: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.pending

    def __getstate__(self) -> dict[str, Any]:
        # Spawned workers get a pickled copy. They receive their tasks through queues.
        return {"pending": iter(())}


def _start_method() -> str | None:
    """None uses the default of the platform or of `set_start_method`.

    A rank of `paceline.spawn` has inherited the method of the fork server, which pickles the dataset; the
    datasets of a notebook cannot be pickled, so such a rank forks its workers.
    """
    inherited = multiprocessing.parent_process() is not None
    return "fork" if inherited and sys.platform == "linux" else None


def _unchanged(result: Any) -> Any:
    return result


def _begin(worker: int) -> None:
    """Runs first in each worker."""
    del worker
    notice.outlive()
    gc.freeze()
    if sys.platform == "linux":
        parent = multiprocessing.parent_process()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if parent is not None and os.getppid() != parent.pid:
            os._exit(1)  # the parent ended before prctl could watch it


def worker_number() -> int | None:
    """The number of this loader worker; None if this process is not one."""
    info = get_worker_info()
    return None if info is None else info.id


def refuse_unsendable(batch: Any, errors: ReadErrors) -> None:
    """Raise if a batch cannot be sent from its worker; torch would wait for it for ever.

    Raises:
        DataError: the batch holds something that cannot be pickled.
    """
    try:
        _Probe(io.BytesIO()).dump(batch)
    except Exception as error:
        raise DataError(
            f"a batch cannot be sent from a loader worker: {type(error).__name__}: {error}",
            where=errors.where(),
            why="batches are pickled to be sent between processes; tensors go through shared memory.",
            fix="return tensors and plain values, or use workers=0.",
            rank=errors.rank,
            worker=errors.worker,
        ) from error


class _Probe(pickle.Pickler):
    """Pickles everything but tensors: pickling would move their storage to shared memory."""

    def reducer_override(self, value: Any) -> Any:
        return (int, ()) if isinstance(value, torch.Tensor) else NotImplemented


def _explained(code: int) -> tuple[str, str, str]:
    """For the exit code of a worker: how it ended, the probable cause, and the fix."""
    if code >= 0:
        return (
            f"ended with exit code {code}",
            "the dataset or a library that it uses ended the process.",
            "use workers=0 to see where.",
        )
    how = f"was killed by {signal.Signals(-code).name}"
    if -code == signal.SIGBUS:
        return (
            how,
            "most often shared memory (/dev/shm) is full; batches are sent through it.",
            "give the container more (`docker run --shm-size=8g`), or use fewer workers.",
        )
    if -code == signal.SIGKILL:
        return (
            how,
            "most often the kernel or the scheduler killed it because memory ran out.",
            "use fewer workers or smaller samples, or request more memory.",
        )
    if -code == signal.SIGSEGV:
        return how, "a library that the dataset uses crashed.", "use workers=0 to see where."
    return how, "", ""
