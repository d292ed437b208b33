"""Helpers of the strategies: how a model is wrapped, names in it, checks, and equal values on all ranks.

The checks run before training and name parameters. torch would raise later, or report indices of buckets.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from paceline import log
from paceline.errors import ConfigError, RankDisagreement, StepError, listed
from paceline.job.collectives import gather
from paceline.job.job import Job
from paceline.job.recovery import SET_UP

# Attribute of a module, and of its copies: the function that has split its parameters over ranks.
SPLIT_BY = "_paceline_split_by"
# Attribute of a module whose parameters stay on the meta device: where `load_weights` allocates them.
UNFILLED = "_paceline_unfilled"
# Attribute of a module that `diloco` has wrapped: its `Outer`.
DILOCO = "_paceline_diloco"
# Names of the module inside `torch.compile` and inside torch's `checkpoint_wrapper`.
INNER = ("_orig_mod", "_checkpoint_wrapped_module")
# Attribute of a module that is split into stages: its `StageRunner`.
PIPELINE = "_paceline_pipeline"


class NoOutputOnThisStage(StepError):
    """Raised by a forward without gradients on ranks that do not hold the last stage of a pipeline."""


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside torch's DDP and `torch.compile`, or `model` itself if it is in neither.

    Collective: none.
    """
    wrapped: nn.Module | None = compiled_module(model)
    if isinstance(model, DistributedDataParallel):
        wrapped = model.module
    return model if wrapped is None else unwrap(wrapped)


def is_split(model: nn.Module) -> bool:
    """Whether `fsdp`, `tensor_parallel` or `pipeline` has split the parameters of `model` over ranks."""
    return SPLIT_BY in unwrap(model).__dict__


def wrapped_by(model: nn.Module) -> str:
    """The function that has wrapped or split `model`, such as `paceline.fsdp`; empty if none has."""
    if DILOCO in unwrap(model).__dict__:
        return "paceline.diloco"
    split_by: str | None = unwrap(model).__dict__.get(SPLIT_BY)
    return split_by or ("paceline.ddp" if find_wrapper(model) is not None else "")


def is_pipeline(model: nn.Module) -> bool:
    """Whether `paceline.pipeline` has split `model` into stages."""
    return PIPELINE in unwrap(model).__dict__


def roots(model: nn.Module) -> list[nn.Module]:
    """The modules whose `forward` computes: of this rank's stages in a pipeline, else the model itself."""
    runner = unwrap(model).__dict__.get(PIPELINE)
    return [unwrap(model)] if runner is None else list(runner.cut.modules.values())


def layer_class(module: nn.Module) -> type[nn.Module]:
    """The class of a layer, also of one that a pipeline has taken away from this rank."""
    kind: type[nn.Module] = getattr(type(module), "kind_of_skipped", type(module))
    return kind


def free_gathered(model: nn.Module) -> None:
    """Free the parameters that FSDP keeps gathered after a forward without a backward.

    Otherwise the next forward would use them, even if the weights have changed in between.
    """
    from torch.distributed.fsdp import FSDPModule

    for layer in (layer for root in roots(model) for layer in root.modules()):
        if isinstance(layer, FSDPModule):
            layer.reshard()


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor; importing that class would take 0.4 s."""
    return hasattr(tensor, "placements")


def sharded_like(own: Any, value: Any) -> Any:
    """Shard `value`, which all ranks hold whole, as `own` is sharded. Other values are returned unchanged."""
    whole = isinstance(value, torch.Tensor) and not is_sharded(value)
    if not is_sharded(own) or not whole or value.shape != own.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    value = value.to(own.device)
    return distribute_tensor(value, own.device_mesh, own.placements, src_data_rank=None)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor: itself, unless it is a DTensor, whose import would take 0.4 s."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "placements") else tensor  # type: ignore[attr-defined]
    return part


def whole(tensor: Any) -> torch.Tensor:
    """A DTensor as a plain tensor, differentiable; any other tensor itself."""
    if hasattr(tensor, "placements"):
        from torch.distributed.tensor import Replicate

        # Shards of FSDP first: torch warns of gathers in another order.
        for dim in range(tensor.device_mesh.ndim - 1):
            placements = [Replicate()] * (dim + 1) + list(tensor.placements[dim + 1 :])
            tensor = tensor.redistribute(placements=placements)
        tensor = tensor.full_tensor()
    plain: torch.Tensor = tensor
    return plain


def compiled_module(model: nn.Module) -> nn.Module | None:
    return model._modules.get("_orig_mod")


def plain_name(model: nn.Module, name: str) -> str:
    """A name from `named_parameters` or `state_dict` without what wrappers in `model` add.

    Wrappers are torch's DDP, `torch.compile` and `checkpoint_wrapper`; the names of `state_dict` lack what
    the last adds.
    """
    module: nn.Module | None = model
    kept = []
    for part in name.split("."):
        while module is not None and (inner := _name_inside(module)) is not None:
            module = module._modules[inner]
            if part == inner:
                break
        else:
            kept.append(part)
            module = None if module is None else module._modules.get(part)
    return ".".join(kept)


def _name_inside(module: nn.Module) -> str | None:
    """Under which name a wrapper holds its module; None if the module is no wrapper."""
    if isinstance(module, DistributedDataParallel):
        return "module"
    return next((name for name in INNER if name in module._modules), None)


def find_wrapper(model: nn.Module) -> DistributedDataParallel | None:
    """torch's DDP around a module, compiled or not."""
    current: nn.Module | None = model
    while current is not None and not isinstance(current, DistributedDataParallel):
        current = compiled_module(current)
    return current


def has_sparse_layer(module: nn.Module) -> bool:
    """Whether a layer, such as `nn.Embedding(..., sparse=True)`, gives its parameters sparse gradients."""
    return any(getattr(layer, "sparse", False) for layer in module.modules())


def refuse_module(job: Job, module: nn.Module, *, wrap: str, may_be_meta: bool = False) -> None:
    """Refuse a module that cannot be trained on this job.

    Args:
        wrap: The function that the user called, for the fix.
        may_be_meta: Whether parameters may be on the meta device, for `load_weights` to fill.

    Raises:
        ConfigError: a parameter has no shape or is on another device (`parameters`); no parameter is
            trainable; on several ranks, a layer is torch's SyncBatchNorm.
    """
    for name, p in module.named_parameters():
        if isinstance(p, UninitializedParameter):
            raise ConfigError(
                f"parameter {name!r} has no shape yet.",
                why="a lazy module gets its parameters in its first forward.",
                fix=f"run one forward before {wrap}(...).",
                parameters=[name],
            )
        if p.device != job.device and not (p.is_meta and may_be_meta):
            raise ConfigError(
                f"parameter {name!r} is on {p.device}, this rank computes on {job.device}.",
                where=job.where(),
                fix=_fill_by_hand(module)
                if p.is_meta
                else f"model.to(job.device) before {wrap}(...) and before the optimizer is made.",
                parameters=[name],
            )
    if not any(p.requires_grad for p in module.parameters()):
        raise ConfigError(
            f"{type(module).__name__} has no trainable parameter.",
            fix="unfreeze some with requires_grad_(True), or do not wrap it.",
        )
    refuse_torch_syncbn(job, module)


def _fill_by_hand(module: nn.Module) -> str:
    ties = ["one parameter: " + ", ".join(names) for names in tied_parameters(module)]
    again = f", and tie again what to_empty has untied ({'; '.join(ties)})" if ties else ""
    return (
        "paceline.load_weights(model, path); or model.to_empty(device=job.device), then initialise it"
        f"{again}."
    )


def refuse_torch_syncbn(job: Job, module: nn.Module) -> None:
    """Refuse torch's SyncBatchNorm, which cannot leave the sample of a padding micro-batch out.

    In eval mode, in which plain BatchNorm runs padding micro-batches, it skips the collectives that other
    ranks wait for.
    """
    layers = [name for name, m in module.named_modules() if isinstance(m, nn.SyncBatchNorm)]
    if layers and job.data.size > 1:
        raise ConfigError(
            f"{listed(layers)}: torch's SyncBatchNorm is not supported on several ranks.",
            why="it cannot leave a sample out, as ranks with fewer samples need it, and does not run on CPU.",
            fix="paceline.sync_batchnorm(job, model) converts it.",
        )


@contextmanager
def refusing_on_all_ranks(job: Job, module: nn.Module) -> Iterator[None]:
    """Raise what the checks in its body raise for the layers of one stage of a pipeline on all ranks.

    Collective: all ranks, if the module is a pipeline.
    """
    own: ConfigError | None = None
    try:
        yield
    except ConfigError as error:
        own = error
    texts = own and {"what": own.what, "where": own.where, "why": own.why, "fix": own.fix}
    first = next(filter(None, gather(job, texts) if is_pipeline(module) else [texts]), None)
    if first is not None:
        raise own or ConfigError(first.pop("what"), **first)


def refuse_wrapped(module: nn.Module, *, wrap: str, after: Sequence[str] = ()) -> None:
    """Refuse a module that another function has wrapped, or the function `wrap` itself.

    Args:
        after: The functions that may have wrapped it.
    """
    other = wrapped_by(module)
    if other in ("", *after):
        return
    fix = f"call {wrap} once." if other == wrap else f"leave {wrap} out, or {other}."
    if wrap == "paceline.diloco" and other in ("paceline.ddp", "paceline.fsdp"):
        fix = f"give diloco the plain module, and wrap={other}."
    if {wrap, other} == {"paceline.ddp", "paceline.fsdp"}:
        fix += " Replicas of a sharded model: paceline.fsdp with Mesh(dp_replicate=2, dp_shard=-1)."
    raise ConfigError(
        f"this module is wrapped by {other} already.",
        why="a model is wrapped once, or by pipeline, tensor_parallel and fsdp in this order.",
        fix=fix,
    )


def refuse_compiled(module: nn.Module, *, wrap: str) -> None:
    """Refuse a module from `torch.compile`, whose layers the function `wrap` would have to replace."""
    if compiled_module(module) is not None:
        raise ConfigError(
            "a compiled model cannot be split.",
            fix=f"compile its layers: layer.compile() before {wrap}(...).",
        )


def names_matching(
    module: nn.Module, pattern: str, *, option: str, remove_duplicate: bool = True
) -> list[str]:
    """The names of the submodules that match a pattern such as "layers.*".

    Args:
        option: What the user gave the pattern for.
        remove_duplicate: Whether a submodule that has several names has only the first here.

    Raises:
        ConfigError: there are none; the fix is the nearest name.
    """
    named = module.named_modules(remove_duplicate=remove_duplicate)
    names = [name for name, each in named if name and layer_class(each) is type(each)]
    matches = [name for name in names if fnmatchcase(name, pattern)]
    if (runner := module.__dict__.get(PIPELINE)) is not None:
        names = runner.cut.names  # also those of other stages
    if not matches and not any(fnmatchcase(name, pattern) for name in names):
        near = get_close_matches(pattern, [*names, *map(pattern_of, names)], n=1)
        raise ConfigError(
            f"{option}: {pattern!r} matches no submodule of {type(module).__name__}.",
            fix=f"did you mean {near[0]!r}?" if near else "see model.named_modules().",
        )
    return matches


def enclosing(name: str, paths: Iterable[str]) -> str:
    """The innermost of some submodules that holds a parameter or submodule of this name; "" if none does."""
    return max((path for path in paths if name.startswith(f"{path}.")), key=len, default="")


def tied_parameters(module: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    return [each for each in names.values() if len(each) > 1]


def refuse_unfilled(module: nn.Module, init: Callable[[nn.Module], None] | None) -> None:
    if init is not None:
        return
    for name, layer in module.named_modules():
        if _own_meta_tensors(layer) and not hasattr(layer, "reset_parameters"):
            raise ConfigError(
                f"{name or 'the module'} ({type(layer).__name__}) is on the meta device and has no "
                "`reset_parameters`, so its values are not known.",
                fix="pass init=, a function that fills the parameters and buffers of one submodule, or "
                'init="later" and then paceline.load_weights(model, path).',
            )


def _own_meta_tensors(layer: nn.Module) -> list[tuple[str, torch.Tensor]]:
    own = [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]
    return [(name, tensor) for name, tensor in own if tensor.is_meta]


def allocate_meta(
    block: nn.Module, device: torch.device, init: Callable[[nn.Module], None] | None
) -> None:
    """Allocate the tensors of a block that are on the meta device, and fill them."""
    new: dict[torch.Tensor, torch.Tensor] = {}  # tied parameters stay tied
    for layer in block.modules():
        own = _own_meta_tensors(layer)
        for name, tensor in own:
            if tensor not in new:
                empty = torch.empty_like(tensor, device=device)
                if empty.is_floating_point():
                    empty.fill_(math.nan)  # to see below whether it was filled
                is_parameter = isinstance(tensor, nn.Parameter)
                new[tensor] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
            setattr(layer, name, new[tensor])
        if not own:
            continue
        with torch.no_grad():
            init(layer) if init is not None else layer.reset_parameters()  # type: ignore[operator]
        for name, _ in own:
            tensor = getattr(layer, name)
            if tensor.numel() and tensor.isnan().all():
                function = "reset_parameters" if init is None else "init"
                raise ConfigError(
                    f"`{function}` does not fill {name!r} of {type(layer).__name__}.",
                    why="the module was on the meta device, so its values are not known.",
                    fix="pass init=, a function that fills all parameters and buffers of one submodule.",
                )


def pattern_of(name: str) -> str:
    """A name with `*` for each number in it."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", "*", name)


def agree_on_parameters(job: Job, module: nn.Module, options: str) -> None:
    """Check that all ranks hold parameters of the same names, shapes and types in the same order.

    Ranks exchange a digest, and the whole lists only if the digests differ. `options` is compared too. The
    stages of a pipeline hold different parameters: only ranks of one stage are compared.

    Raises:
        RankDisagreement: on all ranks; names the first difference (`values`: one for each rank).
    """
    rows = [options]
    for name, p in module.named_parameters():
        kind = "trainable" if p.requires_grad else "frozen"
        rows.append(f"{name}: {list(p.shape)} {p.dtype}, strides {list(p.stride())}, {kind}")
    digest = hashlib.sha256("\n".join(rows).encode()).hexdigest()
    digests = gather(job, digest, call=SET_UP)
    size = job.world_size // (job.mesh.pp if is_pipeline(module) and job.mesh is not None else 1)
    first_of = [rank // size * size for rank in range(job.world_size)]  # of the same stage
    if all(each == digests[first] for each, first in zip(digests, first_of, strict=True)):
        return
    for each in zip_longest(*gather(job, rows, call=SET_UP), fillvalue="nothing more"):
        values = list(each)
        wrong = (rank for rank, value in enumerate(values) if value != values[first_of[rank]])
        if (other := next(wrong, None)) is not None:
            first = first_of[other]
            raise RankDisagreement(
                f"ranks wrap different models: rank {first} has [{values[first]}], "
                f"rank {other} has [{values[other]}].",
                why="gradients are summed over ranks by the position of their parameter.",
                fix="build the same model on all ranks; nothing in it may depend on the rank.",
                values=values,
            )


def broadcast_state(job: Job, module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Give all ranks of `group` the parameters and buffers of its first rank."""
    broadcast_tensors(job, (*module.parameters(), *module.buffers()), group)


def broadcast_tensors(
    job: Job, tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None
) -> None:
    try:
        for tensor in tensors:
            if tensor.is_meta:
                continue  # `load_weights` fills it
            # Gloo sends the memory from the first element on, whatever the strides are.
            sent = tensor.detach().contiguous()
            dist.broadcast(sent, group=group, group_src=0)
            if not tensor.is_contiguous():
                tensor.detach().copy_(sent)
    except RuntimeError as error:
        job.reraise(error)


def equalize_buffers(job: Job, model: nn.Module) -> None:
    """Give all ranks the buffers of rank 0, such as BatchNorm's running statistics, bit for bit.

    One collective for each device, for any number of buffers; none for a model without buffers.
    """
    if job.data.group is None:
        return
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for buffer in model.buffers():
        if buffer.numel() and not buffer.is_meta:
            by_device.setdefault(buffer.device, []).append(buffer.detach())
    for buffers in by_device.values():
        # Sent as bytes, so that one message carries all types. The widest type comes first: then each
        # buffer starts at a multiple of its own element size, as `view` demands.
        buffers.sort(key=lambda b: -b.element_size())
        packed = torch.cat([b.contiguous().view(-1).view(torch.uint8) for b in buffers])
        try:
            dist.broadcast(packed, group=job.data.group, group_src=0)
        except RuntimeError as error:
            job.reraise(error)
        pieces = torch.split(packed, [b.numel() * b.element_size() for b in buffers])
        for buffer, piece in zip(buffers, pieces, strict=True):
            buffer.copy_(piece.view(buffer.dtype).view(buffer.shape))


def owned_parameters(*optimizers: Optimizer) -> list[torch.Tensor]:
    """The parameters that the optimizers update now; groups may be added later."""
    return [
        p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]
    ]


def unreached_error(job: Job, names: Sequence[str], *, why: str, fix: str) -> StepError:
    """What a strategy raises if a step gave some parameters no gradient."""
    what = f"no gradient reached {listed(names)}."
    return StepError(what, where=job.where(), why=why, fix=fix, parameters=names)


def warn_untrained(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Warn once about trainable parameters that no optimizer owns."""
    owned = {id(p) for p in owned_parameters(*optimizers)}
    untrained = [
        name
        for name, p in unwrap(model).named_parameters()
        if p.requires_grad and id(p) not in owned
    ]
    if untrained and optimizers:
        log.once(
            f"no optimizer owns {listed(untrained)}: these parameters are trainable, but never change. "
            "Give them to an optimizer, or freeze them with requires_grad_(False) before wrapping."
        )
