"""Dataclasses from JSON that other processes wrote, with all types checked. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args, get_origin, get_type_hints

# Errors of `json.loads` and `from_json`.
UNREADABLE = (ValueError, KeyError, TypeError, OverflowError, RecursionError)


def from_json(kind: Any, value: Any) -> Any:
    """A value of this type, such as a dataclass, from what `json.loads` returned.

    Raises:
        TypeError: the value, or a part of it, is of another type, or a field is missing.
        KeyError: there is no such field.
        OverflowError: an integer is too large for a float.
    """
    arguments = get_args(kind)
    if hasattr(kind, "__dataclass_fields__") and isinstance(value, dict):
        kinds = get_type_hints(kind)
        return kind(**{name: from_json(kinds[name], part) for name, part in value.items()})
    if type(None) in arguments:
        return value if value is None else from_json(arguments[0], value)
    if get_origin(kind) is tuple and isinstance(value, list):
        parts = arguments if arguments[-1] is not ... else arguments[:1] * len(value)
        if len(parts) == len(value):
            return tuple(map(from_json, parts, value))
    if get_origin(kind) is Mapping and isinstance(value, dict):
        return {name: from_json(arguments[1], part) for name, part in value.items()}
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise TypeError(f"{value!r} is no {kind}")
    return value
