"""`Batches`: the samples of every step of a training, the same for any number of processes.

Combines a plan (which samples, in which order) with a loader (in this process, in loader workers, or over a
stream).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from torch.utils.data import DataLoader

from paceline import log
from paceline.clock.step_clock import DATA, clock
from paceline.data.content import read_content
from paceline.data.dataloader import Source, adopt, agree_on_order, refuse_with_loader
from paceline.data.loader import Loader, MapLoader
from paceline.data.plan import MicroBatch, Plan, PlannedStep, Position, look_up
from paceline.data.samples import Collate, ReadErrors, Samples, is_stream
from paceline.data.streams import StreamLoader, StreamPlan
from paceline.errors import ConfigError, RankDisagreement, StepError
from paceline.job import collectives
from paceline.job.arguments import require_integers
from paceline.job.job import Job


class Batches:
    """The samples of every step, derived from `global_batch` alone.

    Args:
        dataset: Map-style (`__getitem__` and `__len__`), a stream (`__iter__` without `__getitem__`, such as
            torch's IterableDataset), or a `torch.utils.data.DataLoader`. A loader gives its dataset, sampler
            or batch sampler, batch size, collate function, `num_workers` and `worker_init_fn`; see
            [data](../howto/data.md).
        global_batch: Samples of one step over all ranks, at least 1. Only for a `DataLoader` it may be None:
            then it is the loader's batch size times the number of ranks.
        micro_batch: The largest number of samples in one forward of one rank. None sets no limit: a rank
            computes its share of a step in one forward. With `reproducible=True` ranks share whole
            micro-batches, so None is then the batch size of a `DataLoader`. "auto" starts with a rank's whole
            share, and halves it on all ranks while a rank runs out of memory; see
            [data](../howto/data.md#a-micro-batch-that-fits).
        shuffle: Use a new permutation in each epoch. None means True for a map-style dataset and False
            for a stream; shuffle a stream inside the dataset. Not for a `DataLoader`.
        workers: Loader processes of each rank; 0 loads in this process. None means 0, or the loader's number.
        sample_randomness: Draw each sample's randomness from `(seed, epoch, sample)`. Costs about
            7 us a sample. False leaves all generators alone and uses the dataset's `__getitems__` if it has
            one.
        collate: Makes a batch of a list of samples; None is torch's `default_collate`. Not for a
            `DataLoader`.
        drop_last: Leave out the last step of an epoch if it has fewer than `global_batch` samples. None
            means False. Not for a `DataLoader`.

    Attributes:
        num_samples: Samples of an epoch; None for a stream.
        steps_per_epoch: Steps of an epoch; None for a stream.
        global_batch: As given, or of the loader; never None.
        micro_batch: As given, or `global_batch`; never None. With "auto" the present one.
        is_auto: Whether `micro_batch="auto"` was given.
        may_drop_samples: Whether a micro-batch may have fewer samples than were read for it.

    Raises:
        ConfigError: an argument is out of range or contradicts the loader; the dataset is empty or cannot be
            read, or no step is left with `drop_last`.
        RankDisagreement: the ranks have different arguments, datasets of different size, or samplers that
            give different indices.

    Collective: all ranks, same order as the job's other collectives.
    """

    def __init__(
        self,
        job: Job,
        dataset: Any,
        *,
        global_batch: int | None = None,
        micro_batch: int | Literal["auto"] | None = None,
        shuffle: bool | None = None,
        workers: int | None = None,
        sample_randomness: bool = True,
        collate: Collate | None = None,
        drop_last: bool | None = None,
    ) -> None:
        job.refuse_if_left()
        if isinstance(dataset, DataLoader):
            refuse_with_loader(
                shuffle=shuffle, workers=workers, collate=collate, drop_last=drop_last
            )
            source = adopt(job, dataset)
            if micro_batch is None and source.sampled is not None:
                source.sampled.warn_of_sizes()
            if global_batch is None:
                global_batch = _global_batch(job, source)
        else:
            stream = is_stream(dataset)
            if stream and shuffle:
                raise ConfigError(
                    "shuffle=True cannot be used with a stream.",
                    why="its samples can be read only in its own order.",
                    fix="leave `shuffle` out, and shuffle inside the dataset (see docs/howto/data.md).",
                )
            source = Source(
                dataset,
                collate=collate,
                workers=0 if workers is None else workers,
                shuffle=shuffle is not False and not stream,
                drop_last=bool(drop_last),
            )
        self.is_auto = micro_batch == "auto"
        if micro_batch == "auto":
            if source.num_samples is None:
                raise ConfigError(
                    'micro_batch="auto" cannot be used with a stream.',
                    why="a step that does not fit into memory is read again, and a stream is read once.",
                    fix="give a number, or use a map-style dataset.",
                    option="micro_batch",
                )
            require_integers(1, global_batch=global_batch)
            assert global_batch is not None
            micro_batch = -(-global_batch // job.data.size)
        # In reproducible mode; see `align`.
        aligned_micro_batch = micro_batch or source.batch_size
        micro_batch = global_batch if micro_batch is None else micro_batch
        require_integers(1, global_batch=global_batch, micro_batch=micro_batch)
        require_integers(0, workers=source.workers)
        assert global_batch is not None
        assert micro_batch is not None
        if micro_batch > global_batch:
            raise ConfigError(
                f"micro_batch={micro_batch} is more than global_batch={global_batch}.",
                fix="leave micro_batch out; it is the largest forward of one rank.",
                option="micro_batch",
            )
        # torch's own collate function keeps all samples.
        self.may_drop_samples = source.collate is not None or hasattr(
            source.dataset, "__getitems__"
        )
        self._job = job
        self._is_adopted = isinstance(dataset, DataLoader)
        self.global_batch = global_batch
        self.micro_batch = micro_batch
        self.num_samples = source.num_samples
        if source.drop_last and self.num_samples is not None and self.num_samples < global_batch:
            raise ConfigError(
                f"no step is left: the dataset has {self.num_samples} samples, fewer than global_batch="
                f"{global_batch}, and drop_last is True.",
                fix="use a smaller global_batch, or drop_last=False.",
                option="drop_last",
            )
        self._aligned_micro_batch = min(aligned_micro_batch or global_batch, global_batch)
        agreed = {
            "samples": self.num_samples,
            "global_batch": global_batch,
            "micro_batch": "auto" if self.is_auto else micro_batch,
            "batch_size": source.batch_size,
            "shuffle": source.shuffle,
            "drop_last": source.drop_last,
            "sample_randomness": sample_randomness,
        }
        collectives.agree(job, "batches", agreed, fix="give all ranks the same data and arguments.")
        agree_on_order(job, source.sampled)
        self._sampled = source.sampled
        self._plan: Plan | None = None
        self._samples: Samples | None = None  # of a map-style dataset
        self._loader: Loader
        axis, errors = job.data, ReadErrors(job.rank, job.world_size)
        if self.num_samples is None:
            self._loader = StreamLoader(
                job,
                source.dataset,
                StreamPlan(global_batch, micro_batch, axis.rank, axis.size, source.drop_last),
                errors,
                workers=source.workers,
                sample_randomness=sample_randomness,
                collate=source.collate,
            )
        else:
            self._plan = Plan(
                self.num_samples,
                global_batch,
                micro_batch,
                source.shuffle,
                axis.rank,
                axis.size,
                sampled=self._sampled,
                drop_last=source.drop_last,
            )
            self._samples = samples = Samples(
                source.dataset,
                errors,
                collate=source.collate,
                sample_randomness=sample_randomness,
            )
            self._loader = MapLoader(job, self._plan, samples, source.workers, source.worker_init)
        self._num_workers = source.workers
        self._unregister: Callable[[], object] | None = None
        # What `iterate` was called with, and the steps that are left.
        self._steps: list[Iterator[PlannedStep]] = []  # one, which `begin_again` replaces
        self._epochs, self._equal = 0, False

    def __iter__(self) -> Iterator[Any]:
        """Not iterable: the steps come from a training. Raises StepError. Collective: none."""
        raise StepError(
            "Batches cannot be iterated by itself.",
            fix="for step in training.steps(epochs=10): for batch in step: ..., where `training` is "
            "paceline.Training(job, model, optimizer, batches).",
        )

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps of an epoch, including a smaller last one that is not dropped; None for a stream."""
        return None if self._plan is None else self._plan.steps_per_epoch

    def facts(self) -> dict[str, Any]:
        """Settings that decide how long the loading takes, for reports and advice. Collective: none."""
        return {
            "global_batch": self.global_batch,
            "micro_batch": self.micro_batch,
            "samples": self.num_samples,
            "workers": self._num_workers,
            "dataloader": self._is_adopted,
        }

    def identity(self) -> dict[str, Any]:
        """What decides which samples a position means, for checkpoints. Collective: none."""
        sampled = self._sampled
        return {
            "samples": self.num_samples,
            "shuffle": self._plan is not None and self._plan.shuffle,
            "sampler": None if sampled is None else f"{sampled.name} {sampled.digest:08x}",
            "global_batch": self.global_batch,
        }

    def content(self) -> list[int] | None:
        """Digests of the first, the middle and the last sample; None if they cannot be compared.

        That is so for a stream, for a dataset that gives other values each time that it is read, and where
        loader workers are not forked. A dataset that is not a `TensorDataset` is read in a forked process,
        which takes about 0.1 s: it may open files at its first sample.

        On several hosts a difference is a warning: their libraries may compute floats that differ in the last
        bits, and samples may hold paths.

        Raises:
            RankDisagreement: the ranks of one host have other samples.

        Collective: all ranks.
        """
        if self._samples is None:
            return None
        found: list[list[int] | None]
        found = collectives.gather(self._job, read_content(self._job, self._samples))
        if all(digests == found[0] for digests in found):
            return found[0]
        again = collectives.gather(self._job, read_content(self._job, self._samples))
        if None in found or again != found:
            return None
        rank = next(rank for rank, digests in enumerate(found) if digests != found[0])
        error = RankDisagreement(
            f"rank {rank} has other samples than rank 0 in a dataset of the same size.",
            why="the ranks share one order of the samples, so some would be used twice and others never.",
            fix="build the same dataset on all ranks: sort the names of files, and draw random data after "
            "paceline.join, which seeds all ranks alike.",
            values=found,
        )
        if self._job.one_host:
            raise error
        if self._job.rank == 0:
            log.logger.warning("%s", error)
        return None

    def samples_at(self, seed: int, epoch: int, places: Sequence[int]) -> list[int]:
        """The indices in the dataset of the samples at these places of an epoch; of a stream, the places.

        Collective: none.
        """
        if self._plan is None:
            return list(places)
        indices: list[int] = look_up(self._plan.order(seed, epoch), np.array(places)).tolist()
        return indices

    def align(self) -> None:
        """Cut each step into micro-batches that are the same on any number of ranks.

        Raises:
            ConfigError: the data is a stream.

        Collective: all ranks, before `iterate`.
        """
        if self._plan is None or not isinstance(self._loader, MapLoader):
            raise ConfigError(
                "reproducible training cannot use a stream.",
                why="the micro-batches of a stream depend on the number of ranks.",
                fix="use a map-style dataset.",
            )
        self.micro_batch = self._aligned_micro_batch
        self._plan = replace(self._plan, aligned=True, micro_batch=self.micro_batch)
        self._loader.plan = self._plan

    def close_with_padding(self) -> None:
        """End each step with a padding micro-batch on every rank, if `iterate` gets `equal`.

        Collective: all ranks, before `iterate`.
        """
        assert self._plan is not None
        assert isinstance(self._loader, MapLoader)
        self._loader.plan = self._plan = replace(self._plan, closes_with_padding=True)

    def iterate(
        self, position: Position, *, epochs: int, equal: bool = False
    ) -> Iterator[PlannedStep]:
        """The steps from `position` to the end of epoch `epochs - 1`.

        A new call discards what an earlier call has loaded ahead.

        Args:
            position: The first sample. The end of an epoch of a map-style dataset is the start of the next.
            epochs: Number of epochs, counted from epoch 0.
            equal: Give all ranks the same number of micro-batches in each step, for models or strategies
                with collectives in forward or backward. A rank that has fewer gets padding
                micro-batches: one real sample each, `MicroBatch.is_padding`, which must have weight 0.

        Raises:
            ConfigError: `position` is beyond the end of the epoch, or `epochs` is not an integer >= 0.
            DataError: on this rank, while iterating.
            StepError: a later call has started to iterate.
            RankDisagreement: the ranks read streams of different length.

        Collective: all ranks, with the same arguments. A stream adds one asynchronous reduction per step.
        """
        self._job.refuse_if_left()
        require_integers(0, epochs=epochs)
        if self._plan is not None:
            if position.offset > self._plan.num_samples:
                raise ConfigError(
                    f"position {position.offset} is beyond the {self.num_samples} samples of an epoch.",
                    why="the position was saved with another dataset.",
                    fix="use the dataset that the checkpoint was saved with, or start from offset 0.",
                    position=position,
                )
            if position.offset == self._plan.end(position.offset):
                position = Position(position.seed, position.epoch + 1, 0)
        if self._num_workers and position.epoch < epochs and self._unregister is None:
            self._unregister = self._job.on_leave(self.close)
        steps = self._loader.steps(position, epochs, equal)
        if self._plan is None:
            return clock.each(DATA, steps)
        self._steps, self._epochs, self._equal = [steps], epochs, equal
        return self._newest_steps(self._steps)

    def _newest_steps(self, steps: list[Iterator[PlannedStep]]) -> Iterator[PlannedStep]:
        while (step := next(steps[0], None)) is not None:
            yield step

    def cut_again(self, step: PlannedStep, micro_batch: int) -> PlannedStep:
        """The same step in smaller micro-batches, as those after it are from now on; reads it again.

        Collective: all ranks.
        """
        assert self._plan is not None
        assert isinstance(self._loader, MapLoader)
        self.micro_batch = micro_batch
        self._loader.plan = self._plan = replace(self._plan, micro_batch=micro_batch)
        return self.begin_again(step)

    def begin_again(self, step: PlannedStep) -> PlannedStep:
        """The same step of a map-style dataset once more, and those after it. Collective: none."""
        self._steps[0] = self._loader.steps(step.position, self._epochs, self._equal)
        return next(self._steps[0])

    def read_again(self, step: PlannedStep, rank: int, *, equal: bool) -> list[MicroBatch]:
        """The micro-batches of a data rank in a step, read by this rank; `equal` as for `iterate`.

        Not for streams. Collective: none.
        """
        assert self._plan is not None
        assert isinstance(self._loader, MapLoader)
        plan = replace(self._plan, rank=rank)
        return self._loader.read_again(step, list(plan.micro_batch_ranges(step.num_samples, equal)))

    def padding(self, step: PlannedStep, number: int) -> PlannedStep:
        """The same step in `number` padding micro-batches, all of one sample.

        Not for streams. Collective: none.
        """
        assert isinstance(self._loader, MapLoader)
        [one] = self._loader.read_again(step, [(0, 1, True)])
        micro_batches = (
            MicroBatch(one.batch, one.places, is_last=left == 0, is_padding=True)
            for left in reversed(range(number))
        )
        seed, epoch, offset = step.position.seed, step.epoch, step.offset
        return PlannedStep(
            seed, epoch, offset, step.stop, step.num_samples, step.ends_epoch, number, micro_batches
        )

    def close(self) -> None:
        """End the loader workers. Leaving the job also ends them. Collective: none."""
        self._loader.close()
        if self._unregister is not None:
            self._unregister()
            self._unregister = None


def _global_batch(job: Job, source: Source) -> int:
    """The batches of a `DataLoader` on all ranks, if none is given."""
    assert source.batch_size is not None
    size = source.batch_size * job.data.size
    ranks = "1 rank" if job.data.size == 1 else f"{job.data.size} ranks"
    log.logger.info(
        "global_batch=%d: batches of %d on %s. Pass global_batch=%d to keep it on any number of ranks.",
        *(size, source.batch_size, ranks, size),
    )
    return size
