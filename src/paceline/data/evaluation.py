"""The micro-batches of an evaluation, the same for any number of ranks.

Each rank reads a contiguous range of a map-style dataset. A stream, or a loader that makes batches itself, is
read whole by every rank, which scores its share of the batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, default_collate

from paceline.data.dataloader import Source, adopt, agree_on_order, refuse_with_loader
from paceline.data.device import tensors_of, to_device
from paceline.data.digest import digest
from paceline.data.loader import SampleWork
from paceline.data.plan import Plan, num_micro_batches, share
from paceline.data.samples import (
    Collate,
    ReadErrors,
    Samples,
    checked_size,
    keep_globals,
    seed_globals,
)
from paceline.data.workers import Workers
from paceline.errors import ConfigError, StepError
from paceline.job import collectives, rng
from paceline.job.arguments import require_integers
from paceline.job.job import Job

_MICRO_BATCH = 64  # samples, if the caller and the loader give none
_ELEMENTS = 1 << 14  # of each tensor of a batch that are compared between ranks; takes some 50 us


@dataclass(frozen=True)
class EvaluationBatch:
    """Samples `[index * micro_batch, index * micro_batch + count)` of a dataset, on the job's device.

    A padding micro-batch repeats a batch, so that all ranks run the same number of forwards; its count is 0.
    """

    index: int
    batch: Any
    count: int

    @property
    def is_padding(self) -> bool:
        return self.count == 0


class EvaluationBatches:
    """This rank's micro-batches of a map-style dataset, in order. Together the ranks read each sample once.

    The order of a `DataLoader` is used only if its sampler selects samples. All ranks make it, because they
    compare their samplers.

    Args:
        micro_batch: Samples of a batch; None is the loader's batch size, or 64.
        workers, collate: As for `Batches`; not for a `DataLoader`.
        equal: Whether a rank with fewer batches than others gets padding micro-batches, after its own.

    Attributes:
        num_samples: samples over all ranks.
        num_batches: micro-batches over all ranks.

    Raises:
        ConfigError: sizes out of range, or the dataset is a stream or empty.
        DataError: the dataset or the collate function raised.
    """

    def __init__(
        self,
        job: Job,
        dataset: Any,
        *,
        micro_batch: int | None = None,
        workers: int | None = None,
        collate: Collate | None = None,
        equal: bool = False,
    ) -> None:
        if isinstance(dataset, DataLoader):
            refuse_with_loader(workers=workers, collate=collate)
            source = adopt(job, dataset)
            agree_on_order(job, source.sampled)
        else:
            source = Source(dataset, collate, 0 if workers is None else workers)
        if micro_batch is None:
            micro_batch = source.batch_size or _MICRO_BATCH
            if source.sampled is not None:
                source.sampled.warn_of_sizes()
        require_integers(1, micro_batch=micro_batch)
        require_integers(0, workers=source.workers)
        self.num_samples = size = source.num_samples or checked_size(source.dataset)
        self.num_batches = num_micro_batches(size, micro_batch)
        self._micro_batch = micro_batch
        self._job = job
        self._source = source
        axis = job.data
        self._plan = Plan(
            size,
            micro_batch,
            micro_batch,
            shuffle=False,
            rank=axis.rank,
            size=axis.size,
            sampled=source.sampled,
        )
        self._samples = Samples(
            source.dataset,
            ReadErrors(job.rank, job.world_size),
            collate=source.collate,
            sample_randomness=True,
            purpose=rng.EVALUATION,
        )
        begin, end = share(self.num_batches, axis.rank, axis.size)
        indices = list(range(begin, end))
        most = -(-self.num_batches // axis.size)
        self._num_padding = most - len(indices) if equal else 0
        indices += [0] * self._num_padding  # they repeat the first batch of the dataset
        self._tasks = [
            (job.seed, 0, index * micro_batch, min((index + 1) * micro_batch, size))
            for index in indices
        ]

    def __iter__(self) -> Generator[EvaluationBatch]:
        job, source, work = self._job, self._source, SampleWork(self._samples, self._plan)
        pool = None
        if source.workers:
            pool = Workers(job, work, source.workers, tasks=True, init=source.worker_init)
        num_own = len(self._tasks) - self._num_padding
        try:
            if pool is not None and self._tasks:
                pool.start(self._tasks)
            for number, task in enumerate(self._tasks):
                _, _, first, stop = task
                batch = work.read(task)[1] if pool is None else pool.get()[1]
                batch = to_device(batch, job.device, pin=pool is None)
                count = stop - first if number < num_own else 0
                yield EvaluationBatch(first // self._micro_batch, batch, count)
        finally:
            if pool is not None:
                pool.close()


class EvaluationStream:
    """This rank's share of the batches of a stream, or of a loader, that every rank reads whole.

    Rank r scores batch r, r + n, r + 2n, ... of n ranks. So the batches do not depend on the number of ranks.
    The global generators are seeded for each batch, so that a stream may shuffle with them.

    Attributes:
        num_samples, num_batches: over all ranks; known after the iteration.

    Raises:
        ConfigError: options that have no effect or are out of range.
    """

    def __init__(
        self,
        job: Job,
        stream: Iterable[Any],
        *,
        micro_batch: int | None,
        workers: int | None,
        collate: Collate | None,
        equal: bool = False,
    ) -> None:
        makes_batches = not isinstance(stream, IterableDataset)
        if makes_batches:
            refuse_with_loader(micro_batch=micro_batch, workers=workers, collate=collate)
        elif workers:
            raise ConfigError(
                "workers has no effect in the evaluation of a stream.",
                fix="evaluate a DataLoader over the stream, with num_workers.",
            )
        micro_batch = _MICRO_BATCH if micro_batch is None else micro_batch
        require_integers(1, micro_batch=micro_batch)
        self._job = job
        self._stream = stream
        self._makes_batches = makes_batches
        self._micro_batch = micro_batch
        self._collate = collate or default_collate
        self._equal = equal
        self._digest = 0  # of all batches
        self.num_samples = self.num_batches = 0

    def __iter__(self) -> Generator[EvaluationBatch]:
        job, axis = self._job, self._job.data
        first_batch: Any = None
        batches = self._batches()
        for index in itertools.count():
            with keep_globals():
                seed_globals(rng.key(job.seed, rng.EVALUATION, index))
                read = next(batches, None)
            if read is None:
                break
            batch, count = read
            self.num_samples += count
            self.num_batches = index + 1
            self._digest = digest((self._digest, batch), elements=_ELEMENTS)
            if index == 0:
                first_batch = batch
            if index % axis.size == axis.rank:
                yield EvaluationBatch(index, to_device(batch, job.device, pin=True), count)
        if self._equal and 0 < self.num_batches % axis.size <= axis.rank:
            yield EvaluationBatch(0, to_device(first_batch, job.device, pin=True), 0)

    def _batches(self) -> Iterator[tuple[Any, int]]:
        samples = iter(self._stream)
        if self._makes_batches:
            for batch in samples:
                yield batch, num_rows(batch)
            return
        while chunk := list(islice(samples, self._micro_batch)):
            yield self._collate(chunk), len(chunk)

    def check(self) -> None:
        """Check that all ranks read the same batches; called after the iteration.

        Raises:
            StepError: on all ranks, if they differ, or there was none.

        Collective: all ranks.
        """
        own = [self.num_batches, self.num_samples, self._digest]
        each = collectives.gather(self._job, own)
        if any(other != own for other in each):
            read = ", ".join(
                f"{samples} samples by rank {r}" for r, (_, samples, _) in enumerate(each)
            )
            raise StepError(
                f"the ranks read different batches: {read}.",
                why="of a stream or a loader every rank must read all batches, to score its share of them.",
                fix="do not split the stream over ranks; shuffle it with the global generators, or with one "
                "seed on all ranks.",
            )
        if not self.num_batches:
            raise StepError(
                "the stream or loader gave no batch.",
                why="it is empty, or an iterator that was read before.",
                fix="give an object that starts from the beginning with each `iter()`.",
            )


def batches_to_evaluate(
    job: Job,
    dataset: Any,
    *,
    micro_batch: int | None,
    workers: int | None,
    collate: Collate | None,
    equal: bool,
) -> EvaluationBatches | EvaluationStream:
    """The batches of a map-style dataset, a stream, a `DataLoader`, or another iterable of batches."""
    options: dict[str, Any] = {"micro_batch": micro_batch, "workers": workers, "collate": collate}
    options["equal"] = equal
    if isinstance(dataset, DataLoader):
        is_stream = isinstance(dataset.dataset, IterableDataset) or dataset.batch_sampler is None
    else:
        # IterableDataset inherits a __getitem__ that raises.
        is_stream = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
    if is_stream and hasattr(dataset, "__iter__"):
        return EvaluationStream(job, dataset, **options)
    return EvaluationBatches(job, dataset, **options)


def num_rows(batch: Any) -> int:
    """The number of samples of a batch: the first dimension of its first tensor.

    Raises:
        StepError: it has no tensor with a dimension.
    """
    rows = [len(tensor) for tensor in tensors_of(batch) if tensor.dim()]
    if not rows:
        raise StepError(
            f"the number of samples of a batch is not known: it is a {type(batch).__name__} without tensors.",
            fix="return tensors whose first dimension is the samples, from the loader's collate_fn.",
        )
    return rows[0]
