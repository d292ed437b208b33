"""A digest of a sample or a batch, to compare what several readers have read."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def digest(value: Any, *, elements: int | None = None) -> int:
    """A hash in [0, 2^62) of the tensors, arrays, images and plain values in `value`.

    Reads mappings, lists, tuples and dataclasses. Other values, and quantized and nested tensors, are
    ignored. Equal on hosts of one byte order.

    Args:
        elements: How many elements of each tensor are read, from the first on; None reads all. For a sparse
            tensor the limit applies to the indices and to the values separately.
    """
    hasher = hashlib.blake2b(digest_size=8)
    _feed(hasher, value, elements)
    return int.from_bytes(hasher.digest(), "little") >> 2


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The local part of a DTensor, a dense copy of a sparse tensor, or the tensor itself; detached."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return (local if local.layout is torch.strided else local.to_dense()).detach()


def bytes_of(tensor: torch.Tensor, elements: int | None = None) -> bytes:
    """The content of the first elements of a tensor, or of all."""
    flat = plain(tensor).reshape(-1)[:elements].cpu().resolve_conj().resolve_neg().contiguous()
    if isinstance(tensor, torch.nn.Parameter):
        flat = flat.clone()  # FSDP cannot free the storage of a parameter that NumPy has seen
    return flat.view(torch.uint8).numpy().tobytes()


def has_content(value: Any) -> bool:
    """Whether `value` is a tensor, array or image whose content `digest` reads."""
    if isinstance(value, torch.Tensor):
        return not (value.is_quantized or value.is_nested)
    if isinstance(value, np.ndarray):
        return not value.dtype.hasobject
    return hasattr(value, "tobytes") and not isinstance(value, type)


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The indices and values of a sparse tensor, which may be too large as a dense one; else the tensor."""
    if tensor.layout is torch.strided or tensor.is_mkldnn:
        return [tensor]
    coo = tensor.detach().to_sparse().coalesce()
    return [coo.indices(), coo.values()]


def _feed(hasher: hashlib.blake2b, value: Any, elements: int | None) -> None:
    if isinstance(value, torch.Tensor):
        if has_content(value):
            hasher.update(f"{tuple(value.shape)}{value.dtype}".encode())
            for part in _parts(value):
                hasher.update(bytes_of(part, elements))
    elif isinstance(value, bytes):
        hasher.update(f"{len(value)} bytes:".encode())
        hasher.update(value)
    elif isinstance(value, bool | int | float | str | np.generic):
        hasher.update(f"{value!r},".encode())
    elif has_content(value):  # arrays, and images of PIL
        hasher.update(value.tobytes())
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
