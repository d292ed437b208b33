"""`Batches`: the data of a training, the same for any number of processes.

A front to the plan (which samples, in what order), to loading in this process or in torch's DataLoader
workers, and to streams. It deliberately knows nothing of models, losses or steps' outcomes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from paceline.data.autoloader import AutoLoader
from paceline.data.coverage import Audit, used_before
from paceline.data.kinds import checked_size, is_stream, refuse_sizes
from paceline.data.maploader import LocalLoader, WorkerLoader
from paceline.data.plan import Plan, Position
from paceline.data.reader import StreamPlan
from paceline.data.samples import Collate, Samples
from paceline.data.steps import PlannedStep
from paceline.data.streams import StreamLoader
from paceline.data.workers import Threads
from paceline.errors import ConfigError
from paceline.job import collectives
from paceline.job.job import Job

Loader = LocalLoader | WorkerLoader | AutoLoader | StreamLoader


class Batches:
    """The samples of every step, derived from `global_batch` alone.

    Args:
        dataset: Map-style (`__getitem__` and `__len__`), or a stream (`__iter__` without
            `__getitem__`, such as torch's IterableDataset).
        global_batch: Samples of one step over all ranks, at least 1.
        micro_batch: Most samples of one forward of one rank; None takes all of a rank's at once.
        shuffle: One permutation for each epoch. None means True, and False for a stream, which
            cannot be shuffled from outside.
        workers: Loader processes of each rank; 0 loads in this process; "auto" measures the first steps.
        sample_randomness: Draw each sample's randomness from `(seed, epoch, sample)`. Costs about
            7 us a sample (1 us if `__getitem__` takes a `generator`); False leaves all generators
            alone and uses the dataset's `__getitems__` where it has one.
        collate: Makes a batch of a list of samples; None is torch's `default_collate`.

    Attributes:
        num_samples: Samples of an epoch; None for a stream.
        steps_per_epoch: Steps of an epoch; None for a stream.
        global_batch, micro_batch: As given; `micro_batch` is never None.

    Raises:
        ConfigError: an argument out of range, or a dataset that is empty or of no known kind.
        RankDisagreement: the ranks have different arguments or datasets of different size.

    Collective: all ranks, same order as the job's other collectives.
    """

    def __init__(
        self,
        job: Job,
        dataset: Any,
        *,
        global_batch: int,
        micro_batch: int | None = None,
        shuffle: bool | None = None,
        workers: int | Literal["auto"] = 0,
        sample_randomness: bool = True,
        collate: Collate | None = None,
    ) -> None:
        job.refuse_if_left()
        stream = is_stream(dataset)
        largest = global_batch if micro_batch is None else micro_batch
        auto = workers == "auto" and not stream
        fixed = 0 if auto else workers
        refuse_sizes(global_batch=(global_batch, 1), micro_batch=(largest, 1), workers=(fixed, 0))
        if largest > global_batch:
            raise ConfigError(
                f"micro_batch={micro_batch} is more than global_batch={global_batch}.",
                fix="micro_batch is the largest forward of one rank; leave it out for all at once.",
                option="micro_batch",
            )
        if stream and shuffle:
            raise ConfigError(
                "a stream cannot be shuffled from outside.",
                fix="leave `shuffle` out, and shuffle inside the dataset (see docs/data.md).",
            )
        self._job = job
        self.global_batch = global_batch
        self.micro_batch = largest
        self.num_samples = None if stream else checked_size(dataset)
        self._plan: Plan | None = None
        agreed = {
            "samples": self.num_samples,
            "global_batch": global_batch,
            "micro_batch": self.micro_batch,
            "shuffle": shuffle is not False and not stream,
            "sample_randomness": sample_randomness,
        }
        collectives.agree(job, "batches", agreed, fix="give all ranks the same data and arguments.")
        loading = {"collate": collate, "sample_randomness": sample_randomness}
        if stream:
            self._loader: Loader = self._stream(dataset, workers, **loading)
        else:
            self._loader = self._map(dataset, workers, shuffle is not False, **loading)
        self._threads = Threads(job, workers) if isinstance(workers, int) and workers else None
        self._may_have_workers = workers != 0
        self._closes_on_leave = False
        self._audited = False

    def _map(self, dataset: Any, workers: Any, shuffle: bool, **loading: Any) -> Loader:
        job = self._job
        assert self.num_samples is not None
        self._plan = Plan(
            self.num_samples,
            self.global_batch,
            self.micro_batch,
            shuffle,
            job.rank,
            job.world_size,
        )
        samples = Samples(dataset, rank=job.rank, world_size=job.world_size, **loading)
        if workers == "auto":
            return AutoLoader(job, self._plan, samples)
        if workers:
            return WorkerLoader(job, self._plan, samples, workers)
        return LocalLoader(job, self._plan, samples)

    def _stream(self, dataset: Any, workers: Any, **loading: Any) -> Loader:
        job = self._job
        plan = StreamPlan(self.global_batch, self.micro_batch, job.rank, job.world_size)
        return StreamLoader(job, dataset, plan, workers=workers, **loading)

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps of an epoch, the smaller last one included; None for a stream."""
        return None if self._plan is None else self._plan.steps_per_epoch

    def align(self) -> None:
        """Cut each step into the same micro-batches whatever the world, and deal those to the ranks.

        Raises:
            ConfigError: the data is a stream.

        Collective: all ranks, before `iterate`.
        """
        if self._plan is None or isinstance(self._loader, StreamLoader):
            raise ConfigError(
                "the micro-batches of a stream are not the same in any world.",
                fix="reproducible training wants a map-style dataset.",
            )
        self._plan = self._loader.plan = replace(self._plan, aligned=True)

    def iterate(
        self, position: Position, *, epochs: int, equal: bool = False
    ) -> Iterator[PlannedStep]:
        """The steps from `position` to the end of epoch `epochs - 1`.

        A new call drops what an earlier one had loaded ahead. The first epoch that is worked through
        is audited after its last step.

        Args:
            epochs: Epochs in all, counted from 0.
            equal: Give all ranks equally many micro-batches in each step, for models that talk in
                their forward; see `MicroBatch.is_ghost`.

        Raises:
            ConfigError: a position beyond the end of the data.
            SampleError, DataError: on this rank, while iterating.
            AuditError: on all ranks, after an epoch that lost or repeated samples.

        Collective: all ranks iterate alike; the audit is one exchange after the first epoch, and a
        stream is one asynchronous reduction a step.
        """
        self._job.refuse_if_left()
        if type(epochs) is not int or epochs < 0:
            raise ConfigError(f"epochs must be a whole number of at least 0, got {epochs!r}.")
        if self.num_samples is not None and position.offset >= self.num_samples:
            if position.offset > self.num_samples:
                raise ConfigError(
                    f"position {position.offset} is beyond the {self.num_samples} samples of an epoch.",
                    why="the position was taken with another dataset.",
                    position=position,
                )
            position = Position(position.seed, position.epoch + 1, 0)
        if self._may_have_workers and position.epoch < epochs:
            if not self._closes_on_leave:
                self._job.on_leave(self.close)
                self._closes_on_leave = True
            if self._threads is not None:
                self._threads.lower()
        return self._audited_steps(position, epochs, equal)

    def _audited_steps(self, position: Position, epochs: int, equal: bool) -> Iterator[PlannedStep]:
        steps = self._loader.steps(position, epochs, equal)
        if not self._audited:
            audit = Audit(self._job, self.num_samples)
            self._loader.audit = audit
            try:
                for step in steps:
                    yield step
                    if step.ends_epoch:
                        self._close_audit(audit, position, step)
                        break
            finally:
                self._loader.audit = None
        yield from steps

    def _close_audit(self, audit: Audit, position: Position, last: PlannedStep) -> None:
        if self._plan is None:
            used = np.arange(position.offset, dtype=np.int64)
        else:
            used = used_before(self._plan, position.seed, position.epoch, position.offset)
        audit.close(epoch=last.epoch, size=last.offset + last.num_samples, used_before=used)
        self._audited = True

    def close(self) -> None:
        """End the loader workers. Leaving the job does it too. Collective: none."""
        self._loader.close()
        if self._threads is not None:
            self._threads.restore()
