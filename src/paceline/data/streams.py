"""Steps over a stream: a dataset that can only be read from its start.

Place *j* of the stream belongs to data rank `j % size`. Every rank and every loader worker reads the whole
stream and keeps its share, so all of them know its length; a dataset with `shard(index, count)` gives each
rank only its share. Worker *w* of *k* prepares every *k*-th step and skips the others.

All ranks know how many samples a step has, and whether another step follows, before the loop gets the step.
This takes one small asynchronous reduction per step on the control group, started one step ahead, so that
no rank waits for it. It also finds ranks whose streams differ; without it they would hang.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from paceline import log
from paceline.data.device import moved
from paceline.data.loader import Loader
from paceline.data.plan import MicroBatch, PlannedStep, Position, most_micro_batches
from paceline.data.samples import Collate, ReadErrors, globals_kept, sample_keys, seed_globals
from paceline.data.workers import Failure, Workers, refuse_unsendable
from paceline.errors import DataError, PacelineError, RankDisagreement
from paceline.job import rng
from paceline.job.job import Job

_MISSING: Any = object()

# A warning and not an error: a dataset may draw from its own generator and still be the same stream.
_DIFFERENT = (
    "the stream begins with different samples on different ranks or loader workers. Each of them reads "
    "the whole stream and keeps its share, so a dataset that splits or shuffles itself by rank or "
    "worker loses samples. Give the whole stream in one order everywhere, or define "
    "`shard(index, count)`; see docs/data.md."
)


@dataclass(frozen=True)
class StreamPlan:
    """One data rank's share of a stream. `Batches` checks the values."""

    global_batch: int
    micro_batch: int
    rank: int
    size: int


@dataclass
class Part:
    """One step as one reader sees it.

    Attributes:
        seen: samples of the step that the reader read: all of them, or with `shard` the rank's own.
        micros: places and batch of each of this rank's micro-batches.
        ghost: one sample as a batch, if this rank may need ghosts in this step.
        mark: digest of the first sample that the reader read in the epoch.
    """

    seen: int
    micros: tuple[tuple[tuple[int, ...], Any], ...]
    ghost: Any = None
    mark: int = 0


@dataclass(frozen=True)
class End:
    """The stream has ended for this reader after `read` samples. `ghost`: for the steps of longer shards."""

    read: int
    ghost: Any = None


@dataclass
class _Open:
    """A stream that is being read: its iterator, and the places of its next items.

    Attributes:
        last: the item that was read last.
        peeked: an item that was read for a ghost before its turn.
    """

    items: Iterator[Any]
    place: int
    stride: int
    ended: bool = False
    read: int = 0
    last: Any = _MISSING
    peeked: Any = _MISSING
    mark: int = 0


class StreamReader:
    """Reads a stream and cuts it into parts. Copied into each loader worker.

    Attributes:
        sharded: whether the dataset gives each rank only its share.
        errors: set its `worker` in a loader worker.
    """

    def __init__(
        self,
        dataset: Any,
        plan: StreamPlan,
        errors: ReadErrors,
        *,
        sample_randomness: bool,
        collate: Collate | None,
    ) -> None:
        self.sharded = callable(getattr(dataset, "shard", None))
        self.errors = errors
        self._dataset = dataset
        self._plan = plan
        self._randomness = sample_randomness
        self._collate = collate or default_collate

    def parts(
        self, position: Position, epochs: int, equal: bool, *, worker: int = 0, workers: int = 1
    ) -> Iterator[Part | End]:
        """The parts of every `workers`-th step from `position` on, and an `End` after each epoch.

        Taken in turn from all workers, the parts are in the order of the steps. Each worker gives an `End`
        for each epoch; the first step after it is the next worker's.
        """
        skipped = 0
        for epoch in range(position.epoch, epochs):
            start = position.offset if epoch == position.epoch else 0
            stream = self._opened(position.seed, epoch)
            if start:
                self._read(stream, start, position.seed, epoch, keep=False)
            step = 0
            while True:
                mine = (skipped + step) % workers == worker
                stop = start + (step + 1) * self._plan.global_batch
                places, items, seen = self._read(stream, stop, position.seed, epoch, keep=mine)
                if stream.ended and seen == 0:
                    break
                if mine:
                    part = self._part(stream, places, items, seen)
                    # With `shard` the size of the step is not known here, so its largest size counts.
                    total = self._plan.global_batch if self.sharded else seen
                    most = most_micro_batches(total, self._plan.micro_batch, self._plan.size)
                    if equal and len(part.micros) < most:
                        part.ghost = self._ghost(stream, position.seed, epoch)
                    yield part
                step += 1
            skipped += step
            # The shards of other ranks may have one more step.
            spare = equal and self.sharded
            ghost = self._ghost(stream, position.seed, epoch) if spare else None
            yield End(stream.read, ghost)

    def _opened(self, seed: int, epoch: int, shard: int | None = None) -> _Open:
        """The stream of an epoch; with `shard`, that of `shard(index, count)`, here this rank's."""
        shard = self._plan.rank if shard is None else shard
        with self._kept():
            if callable(set_epoch := getattr(self._dataset, "set_epoch", None)):
                set_epoch(epoch)
            if self._randomness:
                # Place -1: draws before the first sample are equal on all ranks and workers.
                seed_globals(rng.key(seed, rng.SAMPLE, epoch, -1))
            if self.sharded:
                items = iter(self._dataset.shard(shard, self._plan.size))
                return _Open(items, shard, self._plan.size)
            return _Open(iter(self._dataset), 0, 1)

    def _read(
        self, stream: _Open, stop: int, seed: int, epoch: int, *, keep: bool
    ) -> tuple[list[int], list[Any], int]:
        """Read up to place `stop`: this rank's places and items, and the number of items read."""
        plan = self._plan
        places: list[int] = []
        items: list[Any] = []
        seen = 0
        with self._kept():
            # A stream that shuffles has a state, so every place is seeded, kept or not.
            keys = self._keys(stream, stop, seed, epoch)
            while stream.place < stop and not stream.ended:
                if keys is not None:
                    seed_globals(next(keys))
                item = self._next(stream)
                if item is _MISSING:
                    stream.ended = True
                    break
                if keep and stream.place % plan.size == plan.rank:
                    places.append(stream.place)
                    items.append(item)
                if stream.last is _MISSING and self._randomness:
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

    def _next(self, stream: _Open) -> Any:
        if stream.peeked is not _MISSING:
            item, stream.peeked = stream.peeked, _MISSING
            return item
        try:
            return next(stream.items, _MISSING)
        except Exception as error:
            why = f"the iterator of {type(self._dataset).__name__} raised."
            raise self.errors.not_read([stream.place], error, why) from error

    def _part(self, stream: _Open, places: list[int], items: list[Any], seen: int) -> Part:
        size = self._plan.micro_batch
        with self._kept():
            micros = tuple(
                (
                    tuple(places[at : at + size]),
                    self._collated(items[at : at + size], places[at : at + size]),
                )
                for at in range(0, len(items), size)
            )
        return Part(seen, micros, mark=stream.mark)

    def _ghost(self, stream: _Open, seed: int, epoch: int) -> Any:
        """One sample as a batch; None if the whole stream is empty."""
        sample, place = stream.last, stream.place - stream.stride
        if sample is _MISSING:  # of a shard nothing is read yet
            place = stream.place
            with self._kept():
                if self._randomness:
                    seed_globals(rng.key(seed, rng.SAMPLE, epoch, place))
                sample = stream.peeked = self._next(stream)
        if sample is _MISSING:  # and it is empty; shard 0 has the first sample of the stream
            other, place = self._opened(seed, epoch, shard=0), 0
            self._read(other, 1, seed, epoch, keep=False)
            sample = stream.last = other.last
        with self._kept():
            return None if sample is _MISSING else self._collated([sample], [place])

    def _collated(self, items: list[Any], places: list[int]) -> Any:
        try:
            return self._collate(items)
        except Exception as error:
            raise self.errors.not_collated(places, error) from error

    def _kept(self) -> contextlib.AbstractContextManager[None]:
        if self._randomness and self.errors.worker is None:
            return globals_kept()
        return contextlib.nullcontext()


def digest(item: Any) -> int:
    """A number in [0, 2^62) for the tensors, arrays and plain values of a sample; ignores anything else."""
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


@dataclass
class _Ahead:
    """A step that was read; the reduction that counts its samples over all ranks is under way."""

    part: Part
    seen: torch.Tensor
    work: Any


class StreamLoader(Loader):
    """Reads a stream in this process, or ahead in loader workers."""

    def __init__(
        self,
        job: Job,
        dataset: Any,
        plan: StreamPlan,
        errors: ReadErrors,
        *,
        workers: int,
        sample_randomness: bool,
        collate: Collate | None,
    ) -> None:
        super().__init__(job.device)
        self._job = job
        self._plan = plan
        self._errors = errors
        self._reader = StreamReader(
            dataset, plan, errors, sample_randomness=sample_randomness, collate=collate
        )
        self._num_workers = workers
        self._workers: Workers | None = None
        self._control = job.data.control
        self._ghost: Any = None

    def steps(self, position: Position, epochs: int, equal: bool) -> Iterator[PlannedStep]:
        """The steps from `position` to the end of epoch `epochs - 1`.

        Raises:
            DataError: the stream is empty, or ends before `position`.
            RankDisagreement: the ranks read streams of different length.

        Collective: all ranks iterate alike; one asynchronous reduction per step.
        """
        if position.offset:
            text = "reading %d samples of the stream to reach the position of the training."
            log.logger.info(text, position.offset)
        run = self._started()
        self._ghost = None
        parts = self._parts(position, epochs, equal)
        for epoch in range(position.epoch, epochs):
            offset = position.offset if epoch == position.epoch else 0
            for part, n, ends in self._agreed(parts, epoch, offset):
                self._refuse_unless_current(run)
                number = len(part.micros)
                if equal:
                    most = most_micro_batches(n, self._plan.micro_batch, self._plan.size)
                    number = max(number, most)
                micros = self._micros(part, offset, number)
                yield PlannedStep(position.seed, epoch, offset, n, ends, number, micros)
                offset += n

    def _agreed(
        self, parts: Iterator[Part | End], epoch: int, offset: int
    ) -> Iterator[tuple[Part, int, bool]]:
        """The steps of one epoch: this rank's part, samples over all ranks, whether it is the last."""
        ahead: deque[_Ahead] = deque()
        ended = False

        def read_ahead() -> None:
            nonlocal ended
            part = Part(0, ()) if ended else next(parts)
            if isinstance(part, End):
                ended, self._ghost, part = True, part.ghost, Part(0, ())
            ahead.append(self._reduced(part))

        read_ahead()
        read_ahead()
        n = self._finished(ahead[0], epoch, offset)
        if n == 0:
            raise self._too_short(epoch, offset)
        while n:
            if self._control is not None:
                read_ahead()  # one more, so that the reduction below has had the time of a step
            step = ahead.popleft()
            following = self._finished(ahead[0], epoch, offset + n)
            yield step.part, n, following == 0
            offset, n = offset + n, following
            if self._control is None:
                read_ahead()
        while not ended:
            # A rank without a place in the last step has not reached its end yet.
            part = next(parts)
            ended = isinstance(part, End)
            if isinstance(part, Part) and part.seen:
                raise self._uneven_shards(epoch, offset)

    def _reduced(self, part: Part) -> _Ahead:
        seen = torch.zeros(self._plan.size, 2, dtype=torch.int64)
        seen[self._plan.rank, 0] = part.seen
        seen[self._plan.rank, 1] = part.mark
        work = None
        if self._control is not None:
            work = dist.all_reduce(seen, group=self._control, async_op=True)
        return _Ahead(part, seen, work)

    def _finished(self, step: _Ahead, epoch: int, offset: int) -> int:
        if step.work is not None:
            try:
                step.work.wait()
            except RuntimeError as error:
                self._job.reraise(error)
        seen: list[int] = step.seen[:, 0].tolist()
        if self._reader.sharded:
            return sum(seen)
        if any(n != seen[0] for n in seen):
            raise RankDisagreement(
                f"the ranks read streams of different length: in the step from sample {offset} of "
                f"epoch {epoch} they found {seen} samples.",
                where=self._errors.where(),
                why="the dataset splits itself over ranks, or its length is random.",
                fix="give the whole stream on every rank, or define `shard(index, count)`.",
                values=seen,
            )
        if len(set(step.seen[:, 1].tolist())) > 1:
            log.once(_DIFFERENT)
        return seen[0]

    def _uneven_shards(self, epoch: int, offset: int) -> DataError:
        return DataError(
            f"the shard of rank {self._plan.rank} continues after sample {offset} of epoch {epoch}, "
            "where the shards of other ranks have ended.",
            where=self._errors.where(),
            why="`shard(index, count)` must give the items index, index + count, ... of one stream.",
        )

    def _too_short(self, epoch: int, offset: int) -> DataError:
        if offset:
            return DataError(
                f"the stream ended before sample {offset} of epoch {epoch}.",
                where=self._errors.where(),
                why="it is shorter than when this position was saved.",
            )
        return DataError(f"the stream gave no sample in epoch {epoch}.", where=self._errors.where())

    def _micros(self, part: Part, offset: int, number: int) -> Iterator[MicroBatch]:
        for places, batch in part.micros:
            number -= 1
            self.gave(torch.tensor(places, dtype=torch.int64))
            yield MicroBatch(self._moved(batch), len(places), places[0], number == 0, False)
        ghost = self._ghost if part.ghost is None else part.ghost
        while number:
            number -= 1
            if ghost is None:
                raise DataError(
                    "this rank has no sample to use in a step in which only other ranks have samples.",
                    where=self._errors.where(),
                    why=f"`shard(0, {self._plan.size})` is empty, but another shard is not.",
                )
            yield MicroBatch(self._moved(ghost), 1, offset, number == 0, True)

    def _moved(self, batch: Any) -> Any:
        if self._device.type == "cpu":
            return batch
        pin = self._device.type == "cuda" and self._workers is None
        return moved(batch, self._device, pin=pin)

    def _parts(self, position: Position, epochs: int, equal: bool) -> Iterator[Part | End]:
        """This rank's parts in the order of the steps, with one `End` after each epoch."""
        if not self._num_workers:
            yield from self._reader.parts(position, epochs, equal)
            return
        self._end_workers()
        work = _StreamWork(self._reader, position, epochs, equal)
        self._workers = workers = Workers(self._job, work, self._num_workers, tasks=False)
        workers.start()
        for _ in range(position.epoch, epochs):
            marks = set()
            while not isinstance(result := workers.get(), End):
                marks.add(result.mark)
                if len(marks) > 1:
                    log.once(_DIFFERENT)
                yield result
            ends = [result] + [workers.get() for _ in range(self._num_workers - 1)]
            for other in ends[1:]:
                if not isinstance(other, End) or other.read != result.read:
                    raise self._workers_differ(result, other)
            yield result

    def _workers_differ(self, one: End, other: Part | End) -> DataError:
        found = f"{other.read}" if isinstance(other, End) else "more"
        return DataError(
            "the loader workers of a rank read streams of different length: one found "
            f"{one.read} samples, another {found}.",
            where=self._errors.where(),
            why="the dataset splits itself over workers, or its length is random.",
            fix="give the whole stream in every worker.",
        )

    def _end_workers(self) -> None:
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def close(self) -> None:
        """End the loader workers."""
        super().close()
        self._end_workers()


class _StreamWork(IterableDataset[Any]):
    """Runs in a loader worker: reads the stream and gives this worker's parts."""

    def __init__(self, reader: StreamReader, position: Position, epochs: int, equal: bool) -> None:
        self._reader = reader
        self._run = position, epochs, equal

    def __iter__(self) -> Iterator[Part | End | Failure]:
        info = get_worker_info()
        assert info is not None
        worker, workers = info.id, info.num_workers
        # Many datasets split themselves by this; they would then give a share of a share.
        object.__setattr__(info, "id", 0)
        object.__setattr__(info, "num_workers", 1)
        self._reader.errors.worker = worker
        checked = False
        try:
            for part in self._reader.parts(*self._run, worker=worker, workers=workers):
                if not checked:
                    refuse_unsendable(part, self._reader.errors)
                    checked = True
                yield part
        except PacelineError as error:
            yield Failure.of(error)
