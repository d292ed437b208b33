"""Digests of nested values (samples, batches, tensors); the states of random generators and their seeds."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any

import numpy
import torch

from paceline.data import digest as content
from paceline.data.digest import bytes_of, has_content, plain

# An object is searched for random generators up to this depth, without what is in longer containers.
_MAX_DEPTH, _MAX_ITEMS = 3, 64

manual_seed = torch.manual_seed  # not the recording one that replaces it


def digest(value: Any) -> int:
    """A hash of the content of a sample, a batch or a tensor; other values count by their representation."""
    return content.digest([x if has_content(x) else repr(x) for x in leaves(value)])


def digest_rows(tensor: torch.Tensor) -> list[int]:
    """The digest of each row of a tensor: its type, shape and bytes."""
    header = f"{tuple(tensor.shape[1:])}{tensor.dtype}"
    whole = bytes_of(tensor)
    size = len(whole) // max(len(tensor), 1)
    return [content.digest([header, whole[i * size : (i + 1) * size]]) for i in range(len(tensor))]


def leaves(value: Any) -> Iterator[Any]:
    """The tensors, arrays and other values inside nested containers, in order."""
    if isinstance(value, Mapping):
        for key in value:
            yield from leaves(value[key])
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield from leaves(getattr(value, each.name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def number_of_samples(batch: Any) -> int | None:
    """The length of the first tensor or array in a batch; None if there is none."""
    for leaf in leaves(batch):
        if hasattr(leaf, "shape") and len(leaf.shape):
            return int(leaf.shape[0])
    return None


def exact_parts(value: Any) -> int:
    """Digest of the integers and texts in a sample, which augmentation does not change; 0 if none."""
    kept = [leaf for leaf in leaves(value) if _is_exact(leaf)]
    return digest(kept) if kept else 0


def _is_exact(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        return not leaf.is_floating_point() and leaf.dtype is not torch.uint8
    kind = getattr(getattr(leaf, "dtype", None), "kind", None)
    return kind == "i" if kind is not None else isinstance(leaf, int | str)


def magnitude(value: Any) -> float:
    """The sum of the absolute values of the floats in a sample."""
    total = 0.0
    for leaf in leaves(value):
        if isinstance(leaf, torch.Tensor):
            if leaf.is_floating_point() and leaf.layout is torch.strided and has_content(leaf):
                total += float(leaf.detach().double().abs().sum())
        elif getattr(getattr(leaf, "dtype", None), "kind", None) == "f" or isinstance(leaf, float):
            total += float(numpy.abs(leaf).sum(dtype=numpy.float64))
    return total


def reals_of(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor, or of a rank's shard, in float64; of complex ones, both parts."""
    values = plain(tensor)
    return (torch.view_as_real(values.resolve_conj()) if values.is_complex() else values).double()


def seed_all(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch."""
    random.seed(seed)
    numpy.random.seed(seed)
    manual_seed(seed)


def random_states(holder: Any = None) -> dict[str, int]:
    """Digests of the states of all known random generators, including those inside `holder`."""
    states = {
        "torch": digest(torch.get_rng_state()),
        "random": digest(hash(random.getstate()[1])),
        "numpy": digest(numpy.random.get_state()),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = digest(torch.cuda.get_rng_state())
    states.update(states_inside(holder, "dataset"))
    return states


def states_inside(holder: Any, name: str, depth: int = 0) -> dict[str, int]:
    """The digests of the generators in an object, its attributes, items and submodules, by their path."""
    state = _generator_state(holder)
    if state is not None:
        return {name: digest(state)}
    if depth == _MAX_DEPTH or isinstance(holder, type | ModuleType | torch.Tensor):
        return {}
    inside: list[tuple[Any, Any]] = list(getattr(holder, "__dict__", {}).items())
    if isinstance(holder, torch.nn.Module):
        every = [(f"{m}.{k}", v) for m, own in holder.named_modules() for k, v in vars(own).items()]
        inside = [(path, value) for path, value in every if not path.endswith("._modules")]
    elif isinstance(holder, dict | list | tuple) and len(holder) <= _MAX_ITEMS:
        inside += holder.items() if isinstance(holder, dict) else enumerate(holder)
    found: dict[str, int] = {}
    for key, value in inside:
        found.update(states_inside(value, f"{name}.{key}", depth + 1))
    return found


def _generator_state(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return repr(value.getstate())
    if isinstance(value, numpy.random.Generator):
        return repr(value.bit_generator.state)
    return repr(value.get_state()) if isinstance(value, numpy.random.RandomState) else None
