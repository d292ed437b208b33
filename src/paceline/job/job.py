"""`join` and `leave`: this process as a rank of a job. A front to `torch.distributed`'s process groups.

`join` chooses device, backend, interface and threads, and connects to the other ranks. After an error
nothing waits for peers: the rank reports the failure, closes its connections, and the exception goes on.
"""

from __future__ import annotations

import atexit
import copy
import ctypes
import dataclasses
import functools
import itertools
import os
import random
import sys
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from paceline import log, store_exchange
from paceline.errors import (
    ConfigError,
    PacelineError,
    PeerFailed,
    StepError,
    rank_location,
    refuse_different_values,
)
from paceline.job import current_step, environment, failures, ray, recovery, rendezvous
from paceline.job.all_gather import AllGather
from paceline.job.arguments import require_positive
from paceline.job.current_step import OUTSIDE
from paceline.job.devices import becomes_idle, choose_backend, choose_device
from paceline.job.exchange import FOREVER, LEFT_JOB, LEFT_LOOP, Exchange, StoreExchange
from paceline.job.failures import Peers
from paceline.job.forks import wait_before_forks
from paceline.job.mesh import DataAxis, Mesh
from paceline.job.network import interface_variables, route_to
from paceline.job.preemption import Preempted, notice
from paceline.job.rng import INIT, key
from paceline.machine import usable_cores

_current: weakref.ReferenceType[Job] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class LeftLoop:
    """A training loop that this rank left early, by `break` or an exception. The training makes it.

    Attributes:
        step: the number of the step in which the loop was left.
        finish: waits for the training's save in progress. All ranks call it when all have left the loop;
            until then the reference keeps the training alive.
    """

    step: int
    finish: Callable[[], None]


class Job:
    """This process as a rank of a job. `join` makes it; it ends with its `with` block or with `leave`.

    Attributes:
        rank: number of this process in the job, from 0.
        world_size: number of ranks of the job.
        local_rank: number of this process on its host, from 0.
        local_world_size: number of ranks on this host.
        one_host: whether all ranks are on this host.
        device: where this rank computes; it is the current device already.
        seed: the source of all randomness of the job; equal on all ranks.
        timeout_s: how long a collective may wait, in seconds.
        launcher: "torchrun" (or `paceline run`), "mpi", "slurm", "ray", "dry run" or "none".
        restarts: how often the launcher has restarted the job.
        mesh: the degrees of parallelism; None if `join` got no mesh.
        data: the ranks that samples are split over.
        device_mesh: torch's `DeviceMesh` of the axes of `mesh`; None without a mesh or with one rank.
        group: the process group of all ranks; None in a job of one process.
        control: a Gloo group of all ranks for small host values; None in a job of one process.
        store: the job's key-value store; None in a job of one process.
        exchange: the exchange of small values on `control`; None in a job of one process.
        peers: the failures of the ranks; None in a job of one process.
        alive: whether the job has not been left.
        failed: whether an error ends the job.
        failure: that error; None if there is none.
        is_sound: False if the device had not ended its work when the job failed, so that the weights are
            those of no step.
        preempted: the preemption that ends the job, if one does.
        left_loops: the training loops that this rank left early, until `check_loop_exit`.
        state_ranks: the ranks whose states together have the names of all tensors in a checkpoint: one of
            each stage of a pipeline, or of each host of `diloco`.
        generation: how often the ranks have connected again; see `reconnect`.
        is_replacement: whether this process replaces a failed one, and has not connected to the others yet.

    Collective: as the methods say.
    """

    def __init__(
        self,
        info: environment.RankInfo,
        device: torch.device,
        *,
        seed: int,
        timeout_s: float,
        mesh: Mesh | None = None,
    ) -> None:
        self.rank = info.rank
        self.world_size = info.world_size
        self.local_rank = info.local_rank
        self.local_world_size = info.local_world_size
        self.one_host = info.one_host
        self.launcher = info.launcher
        self.restarts = info.restarts
        self.device = device
        self.seed = seed
        self.timeout_s = timeout_s
        self.mesh = mesh
        self.device_mesh: Any = None
        self._data: DataAxis | None = None
        self.group: dist.ProcessGroup | None = None
        self.control: dist.ProcessGroup | None = None
        self.store: dist.Store | None = None
        self.exchange: Exchange | None = None
        self.peers: Peers | None = None
        self.alive = True
        self.failed = False
        self.failure: BaseException | None = None
        self.is_sound = True
        self.preempted: Preempted | None = None
        self.left_loops: list[LeftLoop] = []
        self.state_ranks: tuple[int, ...] = (0,)
        self.generation = 0
        self.is_replacement = False
        self._backend = ""
        self._base_store: dist.Store | None = None  # of all generations
        self._leave_actions: dict[int, Callable[[], None]] = {}
        self._action_numbers = itertools.count()
        self._variables: list[str] = []
        self._handler = log.show(self.rank, self.world_size)

    @property
    def is_dry_run(self) -> bool:
        """Whether the other ranks do not exist (`paceline run --dry-run`)."""
        return self.launcher == environment.DRY_RUN

    @property
    def data(self) -> DataAxis:
        """The ranks that samples are split over."""
        if self._data is not None:
            return self._data
        ranks = tuple(range(self.world_size))
        return DataAxis(self.rank, self.world_size, self.group, self.control, ranks, True)

    def on_leave(self, action: Callable[[], None]) -> Callable[[], object]:
        """Call `action` when this rank leaves the job, also after an error. The last one runs first.

        Returns:
            A function that removes the action. The job keeps the action, and all that it refers to, until
            it is removed or the job ends. Removing it twice does nothing.
        """
        number = next(self._action_numbers)
        self._leave_actions[number] = action
        # Not a lambda: the result must not keep the job alive.
        return functools.partial(self._leave_actions.pop, number, None)

    def set_variable(self, name: str, value: str) -> None:
        """Set an environment variable until the job is left, unless the user has set it."""
        if name not in os.environ:
            self._variables.append(name)
            os.environ[name] = value

    def __repr__(self) -> str:
        return f"Job(rank {self.rank} of {self.world_size}, {self.device})"

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, Preempted):
            self.preempted = error  # all ranks raise it at the same point, so the end is clean
        clean = isinstance(error, SystemExit) and error.code in (None, 0)
        if error is None or self.preempted is not None or clean:
            self.leave()
            return
        # A peer's failure also breaks collectives that the user called without Paceline.
        cause = self._peer_failure_behind(error) if isinstance(error, RuntimeError) else None
        self.abort(error)
        if cause is not None:
            raise cause from error

    def leave(self) -> None:
        """Leave the job cleanly: wait for the other ranks, however long they still work; close the groups.

        Raises:
            PeerFailed: another rank failed instead of leaving.
            StepError: this rank left a training loop that others continue.

        Collective: all ranks, once, at the end.
        """
        if not self.alive:
            return
        try:
            while self._leave_actions:
                self._leave_actions.popitem()[1]()
            self.check_loop_exit()
            self.wait_for_all_ranks(LEFT_JOB)
        except BaseException as error:
            self.abort(error)
            raise
        if self.group is not None:
            dist.destroy_process_group()
        self._close()
        failures.uninstall_excepthook()

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows of all data ranks in rank order, with gradient, for losses that compare samples.

        The gradient of a row is the sum of the gradients that all ranks compute for it. See
        [gathered losses](../howto/losses.md#gathered-losses) for the loss to compute from the result.

        Args:
            tensor: Shape (rows, ...), on the job's device. The numbers of rows of the ranks may differ.

        Returns:
            Shape (rows of all ranks, ...). A padding micro-batch sends no row: only its own rank sees it,
            behind those of the others. In a job of one process, `tensor` itself.

        Raises:
            RankDisagreement: the tensors of the ranks differ in dtype, in other dimensions, or in whether
                they require a gradient.
            StepError: the step has several micro-batches.
            ConfigError: the mesh has a pipeline.

        Cost: the ranks also exchange the numbers of rows on the host, so each waits for the slowest.

        Collective: all ranks, in each micro-batch; its backward too.
        """
        self.refuse_if_left()
        num_micro_batches, is_padding = current_step.forward
        if num_micro_batches > 1:
            raise StepError(
                f"all_gather was called in a step of {num_micro_batches} micro-batches.",
                where=self.where(),
                why="it gathers one micro-batch of each rank, so the loss would depend on the number of "
                "ranks.",
                fix="use one micro-batch for each rank: leave micro_batch out, or use a smaller "
                "global_batch.",
            )
        if self.mesh is not None and self.mesh.pp > 1:
            raise ConfigError(
                "all_gather cannot be used in a pipeline.",
                where=self.where(),
                why="only the ranks of the last stage compute the loss.",
                fix="use fsdp or tensor_parallel for this model.",
            )
        if self.exchange is None:
            return tensor
        rows = 0 if is_padding else len(tensor)
        kind = [str(tensor.dtype), list(tensor.shape[1:]), tensor.requires_grad]
        everyone = self.exchange.gather("all_gather", [rows, kind])
        refuse_different_values(
            "dtype, shape of a row, and requires_grad of the tensor of all_gather",
            [kind for _, kind in everyone],
            where=self.where(),
        )
        if self.data.group is None:
            return tensor
        sizes = [everyone[rank][0] for rank in self.data.reporters]
        try:
            gathered: torch.Tensor = AllGather.apply(  # type: ignore[no-untyped-call]
                tensor, sizes, self.data.rank, self.data.group
            )
        except RuntimeError as error:
            self.reraise(error)
        return gathered

    def wait_for_all_ranks(self, call: str) -> None:
        """Wait until all ranks make this call, however long they work; a rank that has ended is an error.

        Collective: all ranks.
        """
        if self.exchange is not None:
            self.exchange.gather(call, None, has_timeout=False)

    def abort(self, error: BaseException) -> None:
        """Leave the job because of `error`, without waiting for any rank.

        The other ranks' collectives break at once, and their errors name this rank. If one rank alone is
        interrupted or exits cleanly, that is a failure too: the others cannot go on without it.
        """
        if not self.alive:
            return
        self.failed, self.failure = True, error
        if self.peers is not None:
            self.peers.mark_failed(error)
        failures.tell_launcher(error)
        if self.group is not None:  # before the actions: the other ranks must not wait for them
            self.is_sound = self.is_sound and becomes_idle(self.device)
            failures.abort_process_groups()
        while self._leave_actions:
            try:
                self._leave_actions.popitem()[1]()
            except Exception as second:  # the first error is the one to report
                log.logger.warning("while leaving after an error: %r", second)
        if self.peers is not None:
            self.peers.wait_for_readers()
            failures.release_peers()
        self._close()

    def _abort_at_exit(self) -> None:
        # A thread of ours or of Gloo that takes the lock of a finished interpreter aborts the process; and
        # ranks that still wait for this one need to know why it ended.
        self.abort(
            StepError("the process ended without leaving the job (`with paceline.join() as job`).")
        )

    def reraise(self, error: BaseException) -> NoReturn:
        """Raise the peer's failure that caused `error` of a collective, if one is known; else `error`."""
        cause = self._peer_failure_behind(error)
        if cause is None:
            raise error
        raise cause from error

    def _peer_failure_behind(self, error: BaseException) -> PeerFailed | None:
        # Our own errors name their cause already, unless a group knew nothing about its peer.
        names_cause = isinstance(error, PacelineError) and error.facts.get("cause_known", True)
        if self.peers is None or names_cause:
            return None
        return self.peers.failure_behind_broken_collective()

    def check_loop_exit(self) -> None:
        """Wait for the other ranks if this rank left a training loop early; called before collectives.

        Raises:
            StepError: another rank continues the loop, and would wait for this rank forever.

        Collective: all ranks if one of them left a loop early; else none.
        """
        loops, self.left_loops = self.left_loops, []
        if not loops:
            return
        self.wait_for_all_ranks(LEFT_LOOP)
        log.logger.warning(
            "the training loop was left in step %d by `break` or an exception; what was not saved or "
            "logged before is lost. `step.stop()` ends the loop after a whole step.",
            loops[0].step,
        )
        for left in loops:
            left.finish()
        notice.deliver()

    def reconnect(self, cause: BaseException) -> None:
        """Connect to the ranks that are left, and to those that replace the others; see `recovery`.

        Args:
            cause: Why the connections are broken.

        Raises:
            BaseException: `cause`, if the launcher has given up; the job can only be left then.

        Collective: all ranks; a process that replaces another one calls it before its training begins.
        """
        assert self._base_store is not None
        if not self.is_replacement:
            self.is_sound = becomes_idle(self.device)
            if not self.is_sound:
                raise cause
            self._close_groups()
            following = self.generation + 1
            if not recovery.tell_launcher("waits", step=current_step.step, generation=following):
                raise cause
            recovery.await_announcement(following, cause)
            self.generation = following
        current_step.step = 0  # ranks whose calls name different steps would disagree
        # The connection to the store may have broken too.
        self._base_store = self._base_store.clone()  # type: ignore[attr-defined] # missing in torch's stubs
        store = dist.PrefixStore(f"generation/{self.generation}", self._base_store)
        recovery.await_ranks(store, self.rank, self.world_size, cause)
        if self.is_replacement:
            self._close_groups()
            self.is_replacement = False
        hook = sys.excepthook  # each call of init_process_group wraps it
        self.store = store
        _make_groups(self, self._backend, store)
        sys.excepthook = hook
        assert self.peers is not None
        failures.install_excepthook(self.peers, hook)

    def _close_groups(self) -> None:
        if self.exchange is not None:
            self.exchange.close()
        failures.abort_process_groups()
        _keep_forever(self.control)
        self.group = self.control = self.exchange = None

    def among(self, ranks: Sequence[int], store: dist.Store | None) -> Job:
        """This job as one of these ranks, for work after a failure; they exchange values through the store.

        Collective: these ranks, in the same order; none if it is this one alone.
        """
        job = copy.copy(self)
        job.rank, job.world_size = list(ranks).index(self.rank), len(ranks)
        job.local_rank, job.local_world_size = job.rank, job.world_size
        job.group = job.control = job.store = job.exchange = job.peers = None
        job.mesh = job.device_mesh = job._data = None
        job.state_ranks = (0,)
        job.failed = False
        if job.world_size > 1:
            assert store is not None
            job.store = store
            job.exchange = StoreExchange(store, job.rank, job.world_size)
        return job

    def where(self, *, step: int | None = None, detail: str = "") -> str:
        """This rank, host and step (the current one by default), for errors."""
        step = current_step.step or None if step is None else step
        return rank_location(self.rank, self.world_size, step=step, detail=detail)

    def refuse_if_left(self) -> None:
        """Raise StepError if the job has been left."""
        if not self.alive:
            raise StepError("this job has been left.", fix="use it only inside the `with` block.")

    def _close(self) -> None:
        global _current
        self.alive = False
        self.left_loops.clear()
        notice.take()  # a signal that this job did not handle does not stop the next one
        atexit.unregister(self._abort_at_exit)
        if self.exchange is not None:
            self.exchange.close()
        if self.failed:
            _keep_forever(self.control)
        self.group = self.control = self.store = self.exchange = self.peers = None
        self.device_mesh = self._data = None
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
    mesh: Mesh | None = None,
) -> Job:
    """Make this process a rank of its job. Without a launcher the job has one process.

    Args:
        seed: the source of all randomness of the job; equal on all ranks. The generators of torch, numpy
            and Python are seeded with it, so all ranks draw equal initial weights.
        device: "cpu", "cuda", "xpu", or None for an accelerator if there is one. The local rank chooses
            the index.
        backend: a backend of torch.distributed; None chooses by device: "nccl" and "gloo" on CUDA, "xccl"
            and "gloo" on XPU; on CPU "shm", which is shared memory, if all ranks are on one host, else
            "gloo".
        timeout_s: how long a collective may wait, in seconds.
        mesh: the degrees of parallelism, for `fsdp`, `tensor_parallel` and `pipeline`; None: samples are
            split over all ranks.

    Raises:
        ConfigError: the launcher's variables are incomplete or contradict each other.
        ConfigError: this host has no such device or backend, two ranks share one GPU, or this process
            has joined a job already, or has a process group.
        RankDisagreement: the seeds of the ranks differ.
        CollectiveTimeout: a rank did not come in time.

    Collective: all ranks, once.
    """
    global _current
    if current() is not None:
        raise ConfigError(
            "this process has joined a job already.",
            fix="leave it first: end its `with paceline.join() as job` block, or call job.leave().",
        )
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ConfigError(f"seed must be a whole number, got {seed!r}.")
    require_positive(timeout_s=timeout_s)
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ConfigError(f"mesh must be a paceline.Mesh, got {mesh!r}.")
    info = environment.read(os.environ)
    store = ray.take_store()
    if store is not None:
        info = dataclasses.replace(info, launcher="ray")
    if info.world_size > 1 and dist.is_available() and dist.is_initialized():
        raise ConfigError(
            "this process has a process group already.",
            where=f"rank {info.rank} of {info.world_size}",
            why="the program called init_process_group, or a library did, such as Accelerate or the"
            " TrainingArguments of transformers.",
            fix="call paceline.join before the library, which then uses its process group, or remove your own"
            " init_process_group.",
        )
    if mesh is not None:
        mesh = mesh.resolve(info.world_size, info.local_world_size)
    if info.launcher == environment.DRY_RUN:
        own_device = choose_device(
            device, dataclasses.replace(info, local_rank=0, local_world_size=1)
        )
        # torch's own: its collectives return at once, and each rank's part is that of this rank.
        chosen_backend = "fake"
    else:
        own_device = choose_device(device, info)
        chosen_backend = choose_backend(backend, own_device, info)
    job = Job(info, own_device, seed=seed, timeout_s=timeout_s, mesh=mesh)
    try:
        if own_device.type != "cpu":
            torch.get_device_module(own_device).set_device(own_device)
        _choose_threads(job)
        _seed_everything(seed)
        current_step.step, current_step.forward, current_step.stage = 0, OUTSIDE, None
        if info.world_size > 1:
            _connect(job, info, chosen_backend, store)
            wait_before_forks()
    except BaseException as error:
        job.abort(error)
        raise
    _current = weakref.ref(job)
    return job


def _keep_forever(control: dist.ProcessGroup | None) -> None:
    """Never free the control group: a Gloo group that is freed waits for the peers of what is in flight."""
    if control is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(control))


def current() -> Job | None:
    """The job that this process has joined and not left; None if there is none."""
    job = None if _current is None else _current()
    return job if job is not None and job.alive else None


def _connect(job: Job, info: environment.RankInfo, backend: str, store: dist.Store | None) -> None:
    if job.one_host:
        # Otherwise Gloo resolves the host name, which may take half a second or give another host.
        job.set_variable("GLOO_SOCKET_IFNAME", "lo")
    elif info.master is not None and (route := route_to(info.master.rpartition(":")[0])):
        for name, interface in interface_variables(route, os.environ).items():
            job.set_variable(name, interface)
    if job.is_dry_run:
        job.store = dist.HashStore()
    else:
        job.store = rendezvous.connect_store(info, timeout_s=job.timeout_s, store=store)
    job._base_store, job._backend = job.store, backend
    job.generation = recovery.first_generation(os.environ)
    job.is_replacement = job.generation > 0
    hook = sys.excepthook
    if job.is_replacement:
        _make_replacement_groups(job)
    else:
        # Before the checks: if they fail, rank 0 keeps the store until all ranks have read the values.
        job.peers = _peers(job, job.store)
        if not job.is_dry_run:
            _refuse_wrong_ranks(job, job.store)
        _make_groups(job, backend, job.store)
    assert job.peers is not None
    failures.install_excepthook(job.peers, hook)
    atexit.register(job._abort_at_exit)


def _peers(job: Job, store: dist.Store) -> Peers:
    return Peers(dist.PrefixStore(failures.PREFIX, store), job.rank, job.world_size)


def _make_replacement_groups(job: Job) -> None:
    """The groups of a process that replaces one that has failed, until its training begins."""
    recovery.register()
    job.peers = _peers(job, dist.HashStore())
    dist.init_process_group(
        recovery.NAME, store=dist.HashStore(), rank=job.rank, world_size=job.world_size
    )
    job.group = job.control = dist.group.WORLD
    job.exchange = recovery.ReplacementExchange(job.world_size)


def _make_groups(job: Job, backend: str, store: dist.Store) -> None:
    """Connect to the other ranks through this store."""
    job.peers = _peers(job, store)
    timeout = timedelta(seconds=job.timeout_s)
    # Not the timeout of collectives: rank 0 may download for hours, or plot at the end. `Exchange` has it.
    control_backend = "fake" if job.is_dry_run else "gloo"
    with failures.note_connections():
        dist.init_process_group(
            backend,
            # Without a store torch loads its backend "fake".
            store=None if job.is_dry_run else dist.PrefixStore("groups", store),
            rank=job.rank,
            world_size=job.world_size,
            timeout=timeout,
            device_id=job.device if job.device.type != "cpu" else None,
        )
        job.group = dist.group.WORLD
        job.control = dist.new_group(backend=control_backend, timeout=FOREVER)
        if job.mesh is not None:
            _connect_axes(job, job.mesh, timeout, control_backend)
    job.exchange = Exchange(
        job.control,
        dist.PrefixStore("exchange", store),
        timeout_s=job.timeout_s,
        reraise=job.reraise,
        failure=job.peers.failure,
    )
    # A rank that fails before all are connected would break the connections of others.
    job.exchange.gather("join", None)


def _connect_axes(job: Job, mesh: Mesh, timeout: timedelta, control_backend: str) -> None:
    """Make the process groups of the mesh. All ranks make all groups, in the same order."""
    world, own_rank = job.world_size, job.rank
    # `fully_shard` needs the axis dp_shard beside other axes, also of one rank.
    for_sharding = mesh.dp_replicate > 1 or mesh.tp > 1 or mesh.pp > 1
    names = [n for n, size in mesh.axes.items() if size > 1 or (for_sharding and n == "dp_shard")]

    def group_of(
        lists: list[list[int]], axis: str, backend: str | None = None
    ) -> dist.ProcessGroup:
        if len(lists) == 1 and backend is None:
            assert job.group is not None
            return job.group
        made: list[dist.ProcessGroup] = [
            # The description is that of torch's own meshes; a report of a hang names the axis.
            dist.new_group(ranks, timeout=timeout, backend=backend, group_desc=f"mesh_{axis}")
            for ranks in lists
        ]
        return next(group for group, ranks in zip(made, lists, strict=True) if own_rank in ranks)

    def lists_of(ranks_of: Callable[[int], list[int]]) -> list[list[int]]:
        return [list(each) for each in sorted({tuple(ranks_of(rank)) for rank in range(world)})]

    groups = [
        group_of(lists_of(functools.partial(mesh.axis_ranks, axis=name)), name) for name in names
    ]
    if mesh.data_size not in (1, world):
        lists = lists_of(mesh.data_ranks)
        own_axis = next(ranks for ranks in lists if own_rank in ranks)
        job._data = DataAxis(
            own_axis.index(own_rank),
            mesh.data_size,
            group_of(lists, "data"),
            group_of(lists, "data", control_backend),
            *_reporters(mesh, own_rank),
        )
    elif mesh.data_size == 1:
        job._data = DataAxis(0, 1, None, None, *_reporters(mesh, own_rank))
    job.state_ranks = tuple(mesh.axis_ranks(0, "pp"))
    if mesh.pp > 1:
        current_step.stage = mesh.axis_ranks(own_rank, "pp").index(own_rank)
    from torch.distributed.device_mesh import DeviceMesh

    sizes = [mesh.axes[name] for name in names]
    grid = torch.arange(world).reshape(sizes)
    job.device_mesh = DeviceMesh.from_group(
        groups if len(groups) > 1 else groups[0],
        job.device.type,
        mesh=grid if len(groups) > 1 else None,
        mesh_dim_names=tuple(names),
    )
    if own_rank == 0:
        log.logger.info(
            "mesh: %s; the samples of a step are split over %d of %d ranks.",
            mesh,
            mesh.data_size,
            world,
        )


def _reporters(mesh: Mesh, rank: int) -> tuple[tuple[int, ...], bool]:
    last_stage = mesh.data_size * mesh.tp * (mesh.pp - 1)
    reporters = tuple(mesh.data_ranks(last_stage))
    return reporters, rank in reporters


def _refuse_wrong_ranks(job: Job, store: dist.Store) -> None:
    """Raise on all ranks if their seeds differ, or if two of them share a GPU."""
    properties: Any = None
    if job.device.type == "cuda":
        properties = torch.cuda.get_device_properties(job.device)
    own = [job.seed, properties and str(properties.uuid)]
    ranks = store_exchange.gather(store, "ranks", own, job.rank, job.world_size)
    seeds, devices = zip(*ranks, strict=True)
    refuse_different_values("seed", seeds, fix="pass the same seed to `join` on every rank.")
    first: dict[str, int] = {}
    for rank, device in enumerate(devices):
        if device is not None and first.setdefault(device, rank) != rank:
            raise ConfigError(
                f"ranks {first[device]} and {rank} share one GPU.",
                where=job.where(),
                why="NCCL needs a GPU for each rank.",  # its own error names neither
                fix="start one rank per GPU, or pass device='cpu'.",
            )


def _seed_everything(seed: int) -> None:
    stream = key(seed, INIT)
    torch.manual_seed(stream >> 1)
    np.random.seed(stream & 0xFFFFFFFF)
    random.seed(stream)


def _choose_threads(job: Job) -> None:
    if "OMP_NUM_THREADS" not in os.environ and job.local_world_size > 1:
        torch.set_num_threads(max(1, usable_cores() // job.local_world_size))
