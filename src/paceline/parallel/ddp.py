"""Replicas whose gradients are averaged: a front to `torch.nn.parallel.DistributedDataParallel`.

Adds what torch leaves to its users: errors with parameter names before training instead of indices or a
hang during it, a bucket layout that is the same in a resumed run, and a part in the reduction for a rank
that has no samples. It deliberately does not reduce gradients itself, does not weigh them (the training
loop does, by a factor on the loss), and moves no module.

torch's DDP has no public way to be told of a backward that never ran. Five of its private names are used
for that, here and nowhere else: `_pre_forward` and `_post_forward`, and of its reducer `_autograd_hook`,
`_rebuild_buckets` and `_reset_state`.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel

from paceline import log
from paceline.errors import ConfigError, GradientError
from paceline.job import Job
from paceline.parallel.buffers import equalize_buffers
from paceline.parallel.preflight import agree_on_parameters, listed, refuse_module
from paceline.shm.group import ShmGroup

Known: TypeAlias = tuple[tuple[str, nn.Parameter], ...]

# torch's default. Passed on as "not given", since only then torch keeps its small first bucket, which
# lets the first reduction start early.
_DEFAULT_BUCKET_MB = 25.0
_KNOWN = "_paceline_known"
_wrappers: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def ddp(
    job: Job,
    module: nn.Module,
    *,
    bucket_mb: float = _DEFAULT_BUCKET_MB,
    static_graph: bool = False,
    find_unused: bool = False,
) -> nn.Module:
    """Wrap `module` so that its gradients are averaged over the ranks; weights become rank 0's.

    In a job of one process the module itself is returned. Otherwise the result is torch's own wrapper:
    gradients are views into its buckets, and the bucket layout is final at once, so that a resumed run
    sums in the same order as an uninterrupted one.

    Args:
        bucket_mb: Size of a gradient bucket in MiB; at the default the first one is 1 MiB.
        static_graph: Promise that all steps use the same parameters in the same way. torch then lays
            its buckets out in the second step, so resuming at 3 and more ranks is exact to rounding
            only.
        find_unused: Search each forward for parameters that it does not use. Slower.

    Raises:
        ConfigError: no trainable parameter; a parameter on another device than the job's, or not
            initialised; an option that is out of range or would have no effect; wrapped already.
        RankDisagreement: the ranks' parameters or options differ; names the first that does.

    Collective: all ranks, once for each model, same order.
    """
    _refuse_options(bucket_mb, static_graph, find_unused)
    if is_ddp(module):
        raise ConfigError("this module is wrapped by DDP already.", fix="call paceline.ddp once.")
    refuse_module(job, module)
    if job.group is None:
        return module
    settings = f"{bucket_mb=:g}, {static_graph=}, {find_unused=}"
    agree_on_parameters(job, module, settings)
    try:
        wrapper = DistributedDataParallel(
            module,
            device_ids=[job.device] if job.device.type == "cuda" else None,
            process_group=job.group,
            bucket_cap_mb=None if bucket_mb == _DEFAULT_BUCKET_MB else bucket_mb,
            find_unused_parameters=find_unused,
            static_graph=static_graph,
            gradient_as_bucket_view=True,
            **_no_buffer_broadcast(),
        )
        unannotated: Any = wrapper
        known = _remember(wrapper, unannotated._build_params_for_reducer()[0])
        if not static_graph and not find_unused:
            _rebuild_buckets_now(wrapper, job.group)
        elif isinstance(job.group, ShmGroup):
            job.group.share_gradients(p for _, p in known)
    except RuntimeError as error:
        job.reraise(error)
    equalize_buffers(job, wrapper)
    return wrapper


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside torch's DDP and `torch.compile`, or `model` itself if in neither.

    Collective: none.
    """
    name = "module" if isinstance(model, DistributedDataParallel) else "_orig_mod"
    inner = model._modules.get(name)
    return model if inner is None else unwrap(inner)


def is_ddp(model: nn.Module) -> bool:
    """Whether `model` is torch's DDP, compiled or not. Collective: none."""
    return _wrapper(model) is not None


def set_sync(model: nn.Module, on: bool) -> None:
    """Choose whether the next forward's backward reduces gradients; nothing for a plain module.

    As DDP's `no_sync`, for a loop that calls it before every micro-batch.

    Collective: none.
    """
    wrapper = model if isinstance(model, DistributedDataParallel) else _wrapper(model)
    if wrapper is not None:
        # nn.Module.__setattr__ takes a microsecond to find out that a bool is no parameter.
        wrapper.__dict__["require_backward_grad_sync"] = on


def disarm(model: nn.Module) -> None:
    """Have DDP forget forwards that no backward followed; before the first forward of a step.

    A forward with gradients enabled, for a printed accuracy or another loss, makes the reducer expect a
    backward; the next one, of a micro-batch that must not be reduced, would be taken for it.

    Collective: none.
    """
    wrapper = _wrapper(model)
    if wrapper is not None:
        wrapper.reducer._reset_state()


def zero_backward(model: nn.Module) -> None:
    """Take part in the gradient reduction without a backward: for a rank that has no samples.

    Contributes the gradients as they stand, and zeros where there are none. Afterwards they hold the
    reduced values, as on the other ranks. No hook of the user's parameters fires. Nothing is done for a
    plain module.

    With `find_unused` the first parameter counts as used by this rank: where no rank used it, its
    gradient becomes zeros instead of staying None. With `static_graph` and no samples in the first step
    this rank assumes that a backward uses each parameter once.

    Collective: the ranks without samples, where the others run the step's last backward.
    """
    wrapper: Any = _wrapper(model)  # Any: torch does not annotate what is called below
    if wrapper is None:
        return
    known = _known(wrapper)
    _give_sparse_gradients(wrapper)
    fire: Any = _Backward.apply
    syncing = wrapper.require_backward_grad_sync
    set_sync(wrapper, True)
    try:
        with torch.enable_grad():
            first = known[0][1]
            anchor = torch.zeros((), device=first.device, requires_grad=True)
            wrapper._pre_forward(anchor)
            if wrapper.find_unused_parameters and not wrapper.static_graph:
                # torch marks all parameters that are not behind the output as unused when the first
                # hook fires, so exactly one may be behind it, and only its hook may be called.
                wrapper._post_forward(first.view_as(first))
                output = fire(anchor, wrapper.reducer, 1)
            else:
                output = wrapper._post_forward(fire(anchor, wrapper.reducer, len(known)))
        output.backward()
    finally:
        set_sync(wrapper, syncing)


class _Backward(torch.autograd.Function):
    """Calls the reducer's hooks from within a backward, where torch allows its final callback.

    The hooks take `p.grad` as it is. A real backward of zeros would fire the hooks of users too, of
    which some step an optimizer, and would turn a gradient of -0.0 into 0.0.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, reducer: Any, count: int) -> torch.Tensor:
        ctx.reducer, ctx.count = reducer, count
        return anchor.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None]:
        # In the order of a real backward, since torch lays out its buckets by it.
        for index in reversed(range(ctx.count)):
            ctx.reducer._autograd_hook(index)
        return None, None, None


def check_parameters(
    job: Job, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Refuse parameters that would be trained on each rank alone; warn of those never trained.

    Raises:
        GradientError: parameters that DDP does not know, or waits for in vain (`parameters`).

    Collective: none.
    """
    wrapper = _wrapper(model)
    named = {id(p): name for name, p in unwrap(model).named_parameters()}
    owned = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    if job.group is not None:
        known = () if wrapper is None else _known(wrapper)  # also makes it one of `_wrappers`
        # An optimizer may own parameters of several models, each wrapped by itself.
        fine = {id(p) for each in _wrappers for p in _handled(each)}
        trainable = {id(p): p for p in [*unwrap(model).parameters(), *owned] if p.requires_grad}
        loose = [
            named.get(key, f"a parameter of shape {list(p.shape)} that is in the optimizer only")
            for key, p in trainable.items()
            if key not in fine
        ]
        if loose:
            raise _loose_error(job, loose, wrapped=wrapper is not None)
        frozen = [name for name, p in known if not p.requires_grad]
        if frozen:
            raise GradientError(
                f"frozen after they were wrapped by DDP: {listed(frozen)}.",
                where=job.where(),
                why="DDP waits for the gradient of each parameter that could be trained then.",
                fix="call requires_grad_(False) before paceline.ddp(...).",
                parameters=frozen,
            )
    ids = {id(p) for p in owned}
    idle = [n for n, p in unwrap(model).named_parameters() if p.requires_grad and id(p) not in ids]
    if idle and optimizers:
        log.once(
            f"no optimizer owns {listed(idle)}: trainable, but it stays as it is. "
            "Give it to an optimizer, or freeze it with requires_grad_(False) before ddp(...)."
        )


def _loose_error(job: Job, names: list[str], *, wrapped: bool) -> GradientError:
    if wrapped:
        why = "added or unfrozen after the model was wrapped, or in the optimizer but not in the model."
        fix = "call paceline.ddp(...) when all parameters are in the model and unfrozen."
    else:
        why = "the model is not wrapped, so each rank would train a model of its own."
        fix = "model = paceline.ddp(job, model)."
    return GradientError(
        f"DDP does not know {listed(names)}: the gradients would differ over ranks.",
        where=job.where(),
        why=why,
        fix=fix,
        parameters=names,
    )


def unused_parameters(model: nn.Module) -> list[str]:
    """Names of the parameters that DDP waits for and that have no gradient; [] for a plain module.

    To be asked after the step's last backward and before gradients are set to None.

    Collective: none.
    """
    wrapper = _wrapper(model)
    return [] if wrapper is None else [name for name, p in _known(wrapper) if p.grad is None]


def refuse_unused(job: Job, model: nn.Module) -> None:
    """Raise if the step's reduction cannot finish, because this rank did not use some parameters.

    torch says so in the next forward, with indices, or not at all where other ranks already wait.
    About a microsecond where all is well, so it may be called after every step's last backward.

    Raises:
        GradientError: names them (`parameters`); torch's own error, if any, is its cause.

    Collective: none.
    """
    wrapper = _wrapper(model)
    if wrapper is None:
        return
    cause: RuntimeError | None = None
    try:
        wrapper.reducer._check_reducer_finalized()
    except RuntimeError as error:
        cause = error
    lenient = wrapper.find_unused_parameters or wrapper.static_graph
    # A finished reduction leaves a gradient everywhere; none at all means that it never began.
    if cause is None and (lenient or _known(wrapper)[0][1].grad is not None):
        return
    names = unused_parameters(wrapper)
    if names:
        what = f"no gradient reached {listed(names)}"
    else:
        what = "the last backward of the step did not use all parameters that earlier ones used"
    raise GradientError(
        f"{what}.",
        where=job.where(),
        why="DDP waits for the gradient of each trainable parameter in the step's last backward.",
        fix="freeze what is never used with requires_grad_(False) before ddp(...), or "
        + ("leave static_graph out." if wrapper.static_graph else "ddp(..., find_unused=True)."),
        parameters=names,
    ) from cause


def _wrapper(model: nn.Module) -> DistributedDataParallel | None:
    current: nn.Module | None = model
    while current is not None and not isinstance(current, DistributedDataParallel):
        current = current._modules.get("_orig_mod")  # what torch.compile puts around it
    return current


def _remember(wrapper: DistributedDataParallel, parameters: Iterable[torch.Tensor]) -> Known:
    """Keep what the reducer waits for: later `requires_grad` may say something else."""
    ids = {id(p) for p in parameters}
    known = tuple((name, p) for name, p in wrapper.module.named_parameters() if id(p) in ids)
    wrapper.__dict__[_KNOWN] = known
    _wrappers.add(wrapper)
    return known


def _known(wrapper: DistributedDataParallel) -> Known:
    known: Known | None = wrapper.__dict__.get(_KNOWN)
    if known is None:
        # Wrapped by hand. Only the buckets tell what was trainable then; asking for them takes, for
        # a moment, the memory of all gradients.
        buckets = wrapper.reducer._get_zeros_like_grad_buckets()
        known = _remember(wrapper, [p for bucket in buckets for p in bucket.parameters()])
    return known


def _handled(wrapper: DistributedDataParallel) -> list[nn.Parameter]:
    """What DDP reduces, and what it was told to leave alone."""
    ignored = wrapper.parameters_to_ignore
    left_alone = [p for name, p in wrapper.module.named_parameters() if name in ignored]
    return [p for _, p in _known(wrapper)] + left_alone


def _rebuild_buckets_now(wrapper: DistributedDataParallel, group: dist.ProcessGroup) -> None:
    """Have torch lay out its buckets now; of itself it does so after the first backward.

    The layout decides where Gloo's and NCCL's rings cut a bucket, and so in which order 3 and more
    ranks are added: the first step of a resumed run would differ from the same step of a straight one.
    """
    known = _known(wrapper)
    # Copies: gradients that exist are views into the buckets already, which the zeros overwrite.
    gradients = [None if p.grad is None else p.grad.clone() for _, p in known]
    for _, p in known:
        p.grad = None
    zero_backward(wrapper)
    rebuilt = wrapper.reducer._rebuild_buckets()
    assert rebuilt, "torch did not lay out its buckets after a whole backward"
    wrapper._has_rebuilt_buckets = True  # as DDP itself does after it; its comm hooks ask for it
    if isinstance(group, ShmGroup):
        group.share_gradients(p for _, p in known)
        zero_backward(wrapper)  # moves the buckets while nobody holds a view into them
    for (_, p), gradient in zip(known, gradients, strict=True):
        p.grad = gradient


def _give_sparse_gradients(wrapper: DistributedDataParallel) -> None:
    """Give sparse embeddings without a gradient an empty one: torch reduces no undefined sparse ones."""
    for layer in wrapper.module.modules():
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse:
            weight = layer.weight
            if weight.requires_grad and weight.grad is None:
                index = torch.zeros((1, 0), dtype=torch.long, device=weight.device)
                rows = weight.new_zeros((0, *weight.shape[1:]))
                weight.grad = torch.sparse_coo_tensor(
                    index, rows, weight.shape, check_invariants=False
                )


def _no_buffer_broadcast() -> dict[str, Any]:
    # torch 2.13 renamed the option and warns of the old name, which 2.11 and 2.12 alone know.
    names = inspect.signature(DistributedDataParallel.__init__).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
    return {name: False}


def _refuse_options(bucket_mb: float, static_graph: bool, find_unused: bool) -> None:
    if not bucket_mb > 0:
        raise ConfigError(f"bucket_mb must be more than 0, got {bucket_mb!r}.")
    if static_graph and find_unused:
        raise ConfigError(
            "find_unused has no effect with static_graph, which finds unused parameters itself.",
            fix="leave one of them out.",
        )
