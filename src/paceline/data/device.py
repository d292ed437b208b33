"""Copies batches to the job's device, through pinned memory and asynchronously.

Handles tensors, objects with a `to` method, mappings, tuples, lists, named tuples and dataclasses. Anything
else is returned unchanged.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from paceline.clock.step_clock import DATA, clock


def to_device(batch: Any, device: torch.device, *, pin: bool) -> Any:
    """The batch on `device`, in the same structure. For the CPU it is returned as it is.

    Args:
        pin: Copy host tensors to pinned memory before they go to a CUDA device, so that the copy is
            asynchronous.
    """
    if device.type == "cpu":
        return batch
    pin = pin and device.type == "cuda"

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if pin and leaf.device.type == "cpu" and not leaf.is_pinned():
                leaf = leaf.pin_memory()
            return leaf.to(device, non_blocking=True)
        to = getattr(leaf, "to", None)
        return to(device) if callable(to) else leaf

    with clock.during(DATA):
        return _map_leaves(batch, move)


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """The tensors of a batch, in their order."""
    found: list[torch.Tensor] = []

    def collect(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif isinstance(leaf, Mapping):  # with a method `to`, as transformers' BatchEncoding
            for item in leaf.values():
                _map_leaves(item, collect)
        return leaf

    _map_leaves(batch, collect)
    return found


def copy_tensors(batch: Any) -> Any:
    """The batch with copies of its tensors, in the same structure."""

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.clone()
        return _map_custom_mapping(leaf, copied) if isinstance(leaf, Mapping) else leaf

    return _map_leaves(batch, copied)


def _map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, torch.Tensor) or callable(getattr(value, "to", None)):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map_leaves(item, function) for item in value))
    if type(value) in (tuple, list):
        return type(value)(_map_leaves(item, function) for item in value)
    if type(value) is dict:
        return {name: _map_leaves(item, function) for name, item in value.items()}
    if isinstance(value, Mapping):
        return _map_custom_mapping(value, function)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # Not `replace`, which wants the InitVars and runs `__post_init__` again.
        mapped = copy.copy(value)
        for field in dataclasses.fields(value):
            # Also of a frozen class.
            object.__setattr__(
                mapped, field.name, _map_leaves(getattr(value, field.name), function)
            )
        return mapped
    return value


def _map_custom_mapping(value: Mapping[Any, Any], function: Callable[[Any], Any]) -> Any:
    """A mapping of another type: a copy that is filled through `__setitem__` if it has one, else a dict."""
    items = {name: _map_leaves(item, function) for name, item in value.items()}
    if not (hasattr(value, "copy") and hasattr(value, "__setitem__")):
        return items
    copied = value.copy()
    for name, item in items.items():
        copied[name] = item
    return copied
