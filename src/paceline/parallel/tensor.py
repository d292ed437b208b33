"""Tensor parallel: several ranks compute each layer together. A front to `parallelize_module`.

It takes the model's own plan or an explicit one, checks sizes and heads before anything is split, and logs
the plan. torch splits the weights and exchanges the activations.

Source of the split: Shoeybi et al., Megatron-LM, arXiv:1909.08053.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from paceline import log
from paceline.errors import ConfigError
from paceline.job.job import Job
from paceline.parallel.modules import (
    SPLIT_BY,
    agree_on_parameters,
    broadcast_state,
    names_matching,
    pattern_of,
    refuse_compiled,
    refuse_module,
    refuse_wrapped,
    refusing_on_all_ranks,
    tied_parameters,
)

Plan = Mapping[str, str | ParallelStyle]


def _gathered() -> ParallelStyle:
    return ColwiseParallel(output_layouts=Replicate())


# Names of Hugging Face's plans.
_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": _gathered,
    "colwise_rep": _gathered,  # in older releases of Transformers
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "replicated_with_grad_allreduce": lambda: SequenceParallel(use_local_output=True),
}
# Attributes with the number of heads of an attention module.
_HEADS = (
    *("n_heads", "n_head", "num_heads", "num_attention_heads"),
    *("n_kv_heads", "n_kv_head", "num_kv_heads", "num_key_value_heads"),
)


def tensor_parallel(job: Job, module: nn.Module, *, plan: Plan | None = None) -> nn.Module:
    """Split the layers of `module` over the axis `tp` of the job's mesh, in place.

    The ranks of the axis get the same samples. Weights become those of the first rank of the axis. With an
    axis of one rank the module is returned as it is. Call `fsdp` afterwards if the mesh has data ranks too.

    Numbers of heads that attention modules keep as attributes (`n_heads`, `num_heads`, ...) are divided by
    the number of ranks, since each rank computes its share of them.

    A module on the meta device stays there; fill it with `load_weights`, after `fsdp(..., init="later")` if
    the mesh has data ranks.

    Args:
        plan: For names of submodules, with `*` as in `"layers.*.attention.wq"`, a `ParallelStyle` of torch or
            one of Hugging Face's names: "colwise" (split the output features), "rowwise" (split the input
            features and add up the outputs), "colwise_gather_output", "embedding_rowwise", or
            "replicated_with_grad_allreduce" (a module with whole weights that gets a part of the heads; its
            gradients are added up). None takes `module.tp_plan`, which many models of Hugging Face have.
            Rank 0 logs the plan.

    Raises:
        ConfigError: there is no plan; a name of the plan matches no submodule; features or heads do not
            divide by the number of ranks; `plan` splits a fused layer; the module is split already.
        RankDisagreement: the ranks' parameters differ.

    Collective: all ranks, once for each model, in the same order.
    """
    size = 1 if job.mesh is None else job.mesh.tp
    refuse_wrapped(module, wrap="paceline.tensor_parallel", after=("paceline.pipeline",))
    refuse_compiled(module, wrap="paceline.tensor_parallel")
    own: Any = getattr(module, "tp_plan", None)
    if plan is None and not own:
        raise _no_plan(module)
    with refusing_on_all_ranks(job, module):
        refuse_module(job, module, wrap="paceline.tensor_parallel", may_be_meta=True)
        styles = _by_name(module, own if plan is None else plan)
        heads = list(_heads(module, styles))
        _refuse_uneven(module, styles, heads, size)
        if plan is not None:
            _refuse_fused(module, styles)
    if size == 1:
        return module
    agree_on_parameters(job, module, f"{styles=}")
    mesh: DeviceMesh = job.device_mesh["tp"]
    broadcast_state(job, module, mesh.get_group())
    tied = tied_parameters(module)
    frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
    torch_plan = {n: _STYLES[s]() if isinstance(s, str) else s for n, s in styles.items()}
    parallelize_module(module, mesh, torch_plan, src_data_rank=None)
    for name in frozen:  # SequenceParallel makes all parameters trainable
        module.get_parameter(name).requires_grad_(False)
    _tie_again(module, tied)
    for path, attribute, number in heads:
        setattr(module.get_submodule(path), attribute, number // size)
    if job.rank == 0:
        shown = ", ".join(f"{name}: {style}" for name, style in _summary(styles).items())
        log.logger.info("tensor_parallel: %d ranks compute together: %s.", size, shown)
    module.__dict__[SPLIT_BY] = "paceline.tensor_parallel"
    return module


def _no_plan(module: nn.Module) -> ConfigError:
    """An error that shows a plan to copy: the last linear layer of each submodule is split by rows."""
    styles = {}
    for path, parent in module.named_modules():
        names = [n for n, child in parent.named_children() if isinstance(child, nn.Linear)]
        for name in names if len(names) > 1 else ():
            whole = pattern_of(f"{path}.{name}" if path else name)
            styles[whole] = "rowwise" if name == names[-1] else "colwise"
    lines = "".join(f'\n    "{name}": "{style}",' for name, style in styles.items())
    return ConfigError(
        f"{type(module).__name__} has no plan for tensor parallel.",
        why="only models with an attribute `tp_plan`, as many of Hugging Face, say how to split them.",
        fix="pass plan=, such as {...} below. Check that the forward passes the output of the colwise layers "
        f"to the rowwise layer, head by head or element by element.\n    plan={{{lines}\n    }}"
        if lines
        else "pass plan=, with names of nn.Linear layers.",
    )


def _by_name(module: nn.Module, plan: Plan) -> dict[str, str | ParallelStyle]:
    """The plan with names of submodules instead of patterns."""
    styles: dict[str, str | ParallelStyle] = {}
    for pattern, style in plan.items():
        if isinstance(style, str) and style not in _STYLES:
            raise ConfigError(
                f"plan: the style {style!r} of {pattern!r} is not known.",
                fix=f"use one of {', '.join(_STYLES)}, or a ParallelStyle of torch.",
            )
        styles |= dict.fromkeys(names_matching(module, pattern, option="plan"), style)
    return styles


def _refuse_uneven(
    module: nn.Module,
    styles: Mapping[str, str | ParallelStyle],
    heads: list[tuple[str, str, int]],
    size: int,
) -> None:
    for name, style in styles.items():
        layer = module.get_submodule(name)
        if style not in ("colwise", "rowwise"):
            continue
        if not isinstance(layer, nn.Linear):
            raise ConfigError(
                f"plan: {name} is a {type(layer).__name__}, which {style!r} cannot split.",
                fix="give names of nn.Linear, or of nn.Embedding for embedding_rowwise.",
            )
        what, features = "output", layer.out_features
        if style == "rowwise":
            what, features = "input", layer.in_features
        if features % size:
            raise ConfigError(
                f"{name} has {features} {what} features, which do not divide by tp={size}.",
                fix="choose a tp that divides them, or leave the layer and its block out of the plan.",
            )
        head_dim = getattr(module.get_submodule(name.rpartition(".")[0]), "head_dim", None)
        if style == "colwise" and type(head_dim) is int and features // size % head_dim:
            raise ConfigError(
                f"{name} has {features // head_dim} heads, which do not divide by tp={size}.",
                why="each rank computes whole heads.",
                fix="choose a tp that divides them.",
            )
    for path, attribute, number in heads:
        if number % size:
            raise ConfigError(
                f"{path or 'the module'} has {attribute}={number}, which does not divide by tp={size}.",
                why="each rank computes whole heads.",
                fix=f"choose a tp that divides {number}.",
            )


def _refuse_fused(module: nn.Module, styles: Mapping[str, str | ParallelStyle]) -> None:
    """Refuse a layer with more outputs than the next layer has inputs: the forward cuts its output."""
    inputs: dict[str, int] = {}  # by the module that holds the layer
    for name, style in styles.items():
        parent = name.rpartition(".")[0]
        if style == "rowwise":
            layer: Any = module.get_submodule(name)
            inputs[parent] = max(inputs.get(parent, 0), layer.in_features)
    for name, style in styles.items():
        layer, most = module.get_submodule(name), inputs.get(name.rpartition(".")[0])
        if style == "colwise" and most is not None and layer.out_features > most:
            raise ConfigError(
                f"plan: {name} has {layer.out_features} output features; the layer after it takes {most}.",
                why="the forward cuts its output, as with a fused layer for q, k and v. A rank has a part "
                "of the features only, so it would cut at other ones.",
                fix="use one linear layer for each part, or leave these layers out of the plan. If the "
                "features of each head lie side by side, pass ColwiseParallel() of torch, and divide the "
                "module's number of heads by tp.",
            )


def _heads(
    module: nn.Module, styles: Mapping[str, str | ParallelStyle]
) -> Iterator[tuple[str, str, int]]:
    """Name of an attention module that is split, name of the attribute, and number of heads.

    A forward that reshapes to the whole number of heads would not fail: it would compute other heads.
    """
    for path in sorted({name.rpartition(".")[0] for name, s in styles.items() if s == "colwise"}):
        for attribute in _HEADS:
            number = getattr(module.get_submodule(path), attribute, None)
            if type(number) is int:
                yield path, attribute, number


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
