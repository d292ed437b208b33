"""`ddp`: a front to `torch.nn.parallel.DistributedDataParallel`, and the strategy that lets it sum gradients.

It reports wrong models before training, with parameter names; torch reports indices later, or hangs. torch's
DDP reduces the gradients.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from paceline import torch_private
from paceline.clock.waits import watch_backward
from paceline.data.batches import Batches
from paceline.data.plan import MicroBatch, PlannedStep
from paceline.errors import ConfigError, StepError, listed
from paceline.job.job import Job
from paceline.parallel.compression import PowerSGD, compress_gradients, refuse_compression
from paceline.parallel.modules import (
    agree_on_parameters,
    equalize_buffers,
    find_wrapper,
    owned_parameters,
    refuse_module,
    refuse_wrapped,
    unreached_error,
    unwrap,
    warn_untrained,
    wrapped_by,
)
from paceline.parallel.strategy import Strategy
from paceline.shm.group import ShmGroup

DEFAULT_BUCKET_MB = 25.0
# Makes a new reducer over the default group, without collectives.
_REBUILD = "torch.nn.parallel.DistributedDataParallel.__setstate__"
# Attribute of a wrapper: the names and parameters that were trainable when DDP wrapped the model.
_KNOWN = "_paceline_known"


class Replica(DistributedDataParallel):
    """torch's DDP, as `ddp` makes it.

    Attributes:
        compress: As given to `ddp`.
    """

    compress: str | PowerSGD | None = None


def ddp(
    job: Job,
    module: nn.Module,
    *,
    bucket_mb: float = DEFAULT_BUCKET_MB,
    find_unused: bool = False,
    compress: str | PowerSGD | None = None,
) -> nn.Module:
    """Wrap `module` so that its gradients are averaged over the ranks; weights become those of rank 0.

    In a job of one process the module itself is returned. Otherwise the result is torch's own wrapper:
    gradients are views into its buckets. torch rebuilds the buckets after the first step of a process,
    so with Gloo or NCCL on 3 and more ranks a resumed run equals an uninterrupted one to rounding.

    Args:
        bucket_mb: Size of a gradient bucket in MiB; at the default the first one is 1 MiB. Over Gloo and
            NCCL, on 3 and more ranks, the size changes the order of sums and so the last bits.
        find_unused: Search each forward for parameters that it does not use, or that are frozen. Slower.
        compress: "fp16" or "bf16" casts gradients before they are sent, `PowerSGD(rank=4)` approximates them.
            For slow networks; the result is no longer that of one process. A resumed training begins
            with an empty state of PowerSGD.

    Raises:
        ConfigError: the module has no trainable parameter, a parameter on another device than the job's, or
            one that is not initialised; an option is out of range or has no effect; the module is
            wrapped already.
        RankDisagreement: the ranks' parameters or options differ; the error names the first difference.

    Collective: all ranks, once for each model, in the same order.
    """
    if not (isinstance(bucket_mb, int | float) and bucket_mb > 0):
        raise ConfigError(
            f"bucket_mb must be a number of MiB greater than 0, got {bucket_mb!r}.",
            fix=f"leave bucket_mb out ({DEFAULT_BUCKET_MB:g} MiB), or give a number.",
        )
    refuse_compression(compress, module)
    refuse_wrapped(module, wrap="paceline.ddp")
    if job.mesh is not None and job.mesh.dp_replicate != job.world_size:
        raise ConfigError(
            f"ddp keeps the whole model on each rank, but the mesh is {job.mesh}.",
            fix="use paceline.fsdp, or Mesh(dp_replicate=-1).",
        )
    refuse_module(job, module, wrap="paceline.ddp")
    if job.data.group is None:
        return module
    agree_on_parameters(job, module, f"{bucket_mb=}, {find_unused=}, {compress=}")
    try:
        wrapper = Replica(
            module,
            device_ids=[job.device] if job.device.type == "cuda" else None,
            process_group=job.data.group,
            bucket_cap_mb=None if bucket_mb == DEFAULT_BUCKET_MB else float(bucket_mb),
            find_unused_parameters=find_unused,
            gradient_as_bucket_view=True,
            init_sync=not job.is_replacement,  # else the weights come with the state of the other ranks
            **_no_buffer_broadcast(),
        )
        wrapper.compress = compress
        _set_up_reduction(job, wrapper)
    except RuntimeError as error:
        job.reraise(error)
    if not job.is_replacement:
        equalize_buffers(job, wrapper)
    return wrapper


def _set_up_reduction(job: Job, wrapper: Replica) -> None:
    if isinstance(job.data.group, ShmGroup):
        job.data.group.share_gradients(p for _, p in known_parameters(wrapper))
    if job.is_dry_run:
        wrapper.register_comm_hook(None, lambda _, bucket: _kept(bucket.buffer()))
    elif wrapper.compress is not None:
        compress_gradients(job, wrapper, wrapper.compress)


def can_reconnect() -> bool:
    """Whether `reconnect` works with the installed torch."""
    return torch_private.find(_REBUILD) is not None


def reconnect(job: Job, wrapper: Replica) -> None:
    """Reduce gradients over the new groups of the job, after `Job.reconnect`.

    As after a restart, torch's first step has other buckets than later ones.

    Collective: all ranks, in the same order of the models.
    """
    for p in wrapper.parameters():
        p.grad = None  # a view of a bucket that is freed now
    assert job.group is not None
    wrapper.process_group = job.group
    rebuild = torch_private.find(_REBUILD)
    assert rebuild is not None
    rebuild(wrapper, wrapper.__getstate__())  # type: ignore[no-untyped-call]
    _set_up_reduction(job, wrapper)


def _kept(gradients: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """The result of a reduction in a dry run; torch's backend "fake" gives DDP none."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(gradients)
    return future


def _no_buffer_broadcast() -> dict[str, Any]:
    # torch 2.13 renamed the option and warns about the old name. 2.11 and 2.12 have only the old name.
    names = inspect.signature(DistributedDataParallel.__init__).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
    return {name: False}


def known_parameters(wrapper: DistributedDataParallel) -> tuple[tuple[str, nn.Parameter], ...]:
    """The parameters that the reducer waits for, whatever their `requires_grad` is now.

    If the user has wrapped the model, they are found when `Training` is made.
    """
    known: tuple[tuple[str, nn.Parameter], ...] | None = wrapper.__dict__.get(_KNOWN)
    if known is None:
        known = tuple(
            (name, p)
            for name, p in wrapper.module.named_parameters()
            if p.requires_grad and name not in wrapper.parameters_to_ignore
        )
        wrapper.__dict__[_KNOWN] = known
    return known


def set_sync(wrappers: Sequence[DistributedDataParallel], on: bool) -> None:
    """Set whether the backward of the next forward reduces gradients, as `no_sync` does."""
    for wrapper in wrappers:
        # nn.Module.__setattr__ would take a microsecond.
        wrapper.__dict__["require_backward_grad_sync"] = on


class DDPStrategy(Strategy):
    """Gradients are averaged by torch's DDP in the last backward of a step."""

    def prepare(self, batches: Batches) -> None:
        self.divisor = self._job.data.size
        self.needs_equal_micro_batches = True
        self._wrappers = [w for w in map(find_wrapper, self._models) if w is not None]
        if any(wrapper.static_graph for wrapper in self._wrappers):
            raise ConfigError(
                "DistributedDataParallel(static_graph=True) is not supported.",
                why="torch records the graph in the first backward, which accumulation would not reduce.",
                fix="leave static_graph out; find_unused_parameters=True allows unused parameters.",
            )
        # For each optimizer: how many parameters it had at the last check, and how many of them a gradient.
        self._numbers_checked: dict[int, tuple[int, int]] = {}
        self._wrappers_of: dict[int, list[DistributedDataParallel]] = {}
        for optimizer in self._optimizers:
            owned = {id(p) for p in owned_parameters(optimizer)}
            self._wrappers_of[id(optimizer)] = [
                wrapper
                for wrapper in self._wrappers
                if any(id(p) in owned for p in wrapper.module.parameters())
            ]

    def check(self) -> None:
        check_parameters(self._job, self._models, self._optimizers)

    def check_precision(self, precision: str, *, skips_non_finite: bool) -> None:
        may_skip = precision == "fp16" or skips_non_finite
        hooks = [getattr(wrapper, "compress", None) for wrapper in self._wrappers]
        if may_skip and any(isinstance(each, PowerSGD) for each in hooks):
            raise ConfigError(
                "PowerSGD cannot be combined with precision='fp16' or on_non_finite='skip'.",
                why="NaN or infinity in a gradient corrupts PowerSGD's error feedback.",
                fix="use precision='bf16' and on_non_finite='raise', or compress='fp16'.",
            )

    def micro_batches(self, step: PlannedStep) -> Iterator[MicroBatch]:
        for micro in super().micro_batches(step):
            set_sync(self._wrappers, micro.is_last)
            yield micro
        set_sync(self._wrappers, False)

    def backward(
        self,
        loss: torch.Tensor,
        start: torch.Tensor,
        micro: MicroBatch,
        inputs: Sequence[torch.Tensor] | None,
    ) -> bool:
        if micro.is_last:
            watch_backward(loss)
        return super().backward(loss, start, micro, inputs)

    def finish(self, optimizer: Optimizer) -> None:
        parameters = owned_parameters(optimizer)
        numbers = (len(parameters), sum(p.grad is not None for p in parameters))
        if numbers != self._numbers_checked.get(id(optimizer)):
            self.check()  # some were added to the optimizer, frozen or unfrozen
            self._numbers_checked[id(optimizer)] = numbers
        for wrapper in self._wrappers_of[id(optimizer)]:
            _refuse_unused(self._job, wrapper, self._optimizers)
        # A further forward, for example to print an accuracy, or of a discriminator for the generator's loss,
        # would have the reducer expect a backward, and reduce in the first one of the next step.
        set_sync(self._wrappers_of[id(optimizer)], False)

    def leave_step(self) -> None:
        super().leave_step()
        set_sync(self._wrappers, True)

    def facts(self) -> dict[str, Any]:
        compress = [getattr(wrapper, "compress", None) for wrapper in self._wrappers]
        return {
            "bucket_bytes": max((w.bucket_bytes_cap for w in self._wrappers), default=0),
            "compress": str(next(filter(None, compress), "")),
        }


def _refuse_unused(
    job: Job, wrapper: DistributedDataParallel, optimizers: Sequence[Optimizer]
) -> None:
    """Raise if the step's reduction cannot finish, because this rank did not use some parameters.

    torch reports this in the next forward, with indices, or never, if other ranks wait. The check runs after
    the last backward of each step and takes about a microsecond.

    Raises:
        StepError: names them (`parameters`); torch's own error, if any, is its cause.
    """
    cause: RuntimeError | None = None
    check = torch_private.find("torch.distributed.Reducer._check_reducer_finalized")
    try:
        if check is not None:
            check(wrapper.reducer)
    except RuntimeError as error:
        cause = error
    # After a finished reduction every parameter has a gradient. If none has one, the reduction never began.
    known = known_parameters(wrapper)
    if cause is None and (wrapper.find_unused_parameters or known[0][1].grad is not None):
        return
    names = [name for name, p in known if p.grad is None]
    why = "DDP waits for the gradient of each trainable parameter in the step's last backward."
    fix = (
        "freeze unused parameters with requires_grad_(False) before ddp(...), or use "
        "ddp(..., find_unused=True)."
    )
    if len(optimizers) > 1:
        fix += " One loss that serves several optimizers: step.backward(loss) without optimizer=."
    if names:
        raise unreached_error(job, names, why=why, fix=fix) from cause
    raise StepError(
        "the last backward of the step did not use all parameters that earlier ones used.",
        where=job.where(),
        why=why,
        fix=fix,
        parameters=[],
    ) from cause


def check_parameters(
    job: Job, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
) -> None:
    """Refuse parameters whose gradients are not summed over ranks; warn about untrained ones.

    Raises:
        StepError: DDP does not know some parameters, or some were frozen after wrapping (`parameters`).
    """
    if job.data.size > 1:
        wrappers = [w for w in map(find_wrapper, models) if w is not None]
        # An optimizer may own parameters of several models, each with a wrapper of its own.
        handled = {id(p) for wrapper in wrappers for p in _handled_parameters(wrapper)}
        for model in models:
            refuse_unknown(job, model, owned_parameters(*optimizers), handled)
        for wrapper in wrappers:
            _refuse_frozen(job, wrapper)
    for model in models:
        warn_untrained(model, optimizers)


def refuse_unknown(
    job: Job, model: nn.Module, owned: Sequence[torch.Tensor], handled: set[int]
) -> None:
    """Raise StepError for trained parameters that `ddp` or `diloco` does not handle.

    Args:
        owned: The parameters of the optimizers.
        handled: The ids of those that are handled.
    """
    inner = unwrap(model)
    trainable = {id(p): p for p in [*inner.parameters(), *owned] if p.requires_grad}
    named = {id(p): name for name, p in inner.named_parameters()}
    unknown = [
        named.get(key, f"a parameter of shape {list(p.shape)} that is in the optimizer only")
        for key, p in trainable.items()
        if key not in handled
    ]
    if not unknown:
        return
    wrap = wrapped_by(model)
    if not wrap:
        why = "the model is not wrapped, so each rank would train its own copy."
        fix = "model = paceline.ddp(job, model)."
    else:
        why = "they were added or unfrozen after wrapping, or are in the optimizer but not in the model."
        fix = (
            f"call {wrap}(...) when all parameters are in the model and unfrozen, and give the result to "
            "Training."
        )
        if wrap == "paceline.ddp":
            fix += " To freeze and unfreeze during the training, use ddp(..., find_unused=True)."
    raise StepError(
        f"{wrap or 'paceline.ddp'} does not know {listed(unknown)}: they would differ over ranks.",
        where=job.where(),
        why=why,
        fix=fix,
        parameters=unknown,
    )


def _refuse_frozen(job: Job, wrapper: DistributedDataParallel) -> None:
    frozen = [name for name, p in known_parameters(wrapper) if not p.requires_grad]
    if frozen and not wrapper.find_unused_parameters:
        raise StepError(
            f"parameters were frozen after DDP wrapped them: {listed(frozen)}.",
            where=job.where(),
            why="DDP waits for each parameter that was trainable when it wrapped the model.",
            fix="call requires_grad_(False) before paceline.ddp(...). To freeze and unfreeze during the "
            "training, use ddp(..., find_unused=True).",
            parameters=frozen,
        )


def _handled_parameters(wrapper: DistributedDataParallel) -> list[nn.Parameter]:
    ignored = wrapper.parameters_to_ignore
    ignored_parameters = [p for name, p in wrapper.module.named_parameters() if name in ignored]
    return [p for _, p in known_parameters(wrapper)] + ignored_parameters
