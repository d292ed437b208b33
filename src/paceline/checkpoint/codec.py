"""A state as JSON and tensors, and back. No pickle, so reading a state runs no code from it.

Dictionaries with string keys, lists, numbers, strings, booleans and None are stored as JSON. Other values are
an object with one key that starts with `$`: tensors by name, NumPy arrays, tuples, sets, counters, bytes, and
dictionaries with other keys.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from paceline.errors import CheckpointError

_PLAIN = (type(None), bool, int, float, str)
_FROM_LIST: dict[str, Callable[[list[Any]], Any]] = {
    "$tuple": tuple,
    "$set": set,
    "$frozenset": frozenset,
}


def encode(state: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """The state as values for JSON, and its tensors by dotted path.

    Raises:
        CheckpointError: a value needs a pickle; the message has its path.
    """
    tensors: dict[str, torch.Tensor] = {}
    return _encode(state, "", tensors), tensors


def _encode(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, dict):
        items = {
            k: _encode(v, f"{path}.{k}" if path else str(k), tensors) for k, v in value.items()
        }
        is_counter = isinstance(value, Counter)
        if not is_counter and all(type(k) is str and not k.startswith("$") for k in items):
            return items
        pairs = [[_encode(k, path, tensors), v] for k, v in items.items()]
        return {"$counter" if is_counter else "$dict": pairs}
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            raise _refusal(path, f"a tensor of layout {value.layout} on {value.device}")
        return {"$tensor": _add(path, value.detach(), tensors)}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        native = np.array(value, dtype=value.dtype.newbyteorder("="))
        try:
            return {"$numpy": _add(path, torch.from_numpy(native), tensors)}
        except TypeError as error:  # numpy.longdouble
            raise _refusal(path, f"an array of {value.dtype}") from error
    if isinstance(value, list | tuple | set | frozenset):
        parts = [_encode(v, f"{path}.{i}", tensors) for i, v in enumerate(value)]
        if isinstance(value, list):
            return parts
        base = next(base for base in (tuple, set, frozenset) if isinstance(value, base))
        return {f"${base.__name__}": parts}
    if isinstance(value, bytes | bytearray):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, int | float | str):  # enums and other subclasses
        return next(base(value) for base in (int, float, str) if isinstance(value, base))
    raise _refusal(path, f"a {kind.__module__}.{kind.__qualname__}")


def _add(path: str, tensor: torch.Tensor, tensors: dict[str, torch.Tensor]) -> str:
    name = path or "value"
    while name in tensors:  # {"a.b": x, "a": {"b": y}}
        name += "'"
    tensors[name] = tensor
    return name


def _refusal(path: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path or 'the state'} is {what}, which cannot be saved without a pickle.",
        why="loading a pickle runs any code that is in it.",
        fix="return numbers, strings, lists, dictionaries, arrays and tensors from state_dict().",
        parameter=path,
    )


def merge(trees: Sequence[Any]) -> Any:
    """One tree of what `encode` returned on the stages of a pipeline, or on the hosts of `diloco`.

    Dictionaries and lists of names are united, lists of equal length merged by element. Of other values the
    first is taken.
    """
    first = trees[0]
    if all(tree == first for tree in trees):
        return first
    if all(isinstance(tree, dict) for tree in trees):
        keys = dict.fromkeys(key for tree in trees for key in tree)
        return {key: merge([tree[key] for tree in trees if key in tree]) for key in keys}
    if all(isinstance(tree, list) for tree in trees):
        parts = [part for tree in trees for part in tree]
        if parts and all(isinstance(part, str) for part in parts):
            return list(dict.fromkeys(parts))
        if all(len(tree) == len(first) for tree in trees):
            return [merge(each) for each in zip(*trees, strict=True)]
    return first


def decode(tree: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The state that `encode` was called with, from its two results; an array of shape () as a NumPy scalar.

    Raises:
        KeyError, TypeError, ValueError: the tree was not made by `encode`.
    """
    if isinstance(tree, list):
        return [decode(part, tensors) for part in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) != 1 or not (key := next(iter(tree))).startswith("$"):
        return {k: decode(v, tensors) for k, v in tree.items()}
    inner = tree[key]
    if key == "$tensor":
        return tensors[inner]
    if key == "$numpy":
        array = tensors[inner].numpy()
        return array if array.ndim else array[()]
    if key == "$bytes":
        return base64.b64decode(inner, validate=True)
    parts = decode(inner, tensors)
    if key in _FROM_LIST:
        return _FROM_LIST[key](parts)
    pairs = dict(parts)
    return Counter(pairs) if key == "$counter" else pairs
