"""`ddp`: a front to `torch.nn.parallel.DistributedDataParallel`, and the strategy that lets it sum gradients.

It reports wrong models before training, with parameter names; torch reports indices later, or hangs.
It fixes the bucket layout, so that a resumed run has the same one. torch's DDP reduces the gradients.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from paceline import torch_private
from paceline.clock.waits import watch_backward
from paceline.data.batches import Batches
from paceline.data.plan import MicroBatch, num_micro_batches
from paceline.errors import ConfigError, StepError
from paceline.job.job import Job
from paceline.parallel.compression import Compression, PowerSGD, refuse_compression
from paceline.parallel.modules import (
    agree_on_parameters,
    allocate_meta,
    equalize_buffers,
    has_sparse_layer,
    owned_parameters,
    refuse_module,
    refuse_unfilled,
    refuse_wrapped,
    unreached_error,
)
from paceline.parallel.replica import Replica, ReplicaStrategy, known_parameters
from paceline.shm.group import ShmGroup

DEFAULT_BUCKET_MB = 25.0


def ddp(
    job: Job,
    module: nn.Module,
    *,
    bucket_mb: float = DEFAULT_BUCKET_MB,
    static_graph: bool = False,
    find_unused: bool = False,
    compress: str | PowerSGD | None = None,
    init: Callable[[nn.Module], None] | None = None,
) -> nn.Module:
    """Wrap `module` so that its gradients are averaged over the ranks; weights become those of rank 0.

    In a job of one process the module itself is returned. Otherwise the result is torch's own wrapper:
    gradients are views into its buckets, and the bucket layout is final at once, so that a resumed run
    sums in the same order as an uninterrupted one.

    Args:
        bucket_mb: Size of a gradient bucket in MiB; at the default the first one is 1 MiB. Over Gloo and
            NCCL, on 3 and more ranks, the size changes the order of sums and so the last bits.
        static_graph: Promise that all steps use the same parameters in the same way. torch then lays
            its buckets out in the second step, so on 3 and more ranks a resumed run equals an
            uninterrupted one to rounding only.
        find_unused: Search each forward for parameters that it does not use, or that are frozen. Slower.
        compress: Compress gradients before they are sent: "fp16" or "bf16" casts them, "powersgd" or
            `PowerSGD(rank=4)` approximates them. For slow networks; the result is no longer that of one
            process. Every 100 steps the log gets `compression_error`, the relative error of the averaged
            gradient, and `compression_saved_bytes`, what each rank did not have to send in that step.
        init: For a module on the meta device: called with each submodule that has parameters or buffers of
            its own, when these are allocated, to fill them. None calls `reset_parameters`. Tied parameters
            stay tied.

    Raises:
        ConfigError: the module has no trainable parameter, a parameter on another device than the job's, or
            one that is not initialised; an option is out of range or has no effect; the module is
            wrapped already.
        RankDisagreement: the ranks' parameters or options differ; the error names the first difference.

    Collective: all ranks, once for each model, in the same order.
    """
    _refuse_options(bucket_mb, static_graph, find_unused)
    is_sparse = has_sparse_layer(module)
    is_final = not (static_graph or find_unused or is_sparse)
    refuse_compression(compress, fixed_buckets=is_final, sparse=is_sparse)
    refuse_wrapped(module, wrap="paceline.ddp")
    if job.mesh is not None and job.mesh.dp_replicate != job.world_size:
        raise ConfigError(
            f"ddp keeps the whole model on each rank, but the mesh is {job.mesh}.",
            fix="use paceline.fsdp, or Mesh(dp_replicate=-1).",
        )
    if any(p.is_meta for p in module.parameters()):
        refuse_unfilled(module, init)
        allocate_meta(module, job.device, init)
    elif init is not None:
        raise ConfigError("init has no effect: no parameter of the module is on the meta device.")
    refuse_module(job, module, wrap="paceline.ddp")
    if job.data.group is None:
        return module
    agree_on_parameters(job, module, f"{bucket_mb=}, {static_graph=}, {find_unused=}, {compress=}")
    try:
        wrapper = Replica(
            module,
            device_ids=[job.device] if job.device.type == "cuda" else None,
            process_group=job.data.group,
            bucket_cap_mb=None if bucket_mb == DEFAULT_BUCKET_MB else float(bucket_mb),
            find_unused_parameters=find_unused,
            static_graph=static_graph,
            gradient_as_bucket_view=True,
            **_no_buffer_broadcast(),
        )
        known = known_parameters(wrapper)
        if isinstance(job.data.group, ShmGroup):
            job.data.group.share_gradients(p for _, p in known)
        if (
            is_final
        ):  # else torch needs a real backward to learn the graph or the form of sparse gradients
            _lay_out_buckets(wrapper)
        if compress is not None:
            wrapper.compression = Compression(job, wrapper, compress, float(bucket_mb))
    except RuntimeError as error:
        job.reraise(error)
    equalize_buffers(job, wrapper)
    return wrapper


def _refuse_options(bucket_mb: Any, static_graph: bool, find_unused: bool) -> None:
    if not (isinstance(bucket_mb, int | float) and bucket_mb > 0):
        raise ConfigError(
            f"bucket_mb must be a number of MiB greater than 0, got {bucket_mb!r}.",
            fix=f"leave bucket_mb out ({DEFAULT_BUCKET_MB:g} MiB), or give a number.",
        )
    if static_graph and find_unused:
        raise ConfigError(
            "find_unused has no effect with static_graph, which finds unused parameters itself.",
            fix="leave one of them out.",
        )


def _no_buffer_broadcast() -> dict[str, Any]:
    # torch 2.13 renamed the option and warns about the old name. 2.11 and 2.12 have only the old name.
    names = inspect.signature(DistributedDataParallel.__init__).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
    return {name: False}


def _lay_out_buckets(wrapper: Replica) -> None:
    """Have torch lay out its buckets now instead of after the first backward.

    The layout decides where the ring algorithms of Gloo and NCCL cut a bucket, and so the order in which the
    gradients of 3 and more ranks are added. Otherwise the first step of a resumed run would differ from the
    same step of an uninterrupted run.
    """
    hook = torch_private.find("torch.distributed.Reducer._autograd_hook")
    if hook is None:
        return
    known = known_parameters(wrapper)
    # Existing gradients are copied: they are views into the buckets, which the zeros overwrite.
    gradients = [None if p.grad is None else p.grad.clone() for _, p in known]
    for _, p in known:
        p.grad = None
    module = wrapper.module
    device = known[0][1].device
    # Two rounds: torch lays out the buckets in the second forward, after it has seen a backward. With the
    # shm backend the buckets move into shared memory in the second backward, while no gradient is a view.
    wrapper.module = _HookCaller(hook, wrapper.reducer, len(known))
    try:
        for _ in range(2):
            with torch.enable_grad():
                wrapper(torch.zeros((), device=device, requires_grad=True)).backward()
            for _, p in known:
                p.grad = None
    finally:
        wrapper.module = module
    for (_, p), gradient in zip(known, gradients, strict=True):
        p.grad = gradient


class _HookCaller(nn.Module):
    """A module whose backward calls the reducer's hooks and computes no gradient.

    A real backward of zeros would also fire the hooks of users, and some of those step an optimizer.
    """

    def __init__(self, hook: Any, reducer: Any, count: int) -> None:
        super().__init__()
        self._arguments = hook, reducer, count

    def forward(self, anchor: torch.Tensor) -> torch.Tensor:
        apply: Any = _CallHooks.apply
        output: torch.Tensor = apply(anchor, *self._arguments)
        return output


class _CallHooks(torch.autograd.Function):
    """Calls the hooks inside a backward, because torch allows the reducer's final callback only there."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, hook: Any, reducer: Any, count: int
    ) -> torch.Tensor:
        ctx.arguments = hook, reducer, count
        return anchor.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None, None]:
        hook, reducer, count = ctx.arguments
        # In the order of a real backward, which is the order of the layout.
        for index in reversed(range(count)):
            hook(reducer, index)
        return None, None, None, None


class DDPStrategy(ReplicaStrategy):
    """Gradients are averaged by torch's DDP in the last backward of a step."""

    def _prepare(self, batches: Batches) -> None:
        super()._prepare(batches)
        size = self._job.data.size
        self.divisor = size
        self.needs_equal_micro_batches = size > 1
        self._refuse_static_accumulation(batches)
        self._wrappers_of: dict[int, list[DistributedDataParallel]] = {}
        for optimizer in self._optimizers:
            owned = {id(p) for p in owned_parameters(optimizer)}
            self._wrappers_of[id(optimizer)] = [
                wrapper
                for wrapper in self._wrappers
                if any(id(p) in owned for p in wrapper.module.parameters())
            ]
        self._compressions = [c for w in self._wrappers if (c := getattr(w, "compression", None))]
        self.keeps_token_divisor = any(c.has_feedback for c in self._compressions)

    def _refuse_static_accumulation(self, batches: Batches) -> None:
        """torch's DDP records a static graph in its first backward, which must be a reduced one."""
        share = -(-batches.global_batch // self._job.data.size)
        most = num_micro_batches(share, batches.micro_batch)
        if most > 1 and any(wrapper.static_graph for wrapper in self._wrappers):
            raise ConfigError(
                f"static_graph=True with {most} micro-batches a rank: torch's DDP cannot accumulate then.",
                fix="leave static_graph out, or make micro_batch the rank's whole share.",
            )

    def check_precision(self, precision: str, *, skips_non_finite: bool) -> None:
        may_skip = precision == "fp16" or skips_non_finite
        if may_skip and any(c.has_feedback for c in self._compressions):
            option = "precision='fp16'" if precision == "fp16" else "on_non_finite='skip'"
            raise ConfigError(
                f"{option} cannot be combined with PowerSGD.",
                why="NaN or infinity in a gradient corrupts PowerSGD's error feedback.",
                fix="use precision='bf16' and on_non_finite='raise', or compress='fp16'.",
            )

    def before_forward(self, micro: MicroBatch) -> None:
        super().before_forward(micro)
        self._set_sync(micro.is_last)

    def backward(
        self,
        loss: torch.Tensor,
        start: torch.Tensor,
        micro: MicroBatch,
        inputs: Sequence[torch.Tensor] | None,
    ) -> None:
        if micro.is_last and self._job.data.size > 1:
            watch_backward(loss)
        super().backward(loss, start, micro, inputs)

    def finish(self, optimizer: Optimizer) -> None:
        super().finish(optimizer)
        for wrapper in self._wrappers_of[id(optimizer)]:
            _refuse_unused(self._job, wrapper, self._optimizers)

    def facts(self) -> dict[str, Any]:
        return {
            "bucket_bytes": max((w.bucket_bytes_cap for w in self._wrappers), default=0),
            "compress": any(getattr(w, "has_hook", False) for w in self._wrappers),
        }

    def measurements(self) -> dict[str, Any]:
        found = [m for c in self._compressions if (m := c.measurement())]
        if not found:
            return {}
        squares = [square for _, each in found for square in each]
        errors, gradients = (torch.stack(each).sum() for each in zip(*squares, strict=True))
        return {
            "compression_error": (errors / gradients).sqrt(),
            "compression_saved_bytes": sum(saved for saved, _ in found),
        }

    def state_dict(self) -> Any:
        states = [compression.state_dict() for compression in self._compressions]
        return {"compression": states} if any(states) else None

    def load_state_dict(self, state: Any) -> None:
        states = (state or {}).get("compression") or []
        for compression, each in zip_longest(self._compressions, states):
            if compression is not None:  # else the training no longer compresses
                compression.load_state_dict(each)


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
    lenient = wrapper.find_unused_parameters or wrapper.static_graph
    # After a finished reduction every parameter has a gradient. If none has one, the reduction never began.
    known = known_parameters(wrapper)
    if cause is None and (lenient or known[0][1].grad is not None):
        return
    names = [name for name, p in known if p.grad is None]
    why = "DDP waits for the gradient of each trainable parameter in the step's last backward."
    option = "leave static_graph out" if wrapper.static_graph else "ddp(..., find_unused=True)"
    fix = f"freeze unused parameters with requires_grad_(False) before ddp(...), or {option}."
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
