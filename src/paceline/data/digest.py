"""A digest of a sample or a batch, to compare what several readers have read."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def digest(value: Any, *, elements: int | None = None) -> int:
    """A hash in [0, 2^62) of the tensors, arrays and plain values in `value`.

    Reads mappings, lists, tuples and dataclasses; other values, and sparse, quantized and nested tensors, are
    ignored. Equal on hosts of one byte order.

    Args:
        elements: The number of elements of each tensor that are read, the first ones; None reads all.
    """
    hasher = hashlib.blake2b(digest_size=8)
    _feed(hasher, value, elements)
    return int.from_bytes(hasher.digest(), "little") >> 2


def _feed(hasher: hashlib.blake2b, value: Any, elements: int | None) -> None:
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided and not (value.is_quantized or value.is_nested):
            flat = value.detach().reshape(-1)[:elements].cpu().resolve_conj().resolve_neg()
            hasher.update(flat.contiguous().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray):
        if not value.dtype.hasobject:
            hasher.update(value.tobytes())
    elif isinstance(value, bool | int | float | str | bytes | np.generic):
        hasher.update(f"{value!r},".encode())
    elif isinstance(value, tuple | list):
        for part in value:
            _feed(hasher, part, elements)
    elif isinstance(value, Mapping):
        for name, part in value.items():
            _feed(hasher, name, elements)
            _feed(hasher, part, elements)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _feed(hasher, getattr(value, field.name), elements)
