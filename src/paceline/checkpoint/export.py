"""Weights in one file, for other programs: torch's `.pth` or safetensors."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.cloud_errors import StorageError
from paceline.checkpoint.manifest import Damaged
from paceline.checkpoint.reader import read
from paceline.checkpoint.store import committed, flush, open_store, read_manifest
from paceline.errors import CheckpointError, ConfigError
from paceline.parallel.modules import INNER

_DDP = "module."


def write_file(path: Path, content: Any) -> None:
    """Write weights atomically, in safetensors if the name ends with `.safetensors`. Called by one rank.

    Raises:
        CheckpointError: the file cannot be written; an existing one is unchanged.
    """
    scratch = path.with_name(f"{path.name}.unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".safetensors":
            _safetensors().save_file(_unshared(content), scratch)
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


def read_weights(path: str | Path, number: int = 0) -> dict[str, torch.Tensor]:
    """The weights in a file (`.pth`, `.pt`, `.safetensors`) or in a checkpoint, by name.

    Args:
        path: A file, a folder of checkpoints (its newest is read), one `step-N` in it, or its URL.
        number: The index of the model, in a checkpoint of several models.

    Raises:
        CheckpointError: there are no weights, they are damaged, or reading them needs a pickle.
        ConfigError: safetensors is not installed.
    """
    name = os.fspath(path)
    suffix = os.path.splitext(name)[1]
    from_file = True
    try:
        if "://" in name and suffix in (".safetensors", ".pth", ".pt"):
            folder, _, last = name.rpartition("/")
            store = open_store(folder)
            data = store.read(last, 0, store.size(last))
            if suffix == ".safetensors":
                found: Any = _safetensors().load(bytes(data))
            else:
                found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        elif suffix == ".safetensors":
            found = _safetensors().load_file(name)
        elif "://" not in name and not Path(name).is_dir():
            found = torch.load(name, map_location="cpu", weights_only=True)
        else:
            found = _read_checkpoint(name, number)
            from_file = False  # its names are those of the model itself
    except (CheckpointError, ConfigError):
        raise
    except StorageError as error:
        raise CheckpointError(str(error), fix=error.fix, path=name) from None
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist.", path=name) from error
    except Exception as error:  # torch, safetensors and file systems raise many types
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{path} cannot be read: {why}",
            fix="give a plain state_dict, saved by torch.save, or safetensors.",
            path=name,
        ) from error
    for key in ("state_dict", "model"):
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not all(
        isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in found.items()
    ):
        raise CheckpointError(f"{path} holds no plain state_dict.", path=name)
    found = without_inner(found) if from_file else found
    while from_file and found and all(key.startswith(_DDP) for key in found):
        found = {key.removeprefix(_DDP): value for key, value in found.items()}
    return dict(found)


def without_inner(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by names without what `torch.compile` and `checkpoint_wrapper` add."""
    return {
        ".".join(part for part in name.split(".") if part not in INNER): value
        for name, value in values.items()
    }


def _read_checkpoint(url: str, number: int) -> Any:
    url = url.rstrip("/") or url
    folder, slash, last = url.rpartition("/")
    named = int(last[5:]) if last.startswith("step-") and last[5:].isdigit() else None
    store = open_store(url if named is None else folder or slash or ".")
    steps = committed(store)
    step = named if named is not None else steps[-1] if steps else None
    if step is None or step not in steps:
        raise CheckpointError(f"{url} holds no checkpoint of Paceline.", path=url)
    try:
        manifest = read_manifest(store, step)
        prefix = f"models.{number}."
        state, _ = read(store, manifest, wants=lambda name: name.startswith(prefix))
    except Damaged as error:
        raise CheckpointError(
            f"step {step} in {store.root} is damaged: {error}.", path=url
        ) from error
    models = state.get("models", []) if isinstance(state, dict) else []
    if not 0 <= number < len(models):
        raise CheckpointError(f"{url} holds {len(models)} models, so there is no model {number}.")
    return models[number]


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ConfigError(
            "safetensors is not installed.", fix="pip install 'paceline[safetensors]'"
        ) from error
    return safetensors.torch
