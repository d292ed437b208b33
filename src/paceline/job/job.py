"""`join` and `leave`: this process as a rank of a job. A front to `torch.distributed`'s process groups.

Chooses device, backend, interface and threads, meets the other ranks, and leaves cleanly. On an error
path nothing waits for peers: the failure is marked, connections are closed, and the exception goes on.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import random
import weakref
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from paceline import log, torch_private
from paceline.errors import ConfigError, PacelineError, PeerFailed, StepError, place
from paceline.job import current_step, environment, hooks, rendezvous
from paceline.job.devices import choose_backend, choose_device
from paceline.job.heap import keep_freed_memory
from paceline.job.mesh import DataAxis
from paceline.job.peers import Peers
from paceline.job.preemption import Preempted, notice
from paceline.job.rng import INIT, key
from paceline.machine import usable_cores

_current: weakref.ReferenceType[Job] | None = None


class Job:
    """This process as a rank of a job. Made by `join`; ends with its `with` block or `leave`.

    Attributes:
        rank, world_size, local_rank, local_world_size: as torchrun names them.
        device: where this rank computes; already set as the current device.
        seed: what all randomness of the job derives from; equal on all ranks.
        launcher: "torchrun" (or `paceline run`), "mpi", "slurm" or "none".
        group: the process group of all ranks, None in a job of one process.
        control: a Gloo group of all ranks for small host values, None in a job of one process.
        store: the job's key-value store, None in a job of one process.
        failed: whether it is being left because of an error.
        preempted: what it is being left by, if that is a preemption.
        threads_chosen: whether the number of threads was chosen for this rank rather than set by the
            user.

    Collective: as the methods say.
    """

    def __init__(
        self, where: environment.Place, device: torch.device, *, seed: int, timeout_s: float
    ) -> None:
        self.rank = where.rank
        self.world_size = where.world_size
        self.local_rank = where.local_rank
        self.local_world_size = where.local_world_size
        self.one_host = where.one_host
        self.launcher = where.launcher
        self.restarts = where.restarts
        self.device = device
        self.seed = seed
        self.timeout_s = timeout_s
        self.group: dist.ProcessGroup | None = None
        self.control: dist.ProcessGroup | None = None
        self.store: dist.Store | None = None
        self.peers: Peers | None = None
        self.threads_chosen = False
        self.alive = True
        self.failed = False
        self.preempted: Preempted | None = None
        self.left_loop: tuple[int, bool] | None = None  # the step, and whether it was updated
        self._leave_actions: dict[int, Callable[[], None]] = {}
        self._action_numbers = itertools.count()
        self._variables: list[str] = []
        self._handler = log.show(self.rank, self.world_size)

    @property
    def data(self) -> DataAxis:
        """The ranks that samples are split over. Collective: none."""
        return DataAxis(self.rank, self.world_size, self.group, self.control)

    def on_leave(self, action: Callable[[], None]) -> Callable[[], None]:
        """Call `action` when this rank leaves the job, also after an error. The last one runs first.

        Returns:
            A function that removes the action. The job keeps the action, and all that it refers to, until
            it is removed or the job ends. Removing it twice does nothing.

        Collective: none.
        """
        number = next(self._action_numbers)
        self._leave_actions[number] = action
        return functools.partial(_remove, self._leave_actions, number)

    def set_variable(self, name: str, value: str) -> None:
        """Set an environment variable until the job is left, unless the user has set it.

        Collective: none.
        """
        if name not in os.environ:
            self._variables.append(name)
            os.environ[name] = value

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, Preempted):
            self.preempted = error  # raised on all ranks at the same place: an agreed end
        clean = isinstance(error, SystemExit) and error.code in (None, 0)
        if error is None or self.preempted is not None or clean:
            self.leave()
            return
        # The user's own collectives break too where a peer fails.
        known = self._behind(error) if isinstance(error, RuntimeError) else None
        self.abandon(error)
        if known is not None:
            raise known from error

    def leave(self) -> None:
        """Leave the job cleanly: wait for the other ranks, then close the groups.

        Raises:
            PeerFailed: another rank failed instead of leaving.
            StepError: this rank left a training loop in which others go on.

        Collective: all ranks, once, at the end.
        """
        if not self.alive:
            return
        try:
            self._run_leave_actions()
            self.settle()
            self._wait_for_all()
        except BaseException as error:
            self.abandon(error)
            raise
        if self.group is not None:
            dist.destroy_process_group()
        self._close()
        hooks.uninstall()

    def _wait_for_all(self) -> None:
        if self.control is not None:
            try:
                dist.barrier(group=self.control)
            except RuntimeError as error:
                self.reraise(error)

    def abandon(self, error: BaseException) -> None:
        """Leave the job because of `error`, waiting for nobody.

        The other ranks' collectives break at once and name this rank. Interrupts and clean exits of
        one rank alone are failures too: the others cannot go on without it.

        Collective: none.
        """
        if not self.alive:
            return
        self.failed = True
        if self.peers is not None:
            hooks.mark(self.peers, error)
        self._run_leave_actions()
        if self.group is not None:
            # torch's public `destroy_process_group` may wait for work that will never end.
            abort = torch_private.find("torch.distributed.distributed_c10d._abort_process_group")
            (abort or dist.destroy_process_group)()
        if self.peers is not None:
            self.peers.linger()
        self._close()

    def _end_unleft(self) -> None:
        """At the end of a process that forgot to leave, before the interpreter shuts down.

        A thread of ours or of Gloo that asks for the lock of an interpreter that has gone aborts the
        process; and ranks that still wait for this one shall hear why it went.
        """
        self.abandon(
            StepError("its process ended without leaving the job (`with paceline.join() as job`).")
        )

    def reraise(self, error: BaseException) -> NoReturn:
        """Raise what is behind `error` of a collective: a peer's failure if one is known, else it.

        Collective: none.
        """
        known = self._behind(error)
        if known is None:
            raise error
        raise known from error

    def _behind(self, error: BaseException) -> PeerFailed | None:
        # Our own errors say what is known, but for those of a group that heard nothing of its peer.
        known = isinstance(error, PacelineError) and error.facts.get("cause_known", True)
        if self.peers is None or known:
            return None
        return self.peers.explain()

    def settle(self) -> None:
        """Wait for the others where this rank left a training loop early; before other collectives.

        Raises:
            StepError: another rank went on; it would wait for this one for ever.

        Collective: all ranks, if one of them does; nothing where no loop was left early.
        """
        left, self.left_loop = self.left_loop, None
        if left is None:
            return
        step, updated = left
        if self.peers is not None:
            self.peers.leave_loop(step, updated=updated, timeout_s=self.timeout_s)
        log.logger.warning(
            "the training loop was left in step %d by `break` or an exception: what was not saved or "
            "logged by then is not; `step.stop()` ends it whole.",
            step,
        )
        notice.deliver()

    def where(self) -> str:
        """This rank, host and step, for errors. Collective: none."""
        return place(self.rank, self.world_size, step=current_step.step or None)

    def refuse_if_left(self) -> None:
        """Raise where something of this job is used after its end. Collective: none."""
        if not self.alive:
            raise StepError(
                "this job has been left.", fix="keep what uses it inside the `with` block."
            )

    def _run_leave_actions(self) -> None:
        while self._leave_actions:
            self._leave_actions.popitem()[1]()

    def _close(self) -> None:
        global _current
        self.alive = False
        notice.take()  # what a failed training had no chance to meet is not the next one's
        atexit.unregister(self._end_unleft)
        if self.peers is not None:
            self.peers.close()
        self.group = self.control = self.store = self.peers = None
        for name in self._variables:
            os.environ.pop(name, None)
        log.hide(self._handler)
        _current = None


def join(
    *,
    seed: int = 0,
    device: str | torch.device | None = None,
    backend: str | None = None,
    timeout_s: float = 600.0,
) -> Job:
    """Make this process a rank of its job, whatever launched it; one process if nothing did.

    Args:
        seed: What all randomness of the job derives from; torch's, numpy's and Python's generators are
            seeded too, so that weights drawn next are the same everywhere.
        device: "cpu", "cuda", "xpu", or None for the best there is. An index is chosen by local rank.
        backend: A backend of torch.distributed; None chooses by device ("nccl" and "gloo" on CUDA,
            "xccl" and "gloo" on XPU; on CPU "shm": shared memory between ranks of one host, Gloo
            between hosts).
        timeout_s: How long a collective may wait, in seconds.

    Raises:
        LauncherError: the launcher's variables are partial or contradict each other.
        ConfigError: no such device or backend here, or a job is joined already.
        RankDisagreement: the ranks have different seeds.

    Collective: all ranks, once.
    """
    global _current
    if current() is not None:
        raise ConfigError("this process has joined a job already.", fix="leave it first.")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ConfigError(f"seed must be a whole number, got {seed!r}.")
    if not timeout_s > 0:
        raise ConfigError(f"timeout_s must be more than 0, got {timeout_s}.")
    where = environment.read(os.environ)
    chosen = choose_device(device, where)
    names = choose_backend(backend, chosen)
    job = Job(where, chosen, seed=seed, timeout_s=timeout_s)
    try:
        if chosen.type != "cpu":
            torch.get_device_module(chosen).set_device(chosen)
        else:
            keep_freed_memory(os.environ)
        _choose_threads(job)
        _seed_everything(seed)
        current_step.step = 0
        if where.world_size > 1:
            _connect(job, where, names)
    except BaseException as error:
        job.abandon(error)
        raise
    _current = weakref.ref(job)
    return job


def _remove(actions: dict[int, Callable[[], None]], number: int) -> None:
    actions.pop(number, None)


def current() -> Job | None:
    """The job that this process has joined and not left."""
    job = None if _current is None else _current()
    return job if job is not None and job.alive else None


def _connect(job: Job, where: environment.Place, backend: str) -> None:
    if job.one_host:
        # Without it Gloo looks the host name up, which may take half a second or lead off the host.
        job.set_variable("GLOO_SOCKET_IFNAME", "lo")
    job.store = rendezvous.meet(where, timeout_s=job.timeout_s)
    _refuse_shared_device(job)
    timeout = timedelta(seconds=job.timeout_s)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("groups", job.store),
        rank=job.rank,
        world_size=job.world_size,
        timeout=timeout,
        device_id=job.device if job.device.type != "cpu" else None,
    )
    job.group = dist.group.WORLD
    job.control = dist.new_group(backend="gloo", timeout=timeout)
    job.peers = Peers(dist.PrefixStore("peers", job.store), job.rank, job.world_size)
    hooks.install(job.peers)
    atexit.register(job._end_unleft)


def _refuse_shared_device(job: Job) -> None:
    """NCCL refuses two ranks on one GPU with a riddle; say it before, by the device's identity."""
    if job.device.type != "cuda" or job.store is None:
        return
    properties: Any = torch.cuda.get_device_properties(job.device)
    job.store.set(f"device/{job.rank}", str(properties.uuid))
    seen: dict[bytes, int] = {}
    for rank in range(job.world_size):
        other = seen.setdefault(job.store.get(f"device/{rank}"), rank)
        if other != rank:
            raise ConfigError(
                f"ranks {other} and {rank} share one GPU ({properties.name}).",
                why="NCCL needs a GPU for each rank.",
                fix="start one rank per GPU, or pass device='cpu'.",
            )


def _seed_everything(seed: int) -> None:
    """Weights that are drawn next follow from the seed, on every rank alike."""
    stream = key(seed, INIT)
    torch.manual_seed(stream >> 1)
    np.random.seed(stream & 0xFFFFFFFF)
    random.seed(stream)


def _choose_threads(job: Job) -> None:
    if os.environ.get("PACELINE_THREADS") == "auto":
        job.threads_chosen = True
    elif "OMP_NUM_THREADS" not in os.environ:
        job.threads_chosen = True
        if job.local_world_size > 1:
            torch.set_num_threads(max(1, usable_cores() // job.local_world_size))
