"""The weight of one sample in a loss, from its autograd graph: `(loss.sum() / 64)` gives 1/64.

All micro-batches and ranks of one optimizer step must give their samples the same weight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

# Operations whose backward multiplies the gradient by a number, or leaves it.
_SCALINGS = {"Mul", "Div", "Neg", "Add", "Sub", "ToCopy", "Alias", "View", "Squeeze"}
_MEAN, _SUM = 1, 2  # values of `_saved_reduction`
_EMPTY = torch.empty(0)


@dataclass(frozen=True)
class LossWeight:
    """A loss that is the sum of `terms` terms, each multiplied by `weight`."""

    weight: float
    terms: float
    kind: str = ""  # the type of the reduction's node, such as "NllLossBackward0"


def loss_weight(loss: torch.Tensor) -> LossWeight | None:
    """The weight of each term; None if the graph is not a reduction followed by scalings."""
    try:
        return _walk(loss.grad_fn, torch.ones_like(loss, requires_grad=False))
    except AttributeError:
        # torch documents the `_saved_` attributes of nodes, but not which node has which.
        return None


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
    if name in ("MeanBackward0", "SumBackward0"):
        count = float(math.prod(node._saved_self_sym_sizes))
        mean = name == "MeanBackward0"
    elif hasattr(node, "_saved_reduction"):
        if node._saved_reduction not in (_MEAN, _SUM):
            return None
        mean = node._saved_reduction == _MEAN
        count = _terms(node)
    else:
        return None
    return LossWeight(factor / count if mean else factor, count, name) if count else None


def _terms(node: Any) -> float:
    # With class weights, the total is the sum of the weights and not a number of samples.
    by_class = getattr(node, "_saved_weight", None) is not None
    if not by_class and getattr(node, "_saved_total_weight", _EMPTY).numel() == 1:
        total = float(node._saved_total_weight)  # targets that are not ignored; 0 for sums
        if total:
            return total
    if hasattr(node, "_saved_ignore_index"):
        return float((node._saved_target != node._saved_ignore_index).sum())
    return float(node._saved_self.numel())
