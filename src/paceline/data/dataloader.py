"""Adopts a `DataLoader` of torch: its dataset, order, batch size, collate function and workers.

`Batches` and `evaluate` read the samples themselves, so that a step holds the same samples on any number of
ranks. The sampler decides the order of an epoch over all ranks:

- `RandomSampler` and `DistributedSampler` become a permutation from the job's seed, `SequentialSampler` the
  order of the dataset.
- Any other sampler or batch sampler is drawn once per epoch on every rank, with equal seeds.
"""

from __future__ import annotations

import reprlib
import zlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from operator import index
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    default_collate,
)

from paceline import log
from paceline.data.plan import Int64Array, Order
from paceline.data.samples import Collate, checked_size, is_stream, keep_globals, seed_globals
from paceline.errors import ConfigError, DataError
from paceline.job import collectives, rng
from paceline.job.job import Job

_CHUNK = 1 << 12  # indices that are checked in one call
# A sampler that gives more indices than this in an epoch is taken for endless.
_MAX_INDICES = 1 << 20
_MAX_REPEATS = 100  # or than this many for each sample of the dataset, if that is more


@dataclass(frozen=True)
class Source:
    """What to read, and how.

    Attributes:
        collate: None for torch's `default_collate`.
        workers: number of loader workers of each rank.
        shuffle: whether to use a new permutation in each epoch.
        sampled: the order of the epochs from a sampler; else None.
        batch_size: the loader's batch size, or the size of its largest batch; None without a loader.
        drop_last: whether to leave a smaller last step of an epoch out.
        worker_init: the loader's `worker_init_fn`.
    """

    dataset: Any
    collate: Collate | None = None
    workers: int = 0
    shuffle: bool = False
    sampled: SampledOrder | None = None
    batch_size: int | None = None
    worker_init: Callable[[int], Any] | None = None
    drop_last: bool = False

    @property
    def num_samples(self) -> int | None:
        """Samples of an epoch; None for a stream.

        Raises:
            ConfigError: the dataset is empty, has no length, or cannot be read.
        """
        if self.sampled is not None:
            return self.sampled.num_samples
        return None if is_stream(self.dataset) else checked_size(self.dataset)


def adopt(job: Job, loader: DataLoader[Any]) -> Source:
    """Read the settings of a `DataLoader`.

    Raises:
        ConfigError: its dataset is a stream, it does not make batches of samples, Accelerate has prepared it,
            or its sampler gives no or wrong indices, or cannot be drawn again.
    """
    dataset, name = loader.dataset, type(loader.dataset).__name__
    if type(loader).__module__.partition(".")[0] == "accelerate":
        raise ConfigError(
            "this DataLoader was prepared by Accelerate, which divides its batches over the ranks.",
            why="Paceline itself decides which samples each rank gets.",
            fix="pass the loader that you had before `prepare`.",
        )
    if isinstance(dataset, IterableDataset):
        raise ConfigError(
            f"this DataLoader reads a stream, {name}, which has to be divided over ranks and workers.",
            fix="pass `loader.dataset` with `workers=loader.num_workers`: each rank and worker reads the "
            f"whole stream and keeps its share. To read less, define in {name} `def shard(self, index, "
            "count): return itertools.islice(iter(self), index, None, count)`.",
        )
    if loader.batch_sampler is None:
        raise ConfigError(
            "this DataLoader has batch_size=None, so its dataset gives batches instead of samples.",
            why="Paceline itself decides which samples make a step.",
            fix="pass a dataset of samples, with `global_batch`.",
        )
    collate = None if loader.collate_fn is default_collate else loader.collate_fn
    size = checked_size(dataset)
    shuffle, sampled, batch_size = False, None, loader.batch_size
    if type(loader.batch_sampler) is BatchSampler and batch_size is not None:
        sampler: Any = loader.sampler
        kind = type(sampler)
        if kind is DistributedSampler and len(sampler.dataset) == size:
            shuffle = sampler.shuffle
        elif kind is RandomSampler and _is_plain(sampler, size):
            shuffle = True
        elif kind is not SequentialSampler or len(sampler) != size:
            sampled = SampledOrder(sampler, job.seed, size, gives_batches=False)
    else:
        sampled = SampledOrder(loader.batch_sampler, job.seed, size, gives_batches=True)
        batch_size = sampled.largest_batch
    return Source(
        dataset,
        collate,
        loader.num_workers,
        shuffle,
        sampled,
        batch_size,
        loader.worker_init_fn,
        loader.drop_last,
    )


def agree_on_order(job: Job, sampled: SampledOrder | None) -> None:
    """Check that all ranks have the same sampler, or none, and that it draws the same order.

    Called by all ranks.

    Raises:
        RankDisagreement: on all ranks.
    """
    own = None if sampled is None else [sampled.name, sampled.num_samples, f"{sampled.digest:08x}"]
    collectives.agree(
        job,
        "sampler (its type, number of indices and a checksum of their order)",
        own,
        fix="give all ranks the same sampler, which gives the indices of all ranks in an order that depends "
        "only on equal seeds. Paceline divides them over the ranks.",
    )


def refuse_with_loader(**given: Any) -> None:
    """Refuse arguments that a loader decides: `name=value`, None if not given.

    Raises:
        ConfigError: for the first that was given.
    """
    for name, value in given.items():
        if value is not None:
            raise ConfigError(
                f"{name} was given together with a loader.",
                why="the loader decides it.",
                fix=f"set it in the loader, or pass `loader.dataset` with `{name}`.",
                option=name,
            )


def _is_plain(sampler: RandomSampler, size: int) -> bool:
    """Whether it draws each sample of the dataset once, from a seed that the user did not choose."""
    return not sampler.replacement and sampler.num_samples == size and sampler.generator is None


class SampledOrder:
    """The order of each epoch, as a sampler or batch sampler draws it. The same on all ranks and workers.

    Before each draw the global generators of torch, numpy and `random` and every `torch.Generator` in the
    sampler are seeded from `(seed, epoch)`, and `set_epoch(epoch)` is called if the sampler has it. So any
    epoch can be drawn without the ones before it. A sampler that nevertheless draws two different orders for
    one epoch keeps a random state of its own, and is refused.

    Args:
        size: Samples of the dataset.
        gives_batches: Whether it is a batch sampler.

    Attributes:
        name: the type of the sampler.
        digest: a checksum of epoch 0.
        num_samples: number of indices of an epoch.
        largest_batch: size of the largest batch in epoch 0; 1 for a sampler of single indices.
        smallest_batch: size of the second smallest batch, because the last one is often smaller.

    Raises:
        ConfigError: the sampler gives no or wrong indices, is endless, or keeps a random state of its own.
    """

    def __init__(self, sampler: Any, seed: int, size: int, *, gives_batches: bool) -> None:
        self.name = type(sampler).__name__
        self._sampler = sampler
        self._size = size
        self._gives_batches = gives_batches
        self._max_indices = max(_MAX_INDICES, _MAX_REPEATS * size)
        self._batch_sizes = [1]
        self._order_key = (seed, 0)
        self._order = self._draw(seed, 0)
        if not np.array_equal(self._order, self._draw(seed, 0)):
            raise ConfigError(
                f"{self.name} keeps a random state of its own: it gave two orders for one epoch.",
                why="its order could not be repeated on all ranks and after a resume.",
                fix="draw from a `torch.Generator` that is an attribute of it or from the global generators, "
                "or define `set_epoch(epoch)` and draw from the epoch.",
            )
        if not len(self._order):
            raise ConfigError(
                f"{self.name} gives no index.", fix="check the sampler of the loader."
            )
        self.num_samples = len(self._order)
        sizes = sorted(self._batch_sizes)
        self.largest_batch, self.smallest_batch = sizes[-1], sizes[:2][-1]
        self.digest = zlib.crc32(self._order.tobytes())

    def __call__(self, seed: int, epoch: int) -> Order:
        """The order of an epoch: a function from places to indices of the dataset.

        Raises:
            DataError: the epoch has another number of samples than epoch 0.
        """
        if self._order_key != (seed, epoch):
            drawn = self._draw(seed, epoch)
            if len(drawn) != self.num_samples:
                raise DataError(
                    f"{self.name} gives {len(drawn)} indices in epoch {epoch} and {self.num_samples} in "
                    "epoch 0.",
                    why="the position in an epoch is a number of samples, so epochs must be equally long.",
                    fix="let the sampler give the same number of indices in each epoch.",
                )
            self._order, self._order_key = drawn, (seed, epoch)
        return self._order.take

    def warn_of_sizes(self) -> None:
        """Warn that batches of different sizes are joined, if there are any."""
        if self.smallest_batch < self.largest_batch:
            log.once(
                f"{self.name} gives batches of {self.smallest_batch} to {self.largest_batch} samples. "
                "They are joined, and cut into steps of equal size: a limit on the tokens of a batch is not "
                f"kept. Pass micro_batch={self.smallest_batch} to keep it."
            )

    def _draw(self, seed: int, epoch: int) -> Int64Array:
        key = rng.key(seed, rng.SAMPLER, epoch)
        generators = _generators(self._sampler, [])
        states = [generator.get_state() for generator in generators]
        with keep_globals():
            seed_globals(key)
            for (
                generator
            ) in generators:  # from its first seed, so that one the user chose has an effect
                generator.manual_seed(rng.key(key, generator.initial_seed()) >> 1)
            if callable(set_epoch := getattr(self._sampler, "set_epoch", None)):
                set_epoch(epoch)
            try:
                return self._indices(iter(self._sampler))
            finally:
                for generator, state in zip(generators, states, strict=True):
                    generator.set_state(state)

    def _indices(self, items: Iterator[Any]) -> Int64Array:
        batches = items
        if not self._gives_batches:
            batches = iter(lambda: list(islice(items, _CHUNK)), [])
        indices = array("q")
        if self._gives_batches:
            self._batch_sizes = []
        for batch in batches:
            try:
                found = array("q", map(index, batch))
            except (TypeError, OverflowError) as error:
                wanted = "lists of integers" if self._gives_batches else "integers"
                raise ConfigError(
                    f"{self.name} gives something else than {wanted}: {error}",
                    why=f"it gave {reprlib.repr(batch)}.",
                    fix=f"let it give indices of the dataset as {wanted}.",
                ) from error
            indices += found
            if self._gives_batches:
                self._batch_sizes.append(len(found))
            if len(indices) > self._max_indices:
                raise ConfigError(
                    f"{self.name} gives more than {self._max_indices} indices and does not end.",
                    why="an epoch is what a sampler gives in one iteration.",
                    fix="end its `__iter__` after one epoch, or pass the dataset with `shuffle=True`.",
                )
        drawn = np.array(indices, dtype=np.int64)
        outside = drawn[(drawn < 0) | (drawn >= self._size)]
        if len(outside):
            raise ConfigError(
                f"{self.name} gives the index {outside[0]}, but the dataset has {self._size} samples.",
                fix="let it give the indices of the dataset of the loader, from 0 on.",
            )
        return drawn


def _generators(sampler: Any, samplers: list[Any]) -> list[torch.Generator]:
    """The generators in the attributes of a sampler and of the samplers in it; `samplers` are known."""
    found: list[torch.Generator] = []
    samplers.append(sampler)
    for value in list(getattr(sampler, "__dict__", {}).values()):
        if isinstance(value, torch.Generator):
            found.append(value)
        elif isinstance(value, Sampler) and all(value is not known for known in samplers):
            found += _generators(value, samplers)
    return list({id(generator): generator for generator in found}.values())
