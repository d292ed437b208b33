"""Samples become a batch: in this process, or in a loader worker, by the same code.

A front to a dataset's `__getitem__` (or `__getitems__`) and torch's `default_collate`. Tensors that lie
in memory (a `TensorDataset`) are indexed as a whole. What a dataset raises leaves here as a
`SampleError` that names the sample.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset, default_collate

from paceline.data.randomness import globals_kept, sample_keys, seed_globals
from paceline.errors import PacelineError, SampleError, place
from paceline.job import rng

Collate = Callable[[list[Any]], Any]


class Samples:
    """Reads micro-batches of a map-style dataset.

    Attributes:
        tensors: the tensors of a dataset that lies in memory and draws no randomness, else None.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        collate: Collate | None,
        sample_randomness: bool,
        rank: int,
        world_size: int,
        stream: int = rng.SAMPLE,
    ) -> None:
        self._stream = stream
        self._collate = collate or default_collate
        self._rank = rank
        self._world_size = world_size
        self._worker: int | None = None
        self._epoch = -1
        self._epoch_setters = _epoch_setters(dataset)
        self._dataset, self._rows = _unwrapped(dataset)
        self.tensors = _tensors(self._dataset) if collate is None else None
        if self.tensors and self._rows is not None:
            self._rows = self._rows.to(self.tensors[0].device)
        self._batched = getattr(self._dataset, "__getitems__", None)
        self._randomness = sample_randomness
        self._asks = sample_randomness and asks_for_generator(self._dataset)
        self._generator: torch.Generator | None = None  # made where it is used: it cannot be sent

    def in_worker(self, worker: int) -> None:
        """Say that this copy lives in a loader worker: errors name it, and no state needs restoring."""
        self._worker = worker

    def ids(self, first: int, stop: int) -> torch.Tensor:
        """The ids `[first, stop)`, where the dataset's own tensors lie."""
        return torch.arange(first, stop, device=self.tensors[0].device if self.tensors else None)

    def read(self, seed: int, epoch: int, ids: torch.Tensor, *, pin: bool = False) -> Any:
        """The collated batch of these sample ids (int64, one dimension, at least one).

        Args:
            pin: Put a dataset's in-memory tensors into pinned memory.

        Raises:
            SampleError: the dataset or the collate function raised; the original is its cause.
        """
        if self.tensors is not None:
            if self._rows is not None:
                ids = self._rows.index_select(0, ids)
            if pin:
                return [_pinned(tensor, ids) for tensor in self.tensors]
            return [tensor.index_select(0, ids) for tensor in self.tensors]
        if epoch != self._epoch:
            for set_epoch in self._epoch_setters:
                set_epoch(epoch)
            self._epoch = epoch
        restoring = self._randomness and not self._asks and self._worker is None
        with globals_kept() if restoring else contextlib.nullcontext():
            names = ids.tolist()
            rows = names if self._rows is None else self._rows.index_select(0, ids).tolist()
            if not self._randomness:
                samples = self._plain(names, rows)
            else:
                samples = self._random(
                    names, rows, sample_keys((seed, self._stream, epoch), ids.numpy())
                )
            return self._collated(names, samples)

    def _plain(self, names: list[int], rows: list[int]) -> list[Any]:
        if self._batched is not None:
            try:
                return list(self._batched(rows))
            except Exception as error:
                raise self._failed(f"samples {_listed(names)}", error, names) from error
        return [self._one(name, row) for name, row in zip(names, rows, strict=True)]

    def _random(self, names: list[int], rows: list[int], keys: list[int]) -> list[Any]:
        samples = []
        if self._asks and self._generator is None:
            self._generator = torch.Generator()
        for name, row, key in zip(names, rows, keys, strict=True):
            if self._generator is not None:
                self._generator.manual_seed(key)
                samples.append(self._one(name, row, generator=self._generator))
            else:
                seed_globals(key)
                samples.append(self._one(name, row))
        return samples

    def _one(self, name: int, row: int, **options: Any) -> Any:
        try:
            if options:
                return self._dataset.__getitem__(row, **options)
            return self._dataset[row]
        except Exception as error:
            raise self._failed(f"sample {name}", error, [name]) from error

    def _collated(self, names: list[int], samples: list[Any]) -> Any:
        try:
            return self._collate(samples)
        except Exception as error:
            raise collate_failed(
                error, names, rank=self._rank, world_size=self._world_size, worker=self._worker
            ) from error

    def _failed(self, what: str, error: Exception, names: list[int]) -> SampleError:
        return SampleError(
            f"{what} could not be read: {type(error).__name__}: {error}",
            where=where(self._rank, self._world_size, self._worker),
            why=f"`__getitem__` of {type(self._dataset).__name__} raised.",
            sample=names[0] if len(names) == 1 else None,
            samples=names,
            rank=self._rank,
            worker=self._worker,
            original=error,
        )


def collate_failed(
    error: Exception, names: Sequence[int], *, rank: int, world_size: int, worker: int | None
) -> PacelineError:
    """The error to raise where samples could be read, but not put together."""
    return SampleError(
        f"samples {_listed(names)} could not be collated: {type(error).__name__}: {error}",
        where=where(rank, world_size, worker),
        why="the samples of a micro-batch have different shapes or types, or `collate` raised.",
        fix="make them equal in `__getitem__`, or pass `collate=` a function that pads.",
        sample=None,
        samples=list(names),
        rank=rank,
        worker=worker,
        original=error,
    )


def where(rank: int, world_size: int, worker: int | None) -> str:
    """Render rank, host and loader worker."""
    return place(rank, world_size, detail="" if worker is None else f"loader worker {worker}")


def asks_for_generator(dataset: Any) -> bool:
    """Whether `__getitem__` has a parameter named `generator`."""
    try:
        parameters = inspect.signature(dataset.__getitem__).parameters
    except (TypeError, ValueError):
        return False  # written in C, without a signature
    return "generator" in parameters


def _listed(names: Sequence[int], limit: int = 8) -> str:
    text = ", ".join(str(name) for name in names[:limit])
    return text if len(names) <= limit else f"{text} and {len(names) - limit} more"


def _layers(dataset: Any) -> list[Any]:
    """The dataset and what it is a subset of, outermost first; only torch's own Subset is known."""
    layers = [dataset]
    while type(layers[-1]) is Subset:
        layers.append(layers[-1].dataset)
    return layers


def _epoch_setters(dataset: Any) -> list[Callable[[int], Any]]:
    setters = [getattr(layer, "set_epoch", None) for layer in _layers(dataset)]
    return [setter for setter in setters if callable(setter)]


def _unwrapped(dataset: Any) -> tuple[Any, torch.Tensor | None]:
    """The innermost dataset under torch's Subset (`random_split`), and its row of each sample.

    So a part of a set keeps what the set offers: tensors in memory, a `generator` parameter. The row
    is None where it is the sample's own number.
    """
    *subsets, inner = _layers(dataset)
    rows: torch.Tensor | None = None
    for subset in subsets:
        table = torch.from_numpy(np.array(subset.indices, dtype=np.int64))
        rows = table if rows is None else table.index_select(0, rows)
    return inner, rows


def _tensors(dataset: Any) -> tuple[torch.Tensor, ...] | None:
    """The tensors of a dataset that is nothing but them, all on one device; else None."""
    if not isinstance(dataset, TensorDataset):
        return None
    kind = type(dataset)
    if kind.__getitem__ is not TensorDataset.__getitem__ or hasattr(kind, "__getitems__"):
        return None
    plain = all(t.layout is torch.strided and not t.requires_grad for t in dataset.tensors)
    one_device = len({t.device for t in dataset.tensors}) == 1
    return dataset.tensors if plain and one_device else None


def _pinned(tensor: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    # Gathered into pinned memory at once: one copy less than pinning the result.
    out = torch.empty((len(ids), *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=True)
    return torch.index_select(tensor, 0, ids, out=out)
