"""The weights and buffers of a model of the ordinary run, which a union loads."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parameter import is_lazy

from paceline.audit.digests import reals_of
from paceline.audit.models import Models, without_ddp
from paceline.audit.progress import Progress
from paceline.audit.run_plan import UNIONS
from paceline.data.digest import plain

# Of a larger tensor, about so many numbers are kept, spread evenly over it.
_NUMBERS = 2**16

# Of each tensor, the dimension in which the ranks hold parts of it (None if they do not), and the own part.
Saved = dict[str, tuple[int | None, torch.Tensor]]


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    # Not by the state dict, which may be one of the script, or gather shards.
    named = without_ddp(model, chain(model.named_parameters(), model.named_buffers()))
    return ((name, tensor) for name, tensor in named if not is_lazy(tensor))


def dimension(tensor: torch.Tensor) -> int | None:
    """The dimension in which a tensor is sharded over the ranks; None if it is not."""
    placements = tensor.placements if isinstance(tensor, DTensor) else ()
    return next((each.dim for each in placements if isinstance(each, Shard)), None)


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether the ranks hold parts of a model."""
    return any(dimension(tensor) is not None for _, tensor in _tensors(model))


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Some numbers of a tensor, in float64; all of one that is sharded: the ranks hold other parts."""
    if isinstance(tensor, DTensor):
        return reals_of(tensor).cpu().clone()
    flat = plain(tensor).flatten()
    return reals_of(flat[:: max(1, len(flat) // _NUMBERS)]).cpu().flatten().clone()


def numbers_of(model: torch.nn.Module, *, without: tuple[type, ...]) -> dict[str, Any]:
    """Some numbers of the weights and buffers of a model, without the buffers of these modules."""
    left_out = {id(b) for m in model.modules() if isinstance(m, without) for b in m.buffers()}
    named = {
        name: tensor
        for name, tensor in _tensors(model)
        if id(tensor) not in left_out and (tensor.is_floating_point() or tensor.is_complex())
    }
    return {
        "numbers": {name: numbers(tensor.detach()) for name, tensor in named.items()},
        "dimensions": {name: dimension(tensor) for name, tensor in named.items()},
        "buffers": [name for name, t in named.items() if not isinstance(t, torch.nn.Parameter)],
    }


def copy_of(model: torch.nn.Module) -> Saved:
    """A copy of what this rank holds of a model."""
    return {n: (dimension(t), plain(t).to("cpu", copy=True)) for n, t in _tensors(model)}


@torch.no_grad()
def load(model: torch.nn.Module, of_ranks: list[Saved]) -> None:
    """Load what the ranks hold of a model: what is not sharded from the first of them."""
    for name, own in _tensors(model):
        if name not in of_ranks[0]:
            continue
        dim, value = of_ranks[0][name]
        if dim is not None:
            value = torch.cat([each[name][1] for each in of_ranks if name in each], dim)
        # A write would break a graph that still needs the value, as that of a forward before this one.
        if own.shape == value.shape and not torch.equal(plain(own).cpu(), value):
            plain(own).copy_(value)


def begin_evaluation(progress: Progress, models: Models) -> None:
    """Before an evaluation: copy the weights of the ordinary run, or load them into a union."""
    plan = progress.plan
    if plan.mode == "ordinary":
        # Saved later, because few evaluations have a result.
        progress.weights_of_evaluation = {
            number: copy_of(model)
            for number, model in models.by_number().items()
            if progress.rank == 0 or is_sharded(model)
        }
    elif plan.mode in UNIONS and plan.source is not None:
        paths = [_path(plan.source, progress.evaluation, rank) for rank in range(plan.ranks)]
        of_ranks = [torch.load(path, weights_only=True) for path in paths if path.exists()]
        for number, model in models.by_number().items():
            if saved := [each[number] for each in of_ranks if number in each]:
                before = copy_of(model)
                load(model, saved)
                progress.after_evaluation.append(partial(_restore, model, before, copy_of(model)))


@torch.no_grad()
def _restore(model: torch.nn.Module, before: Saved, loaded: Saved) -> None:
    """Put the weights of a union back after an evaluation, except those that the script has changed in it."""
    for name, own in _tensors(model):
        if name in loaded and torch.equal(plain(own).cpu(), loaded[name][1]):
            plain(own).copy_(before[name][1])


def save_weights(progress: Progress) -> None:
    """Save the weights of this evaluation of the ordinary run: it has a result, which rules compare."""
    if progress.weights_of_evaluation:
        path = _path(progress.plan.folder, progress.evaluation, progress.rank)
        torch.save(progress.weights_of_evaluation, path)
    progress.weights_of_evaluation = None


def _path(folder: Path, evaluation: int | None, rank: int) -> Path:
    return folder / f"weights-{evaluation}-{rank}.pt"
