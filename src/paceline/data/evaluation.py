"""The micro-batches of an evaluation: cut the same for any number of ranks, dealt in contiguous runs."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from paceline.data.device import moved
from paceline.data.kinds import checked_size, refuse_sizes
from paceline.data.maploader import SampleWork, Task
from paceline.data.plan import Plan, micro_batches, share
from paceline.data.samples import Collate, Samples
from paceline.data.workers import Threads, Workers
from paceline.job import rng
from paceline.job.job import Job


@dataclass(frozen=True)
class EvaluationBatch:
    """Samples `[index * micro_batch, index * micro_batch + count)` of a dataset, on the job's device."""

    index: int
    batch: Any
    count: int


def evaluation_batches(
    job: Job,
    dataset: Any,
    *,
    micro_batch: int,
    workers: int = 0,
    collate: Collate | None = None,
) -> Generator[EvaluationBatch]:
    """This rank's micro-batches of a map-style dataset, each sample once over all ranks, in order.

    Raises:
        ConfigError: sizes out of range, or a dataset that is a stream or empty.
        SampleError: the dataset or the collation raised.
    """
    refuse_sizes(micro_batch=(micro_batch, 1), workers=(workers, 0))
    size = checked_size(dataset)
    plan = Plan(size, micro_batch, micro_batch, False, job.rank, job.world_size)
    samples = Samples(
        dataset,
        collate=collate,
        sample_randomness=True,
        rank=job.rank,
        world_size=job.world_size,
        stream=rng.EVALUATION,
    )
    begin, end = share(micro_batches(size, micro_batch), job.rank, job.world_size)
    tasks = [
        (job.seed, 0, index * micro_batch, min((index + 1) * micro_batch, size))
        for index in range(begin, end)
    ]
    return _read(job, plan, samples, tasks, workers)


def _read(
    job: Job, plan: Plan, samples: Samples, tasks: list[Task], workers: int
) -> Generator[EvaluationBatch]:
    pool = Workers(job, SampleWork(samples, plan), workers, tasks=True) if workers else None
    threads = Threads(job, workers)
    try:
        if pool is not None and tasks:
            threads.lower(say=False)  # once an epoch is too often
            pool.start(tasks)
        for seed, epoch, first, stop in tasks:
            if pool is not None:
                _, batch = pool.get()
            else:
                batch = samples.read(seed, epoch, samples.ids(first, stop))
            if job.device.type != "cpu":
                batch = moved(batch, job.device, pin=pool is None and job.device.type == "cuda")
            yield EvaluationBatch(first // plan.micro_batch, batch, stop - first)
    finally:
        threads.restore()
        if pool is not None:
            pool.close()
