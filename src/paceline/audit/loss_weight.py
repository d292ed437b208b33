"""The weight of one sample in a loss, from its autograd graph: `(loss.sum() / 64)` gives 1/64.

All micro-batches and ranks of one optimizer step must give their samples the same weight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

_WITHOUT_EFFECT = frozenset(
    {"ToCopyBackward0", "AliasBackward0", "ViewBackward0", "SqueezeBackward0"}
)
_MEAN, _SUM = 1, 2  # values of `_saved_reduction`
_EMPTY = torch.empty(0)


@dataclass(frozen=True)
class LossWeight:
    """A loss that is the sum of `terms` terms, each multiplied by `weight`.

    Attributes:
        kind: The type of the reduction's node, such as "NllLossBackward0".
    """

    weight: float
    terms: float
    kind: str = ""


def loss_weight(loss: torch.Tensor) -> LossWeight | None:
    """The weight of each term; None if the graph is not a reduction followed by scalings."""
    try:
        return _walk(loss.grad_fn, 1.0)
    except AttributeError:
        # torch documents the `_saved_` attributes of nodes, but not which node has which.
        return None


def _walk(node: Any, factor: float) -> LossWeight | None:
    while node is not None:
        name = type(node).__name__
        if name in ("MulBackward0", "DivBackward0"):
            other = node._saved_other
            if other is None or other.numel() != 1 or node.next_functions[1][0] is not None:
                return None
            factor = factor / float(other) if name == "DivBackward0" else factor * float(other)
        elif name in ("MulBackward1", "DivBackward1"):  # by a number, as with label smoothing
            other = float(node._saved_other)
            factor = factor * other if name == "MulBackward1" else factor / other
        elif name == "NegBackward0":
            factor = -factor
        elif name == "AddBackward0":
            # A penalty was added to the loss; the first reduction is the one over samples.
            first = _walk(node.next_functions[0][0], factor)
            return first or _walk(node.next_functions[1][0], factor)
        elif name not in _WITHOUT_EFFECT:
            return _reduction(node, name, factor)
        node = node.next_functions[0][0]
    return None


def _reduction(node: Any, name: str, factor: float) -> LossWeight | None:
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
