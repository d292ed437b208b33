"""Writes weights for other programs: torch's `.pth` or safetensors."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.store import flush
from paceline.errors import CheckpointError, ConfigError


def write_file(path: Path, content: Any) -> None:
    """Write weights atomically, in safetensors if the name ends with `.safetensors`. Called by one rank.

    Raises:
        CheckpointError: the file cannot be written; an existing one is unchanged.
    """
    scratch = path.with_name(f"{path.name}.unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".safetensors":
            safetensors_torch().save_file(_unshared(content), scratch)
        else:
            torch.save(content, scratch)
        flush(scratch)
        scratch.replace(path)
        flush(path.parent)
    except ConfigError:
        raise
    # torch reports a full disk as a RuntimeError, and safetensors has its own error.
    except Exception as error:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)
        raise CheckpointError(f"{path} cannot be written: {error}", path=str(path)) from error


def _unshared(content: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors; of those that share memory, as tied weights do, all but the first are copies.

    safetensors refuses tensors that share memory.
    """
    found = {}
    seen = set()
    for name, tensor in content.items():
        storage = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if storage in seen else tensor.contiguous()
        seen.add(storage)
    return found


def safetensors_torch() -> Any:
    """The module `safetensors.torch`.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import safetensors.torch
    except ImportError as error:
        raise ConfigError(
            "safetensors is not installed.", fix="pip install 'paceline[safetensors]'"
        ) from error
    return safetensors.torch
