"""The micro-batches of an evaluation, the same for any number of ranks. Each rank gets a contiguous range."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch

from paceline.data.device import to_device
from paceline.data.loader import SampleWork, Task
from paceline.data.plan import Plan, num_micro_batches, share
from paceline.data.samples import Collate, ReadErrors, Samples, checked_size, refuse_sizes
from paceline.data.workers import ComputeThreads, Workers
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
    """This rank's micro-batches of a map-style dataset, in order. Together the ranks read each sample once.

    Raises:
        ConfigError: sizes out of range, or the dataset is a stream, a data loader or empty.
        SampleError: the dataset or the collate function raised.
    """
    refuse_sizes(micro_batch=(micro_batch, 1), workers=(workers, 0))
    size, axis = checked_size(dataset), job.data
    plan = Plan(size, micro_batch, micro_batch, shuffle=False, rank=axis.rank, size=axis.size)
    samples = Samples(
        dataset,
        ReadErrors(job.rank, job.world_size),
        collate=collate,
        sample_randomness=True,
        purpose=rng.EVALUATION,
    )
    begin, end = share(num_micro_batches(size, micro_batch), axis.rank, axis.size)
    tasks = [
        (job.seed, 0, index * micro_batch, min((index + 1) * micro_batch, size))
        for index in range(begin, end)
    ]
    return _read(job, plan, samples, tasks, workers)


def _read(
    job: Job, plan: Plan, samples: Samples, tasks: list[Task], workers: int
) -> Generator[EvaluationBatch]:
    pool = Workers(job, SampleWork(samples, plan), workers, tasks=True) if workers else None
    threads = ComputeThreads(job, workers)
    try:
        if pool is not None and tasks:
            threads.lower(quiet=True)  # evaluations are too frequent for a log line each
            pool.start(tasks)
        for seed, epoch, first, stop in tasks:
            if pool is not None:
                _, batch = pool.get()
            else:
                ids = torch.arange(first, stop, device=samples.ids_device)
                batch = samples.read(seed, epoch, ids)
            if job.device.type != "cpu":
                batch = to_device(batch, job.device, pin=pool is None and job.device.type == "cuda")
            yield EvaluationBatch(first // plan.micro_batch, batch, stop - first)
    finally:
        threads.restore()
        if pool is not None:
            pool.close()
