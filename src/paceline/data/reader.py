"""A stream read from its start: this rank's and this worker's share of each step.

Place *j* of the stream belongs to rank `j % world_size`. Every rank, and every loader worker, reads the
whole stream and keeps its share, so all know how long it is; a dataset with `shard(index, count)` gives
each rank its share alone. Worker *w* of *k* prepares every *k*-th step and only skips over the others.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from paceline.data.plan import Position
from paceline.data.randomness import globals_kept, sample_keys, seed_globals
from paceline.data.samples import Collate, collate_failed, where
from paceline.errors import SampleError
from paceline.job import rng

_END = object()


@dataclass(frozen=True)
class StreamPlan:
    """One rank's share of a stream. Checked by `Batches`, not here."""

    global_batch: int
    micro_batch: int
    rank: int
    world_size: int


@dataclass(frozen=True)
class Part:
    """What a reader knows of one step.

    Attributes:
        seen: samples of the step that this reader came across: all, or with `shard` the rank's own.
        micros: places and batch of each of this rank's micro-batches.
        ghost: one sample as a batch, where ghosts are wanted and one was ever seen.
        mark: a digest of the first sample that this reader came across in the epoch.
    """

    seen: int
    micros: tuple[tuple[tuple[int, ...], Any], ...]
    ghost: Any = None
    mark: int = 0


@dataclass(frozen=True)
class End:
    """The stream has ended for this reader, after `read` samples."""

    read: int


@dataclass
class _Open:
    """A stream that is being read: its iterator and the places it will give."""

    items: Iterator[Any]
    place: int
    stride: int
    ended: bool = False
    read: int = 0
    last: Any = _END
    mark: int = 0


class StreamReader:
    """Reads a stream and cuts it into parts; made once, copied into each loader worker.

    Attributes:
        sharded: whether the dataset gives each rank its share alone.
    """

    def __init__(
        self, dataset: Any, plan: StreamPlan, *, sample_randomness: bool, collate: Collate | None
    ) -> None:
        self.sharded = callable(getattr(dataset, "shard", None))
        self._dataset = dataset
        self._plan = plan
        self._randomness = sample_randomness
        self._collate = collate or default_collate

    def parts(
        self, position: Position, epochs: int, equal: bool, *, worker: int | None, workers: int
    ) -> Iterator[Part | End]:
        """The parts of every `workers`-th step from `position` on, and an `End` after each epoch.

        Taken in turn from all workers, they come in the order of the steps, but for the `End` of an
        epoch, which each worker gives: the first step after it is the next worker's turn.

        Args:
            worker: which of `workers` this is; None in the process of the loop itself.
        """
        base = 0
        for epoch in range(position.epoch, epochs):
            start = position.offset if epoch == position.epoch else 0
            stream = self._opened(position.seed, epoch, worker)
            self._skip(stream, start, position.seed, epoch, worker)
            step = 0
            while True:
                mine = (base + step) % workers == (worker or 0)
                stop = start + (step + 1) * self._plan.global_batch
                places, items, seen = self._read(
                    stream, stop, position.seed, epoch, worker, keep=mine
                )
                if stream.ended and seen == 0:
                    break
                if mine:
                    yield self._part(stream, places, items, seen, equal, worker)
                step += 1
            base += step
            yield End(stream.read)

    def _opened(self, seed: int, epoch: int, worker: int | None) -> _Open:
        plan = self._plan
        with self._kept(worker):
            if callable(set_epoch := getattr(self._dataset, "set_epoch", None)):
                set_epoch(epoch)
            if self._randomness:
                # Place -1: whatever is drawn to begin is equal on all ranks and workers.
                seed_globals(rng.key(seed, rng.SAMPLE, epoch, -1))
            if self.sharded:
                items = iter(self._dataset.shard(plan.rank, plan.world_size))
                return _Open(items, plan.rank, plan.world_size)
            return _Open(iter(self._dataset), 0, 1)

    def _skip(self, stream: _Open, start: int, seed: int, epoch: int, worker: int | None) -> None:
        if start:
            self._read(stream, start, seed, epoch, worker, keep=False)

    def _read(
        self, stream: _Open, stop: int, seed: int, epoch: int, worker: int | None, *, keep: bool
    ) -> tuple[list[int], list[Any], int]:
        """Read up to place `stop`; the places and items of this rank, and how many were read."""
        plan = self._plan
        places: list[int] = []
        items: list[Any] = []
        seen = 0
        with self._kept(worker):
            # A stream that shuffles has a state, so each place is seeded, kept or not.
            keys = self._keys(stream, stop, seed, epoch)
            while stream.place < stop and not stream.ended:
                if keys is not None:
                    seed_globals(next(keys))
                item = self._next(stream, worker)
                if item is _END:
                    stream.ended = True
                    break
                if keep and stream.place % plan.world_size == plan.rank:
                    places.append(stream.place)
                    items.append(item)
                if stream.last is _END and self._randomness:
                    stream.mark = digest(item)
                stream.last = item
                stream.place += stream.stride
                seen += 1
        stream.read += seen
        return places, items, seen

    def _keys(self, stream: _Open, stop: int, seed: int, epoch: int) -> Iterator[int] | None:
        if not self._randomness:
            return None
        places = np.arange(stream.place, stop, stream.stride, dtype=np.int64)
        return iter(sample_keys((seed, rng.SAMPLE, epoch), places))

    def _next(self, stream: _Open, worker: int | None) -> Any:
        try:
            return next(stream.items, _END)
        except Exception as error:
            plan = self._plan
            raise SampleError(
                f"sample {stream.place} could not be read: {type(error).__name__}: {error}",
                where=where(plan.rank, plan.world_size, worker),
                why=f"the iterator of {type(self._dataset).__name__} raised.",
                sample=stream.place,
                samples=[stream.place],
                rank=plan.rank,
                worker=worker,
                original=error,
            ) from error

    def _part(
        self,
        stream: _Open,
        places: list[int],
        items: list[Any],
        seen: int,
        equal: bool,
        worker: int | None,
    ) -> Part:
        size = self._plan.micro_batch
        with self._kept(worker):
            micros = tuple(
                (
                    tuple(places[at : at + size]),
                    self._collated(items[at : at + size], places[at : at + size], worker),
                )
                for at in range(0, len(items), size)
            )
            ghost = None
            if equal and stream.last is not _END:
                ghost = self._collated([items[0] if items else stream.last], places[:1], worker)
        return Part(seen, micros, ghost, stream.mark)

    def _collated(self, items: list[Any], places: list[int], worker: int | None) -> Any:
        try:
            return self._collate(items)
        except Exception as error:
            plan = self._plan
            raise collate_failed(
                error, places, rank=plan.rank, world_size=plan.world_size, worker=worker
            ) from error

    def _kept(self, worker: int | None) -> contextlib.AbstractContextManager[None]:
        if self._randomness and worker is None:
            return globals_kept()
        return contextlib.nullcontext()


def digest(item: Any) -> int:
    """A number in [0, 2^62) for the tensors, arrays and plain values of a sample; the rest is left out.

    Collective: none.
    """
    whole = hashlib.blake2b(digest_size=8)
    _feed(whole, item)
    return int.from_bytes(whole.digest(), "little") >> 2


def _feed(whole: hashlib.blake2b, item: Any) -> None:
    if isinstance(item, torch.Tensor):
        if item.layout is torch.strided and not item.is_quantized:
            flat = item.detach().cpu().contiguous().reshape(-1)
            whole.update(flat.view(torch.uint8).numpy().tobytes())
    elif isinstance(item, np.ndarray):
        if not item.dtype.hasobject:
            whole.update(item.tobytes())
    elif isinstance(item, bool | int | float | str | bytes):
        whole.update(repr(item).encode())
    elif isinstance(item, tuple | list):
        for part in item:
            _feed(whole, part)
    elif isinstance(item, dict):
        for name, part in item.items():
            _feed(whole, name)
            _feed(whole, part)
