"""Tensor and sequence parallel: several ranks compute each layer together. A front to `parallelize_module`.

It finds the plan of common models, checks sizes and heads before anything is split, and logs the plan.
torch splits the weights and exchanges the activations.

Source of the split: Shoeybi et al., Megatron-LM, arXiv:1909.08053; of the sequence: Korthikanti et al.,
Reducing Activation Recomputation in Large Transformer Models, arXiv:2205.05198.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel import loss_parallel as torch_loss_parallel

from paceline import log
from paceline.errors import ConfigError
from paceline.job.job import Job
from paceline.parallel import fsdp as _strategy  # noqa: F401 - its strategy trains split models too
from paceline.parallel.modules import (
    SPLIT_BY,
    agree_on_parameters,
    broadcast_state,
    enclosing,
    names_matching,
    pattern_of,
    refuse_compiled,
    refuse_module,
    refuse_wrapped,
    tied_parameters,
)

Plan = Mapping[str, str | ParallelStyle]

COLWISE, ROWWISE, GATHERED, SEQUENCE = "colwise", "rowwise", "colwise_gather_output", "sequence"
_EMBEDDING = "embedding_rowwise"  # Hugging Face's name
_STYLES = {
    COLWISE: COLWISE,
    ROWWISE: ROWWISE,
    GATHERED: GATHERED,
    "colwise_rep": GATHERED,  # in older releases of Transformers
    _EMBEDDING: _EMBEDDING,
    SEQUENCE: SEQUENCE,
    "replicated_with_grad_allreduce": SEQUENCE,  # Hugging Face's name
}
# Usual names of linear layers: (inputs of a module, its output). A module is split if all its linear layers
# have such names, with at least one input and one output.
_PAIRS = (
    (("q_proj", "k_proj", "v_proj"), ("o_proj", "out_proj")),
    (("wq", "wk", "wv"), ("wo",)),
    (("query", "key", "value"), ("out", "proj")),
    (("gate_proj", "up_proj"), ("down_proj",)),
    (("w1", "w3"), ("w2",)),
    (("fc1",), ("fc2",)),
    (("lin1",), ("lin2",)),
    (("up",), ("down",)),
)
_HEADS = ("n_heads", "n_head", "num_heads", "num_attention_heads")
_KV_HEADS = ("n_kv_heads", "n_kv_head", "num_kv_heads", "num_key_value_heads")
_HEAD_NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_norm", "key_norm")
_NORMS = (nn.LayerNorm, nn.RMSNorm)
_enabled: AbstractContextManager[Any] | None = None  # of `loss_parallel`


def tensor_parallel(
    job: Job,
    module: nn.Module,
    *,
    plan: Plan | None = None,
    sequence: bool = False,
    loss_parallel: bool = False,
) -> nn.Module:
    """Split the layers of `module` over the axis `tp` of the job's mesh, in place.

    The ranks of the axis get the same samples. Weights become those of the first rank of the axis. With an
    axis of one rank the module is returned as it is. Call `fsdp` afterwards if the mesh has data ranks too.

    Numbers of heads that attention modules keep as attributes (`n_heads`, `num_heads`, ...) are divided by
    the number of ranks, since each rank computes its share of them.

    Args:
        plan: For names of submodules, with `*` as in `"layers.*.attention.wq"`: "colwise" (split the output
            features), "rowwise" (split the input features and add up the outputs),
            "colwise_gather_output", "embedding_rowwise", "sequence" (a module without split weights that
            gets a part of the heads or of the sequence; its gradients are added up), or a `ParallelStyle`
            of torch. None takes the module's own `tp_plan`, as Hugging Face's models have it, or finds
            attention and feed-forward modules by the usual names of their linear layers. Rank 0 logs it.
        sequence: Split the sequence (dim 1 of activations, a multiple of the number of ranks) between the
            layers, so that norms and dropout need less memory. For models that repeat a block with norms,
            attention and feed-forward.
        loss_parallel: Keep the output of the last linear layer split over the vocabulary. The loss must be
            torch's `cross_entropy`.

    Raises:
        ConfigError: a name of the plan matches no submodule; features or heads do not divide by the number of
            ranks; `plan` splits a fused layer; no plan is known; the module is split already; an option has
            no effect.
        RankDisagreement: the ranks' parameters differ.

    Collective: all ranks, once for each model, in the same order.
    """
    size = 1 if job.mesh is None else job.mesh.tp
    refuse_wrapped(module, wrap="paceline.tensor_parallel")
    refuse_compiled(module, wrap="paceline.tensor_parallel")
    refuse_module(job, module, wrap="paceline.tensor_parallel")
    whole_plan = _known_plan(module) if plan is None else plan
    styles = _resolve(module, whole_plan)
    _refuse_uneven(module, styles, size)
    if plan is not None:
        _refuse_fused(module, styles)
    blocks = _sequence_blocks(module, styles) if sequence else []
    norms = [*_norms_of_heads(module, styles), *_norms_of_blocks(module, blocks)]
    styles |= dict.fromkeys((name for name in norms if name not in styles), SEQUENCE)
    if loss_parallel and GATHERED not in styles.values():
        raise ConfigError(
            "loss_parallel has no effect: the plan has no layer whose output is gathered.",
            fix=f'give the last linear layer in the plan, as {{"lm_head": "{GATHERED}"}}.',
        )
    if size == 1:
        return module
    agree_on_parameters(job, module, f"{styles=}, {sequence=}, {loss_parallel=}")
    mesh: DeviceMesh = job.device_mesh["tp"]
    broadcast_state(job, module, mesh.get_group())
    tied = tied_parameters(module)
    torch_plan = {
        name: _torch_style(
            style, in_sequence=bool(enclosing(name, blocks)), loss_parallel=loss_parallel
        )
        for name, style in styles.items()
    }
    frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
    parallelize_module(module, mesh, torch_plan, src_data_rank=None)
    for name in frozen:  # SequenceParallel makes all parameters trainable
        module.get_parameter(name).requires_grad_(False)
    _tie_again(module, tied)
    _divide_heads(module, styles, size)
    if sequence:
        _split_sequence(module, blocks, styles, mesh)
    if loss_parallel:
        _enable_loss_parallel(job)
    if job.rank == 0:
        shown = ", ".join(f"{name}: {style}" for name, style in _summary(styles).items())
        log.logger.info("tensor_parallel: %d ranks compute together: %s.", size, shown)
    module.__dict__[SPLIT_BY] = "paceline.tensor_parallel"
    return module


def _known_plan(module: nn.Module) -> Plan:
    own = getattr(module, "tp_plan", None)
    if own:
        return dict(own)
    plan: dict[str, str | ParallelStyle] = {}
    for path, parent in module.named_modules():
        linears = {n: c for n, c in parent.named_children() if isinstance(c, nn.Linear)}
        prefix = f"{path}." if path else ""
        for inputs, outputs in _PAIRS:
            first = [name for name in inputs if name in linears]
            last = [name for name in outputs if name in linears]
            if not (first and len(last) == 1 and len(linears) == len(first) + 1):
                continue
            # If the first has more outputs than the last has inputs, something between them, such as a GLU,
            # combines features of different ranks. Such a pair is not split.
            sizes_match = linears[first[0]].out_features == linears[last[0]].in_features
            if len(first) > 1 or sizes_match:
                plan |= {f"{prefix}{name}": COLWISE for name in first}
                plan[f"{prefix}{last[0]}"] = ROWWISE
    if not plan:
        raise ConfigError(
            f"no plan for tensor parallel is known for {type(module).__name__}.",
            why="it has no `tp_plan`, and no submodule whose linear layers have the usual names, such as "
            "q_proj, k_proj, v_proj and o_proj.",
            fix='pass plan={"layers.*.attention.wq": "colwise", "layers.*.attention.wo": "rowwise", ...}.',
        )
    return plan


def _resolve(module: nn.Module, plan: Plan) -> dict[str, str | ParallelStyle]:
    """The plan with names of submodules instead of patterns."""
    styles: dict[str, str | ParallelStyle] = {}
    for pattern, style in plan.items():
        matches = names_matching(module, pattern, option="plan")
        if isinstance(style, str):
            if style not in _STYLES:
                raise ConfigError(
                    f"plan: the style {style!r} of {pattern!r} is not known.",
                    fix=f"use one of {', '.join(_STYLES)}, or a ParallelStyle of torch.",
                )
            style = _STYLES[style]
        styles |= dict.fromkeys(matches, style)
    return styles


def _refuse_uneven(module: nn.Module, styles: Mapping[str, str | ParallelStyle], size: int) -> None:
    for name, style in styles.items():
        layer = module.get_submodule(name)
        if isinstance(style, ParallelStyle) or style == SEQUENCE:
            continue
        if not isinstance(layer, nn.Embedding if style == _EMBEDDING else nn.Linear):
            raise ConfigError(
                f"plan: {name} is a {type(layer).__name__}, which {style!r} cannot split.",
                fix="give names of nn.Linear, or of nn.Embedding for embedding_rowwise.",
            )
        if isinstance(layer, nn.Linear) and style != GATHERED:
            what, features = "output", layer.out_features
            if style == ROWWISE:
                what, features = "input", layer.in_features
            if features % size:
                raise ConfigError(
                    f"{name} has {features} {what} features, which do not divide by tp={size}.",
                    fix="choose a tp that divides them, or leave the layer and its block out of the plan.",
                )
    for parent, attribute, heads in _heads(module, styles):
        if heads % size:
            raise ConfigError(
                f"{parent or 'the module'} has {attribute}={heads}, which does not divide by tp={size}.",
                why="each rank computes whole heads.",
                fix=f"choose a tp that divides {heads}.",
            )
        known = getattr(type(module.get_submodule(parent)), attribute, None)
        if size > 1 and isinstance(known, property) and known.fset is None:
            raise ConfigError(
                f"{parent or 'the module'} has the read-only property {attribute}.",
                why="each rank computes its share of the heads, so the number is divided by tp.",
                fix=f"keep {attribute} as an attribute of the module.",
            )


def _refuse_fused(module: nn.Module, styles: Mapping[str, str | ParallelStyle]) -> None:
    """Refuse a layer with more outputs than the next layer has inputs: the forward cuts its output."""
    inputs: dict[str, int] = {}  # by the module that holds the layer
    for name, style in styles.items():
        parent = name.rpartition(".")[0]
        if style == ROWWISE:
            layer: Any = module.get_submodule(name)
            inputs[parent] = max(inputs.get(parent, 0), layer.in_features)
    for name, style in styles.items():
        layer, most = module.get_submodule(name), inputs.get(name.rpartition(".")[0])
        if style == COLWISE and most is not None and layer.out_features > most:
            raise ConfigError(
                f"plan: {name} has {layer.out_features} output features; the layer after it takes {most}.",
                why="the forward cuts its output, as with a fused layer for q, k and v. A rank has a part "
                "of the features only, so it would cut at other ones.",
                fix="use one linear layer for each part, or leave these layers out of the plan. If the "
                "features of each head lie side by side, pass ColwiseParallel() of torch, and divide the "
                "module's number of heads by tp.",
            )


def _norms_of_heads(module: nn.Module, styles: Mapping[str, str | ParallelStyle]) -> list[str]:
    """Trained norms of queries and keys in split attention modules. Each rank gives them its own heads."""
    parents = {name.rpartition(".")[0] for name, style in styles.items() if style == COLWISE}
    return [
        name
        for name, layer in module.named_modules()
        if name.rpartition(".")[2] in _HEAD_NORMS
        and name.rpartition(".")[0] in parents
        and any(p.requires_grad for p in layer.parameters())
    ]


def _heads(
    module: nn.Module, styles: Mapping[str, str | ParallelStyle]
) -> list[tuple[str, str, int]]:
    """Name of an attention module that is split, name of the attribute, and number of heads."""
    found = []
    for path in {name.rpartition(".")[0] for name, style in styles.items() if style == COLWISE}:
        parent = module.get_submodule(path)
        names = [n for n in (*_HEADS, *_KV_HEADS) if type(getattr(parent, n, None)) is int]
        found += [(path, name, getattr(parent, name)) for name in names]
        head_dim = getattr(parent, "head_dim", None)
        if not names and type(head_dim) is int:
            children = [n for n, _ in parent.named_children()]
            for child in children:
                if styles.get(f"{path}.{child}" if path else child) == COLWISE:
                    features = parent.get_submodule(child).out_features
                    found.append((path, f"heads of {child}", features // head_dim))  # type: ignore[operator]
    return sorted(found)


def _divide_heads(module: nn.Module, styles: Mapping[str, str | ParallelStyle], size: int) -> None:
    for path, attribute, heads in _heads(module, styles):
        parent = module.get_submodule(path)
        if hasattr(parent, attribute):
            setattr(parent, attribute, heads // size)


def _torch_style(
    style: str | ParallelStyle, *, in_sequence: bool, loss_parallel: bool
) -> ParallelStyle:
    if isinstance(style, ParallelStyle):
        return style
    if style == COLWISE:
        return ColwiseParallel()
    if style == GATHERED and loss_parallel:
        return ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    if style == GATHERED:
        return ColwiseParallel(output_layouts=Replicate())
    if style == SEQUENCE:
        return SequenceParallel(use_local_output=True)
    if style == _EMBEDDING:
        return RowwiseParallel(input_layouts=Replicate())
    return RowwiseParallel(output_layouts=Shard(1) if in_sequence else Replicate())


def _enable_loss_parallel(job: Job) -> None:
    """Enable torch's `loss_parallel` until the job is left. torch's context cannot be entered twice."""
    global _enabled
    if _enabled is None:
        _enabled = torch_loss_parallel()
        _enabled.__enter__()
        job.on_leave(_disable_loss_parallel)


def _disable_loss_parallel() -> None:
    global _enabled
    if _enabled is not None:
        _enabled.__exit__(None, None, None)
        _enabled = None


def _sequence_blocks(module: nn.Module, styles: Mapping[str, str | ParallelStyle]) -> list[str]:
    """The blocks between which the sequence is split, in their order.

    A block has submodules that hold split layers, such as attention. Modules whose split layers are all their
    own children do not count: a model may keep attention and feed-forward modules in two separate lists. Nor
    do lists in a list, which no forward calls.
    """
    split = {name.rpartition(".")[0] for name, style in styles.items() if style == ROWWISE}
    for path, container in module.named_modules():
        if not isinstance(container, nn.ModuleList | nn.Sequential):
            continue
        children = [f"{path}.{name}" if path else name for name, _ in container.named_children()]
        if any(isinstance(child, nn.ModuleList | nn.ModuleDict) for child in container):
            continue
        inside = [any(s.startswith(f"{child}.") for s in split) for child in children]
        if children and all(inside):
            return children
    raise ConfigError(
        "sequence=True: no repeated block with norms, attention and feed-forward was found.",
        fix="leave sequence out, or pass a plan of torch's ParallelStyle objects.",
    )


def _norms_of_blocks(module: nn.Module, blocks: list[str]) -> list[str]:
    return [
        f"{block}.{name}"
        for block in blocks
        for name, layer in module.get_submodule(block).named_children()
        if isinstance(layer, _NORMS) or type(layer).__name__.endswith(("LayerNorm", "RMSNorm"))
    ]


def _split_sequence(
    module: nn.Module,
    blocks: list[str],
    styles: Mapping[str, str | ParallelStyle],
    mesh: DeviceMesh,
) -> None:
    """Split the sequence at the first block, gather it before each split module and after the last block."""

    def split(x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] % mesh.size():
            raise ConfigError(
                f"the sequence has {x.shape[1]} elements, which do not divide by tp={mesh.size()}.",
                fix="pad the sequences to a multiple of tp, or leave sequence=True out.",
            )
        whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        return whole.redistribute(placements=[Shard(1)]).to_local()

    def gather(x: torch.Tensor) -> DTensor:
        part = DTensor.from_local(x, mesh, [Shard(1)], run_check=False)
        return part.redistribute(placements=[Replicate()])

    def before(change: Any) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if args:
                return (change(args[0]), *args[1:]), kwargs
            name = next(name for name, value in kwargs.items() if isinstance(value, torch.Tensor))
            return args, {**kwargs, name: change(kwargs[name])}

        return hook

    def after(_: nn.Module, __: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (gather(output[0]).to_local(), *output[1:])
        return gather(output).to_local()

    gathering = set()
    for name in (name for name, style in styles.items() if style == COLWISE):
        parent = name.rpartition(".")[0]
        # Layers directly in a block, such as fc1 beside a LayerNorm, gather one by one.
        if parent in blocks or enclosing(parent, blocks):
            gathering.add(name if parent in blocks else parent)
    for path in gathering:
        # `prepend`: this hook must run before `ColwiseParallel`'s, which treats its input as replicated.
        module.get_submodule(path).register_forward_pre_hook(
            before(gather), with_kwargs=True, prepend=True
        )
    module.get_submodule(blocks[0]).register_forward_pre_hook(before(split), with_kwargs=True)
    module.get_submodule(blocks[-1]).register_forward_hook(after)


def _tie_again(module: nn.Module, tied: list[list[str]]) -> None:
    for first, *others in tied:
        kept = module.get_parameter(first)
        for name in others:
            other = module.get_parameter(name)
            if getattr(other, "placements", None) != getattr(kept, "placements", None):
                raise ConfigError(
                    f"{first} and {name} are one parameter, but the plan splits them differently.",
                    fix="split both in the same way, such as embedding_rowwise and "
                    "colwise_gather_output, or leave both out of the plan.",
                    parameters=[first, name],
                )
            path, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(path), attribute, kept)


def _summary(styles: Mapping[str, str | ParallelStyle]) -> dict[str, str]:
    return {
        pattern_of(name): style if isinstance(style, str) else type(style).__name__
        for name, style in styles.items()
    }
