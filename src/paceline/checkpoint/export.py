"""Writes weights for other programs: torch's `.pth`, safetensors, or a folder of torch's DCP."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.store import flush
from paceline.checkpoint.weights import INDEX, ONE_FILE, Weights, no_dist, safetensors_torch
from paceline.errors import CheckpointError, ConfigError


def write_file(path: Path, content: Any) -> None:
    """Write weights atomically, in safetensors if the name ends with `.safetensors`. Called by one rank.

    Raises:
        CheckpointError: the file cannot be written; an existing one is unchanged.
    """
    path = path.absolute()
    scratch = path.with_name(f"{path.name}.unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".safetensors":
            safetensors_torch().save_file(_unshared(content), scratch, {"format": "pt"})
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


def write_shards(folder: Path, weights: Weights, shard_bytes: int) -> None:
    """Write a folder of safetensors files with an index, as on the Hugging Face hub. Called by one rank.

    Needs memory for the tensors of one file.

    Args:
        folder: It must not exist.
        shard_bytes: Bytes of tensors in a file at most; a larger tensor has a file of its own.

    Raises:
        CheckpointError: the folder exists, or cannot be written.
    """
    shards: list[list[str]] = []
    left = 0
    for key in weights.shapes:
        size = weights.shapes[key].whole_bytes
        if not shards or size > left:
            shards.append([])
            left = shard_bytes
        shards[-1].append(key)
        left -= size
    file_of: dict[str, str] = {}
    with _new_folder(folder) as scratch:
        for number, keys in enumerate(shards, 1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            if len(shards) == 1:
                file = ONE_FILE
            found = weights.read(keys)
            safetensors_torch().save_file(_unshared(found), scratch / file, {"format": "pt"})
            flush(scratch / file)
            file_of |= dict.fromkeys(found, file)
        if len(shards) > 1:
            total = sum(saved.whole_bytes for saved in weights.shapes.values())
            index = {"metadata": {"total_size": total}, "weight_map": file_of}
            (scratch / INDEX).write_text(json.dumps(index, indent=2))
            flush(scratch / INDEX)


def write_dcp(folder: Path, weights: Weights) -> None:
    """Write a folder that `torch.distributed.checkpoint.load(model.state_dict(), checkpoint_id=)` reads.

    Called by one rank. Needs memory for all tensors.

    Raises:
        CheckpointError: the folder exists, or cannot be written.
    """
    import torch.distributed.checkpoint as dcp

    with _new_folder(folder) as scratch, no_dist():
        dcp.save({**weights.read(), **weights.values}, checkpoint_id=scratch, no_dist=True)


@contextlib.contextmanager
def _new_folder(path: Path) -> Iterator[Path]:
    """A folder that gets its name when the block ends without an error."""
    path = path.absolute()  # "." has no name
    scratch = path.with_name(f"{path.name}.unfinished")
    if path.exists():
        raise CheckpointError(f"{path} exists.", fix="give a new folder.", path=str(path))
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        yield scratch
        scratch.replace(path)
        flush(path.parent)
    except (CheckpointError, ConfigError):
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    except Exception as error:  # see `write_file`
        shutil.rmtree(scratch, ignore_errors=True)
        raise CheckpointError(f"{path} cannot be written: {error}", path=str(path)) from error
