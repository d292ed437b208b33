"""The micro-batches of an evaluation, the same for any number of ranks. Each rank gets a contiguous range."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from paceline.data.dataloader import Source, adopt, refuse_with_loader
from paceline.data.device import to_device
from paceline.data.loader import SampleWork
from paceline.data.plan import Plan, num_micro_batches, share
from paceline.data.samples import Collate, ReadErrors, Samples, checked_size, refuse_sizes
from paceline.data.workers import ComputeThreads, Workers
from paceline.job import rng
from paceline.job.job import Job

_MICRO_BATCH = 64


@dataclass(frozen=True)
class EvaluationBatch:
    """Samples `[index * micro_batch, index * micro_batch + count)` of a dataset, on the job's device."""

    index: int
    batch: Any
    count: int


class EvaluationBatches:
    """This rank's micro-batches of a map-style dataset, in order. Together the ranks read each sample once.

    Of a `DataLoader`, its order is used only if its sampler selects samples.

    Attributes:
        num_samples: samples over all ranks.
        micro_batch: samples of a forward; the loader's batch size, or 64, if None is given.

    Raises:
        ConfigError: sizes out of range, or the dataset is a stream or empty.
        SampleError: the dataset or the collate function raised.
    """

    def __init__(
        self,
        job: Job,
        dataset: Any,
        *,
        micro_batch: int | None = None,
        workers: int | None = None,
        collate: Collate | None = None,
    ) -> None:
        if isinstance(dataset, DataLoader):
            refuse_with_loader(workers=workers, collate=collate)
            source = adopt(job, dataset)
            if source.sampled is not None:
                source.sampled.agree(job)
        else:
            source = Source(dataset, collate, 0 if workers is None else workers)
        if micro_batch is None:
            micro_batch = source.batch_size or _MICRO_BATCH
        refuse_sizes(micro_batch=(micro_batch, 1), workers=(source.workers, 0))
        self.num_samples = size = source.num_samples or checked_size(source.dataset)
        self.micro_batch = micro_batch
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
        begin, end = share(num_micro_batches(size, micro_batch), axis.rank, axis.size)
        self._tasks = [
            (job.seed, 0, index * micro_batch, min((index + 1) * micro_batch, size))
            for index in range(begin, end)
        ]

    def __iter__(self) -> Generator[EvaluationBatch]:
        job, source, work = self._job, self._source, SampleWork(self._samples, self._plan)
        pool = None
        if source.workers:
            pool = Workers(job, work, source.workers, tasks=True, init=source.worker_init)
        threads = ComputeThreads(job, source.workers)
        try:
            if pool is not None and self._tasks:
                threads.lower(quiet=True)  # evaluations are too frequent for a log line each
                pool.start(self._tasks)
            for task in self._tasks:
                _, _, first, stop = task
                batch = work.read(task)[1] if pool is None else pool.get()[1]
                if job.device.type != "cpu":
                    pin = pool is None and job.device.type == "cuda"
                    batch = to_device(batch, job.device, pin=pin)
                yield EvaluationBatch(first // self.micro_batch, batch, stop - first)
        finally:
            threads.restore()
            if pool is not None:
                pool.close()
