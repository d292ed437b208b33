"""torch's DDP from within: its reducer, its buckets, and a part in the reduction without a backward.

A front to `DistributedDataParallel` and its `Reducer`. torch has no public way to be told of a backward
that never ran, or to change the size of its buckets. Its private names are used here and nowhere else:
`_pre_forward`, `_post_forward`, `_build_params_for_reducer`, `_comm_hooks` and `_join_config`, and of the
reducer `_autograd_hook`, `_rebuild_buckets` and `_reset_state`.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel

from paceline.job.job import Job
from paceline.shm.group import ShmGroup

Known: TypeAlias = tuple[tuple[str, nn.Parameter], ...]

_KNOWN = "_paceline_known"
_OPTIONS = "_paceline_options"
_TUNED = "_paceline_tuned"
_DEFAULT = "_paceline_default"
_PARTS = ("_modules", "_parameters", "_buffers")
wrappers: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


class Replica(DistributedDataParallel):
    """torch's DDP, but that a forward of which nothing will be reduced goes to the module at once."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's own forward. Collective: all ranks, where the backward reduces."""
        others_ask = self.static_graph or self.device_ids or self._join_config.enable
        if self.require_backward_grad_sync or others_ask:
            averaged: Any = super().forward
            return averaged(*inputs, **kwargs)
        return self.module(*inputs, **kwargs)


def wrap(
    job: Job,
    module: nn.Module,
    *,
    bucket_mb: float | None,
    tuned: bool,
    static_graph: bool,
    find_unused: bool,
) -> Replica:
    """`module` in torch's DDP, with its bucket layout final at once where the options allow that.

    Args:
        bucket_mb: None is torch's default: 25 MiB, with a first one of 1 MiB, which starts early.
        tuned: Whether a training may change that.

    Collective: all ranks of a job of several.
    """
    assert job.group is not None
    options: dict[str, Any] = {
        "device_ids": [job.device] if job.device.type == "cuda" else None,
        "process_group": job.group,
        "find_unused_parameters": find_unused,
        "static_graph": static_graph,
        "gradient_as_bucket_view": True,
        **_no_buffer_broadcast(),
    }
    wrapper = Replica(module, bucket_cap_mb=bucket_mb, **options)
    is_default = bucket_mb is None and not (tuned or static_graph or find_unused)
    wrapper.__dict__.update({_OPTIONS: options, _TUNED: tuned, _DEFAULT: is_default})
    unannotated: Any = wrapper
    known = remember(wrapper, unannotated._build_params_for_reducer()[0])
    if isinstance(job.group, ShmGroup):
        job.group.share_gradients(p for _, p in known)
    _lay_out_now(wrapper)
    return wrapper


def gradient_bytes(wrapper: DistributedDataParallel) -> int:
    """The size of what is reduced."""
    return sum(p.nbytes for _, p in known_parameters(wrapper))


def set_bucket_mb(wrapper: DistributedDataParallel, bucket_mb: float | None) -> None:
    """Have a wrapper that `wrap` made reduce in buckets of another size, from the next backward on.

    Between steps. What was registered on the wrapper stays; gradients keep their values.

    Collective: all ranks, same size.
    """
    # All that a module has but its parts: hooks, `training`.
    kept = {name: wrapper.__dict__[name] for name in vars(nn.Module()) if name not in _PARTS}
    # There is no other way to a new reducer that all versions of torch have in common. The hooks of the
    # old one go with it.
    DistributedDataParallel.__init__(
        wrapper,
        wrapper.module,
        bucket_cap_mb=bucket_mb,
        init_sync=False,
        **wrapper.__dict__[_OPTIONS],
    )
    wrapper.__dict__.update(kept)
    _lay_out_now(wrapper)


def is_tuned(wrapper: DistributedDataParallel) -> bool:
    """Whether a training may change the size of its buckets."""
    # A communication hook may keep something for each bucket, as PowerSGD's does.
    return bool(wrapper.__dict__.get(_TUNED)) and not wrapper._comm_hooks


def is_default(wrapper: DistributedDataParallel) -> bool:
    """Whether it was made without any option, so that nobody minds how it reduces."""
    return bool(wrapper.__dict__.get(_DEFAULT))


def _no_buffer_broadcast() -> dict[str, Any]:
    # torch 2.13 renamed the option and warns of the old name, which 2.11 and 2.12 alone know.
    names = inspect.signature(DistributedDataParallel.__init__).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
    return {name: False}


def _lay_out_now(wrapper: DistributedDataParallel) -> None:
    """Have torch lay out its buckets now; of itself it does so after the first backward.

    The layout decides where Gloo's and NCCL's rings cut a bucket, and so in which order 3 and more
    ranks are added: the first step of a resumed run would differ from the same step of a straight one.
    """
    if wrapper.static_graph or wrapper.find_unused_parameters:
        return  # torch waits for a backward that shows the graph
    known = known_parameters(wrapper)
    # Copies: gradients that exist are views into the buckets already, which the zeros overwrite.
    gradients = [None if p.grad is None else p.grad.clone() for _, p in known]
    for _, p in known:
        p.grad = None
    zero_backward(wrapper)
    rebuilt = wrapper.reducer._rebuild_buckets()
    assert rebuilt, "torch did not lay out its buckets after a whole backward"
    wrapper._has_rebuilt_buckets = True  # as DDP itself does after it; its comm hooks ask for it
    if isinstance(wrapper.process_group, ShmGroup):
        zero_backward(wrapper)  # moves the buckets while nobody holds a view into them
    for (_, p), gradient in zip(known, gradients, strict=True):
        p.grad = gradient


def find_wrapper(model: nn.Module) -> DistributedDataParallel | None:
    """torch's DDP in `model`, compiled or not; None for a plain module."""
    current: nn.Module | None = model
    while current is not None and not isinstance(current, DistributedDataParallel):
        current = current._modules.get("_orig_mod")  # what torch.compile puts around it
    return current


def remember(wrapper: DistributedDataParallel, parameters: Iterable[torch.Tensor]) -> Known:
    """Keep what the reducer waits for: later `requires_grad` may say something else."""
    ids = {id(p) for p in parameters}
    known = tuple((name, p) for name, p in wrapper.module.named_parameters() if id(p) in ids)
    wrapper.__dict__[_KNOWN] = known
    wrappers.add(wrapper)
    return known


def known_parameters(wrapper: DistributedDataParallel) -> Known:
    """What the reducer waits for, with names."""
    known: Known | None = wrapper.__dict__.get(_KNOWN)
    if known is None:
        # Wrapped by hand. Only the buckets tell what was trainable then; asking for them takes, for
        # a moment, the memory of all gradients.
        buckets = wrapper.reducer._get_zeros_like_grad_buckets()
        known = remember(wrapper, [p for bucket in buckets for p in bucket.parameters()])
    return known


def handled_parameters(wrapper: DistributedDataParallel) -> list[nn.Parameter]:
    """What DDP reduces, and what it was told to leave alone."""
    ignored = wrapper.parameters_to_ignore
    left_alone = [p for name, p in wrapper.module.named_parameters() if name in ignored]
    return [p for _, p in known_parameters(wrapper)] + left_alone


def set_sync(model: nn.Module, on: bool) -> None:
    """Choose whether the next forward's backward reduces gradients; nothing for a plain module.

    As DDP's `no_sync`, for a loop that calls it before every micro-batch.
    """
    wrapper = model if isinstance(model, DistributedDataParallel) else find_wrapper(model)
    if wrapper is not None:
        # nn.Module.__setattr__ takes a microsecond to find out that a bool is no parameter.
        wrapper.__dict__["require_backward_grad_sync"] = on


def disarm(model: nn.Module) -> None:
    """Have DDP forget forwards that no backward followed; before the first forward of a step.

    A forward with gradients enabled, for a printed accuracy or another loss, makes the reducer expect a
    backward; the next one, of a micro-batch that must not be reduced, would be taken for it.

    Collective: all ranks, at the start of a step.
    """
    wrapper = find_wrapper(model)
    if wrapper is None:
        return
    if wrapper.static_graph and not wrapper._has_rebuilt_buckets:
        # torch would do it in this step's forward, but forgets with the reset what it has learned.
        wrapper._has_rebuilt_buckets = wrapper.reducer._rebuild_buckets()
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
    wrapper: Any = find_wrapper(model)  # Any: torch does not annotate what is called below
    if wrapper is None:
        return
    known = known_parameters(wrapper)
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
