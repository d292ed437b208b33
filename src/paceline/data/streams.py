"""Steps over a stream: a dataset that can only be read from its start.

Place *j* of the stream belongs to data rank `j % size`. Every rank and every loader worker reads the whole
stream and keeps its share, so all of them know its length; a dataset with `shard(index, count)` gives each
rank only its share. Each of *k* workers prepares every *k*-th step and skips the others.

Before the loop gets a step, all ranks know how many samples it has and whether another step follows. This
takes one small asynchronous reduction per step on the control group. It starts one step ahead, so no rank
waits for it. It also detects ranks whose streams differ, which would otherwise hang.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from paceline import log
from paceline.data.device import to_device
from paceline.data.digest import digest
from paceline.data.loader import Loader
from paceline.data.plan import MicroBatch, PlannedStep, Position, max_micro_batches
from paceline.data.samples import Collate, ReadErrors, keep_globals, sample_keys, seed_globals
from paceline.data.workers import Failure, Workers, refuse_unsendable
from paceline.errors import DataError, PacelineError, RankDisagreement
from paceline.job import rng
from paceline.job.exchange import Pending
from paceline.job.job import Job

_MISSING: Any = object()
_KEYS_PER_CALL = 1 << 14  # computed in one call; a resume may skip billions of items

# Only a warning: with a dataset that augments from its own generator, the samples differ but none is lost.
_DIFFERENT_STREAMS = (
    "the stream begins with different samples on different ranks or loader workers. Each of them reads "
    "the whole stream and keeps its share, so a dataset that splits or shuffles itself by rank or "
    "worker loses samples. Give the whole stream in one order everywhere, or define "
    "`shard(index, count)`; see docs/howto/data.md."
)


@dataclass(frozen=True)
class StreamPlan:
    """One data rank's share of a stream. `Batches` checks the values."""

    global_batch: int
    micro_batch: int
    rank: int
    size: int
    drop_last: bool = False


@dataclass
class Part:
    """What one reader read of one step.

    Attributes:
        num_read: samples of the step that the reader read: all of them, or with `shard` the rank's own.
        micro_batches: `(places, batch)` of each of this rank's micro-batches.
        padding: a batch of one sample, if this rank may need padding micro-batches in this step; else None.
        first_digest: digest of the first sample that the reader read in the epoch.
    """

    num_read: int
    micro_batches: tuple[tuple[tuple[int, ...], Any], ...]
    padding: Any = None
    first_digest: int = 0


@dataclass(frozen=True)
class End:
    """The end of an epoch for one reader.

    Attributes:
        num_read: samples that the reader read in the epoch.
        padding: a batch of one sample, for steps in which only longer shards have samples; else None.
    """

    num_read: int
    padding: Any = None


@dataclass
class _OpenStream:
    """The state of reading a stream in one epoch.

    Attributes:
        place: place of the next item.
        stride: difference between the places of two items; more than 1 with `shard`.
        num_read: items read.
        last_item: the item that was read last.
        peeked: the next item, if it was already read for a padding micro-batch.
        first_digest: digest of the first item.
    """

    items: Iterator[Any]
    place: int
    stride: int
    ended: bool = False
    num_read: int = 0
    last_item: Any = _MISSING
    peeked: Any = _MISSING
    first_digest: int = 0


class StreamReader:
    """Reads a stream and divides it into parts. Copied into each loader worker.

    Attributes:
        sharded: whether the dataset gives each rank only its share.
        errors: makes the errors; a loader worker sets its `worker`.
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
        self._sample_randomness = sample_randomness
        self._collate = collate or default_collate

    def parts(
        self, position: Position, epochs: int, equal: bool, *, worker: int = 0, workers: int = 1
    ) -> Iterator[Part | End]:
        """The parts of every `workers`-th step from `position` on, and an `End` after each epoch.

        DataLoader takes one result from each worker in turn, which gives the parts in the order of the steps.
        At the end of an epoch every worker gives an `End`. The worker after the one with the last step of an
        epoch has the first step of the next.
        """
        steps_before = 0
        for epoch in range(position.epoch, epochs):
            start = position.offset if epoch == position.epoch else 0
            stream = self._open(position.seed, epoch)
            if start:
                self._read(stream, start, position.seed, epoch, keep=False)
            step = 0
            while True:
                is_own = (steps_before + step) % workers == worker
                stop = start + (step + 1) * self._plan.global_batch
                places, items, num_read = self._read(
                    stream, stop, position.seed, epoch, keep=is_own
                )
                if stream.ended and num_read == 0:
                    break
                if is_own:
                    part = self._make_part(stream, places, items, num_read)
                    # With `shard` the size of the step is not known here, so assume its largest size.
                    total = self._plan.global_batch if self.sharded else num_read
                    most = max_micro_batches(total, self._plan.micro_batch, self._plan.size)
                    if equal and len(part.micro_batches) < most:
                        part.padding = self._padding(stream, position.seed, epoch)
                    yield part
                step += 1
            steps_before += step
            # The shards of other ranks may have one more step.
            needs_padding = equal and self.sharded
            padding = self._padding(stream, position.seed, epoch) if needs_padding else None
            yield End(stream.num_read, padding)

    def _open(self, seed: int, epoch: int, shard: int | None = None) -> _OpenStream:
        """Start to read an epoch. `shard` is the index for `dataset.shard`; None is this rank's."""
        shard = self._plan.rank if shard is None else shard
        with self._keeping_globals():
            if callable(set_epoch := getattr(self._dataset, "set_epoch", None)):
                set_epoch(epoch)
            if self._sample_randomness:
                # Place -1 is for draws before the first sample. They are equal on all ranks and workers.
                seed_globals(rng.key(seed, rng.SAMPLE, epoch, -1))
            if self.sharded:
                items = iter(self._dataset.shard(shard, self._plan.size))
                return _OpenStream(items, shard, self._plan.size)
            return _OpenStream(iter(self._dataset), 0, 1)

    def _read(
        self, stream: _OpenStream, stop: int, seed: int, epoch: int, *, keep: bool
    ) -> tuple[list[int], list[Any], int]:
        """Read up to place `stop`. Returns this rank's places and items, and the number of items read."""
        plan = self._plan
        places: list[int] = []
        items: list[Any] = []
        num_read = 0
        with self._keeping_globals():
            # Seed for every place, also those of other ranks: a stream that shuffles draws at each of them.
            keys = self._keys(stream.place, stop, stream.stride, (seed, rng.SAMPLE, epoch))
            while stream.place < stop and not stream.ended:
                if self._sample_randomness:
                    seed_globals(next(keys))
                item = self._next(stream)
                if item is _MISSING:
                    stream.ended = True
                    break
                if keep and stream.place % plan.size == plan.rank:
                    places.append(stream.place)
                    items.append(item)
                if stream.last_item is _MISSING and self._sample_randomness:
                    stream.first_digest = digest(item)
                stream.last_item = item
                stream.place += stream.stride
                num_read += 1
        stream.num_read += num_read
        return places, items, num_read

    @staticmethod
    def _keys(place: int, stop: int, stride: int, prefix: tuple[int, ...]) -> Iterator[int]:
        """The keys of every `stride`-th place of `[place, stop)`."""
        for begin in range(place, stop, _KEYS_PER_CALL * stride):
            end = min(begin + _KEYS_PER_CALL * stride, stop)
            yield from sample_keys(prefix, np.arange(begin, end, stride, dtype=np.int64))

    def _next(self, stream: _OpenStream) -> Any:
        if stream.peeked is not _MISSING:
            item, stream.peeked = stream.peeked, _MISSING
            return item
        try:
            return next(stream.items, _MISSING)
        except Exception as error:
            why = f"the iterator of {type(self._dataset).__name__} raised."
            raise self.errors.not_read([stream.place], error, why) from error

    def _make_part(
        self, stream: _OpenStream, places: list[int], items: list[Any], num_read: int
    ) -> Part:
        size = self._plan.micro_batch
        with self._keeping_globals():
            micro_batches = tuple(
                (
                    tuple(places[at : at + size]),
                    self._collate_items(items[at : at + size], places[at : at + size]),
                )
                for at in range(0, len(items), size)
            )
        return Part(num_read, micro_batches, first_digest=stream.first_digest)

    def _padding(self, stream: _OpenStream, seed: int, epoch: int) -> Any:
        """A batch of one sample; None if the whole stream is empty."""
        sample, place = stream.last_item, stream.place - stream.stride
        if sample is _MISSING:  # no item of this shard has been read yet
            place = stream.place
            with self._keeping_globals():
                if self._sample_randomness:
                    seed_globals(rng.key(seed, rng.SAMPLE, epoch, place))
                sample = stream.peeked = self._next(stream)
        if sample is _MISSING:  # this shard is empty; shard 0 has the first sample of the stream
            other, place = self._open(seed, epoch, shard=0), 0
            self._read(other, 1, seed, epoch, keep=False)
            sample = stream.last_item = other.last_item
        with self._keeping_globals():
            return None if sample is _MISSING else self._collate_items([sample], [place])

    def _collate_items(self, items: list[Any], places: list[int]) -> Any:
        if self._collate is not default_collate:
            self.errors.refuse_missing(places, items)
        try:
            return self._collate(items)
        except Exception as error:
            raise self.errors.not_collated(places, error) from error

    def _keeping_globals(self) -> contextlib.AbstractContextManager[None]:
        if self._sample_randomness and self.errors.worker is None:
            return keep_globals()
        return contextlib.nullcontext()


@dataclass
class _PendingStep:
    """A step that was read.

    Attributes:
        by_rank: for each data rank, the samples that it read and the digest of its first sample, int64 of
            shape (data ranks, 2); complete when `pending` was read.
        pending: the sum of `by_rank` over the ranks; None in a job of one process.
    """

    part: Part
    by_rank: torch.Tensor
    pending: Pending | None


class StreamLoader(Loader):
    """Steps over a stream, read in this process when needed, or ahead in loader workers."""

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
        self._padding: Any = None

    def steps(self, position: Position, epochs: int, equal: bool) -> Iterator[PlannedStep]:
        """The steps from `position` to the end of epoch `epochs - 1`.

        All ranks must iterate alike: there is one asynchronous reduction per step.

        Raises:
            DataError: the stream is empty, or ends before `position`, or its shards have different lengths.
            RankDisagreement: the ranks read streams of different length.
        """
        if position.offset:
            text = "reading %d samples of the stream to reach the position of the training."
            log.logger.info(text, position.offset)
        run = self._start_run()
        self._padding = None
        parts = self._parts(position, epochs, equal)
        for epoch in range(position.epoch, epochs):
            offset = position.offset if epoch == position.epoch else 0
            for part, n, ends in self._steps_of_epoch(parts, epoch, offset):
                self._refuse_unless_current(run)
                number = len(part.micro_batches)
                if equal:
                    most = max_micro_batches(n, self._plan.micro_batch, self._plan.size)
                    number = max(number, most)
                micro_batches = self._micro_batches(part, offset, number)
                stop = offset + self._plan.global_batch
                yield PlannedStep(
                    position.seed, epoch, offset, stop, n, ends, number, micro_batches
                )
                offset = stop
                if not ends or epoch + 1 < epochs:
                    self._refuse_unless_current(run)

    def _steps_of_epoch(
        self, parts: Iterator[Part | End], epoch: int, offset: int
    ) -> Iterator[tuple[Part, int, bool]]:
        """For each step of an epoch: this rank's part, the samples over all ranks, whether it is the last."""
        ahead: deque[_PendingStep] = deque()
        ended = False
        global_batch = self._plan.global_batch

        def read_ahead() -> None:
            nonlocal ended
            part = Part(0, ()) if ended else next(parts)
            if isinstance(part, End):
                ended, self._padding, part = True, part.padding, Part(0, ())
            ahead.append(self._start_reduction(part))

        read_ahead()
        read_ahead()
        n = self._finish_reduction(ahead[0], epoch, offset)
        least = global_batch if self._plan.drop_last else 1  # samples of a step
        if n < least:
            raise self._too_short_error(epoch, offset)
        while n >= least:
            if self._job.exchange is not None:
                read_ahead()  # one more step, so that the reduction below was started one step ago
            step = ahead.popleft()
            following = self._finish_reduction(ahead[0], epoch, offset + global_batch)
            if following and n < global_batch:
                raise self._uneven_shards_error(epoch, offset + global_batch)
            yield step.part, n, following < least
            offset, n = offset + global_batch, following
            if self._job.exchange is None:
                read_ahead()
        while not ended:
            # A rank without a sample in the last step has not read to the end of its shard yet.
            part = next(parts)
            ended = isinstance(part, End)
            if isinstance(part, Part) and part.num_read and not self._plan.drop_last:
                raise self._uneven_shards_error(epoch, offset)

    def _start_reduction(self, part: Part) -> _PendingStep:
        by_rank = torch.zeros(self._plan.size, 2, dtype=torch.int64)
        by_rank[self._plan.rank, 0] = part.num_read
        by_rank[self._plan.rank, 1] = part.first_digest
        exchange, pending = self._job.exchange, None
        if exchange is not None:
            if not self._job.data.reports:  # another rank has read the same samples
                by_rank.zero_()
            pending = exchange.send("the next step of a stream", numbers=by_rank)
        return _PendingStep(part, by_rank, pending)

    def _finish_reduction(self, step: _PendingStep, epoch: int, offset: int) -> int:
        """The number of samples of a step over all ranks; 0 after the end of the epoch."""
        if step.pending is not None and self._job.exchange is not None:
            self._job.exchange.read_sum(step.pending)
        num_read: list[int] = step.by_rank[:, 0].tolist()
        if self._reader.sharded:
            return sum(num_read)
        if any(n != num_read[0] for n in num_read):
            raise RankDisagreement(
                f"the ranks read streams of different length: in the step from sample {offset} of "
                f"epoch {epoch}, rank by rank, they found {num_read} samples.",
                where=self._errors.where(),
                why="the dataset splits itself over ranks, or its length is random.",
                fix="give the whole stream on every rank, or define `shard(index, count)`.",
                values=num_read,
            )
        if len(set(step.by_rank[:, 1].tolist())) > 1:
            log.once(_DIFFERENT_STREAMS)
        return num_read[0]

    def _uneven_shards_error(self, epoch: int, offset: int) -> DataError:
        return DataError(
            f"some ranks have more samples after sample {offset} of epoch {epoch}, and others have none.",
            where=self._errors.where(),
            why="the lengths of the shards differ by more than one sample.",
            fix="let `shard(index, count)` give the items index, index + count, ... of one stream.",
        )

    def _too_short_error(self, epoch: int, offset: int) -> DataError:
        if offset:
            return DataError(
                f"the stream ended before sample {offset} of epoch {epoch}.",
                where=self._errors.where(),
                why="it is shorter than when this position was saved.",
                fix="use the stream that the checkpoint was saved with, or start a new training.",
            )
        if self._plan.drop_last:
            return DataError(
                f"the stream gave fewer samples than a step has in epoch {epoch}, and drop_last is True.",
                where=self._errors.where(),
                fix=f"use a smaller global_batch than {self._plan.global_batch}, or drop_last=False.",
            )
        return DataError(
            f"the stream gave no sample in epoch {epoch}.",
            where=self._errors.where(),
            why="its iterator ended at once; `__iter__` (or `shard`) must start again in each epoch.",
            fix="check the files that it reads, and return a new iterator from each call.",
        )

    def _micro_batches(self, part: Part, offset: int, number: int) -> Iterator[MicroBatch]:
        pin = self._workers is None
        for places, batch in part.micro_batches:
            number -= 1
            self.record_delivered(torch.tensor(places, dtype=torch.int64))
            moved = to_device(batch, self._device, pin=pin)
            yield MicroBatch(moved, places, is_last=number == 0)
        padding = self._padding if part.padding is None else part.padding
        while number:
            number -= 1
            if padding is None:
                raise DataError(
                    "this rank has no sample for a padding micro-batch, and only other ranks have samples "
                    "in this step.",
                    where=self._errors.where(),
                    why=f"`shard(0, {self._plan.size})` is empty, but another shard is not.",
                )
            moved = to_device(padding, self._device, pin=pin)
            yield MicroBatch(moved, [offset], is_last=number == 0, is_padding=True)

    def _parts(self, position: Position, epochs: int, equal: bool) -> Iterator[Part | End]:
        """This rank's parts in the order of the steps, and one `End` after each epoch."""
        if not self._num_workers:
            yield from self._reader.parts(position, epochs, equal)
            return
        self._end_workers()
        work = _StreamWork(self._reader, position, epochs, equal)
        self._workers = workers = Workers(self._job, work, self._num_workers, tasks=False)
        workers.start()
        for _ in range(position.epoch, epochs):
            first_digests = set()
            while not isinstance(result := workers.get(), End):
                if result.first_digest:  # of a worker that has read a sample
                    first_digests.add(result.first_digest)
                if len(first_digests) > 1:
                    log.once(_DIFFERENT_STREAMS)
                yield result
            ends = [result] + [workers.get() for _ in range(self._num_workers - 1)]
            for other in ends[1:]:
                if not isinstance(other, End) or other.num_read != result.num_read:
                    raise self._different_workers_error(result, other)
            yield result

    def _different_workers_error(self, one: End, other: Part | End) -> DataError:
        found = f"{other.num_read}" if isinstance(other, End) else "more"
        return DataError(
            "the loader workers of a rank read streams of different length: one found "
            f"{one.num_read} samples, another {found}.",
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
    """Runs in a loader worker: reads the stream and yields this worker's parts."""

    def __init__(self, reader: StreamReader, position: Position, epochs: int, equal: bool) -> None:
        self._reader = reader
        self._run = position, epochs, equal

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        worker, workers = info.id, info.num_workers
        # Many datasets split themselves by this info. With it, a worker would get a share of its share.
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
