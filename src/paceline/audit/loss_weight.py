"""The weight of one sample in a loss, from its autograd graph: `(loss.sum() / 64)` gives 1/64.

All micro-batches and ranks of one optimizer step must give their samples the same weight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from paceline import torch_private

# Operations whose backward multiplies the gradient by a number, or leaves it.
_SCALINGS = {"Mul", "Div", "Neg", "Add", "Sub", "ToCopy", "Alias", "View", "Squeeze"}
_MEAN, _SUM = 1, 2  # values of `_saved_reduction`
_NODE = "torch.autograd.graph.Node"


@dataclass(frozen=True)
class LossWeight:
    """A loss that is the sum of `terms` terms, each multiplied by `term_weight`."""

    term_weight: float
    terms: float
    kind: str = ""  # the type of the reduction's node, such as "NllLossBackward0"


def loss_weight(loss: torch.Tensor) -> LossWeight | None:
    """The weight of each term; None if the graph is not a reduction followed by scalings."""
    try:
        return _walk(loss.grad_fn, torch.ones_like(loss, requires_grad=False))
    except RecursionError:
        return None  # a loss that is added up over many steps, such as those of an RNN


def reached(loss: torch.Tensor) -> list[torch.Tensor]:
    """The parameters that a backward from this loss reaches, by its graph."""
    found: list[torch.Tensor] = []
    seen: set[Any] = set()
    nodes: list[Any] = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        parameter = getattr(node, "variable", None)  # of an AccumulateGrad
        if isinstance(parameter, torch.Tensor):
            found.append(parameter)
        nodes += [following for following, _ in node.next_functions]
    return found


def _walk(node: Any, gradient: torch.Tensor) -> LossWeight | None:
    """Follow the gradient of the loss, which is its factor, back to the first reduction."""
    name, _, _ = type(node).__name__.partition("Backward")
    if node is None or gradient.numel() != 1:
        return None
    if name not in _SCALINGS:
        return _reduction(node, float(gradient))
    gradients = node(gradient)
    each = zip(
        node.next_functions,
        gradients if isinstance(gradients, tuple) else (gradients,),
        strict=True,
    )
    inputs = [(following, own) for (following, _), own in each if following is not None]
    if len(inputs) > 1 and name not in ("Add", "Sub"):
        return None  # a product of two losses
    # A penalty may be added to the loss; the first reduction is the one over samples.
    return next(filter(None, (_walk(*own) for own in inputs)), None)


def _reduction(node: Any, factor: float) -> LossWeight | None:
    name = type(node).__name__
    reduction = torch_private.attribute(f"{_NODE}._saved_reduction", node)
    if name in ("MeanBackward0", "SumBackward0"):
        sizes = torch_private.attribute(f"{_NODE}._saved_self_sym_sizes", node)
        count = 0.0 if sizes is None else float(math.prod(sizes))
        mean = name == "MeanBackward0"
    elif reduction in (_MEAN, _SUM):
        mean = reduction == _MEAN
        count = _terms(node)
    else:
        return None
    return LossWeight(factor / count if mean else factor, count, name) if count else None


def _terms(node: Any) -> float:
    """The number of terms of a loss function of torch; 0 if its node does not tell it."""
    # With class weights, the total is the sum of the weights and not a number of samples.
    by_class = torch_private.attribute(f"{_NODE}._saved_weight", node) is not None
    total = torch_private.attribute(f"{_NODE}._saved_total_weight", node)
    # It is the number of targets that are not ignored; torch leaves it 0 for sums.
    if not by_class and total is not None and total.numel() == 1 and float(total):
        return float(total)
    ignored = torch_private.attribute(f"{_NODE}._saved_ignore_index", node)
    if ignored is not None:
        targets = torch_private.attribute(f"{_NODE}._saved_target", node)
        return 0.0 if targets is None else float((targets != ignored).sum())
    values = torch_private.attribute(f"{_NODE}._saved_self", node)
    return 0.0 if values is None else float(values.numel())
