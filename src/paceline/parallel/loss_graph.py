"""The autograd graph of a loss: which parameters it uses, and how to keep a NaN out of their gradients."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from paceline.job.all_gather import AllGather

_Gradients = tuple[torch.Tensor | None, ...]


def used_leaves(loss: torch.Tensor, *, excluded: Collection[Any]) -> list[torch.Tensor]:
    """The leaf tensors, such as parameters, that a loss is computed from.

    Args:
        excluded: Nodes of the graph, such as that of a model's output. Leaves that the loss uses only through
            them are left out.
    """
    return [node.variable for node in _nodes(loss, excluded) if _is_leaf(node)]


def uses_all_gather(loss: torch.Tensor) -> bool:
    """Whether a loss is computed from the result of `job.all_gather`."""
    return any(map(_is_all_gather, _nodes(loss)))


def discard_gradients(loss: torch.Tensor) -> list[RemovableHandle]:
    """Have the backward of `loss` give zeros to all parameters, until the hooks are removed.

    A mean over no tokens may be 0/0. Its gradient is then NaN, and stays NaN times a weight of 0.
    """
    hooks = []
    for node in list(_nodes(loss)):
        # At the nodes before the leaves: the graphs of other micro-batches share the leaves.
        if any(_is_leaf(each) for each, _ in node.next_functions):
            hooks.append(node.register_hook(_zeros))
        if _is_all_gather(node):  # sends gradients to other ranks
            hooks.append(node.register_prehook(_zeros))
    return hooks


def _nodes(loss: torch.Tensor, excluded: Collection[Any] = ()) -> Iterator[Any]:
    seen = {None, *excluded}
    pending: list[Any] = [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            pending += [each for each, _ in node.next_functions]
            yield node


def _is_leaf(node: Any) -> bool:
    return type(node).__name__ == "AccumulateGrad"


def _is_all_gather(node: Any) -> bool:
    return type(node).__name__ == f"{AllGather.__name__}Backward"


def _zeros(gradients: _Gradients, *_: _Gradients) -> _Gradients:
    return tuple(None if g is None else torch.zeros_like(g) for g in gradients)
