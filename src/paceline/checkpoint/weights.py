"""Reads weights into a model: safetensors files, `torch.save` files, folders of torch's DCP, checkpoints.

Each rank reads the parts of tensors that it holds, from files of which it has read the headers. Names and
shapes are compared with the model before any tensor is allocated or read.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.checkpoint import layout, reader
from paceline.checkpoint.cloud_errors import FIX, StorageError
from paceline.checkpoint.manifest import Chunk, Damaged, SavedTensor
from paceline.checkpoint.store import check_sizes, committed, open_store, read_manifest
from paceline.errors import (
    CheckpointError,
    ConfigError,
    PacelineError,
    listed,
    refuse_different_values,
)
from paceline.job import collectives
from paceline.job.job import current
from paceline.parallel.modules import INNER, UNFILLED, local, plain_name, unwrap

INDEX = "model.safetensors.index.json"
ONE_FILE = "model.safetensors"  # without an index
DCP_METADATA = ".metadata"
_DDP = "module."
_EXTRA_STATE = "_extra_state"  # torch's name of what `get_extra_state` of a module returns
_NESTED = ("state_dict", "model")  # under which programs save the weights beside other state


def load_weights(
    model: nn.Module,
    path: str | Path,
    *,
    number: int = 0,
    rename: Callable[[str], str | None] | None = None,
) -> None:
    """Load the weights of files or of a checkpoint into a model; each rank reads what it holds.

    Tensors of the model on the meta device are allocated on the device of the job, each with the size of
    this rank's shard; make the optimizer afterwards. Values are converted to the dtypes of the model.
    Parameters that the model ties need one of their names in the file; if it has several, their values must
    be equal.

    From safetensors a rank reads the slices of its shards, from files that are mapped, one tensor at a time.
    Beside its shards it needs memory for one shard of the writer, from a folder of torch's DCP; and for some
    parts of 16 MiB, from a checkpoint, whose digests are checked. A file of `torch.save` is read whole by
    each rank.

    Args:
        model: Wrapped, split over ranks, or neither; names with and without `module.` both fit.
        path: A safetensors file, or a folder with `model.safetensors.index.json` or `model.safetensors`, as
            from the Hugging Face hub; a file of `torch.save`; a folder of `torch.distributed.checkpoint`
            (its metadata is a pickle: read only what you trust); a folder of checkpoints (its newest is
            read), one `step-N` in it, or its URL.
        number: Which model, for a checkpoint of several.
        rename: A function from a name in the file to the name in the model, or to None for a tensor that the
            model does not need. It must return the same on all ranks.

    Raises:
        CheckpointError: on all ranks, and the model is not changed: there are no weights, a file is missing
            or cannot be read, names or shapes are not those of the model, values are complex and those of
            the model are not, or two names become one. Also on all ranks, with a model that is partly
            loaded: reading fails later, or the names of a tied parameter have different values.
        ConfigError: on all ranks: safetensors is not installed; a buffer on the meta device is not saved.

    Collective: all ranks of the job, if there is one.
    """
    module = unwrap(model)
    problem: PacelineError | None = None
    unknown: list[str] = []
    try:
        weights = open_weights(path, number)
        sources, unknown = _match(module, weights, rename)
    except (CheckpointError, ConfigError) as error:
        problem = error
    reports = _exchange(path, problem, [unknown, None if problem else weights.step])
    refuse_different_values(
        "the newest checkpoint",
        [step for _, step in reports],
        where=f"in {path}",
        fix="another job saves there: name the checkpoint, such as step-500.",
    )
    # Of a pipeline each rank has some names.
    nowhere = set(unknown).intersection(*(names for names, _ in reports))
    if nowhere:
        first = min(nowhere)
        raise CheckpointError(
            f"{first}: the model has no such name, the weights in {path} have "
            f"{layout.described(weights.shapes.get(first, weights.values.get(first)))}"
            f"{f'; {len(nowhere)} tensors are not in the model' if len(nowhere) > 1 else ''}.",
            fix="build the model that the weights were saved from; rename= may return None for tensors that "
            "are not needed.",
            path=os.fspath(path),
            parameter=first,
        )
    job = current()
    device = torch.device("cpu") if job is None else job.device
    try:
        _fill(module, weights, sources, module.__dict__.pop(UNFILLED, device))
    except CheckpointError as error:
        problem = error
    except Exception as error:  # as in `open_weights`
        problem = CheckpointError(f"{path} cannot be read: {_why(error)}", path=os.fspath(path))
        problem.__cause__ = error
    _exchange(path, problem, None, has_timeout=False)  # one rank may read for long


def _exchange(
    path: str | Path, problem: PacelineError | None, value: Any, *, has_timeout: bool = True
) -> list[Any]:
    """The values of all ranks; or all raise the problem of one."""
    job, own = current(), ["" if problem is None else str(problem), value]
    reports = [own] if job is None else collectives.gather(job, own, has_timeout=has_timeout)
    if problem is not None:
        raise problem
    for rank, (text, _) in enumerate(reports):
        if text:
            raise CheckpointError(f"on rank {rank}: {text}", path=os.fspath(path))
    return [value for _, value in reports]


def _match(
    module: nn.Module, weights: Weights, rename: Callable[[str], str | None] | None
) -> tuple[dict[str, list[str]], list[str]]:
    """For names in the state of the module, the names in the file; and names that the module lacks.

    A tied parameter may have several names in the file.
    """
    source = {name: key for key, name in weights.names(rename).items()}
    state = module.state_dict(keep_vars=True)
    names_of: dict[Any, list[str]] = {}  # tied parameters have several
    for name, value in state.items():
        names_of.setdefault(_identity(name, value), []).append(plain_name(module, name))
    found: dict[str, list[str]] = {}
    for name, value in state.items():
        tied = names_of[_identity(name, value)]
        found[name] = [source[each] for each in tied if each in source]
        keys: list[str | None] = [*found[name]] or [None]
        for key in keys:
            other = None if key is None else weights.shapes.get(key, weights.values.get(key))
            if layout.described(value) != layout.described(other):
                raise CheckpointError(
                    f"{tied[0]}: the model has {layout.described(value)}, the weights in {weights.path} have "
                    f"{layout.described(other)}.",
                    fix="build the model that the weights were saved from, or pass rename= if names differ.",
                    path=weights.path,
                    parameter=tied[0],
                )
    lost = [name for name, buffer in module.named_buffers() if buffer.is_meta and name not in state]
    if lost:
        raise ConfigError(
            f"{listed(lost)}: on the meta device, and not a part of saved weights (`persistent=False`).",
            fix="build the modules of these buffers outside of `torch.device('meta')`, and put them into "
            "the model.",
        )
    known = {name for names in names_of.values() for name in names}
    return found, sorted(key for name, key in source.items() if name not in known)


def _fill(
    module: nn.Module, weights: Weights, sources: Mapping[str, list[str]], device: torch.device
) -> None:
    """Read the values of the module's state, whose names in the file are `sources`."""
    state = module.state_dict(keep_vars=True)
    allocated: dict[int, torch.Tensor] = {}  # by the id of what it replaces: ties stay
    targets: dict[str, torch.Tensor] = {}
    repeated: list[tuple[str, str]] = []  # names of one tied parameter
    new: dict[str, Any] = {}
    for name, (key, *others) in sources.items():
        own = state[name]
        if not isinstance(own, torch.Tensor):
            new[name] = weights.values[key]
            continue
        if own.is_meta:
            if id(own) not in allocated:
                empty = torch.empty_like(own.detach(), device=device)
                is_parameter = isinstance(own, nn.Parameter)
                allocated[id(own)] = (
                    nn.Parameter(empty, own.requires_grad) if is_parameter else empty
                )
            new[name] = own = allocated[id(own)]
        if key not in targets:
            repeated += [(key, other) for other in others]
        targets[key] = own.detach()
    weights.fill(targets)
    for key, other in repeated:
        values = torch.empty_like(targets[key])
        weights.fill({other: values})
        if not torch.equal(local(values), local(targets[key])):
            raise CheckpointError(
                f"{key} and {other} have different values in {weights.path}, and the model ties them.",
                fix="untie them in the model, or pass rename= that returns None for one of them.",
                path=weights.path,
                parameter=key,
            )
    if new:
        module.load_state_dict(new, strict=False, assign=True)


def _identity(name: str, value: Any) -> Any:
    return id(value) if isinstance(value, torch.Tensor) else name


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Weights of which parts can be read.

    Attributes:
        shapes: Dtypes and shapes, by name.
        fill: Reads the values of some tensors, by name; the tensors may be sharded.
        values: What modules return from `get_extra_state`, if it is no tensor.
        path: Where they are.
        is_file: Whether names may have parts that wrappers of a model add.
        step: Of a checkpoint of Paceline.
    """

    shapes: dict[str, SavedTensor]
    fill: Callable[[dict[str, torch.Tensor]], None]
    path: str
    values: dict[str, Any] = field(default_factory=dict)
    is_file: bool = True
    step: int | None = None

    def names(self, rename: Callable[[str], str | None] | None = None) -> dict[str, str]:
        """For each name in the file, the name in the model.

        Raises:
            CheckpointError: two names become one.
        """
        keys = [*self.shapes, *self.values]
        found = {key: key for key in keys}
        if rename is not None:
            renamed = ((key, rename(key)) for key in keys)
            found = {key: new for key, new in renamed if new is not None}
        elif self.is_file:
            found = {k: ".".join(part for part in k.split(".") if part not in INNER) for k in keys}
            while found and all(name.startswith(_DDP) for name in found.values()):
                found = {key: name.removeprefix(_DDP) for key, name in found.items()}
        key_of: dict[str, str] = {}
        for key, name in found.items():
            if key_of.setdefault(name, key) != key:
                raise CheckpointError(
                    f"{key_of[name]} and {key} of {self.path} both become {name}.",
                    fix="pass rename= to load_weights: a different name, or None, for one of them.",
                    path=self.path,
                    parameter=name,
                )
        return found

    def read(self, keys: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
        """Whole tensors, by the name in the model. None: all of them."""
        parts = self.shapes if keys is None else {key: self.shapes[key] for key in keys}
        whole = {
            key: torch.empty(saved.shape, dtype=getattr(torch, saved.dtype))
            for key, saved in parts.items()
        }
        self.fill(whole)
        return {name: whole[key] for key, name in self.names().items() if key in whole}


def open_weights(path: str | Path, number: int = 0) -> Weights:
    """The weights at a path, whose names, dtypes and shapes are read; see `load_weights`.

    Raises:
        CheckpointError: there are no weights, they are damaged, or reading them needs a pickle.
        ConfigError: safetensors is not installed.
    """
    name = os.fspath(path)
    try:
        if "://" in name:
            is_file = name.endswith((".safetensors", ".pth", ".pt"))
            return _remote_file(name) if is_file else _checkpoint(name, number)
        if (Path(name) / INDEX).exists() or (Path(name) / ONE_FILE).exists():
            return _safetensors_folder(Path(name))
        if name.endswith(".safetensors"):
            return _safetensors(name, [name])
        if (Path(name) / DCP_METADATA).exists():
            return _dcp(name)
        if Path(name).is_dir():
            _refuse_pickles(Path(name))
            return _checkpoint(name, number)
        return _in_memory(torch.load(name, map_location="cpu", weights_only=True), name)
    except (CheckpointError, ConfigError):
        raise
    except StorageError as error:
        raise CheckpointError(str(error), fix=FIX, path=name) from None
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist.", path=name) from error
    except Exception as error:  # torch, safetensors and file systems raise many types
        raise CheckpointError(
            f"{path} cannot be read: {_why(error)}",
            fix="give a plain state_dict, saved by torch.save, or safetensors.",
            path=name,
        ) from error


def _why(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _safetensors_folder(folder: Path) -> Weights:
    """The files that the index names: a folder may have the same weights in other files too."""
    index = folder / INDEX
    if not index.exists():
        return _safetensors(os.fspath(folder), [os.fspath(folder / ONE_FILE)])
    try:
        file_of = {str(k): str(v) for k, v in json.loads(index.read_text())["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index} is not an index of safetensors.", path=str(index)
        ) from error
    paths = [os.fspath(folder / name) for name in sorted(set(file_of.values()))]
    return _safetensors(os.fspath(folder), paths, file_of)


def _refuse_pickles(folder: Path) -> None:
    """Raise CheckpointError if a folder from the hub holds its weights as pickles only."""
    if pickles := sorted(path.name for path in folder.glob("pytorch_model*.bin")):
        raise CheckpointError(
            f"{folder} holds its weights in {listed(pickles)}, and not in safetensors.",
            why="each rank would read all of it; and loading a pickle can run code.",
            fix="convert it once, with the class of your model: `model = "
            f"transformers.AutoModelForCausalLM.from_pretrained({os.fspath(folder)!r})`, then "
            "`model.save_pretrained(NEW_FOLDER)`.",
            path=os.fspath(folder),
        )


def _safetensors(path: str, files: list[str], file_of: Mapping[str, str] | None = None) -> Weights:
    """The tensors in the files; with `file_of`, each from the file that it names."""
    safetensors_torch()
    from safetensors import safe_open

    shapes: dict[str, SavedTensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118 - it is no dict
                    if file_of is not None and file_of.get(key) != os.path.basename(file):
                        continue
                    tensor = opened.get_tensor(key)  # mapped, not read
                    shapes[key] = _one_chunk(tensor, file)
        except Exception as error:  # its own type of error, which is not public
            raise CheckpointError(f"{file} cannot be read: {error}", path=file) from error

    def part(key: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        # Pages of the file that were read are memory of this process until the file is closed.
        with safe_open(shapes[key].chunks[0].file, framework="pt") as opened:
            if not sizes:
                return opened.get_tensor(key)  # type: ignore[no-any-return]
            box = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
            return opened.get_slice(key)[box]  # type: ignore[no-any-return]

    return Weights(shapes=shapes, fill=_filler(shapes, part), path=path)


def _in_memory(content: Any, path: str) -> Weights:
    for key in _NESTED:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not all(
        isinstance(k, str) and (isinstance(v, torch.Tensor) or k.split(".")[-1] == _EXTRA_STATE)
        for k, v in content.items()
    ):
        raise CheckpointError(f"{path} holds no plain state_dict.", path=path)
    tensors = {key: value for key, value in content.items() if isinstance(value, torch.Tensor)}
    shapes = {key: _one_chunk(value) for key, value in tensors.items()}

    def part(key: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        return layout.narrowed(tensors[key], offsets, sizes)

    values = {key: value for key, value in content.items() if key not in tensors}
    return Weights(shapes=shapes, fill=_filler(shapes, part), path=path, values=values)


def _remote_file(url: str) -> Weights:
    folder, _, last = url.rpartition("/")
    store = open_store(folder)
    data = bytes(store.read(last))
    if last.endswith(".safetensors"):
        return _in_memory(safetensors_torch().load(data), url)
    return _in_memory(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True), url)


def _dcp(folder: str) -> Weights:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = dcp.FileSystemReader(folder).read_metadata()
    tensors = {
        key: item
        for key, item in metadata.state_dict_metadata.items()
        if isinstance(item, TensorStorageMetadata)
    }
    # A flat state may have names such as `model.norm.weight` too.
    places = metadata.planner_data or {}  # the keys that lead to each value in what was saved
    outer = {places[key][0] for key in tensors if len(places.get(key, ())) > 1}
    prefix = next((f"{name}." for name in _NESTED if name in outer), "")
    shapes = {
        key.removeprefix(prefix): SavedTensor(_dtype(item.properties.dtype), tuple(item.size), ())
        for key, item in tensors.items()
        if key.startswith(prefix)
    }

    def fill(targets: dict[str, torch.Tensor]) -> None:
        wanted: dict[str, Any] = {prefix + key: target for key, target in targets.items()}
        with no_dist():
            dcp.load(wanted, storage_reader=dcp.FileSystemReader(folder), no_dist=True)

    return Weights(shapes=shapes, fill=fill, path=folder)


@contextlib.contextmanager
def no_dist() -> Iterator[None]:
    """Without the warning of torch's DCP that one process uses it alone, and with its errors as they were."""
    from torch.distributed.checkpoint import CheckpointException

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:  # a BaseException
            raise next(iter(error.failures.values()))[0] from None


def _checkpoint(url: str, number: int) -> Weights:
    url = url.rstrip("/") or url
    folder, slash, last = url.rpartition("/")
    named = int(last[5:]) if last.startswith("step-") and last[5:].isdigit() else None
    store = open_store(url if named is None else folder or slash or ".")
    steps = committed(store)
    step = named if named is not None else steps[-1] if steps else None
    if step is None or step not in steps:
        raise CheckpointError(f"{url} holds no checkpoint of Paceline.", path=url)

    def damaged(error: Damaged) -> CheckpointError:
        return CheckpointError(f"step {step} in {store.root} is damaged: {error}.", path=url)

    try:
        manifest = read_manifest(store, step)
        check_sizes(store, manifest)
    except Damaged as error:
        raise damaged(error) from error
    models = manifest.tree.get("models", []) if isinstance(manifest.tree, dict) else []
    if not 0 <= number < len(models):
        raise CheckpointError(f"{url} holds {len(models)} models, so there is no model {number}.")
    path_of = {
        key: value["$tensor"]
        for key, value in models[number].items()
        if isinstance(value, dict) and "$tensor" in value
    }
    values = {}
    if len(path_of) < len(models[number]):  # some modules have a state beside their tensors
        others = set(manifest.tensors) - set(path_of.values())
        wants = {path for path in others if path.startswith(f"models.{number}.")}
        state, _ = reader.read(store, manifest, wants=lambda path: path in wants)
        values = {k: v for k, v in state["models"][number].items() if k not in path_of}

    def fill(targets: dict[str, torch.Tensor]) -> None:
        try:
            reader.fill(store, manifest, {path_of[key]: t for key, t in targets.items()})
        except Damaged as error:
            raise damaged(error) from error

    return Weights(
        shapes={key: manifest.tensors[path] for key, path in path_of.items()},
        fill=fill,
        values=values,
        path=url,
        step=step,
        is_file=False,
    )


def _one_chunk(tensor: torch.Tensor, file: str = "") -> SavedTensor:
    shape = tuple(tensor.shape)
    return SavedTensor(_dtype(tensor.dtype), shape, (Chunk((0,) * len(shape), shape, file, 0, ""),))


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _filler(
    shapes: dict[str, SavedTensor],
    part: Callable[[str, tuple[int, ...], tuple[int, ...]], torch.Tensor],
) -> Callable[[dict[str, torch.Tensor]], None]:
    """A function that copies parts of tensors, which `part` returns, to where they are wanted."""

    def fill(targets: dict[str, torch.Tensor]) -> None:
        for key, _, copies in layout.plan_reads(targets, shapes):
            for (offsets, sizes), target in copies:
                target.copy_(part(key, offsets, sizes))

    return fill


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
