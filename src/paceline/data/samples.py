"""Reads samples and collates them into a batch; the same code runs in this process and in loader workers.

A front to a dataset's `__getitem__` (or `__getitems__`) and torch's `default_collate`. The tensors of a
`TensorDataset` are indexed directly. An exception of the dataset becomes a `DataError` that names the
sample.

The randomness of a sample is the same on any rank and worker, in any micro-batch and after a restart: the
global generators of torch (CPU), numpy and `random` are seeded before each sample. Draws on an accelerator,
or from generators that the dataset makes itself, are not covered.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import (
    IterableDataset,
    Sampler,
    Subset,
    TensorDataset,
    default_collate,
)

from paceline.errors import ConfigError, DataError, listed, rank_location
from paceline.job import rng

Collate = Callable[[list[Any]], Any]

# Attribute of a dataset: the epoch that `set_epoch` has set last.
_EPOCH = "_paceline_epoch"


@dataclass
class ReadErrors:
    """Makes the errors of reading samples on one rank, in its own process or in one of its loader workers.

    Attributes:
        worker: number of the loader worker; None in the rank's own process.
    """

    rank: int
    world_size: int
    worker: int | None = None

    def where(self) -> str:
        """Rank, host and loader worker."""
        detail = "" if self.worker is None else f"loader worker {self.worker}"
        return rank_location(self.rank, self.world_size, detail=detail)

    def not_read(self, ids: Sequence[int], error: Exception, why: str) -> DataError:
        """The error for samples whose reading raised `error`."""
        return self._error(ids, error, "could not be read", why=why)

    def not_collated(self, ids: Sequence[int], error: Exception) -> DataError:
        """The error for samples that were read but could not be collated."""
        return self._error(
            ids,
            error,
            "could not be collated",
            why="the samples of a micro-batch have different shapes or types, or `collate` raised.",
            fix="return equal shapes from `__getitem__`, or pass a `collate` function that pads.",
        )

    def refuse_missing(self, ids: Sequence[int], samples: list[Any]) -> None:
        """Refuse samples that are None, which a collate function would drop.

        Raises:
            DataError: for the first.
        """
        for sample_id, sample in zip(ids, samples, strict=True):
            if sample is None:
                raise DataError(
                    f"sample {sample_id} is None.",
                    where=self.where(),
                    why="a collate function that drops it would change the number of samples of the step.",
                    fix="leave such samples out of the dataset (torch.utils.data.Subset).",
                    sample=sample_id,
                )

    def _error(self, ids: Sequence[int], error: Exception, what: str, **text: str) -> DataError:
        return DataError(
            f"{'sample' if len(ids) == 1 else 'samples'} {listed([*map(str, ids)])} {what}: "
            f"{type(error).__name__}: {error}",
            where=self.where(),
            sample=ids[0] if len(ids) == 1 else None,
            samples=list(ids),
            rank=self.rank,
            worker=self.worker,
            original=error,
            **text,
        )


class Samples:
    """Reads micro-batches of a map-style dataset.

    Args:
        purpose: Part of the key of each sample's randomness: `rng.SAMPLE` or `rng.EVALUATION`.

    Attributes:
        tensors: the tensors of a dataset that is only tensors, which are indexed directly; else None.
        dataset: as given, possibly a subset.
        errors: makes the errors; a loader worker sets its `worker`.
    """

    def __init__(
        self,
        dataset: Any,
        errors: ReadErrors,
        *,
        collate: Collate | None,
        sample_randomness: bool,
        purpose: int = rng.SAMPLE,
    ) -> None:
        self.dataset = dataset
        self.errors = errors
        self._purpose = purpose
        self._collate = collate or default_collate
        self._epoch = -1
        self._epochal = [
            each for each in _layers(dataset) if callable(getattr(each, "set_epoch", None))
        ]
        self._dataset, self._rows = _unwrap_subsets(dataset)
        self.tensors = _plain_tensors(self._dataset) if collate is None else None
        if self.tensors and self._rows is not None:
            rows = self._rows.to(self.tensors[0].device)
            self._rows = _from_the_start(rows, len(self.tensors[0]))
        self._batched = getattr(self._dataset, "__getitems__", None)
        self._sample_randomness = sample_randomness

    @property
    def ids_device(self) -> torch.device:
        """The device on which `read` expects sample ids."""
        return self.tensors[0].device if self.tensors else torch.device("cpu")

    def read(
        self,
        seed: int,
        epoch: int,
        ids: torch.Tensor,
        *,
        place: int | None = None,
        pin: bool = False,
    ) -> Any:
        """The collated batch of these sample ids (int64, one dimension, at least one).

        Args:
            place: Place in the epoch of the first id. If given, the randomness of a sample depends on its
                place instead of its id, for orders in which a sample may occur several times.
            pin: Put the rows of a dataset's tensors into pinned memory.

        Raises:
            DataError: the dataset or the collate function raised; the original error is its cause.
        """
        if self.tensors is not None:
            return self._read_tensors(self.tensors, ids, pin)
        for layer in self._epochal:
            # An evaluation may read another part of the same dataset, in an epoch of its own.
            attributes = getattr(layer, "__dict__", {})
            if epoch != self._epoch or epoch != attributes.get(_EPOCH):
                layer.set_epoch(epoch)
                attributes[_EPOCH] = epoch
        self._epoch = epoch
        in_worker = self.errors.worker is not None
        seeds_here = self._sample_randomness and not in_worker
        with keep_globals() if seeds_here else contextlib.nullcontext():
            id_list = ids.tolist()
            rows = self._rows_of(ids, id_list)
            keys = None
            if self._sample_randomness:
                named = ids.numpy() if place is None else np.arange(place, place + len(ids))
                keys = sample_keys((seed, self._purpose, epoch), named)
            samples = self._read_samples(id_list, rows, keys)
            if self._collate is not default_collate:
                self.errors.refuse_missing(id_list, samples)
            try:
                return self._collate(samples)
            except Exception as error:
                raise self.errors.not_collated(id_list, error) from error

    def _read_tensors(
        self, tensors: tuple[torch.Tensor, ...], ids: torch.Tensor, pin: bool
    ) -> list[torch.Tensor]:
        try:
            rows = ids if self._rows is None else self._rows.index_select(0, ids)
            if pin:
                return [_index_pinned(tensor, rows) for tensor in tensors]
            return [tensor.index_select(0, rows) for tensor in tensors]
        except (IndexError, RuntimeError) as error:
            raise self.errors.not_read(ids.tolist(), error, "") from error

    def _rows_of(self, ids: torch.Tensor, id_list: list[int]) -> list[int]:
        """The rows of these samples in the innermost dataset."""
        if self._rows is None:
            return id_list
        try:
            rows: list[int] = self._rows.index_select(0, ids).tolist()
        except (IndexError, RuntimeError) as error:
            raise self.errors.not_read(ids.tolist(), error, "") from error
        return rows

    def _read_samples(
        self, id_list: list[int], rows: list[int], keys: list[int] | None
    ) -> list[Any]:
        """The samples, each with its own randomness if keys are given."""
        if keys is None and self._batched is not None:
            try:
                return list(self._batched(rows))
            except Exception as error:
                raise self._not_read(id_list, error) from error
        samples = []
        for number, (sample_id, row) in enumerate(zip(id_list, rows, strict=True)):
            if keys is not None:
                seed_globals(keys[number])
            try:
                samples.append(self._dataset[row])
            except Exception as error:
                raise self._not_read([sample_id], error) from error
        return samples

    def _not_read(self, id_list: list[int], error: Exception) -> DataError:
        why = f"`__getitem__` of {type(self._dataset).__name__} raised."
        return self.errors.not_read(id_list, error, why)


def _layers(dataset: Any) -> list[Any]:
    """The dataset and the datasets that it is a subset of, outermost first. Only torch's Subset counts."""
    layers = [dataset]
    while type(layers[-1]) is Subset:
        layers.append(layers[-1].dataset)
    return layers


def _unwrap_subsets(dataset: Any) -> tuple[Any, torch.Tensor | None]:
    """The innermost dataset under torch's Subset (`random_split`), and the row of each sample in it.

    So the fast path for tensors also works for a subset. The rows are None if there is no subset. A subset
    whose indices are not integers, such as keys, counts as a dataset.
    """
    *subsets, inner = _layers(dataset)
    rows: torch.Tensor | None = None
    for subset in subsets:
        indices = np.asarray(subset.indices)
        if indices.dtype.kind not in "iu" or indices.ndim != 1:
            return subset, rows
        table = torch.from_numpy(indices.astype(np.int64))
        if rows is not None:
            table = table.index_select(0, _from_the_start(rows, len(table)))
        rows = table
    return inner, rows


def _from_the_start(indices: torch.Tensor, size: int) -> torch.Tensor:
    """Replace negative indices, which count from the end."""
    return torch.where(indices < 0, indices + size, indices)


def _plain_tensors(dataset: Any) -> tuple[torch.Tensor, ...] | None:
    """The tensors of a dataset that is nothing but tensors on one device; else None."""
    if not isinstance(dataset, TensorDataset):
        return None
    kind = type(dataset)
    if kind.__getitem__ is not TensorDataset.__getitem__ or hasattr(kind, "__getitems__"):
        return None
    plain = all(t.layout is torch.strided and not t.requires_grad for t in dataset.tensors)
    one_device = len({t.device for t in dataset.tensors}) == 1
    return dataset.tensors if plain and one_device else None


def _index_pinned(tensor: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    # Indexing directly into pinned memory saves a copy, compared with pinning the result.
    out = torch.empty((len(ids), *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=True)
    return torch.index_select(tensor, 0, ids, out=out)


# Randomness


def sample_keys(prefix: tuple[int, ...], samples: npt.NDArray[Any]) -> list[int]:
    """One 64-bit key for each of these samples: `rng.key(*prefix, sample)`."""
    keys: list[int] = rng.keys(rng.key(*prefix), samples).tolist()
    return keys


def seed_globals(key: int) -> None:
    """Seed the global generators of torch (CPU), numpy and `random`; takes about 7 us."""
    # torch.manual_seed takes 100 us and reseeds the accelerators too. torch and numpy run the same algorithm
    # and would draw equal numbers from equal seeds, so each gets its own half of the key.
    torch.default_generator.manual_seed(key & 0xFFFFFFFF)
    np.random.seed(key >> 32)
    random.seed(key)


@contextlib.contextmanager
def keep_globals() -> Iterator[None]:
    """Restore the global generators of torch (CPU), numpy and `random` at the end; takes about 80 us."""
    states = torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


# Checks of what a user passes


def refuse_dropped_samples(batch: Any, count: int, where: Callable[[], str]) -> None:
    """Refuse a batch of fewer than `count` samples, if its shapes show it.

    Raises:
        DataError: see `rows_left`.
    """
    # Quick, because it runs in each micro-batch.
    first = next(iter(_items(batch)), None)
    if isinstance(first, torch.Tensor) and first.dim() and len(first) >= count:
        return
    rows = rows_left(batch, count)
    if rows is not None:
        raise DataError(
            f"a micro-batch of {count} samples has tensors of {rows} rows.",
            where=where(),
            why="the collate function drops samples, and the loss would be divided by the number of all.",
            fix="leave them out of the dataset or the sampler, or give the loss a count with "
            'Training(count="tokens").',
        )


def rows_left(batch: Any, count: int) -> int | None:
    """The rows of a batch from which the collate function dropped some of `count` samples; else None.

    It is known only if the batch is a tensor, or a flat sequence or mapping of tensors, which all have the
    same, smaller first dimension, and none has the number of samples as another dimension, as time-major
    batches do. One row may be all samples, packed.
    """
    items = list(_items(batch))
    if any(isinstance(item, tuple | list | Mapping) for item in items):
        return None
    tensors = [item for item in items if isinstance(item, torch.Tensor) and not item.is_nested]
    shapes = [tuple(tensor.shape) for tensor in tensors if tensor.dim()]
    lengths = {shape[0] for shape in shapes}
    if len(lengths) != 1 or any(count in shape for shape in shapes):
        return None
    rows = lengths.pop()
    return rows if rows < count and rows != 1 else None


def _items(batch: Any) -> Iterable[Any]:
    if isinstance(batch, Mapping):
        return batch.values()
    return batch if type(batch) in (tuple, list) else (batch,)


def is_stream(dataset: Any) -> bool:
    """Whether a dataset is a stream: it can be read only from its start.

    Raises:
        ConfigError: it cannot be read at all, or it gives batches instead of samples.
    """
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        return True  # it inherits a `__getitem__` that only raises
    if isinstance(dataset, Sampler):
        raise ConfigError(
            f"{name} is a sampler: it gives indices, not samples.",
            fix="pass the dataset; `Batches` decides the order itself.",
        )
    if callable(getattr(dataset, "__getitem__", None)):
        return False
    if _gives_batches(dataset):
        raise ConfigError(
            f"{name} is a data loader: it gives batches instead of samples.",
            why="Paceline itself decides which samples make a step.",
            fix="pass its dataset (`loader.dataset`), or a `torch.utils.data.DataLoader`; the batch size is "
            "`global_batch` for `Batches` and `micro_batch` for `evaluate`.",
        )
    if isinstance(dataset, Iterable):
        if isinstance(dataset, Iterator):
            raise ConfigError(
                f"{name} is an iterator, which can be read only once.",
                fix="pass an object whose `__iter__` starts again in each epoch.",
            )
        return True
    raise ConfigError(
        f"{name} is not a dataset.",
        why="it has neither `__getitem__` nor `__iter__`.",
        fix="pass a torch Dataset or IterableDataset, or a sequence of samples.",
    )


def _gives_batches(dataset: Any) -> bool:
    return isinstance(dataset, Iterable) and any(
        hasattr(dataset, name) for name in ("batch_size", "batch_sampler")
    )


def checked_size(dataset: Any) -> int:
    """The number of samples of a map-style dataset.

    Raises:
        ConfigError: it is empty, a stream, or has no length.
    """
    name = type(dataset).__name__
    if is_stream(dataset):
        raise ConfigError(
            f"{name} is a stream, which has no length.",
            fix="pass a map-style dataset, with `__getitem__` and `__len__`.",
        )
    if not isinstance(dataset, Sized):
        raise ConfigError(
            f"{name} has `__getitem__` but no `__len__`.",
            fix="add `__len__`; for a stream, write `__iter__` instead of `__getitem__`.",
        )
    size = len(dataset)
    if size < 1:
        raise ConfigError(
            "the dataset is empty.",
            why=f"len({name}) is {size}.",
            fix="check the path or the filter of the dataset.",
        )
    return size
