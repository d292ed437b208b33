"""Loader workers: processes that read ahead. A front to torch's `DataLoader`.

Workers are started by the platform's default method (on Linux with Python 3.11 to 3.13: a fork). With a fork,
datasets in memory are shared, transforms need not be picklable, and a start takes milliseconds.
`torch.multiprocessing.set_start_method` changes the method.

A forked worker inherits the connections of the rank's process groups. This has two hazards:

- If the rank dies and its worker lives, the rank's connections stay open and its peers keep waiting. So the
  kernel kills each worker when the thread that started it ends.
- If the worker's garbage collector frees an inherited process group, it waits for threads that the worker
  does not have. So inherited objects are never collected: the collector is off from before the fork until
  they are frozen (`gc.freeze`). It would otherwise run inside of `os.fork` already, in the handlers there.

`paceline.job.forks` guards against a third one, on Python 3.11.

A worker returns an error as a value, so that its type and message are kept.
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
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from paceline.data.samples import ReadErrors
from paceline.errors import DataError, PacelineError
from paceline.exit_codes import signal_name
from paceline.job.job import Job
from paceline.job.preemption import notice

_PREFETCH = 2  # batches per worker; torch's default
_EXIT_WAIT_S = 1.0  # longest wait for the exit of a worker that is ending
_PR_SET_PDEATHSIG = 1  # from linux/prctl.h

_pools: weakref.WeakSet[Workers] = weakref.WeakSet()
os.register_at_fork(after_in_child=_pools.clear)  # workers belong to the process that started them


@dataclass(frozen=True)
class Failure:
    """What a worker sends if its work raised: the error, and the worker's traceback as text."""

    error: PacelineError
    original: BaseException | None
    text: str

    @classmethod
    def of(cls, error: PacelineError) -> Failure:
        """What to send for `error`. Called in the worker, in the `except` block."""
        text = "".join(traceback.format_exception(error.__cause__ or error))
        original = error.__cause__
        try:
            pickle.loads(pickle.dumps(original))
        except Exception:
            original = None  # it cannot be pickled; its traceback is sent as text
        error.facts["original"] = original
        return cls(error, original, text)

    def throw(self) -> None:
        """Raise the error in this process, with the worker's traceback as a note."""
        self.error.add_note(f"in the loader worker:\n{self.text.rstrip()}")
        raise self.error from self.original


class Workers:
    """The loader workers of one rank.

    Args:
        work: Copied into each worker: a map-style object whose indices are tasks, or an iterable. Results
            may be a `Failure`.
        tasks: Whether `work` is map-style.
        init: A user's `worker_init_fn`, which each worker calls with its number.
        timeout_s: How long `get` waits before it raises RuntimeError; 0: as long as the workers live.
    """

    def __init__(
        self,
        job: Job,
        work: Any,
        workers: int,
        *,
        tasks: bool,
        init: Callable[[int], Any] | None = None,
        timeout_s: float = 0,
    ) -> None:
        self._job = job
        self._timeout_s = timeout_s
        self._work = work
        self._num_workers = workers
        self._tasks = _Tasks() if tasks else None
        self._init = init
        self._loader: DataLoader[Any] | None = None
        self._results: Iterator[Any] | None = None
        self._processes: list[BaseProcess] = []

    def start(self, tasks: Iterable[Any] = ()) -> None:
        """Start these tasks and discard earlier ones. The processes are reused, unless `work` is iterable."""
        if self._tasks is not None:
            self._tasks.pending = iter(tasks)
        else:
            self.close()  # a worker cannot set an iterable back to its start
        if self._loader is None:
            self._loader = DataLoader(
                self._work,
                batch_size=None,
                sampler=self._tasks,
                num_workers=self._num_workers,
                collate_fn=_identity,
                pin_memory=self._job.device.type == "cuda",
                worker_init_fn=partial(
                    _init_worker, self._init, gc.isenabled(), self._tasks is not None
                ),
                multiprocessing_context=start_method(),
                persistent_workers=True,
                prefetch_factor=_PREFETCH,
                timeout=self._timeout_s,
                # The default draws a seed from torch's global generator, which belongs to the training.
                generator=torch.Generator(),
            )
        _pools.add(self)
        before = set(multiprocessing.active_children())
        with _no_collection():
            self._results = iter(self._loader)
        started = set(multiprocessing.active_children()) - before
        for process in started:
            # DataLoader terminates workers that do not end by themselves, but ours ignore one SIGTERM.
            process.terminate = process.kill  # type: ignore[method-assign]
        # In the order of their numbers: the name of a process ends in its number.
        self._processes += sorted(started, key=lambda process: (len(process.name), process.name))

    def get(self) -> Any:
        """Wait for the next result, in the order of the tasks.

        Raises:
            DataError: a worker died.
            PacelineError: the error that a worker sent.
            StopIteration: the iterable has ended in all workers.
        """
        assert self._results is not None
        death = None
        try:
            result = next(self._results)
        except (RuntimeError, OSError, EOFError):
            death = self._find_death()
            if death is None:
                raise
        if death is not None:
            # Not raised in the `except` block: torch's error keeps DataLoader's iterator, with its threads.
            raise death
        if isinstance(result, Failure):
            result.throw()
        return result

    def _find_death(self) -> DataError | None:
        """The error that names the worker that died; None if all are alive."""
        # If a worker dies before its tensor was fetched, the kernel closes first the connection, then the
        # sentinel, and only then sets the exit code.
        sentinels = [process.sentinel for process in self._processes]
        try:
            exiting = wait(sentinels, timeout=_EXIT_WAIT_S)
        except RuntimeError:  # of torch's SIGCHLD handler, once for each worker that has ended
            exiting = wait(sentinels, timeout=_EXIT_WAIT_S)
        for worker, process in enumerate(self._processes):
            if process.sentinel in exiting:
                process.join(_EXIT_WAIT_S)
            if (code := process.exitcode) is not None:
                self.kill()  # the dead worker may have held a lock that the others need to exit
                return self._death_error(worker, code)
        return None

    def _death_error(self, worker: int, code: int) -> DataError:
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        return DataError(
            f"loader worker {worker} {how}.",
            where=ReadErrors(self._job.rank, self._job.world_size, worker).where(),
            why="SIGKILL mostly means that memory ran out, and SIGBUS that shared memory (/dev/shm) is full; "
            "otherwise the dataset or a library that it uses ended the process.",
            fix="use fewer workers or give the job more memory (`docker run --shm-size=8g`); workers=0 shows "
            "where the dataset ends the process.",
            rank=self._job.rank,
            worker=worker,
            worker_exit_code=code,
        )

    def kill(self) -> None:
        """Kill the processes."""
        for process in self._processes:
            # torch's SIGCHLD handler may raise for a process that is killed here, until it is joined.
            with contextlib.suppress(RuntimeError):
                process.kill()
                process.join(_EXIT_WAIT_S)

    def close(self) -> None:
        """End the processes."""
        # DataLoader ends the workers of an iterator that is freed. A traceback may keep it. Workers that are
        # killed before that are an error of torch's SIGCHLD handler.
        self._results = self._loader = None
        self.kill()
        self._processes.clear()


@atexit.register
def _kill_all() -> None:
    """At exit, multiprocessing sends workers one SIGTERM, which ours ignore, and waits for them forever."""
    for pool in list(_pools):
        pool.kill()


class _Tasks:
    """A sampler that gives the tasks of the current run; DataLoader iterates over it once per run."""

    def __init__(self) -> None:
        self.pending: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.pending

    def __getstate__(self) -> dict[str, Any]:
        # Spawned workers get a pickled copy. They receive their tasks through queues.
        return {"pending": iter(())}


def start_method() -> str | None:
    """The method that starts workers; None is the default of the platform or of `set_start_method`.

    The default of a rank of `paceline.spawn` is the fork server, which pickles the dataset. A dataset that is
    defined in a notebook cannot be pickled, so such a rank forks its workers.
    """
    inherited = multiprocessing.parent_process() is not None
    return "fork" if inherited and sys.platform == "linux" else None


def _identity(result: Any) -> Any:
    return result


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Turn the garbage collector off, also in processes that are forked meanwhile."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _init_worker(
    init: Callable[[int], Any] | None, collects: bool, runs_tasks: bool, worker: int
) -> None:
    """Runs first in each worker.

    Args:
        collects: Whether the garbage collector runs.
        runs_tasks: Whether the worker holds an object that reads samples, and not the user's dataset itself.
    """
    notice.ignore_in_worker()
    gc.freeze()
    if collects:
        gc.enable()
    if sys.platform == "linux":
        parent = multiprocessing.parent_process()
        # With "forkserver" the parent is that server, which ends with the rank.
        is_child = multiprocessing.get_start_method(allow_none=True) != "forkserver"
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if is_child and parent is not None and os.getppid() != parent.pid:
            os._exit(1)  # the parent ended before the call of prctl
    if init is not None:
        info: Any = get_worker_info()
        dataset = info.dataset.dataset if runs_tasks else info.dataset
        object.__setattr__(info, "dataset", dataset)  # torch refuses an assignment
        init(worker)


def worker_number() -> int | None:
    """The number of this loader worker; None if this process is not one."""
    info = get_worker_info()
    return None if info is None else info.id


def refuse_unsendable(batch: Any, errors: ReadErrors) -> None:
    """Raise if a batch cannot be sent from a worker. torch would wait for such a batch forever.

    Raises:
        DataError: the batch holds something that cannot be pickled.
    """
    try:
        _PicklingCheck(io.BytesIO()).dump(batch)
    except Exception as error:
        raise DataError(
            f"a batch cannot be sent from a loader worker: {type(error).__name__}: {error}",
            where=errors.where(),
            why="batches are pickled to be sent between processes; tensors go through shared memory.",
            fix="return tensors and plain values, or use workers=0.",
            rank=errors.rank,
            worker=errors.worker,
        ) from error


class _PicklingCheck(pickle.Pickler):
    """Pickles everything except tensors, because pickling moves their storage to shared memory."""

    def reducer_override(self, value: Any) -> Any:
        return (int, ()) if isinstance(value, torch.Tensor) else NotImplemented
