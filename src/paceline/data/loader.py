"""Steps over a map-style dataset."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from paceline.data.device import to_device
from paceline.data.plan import (
    Int64Array,
    MicroBatch,
    Order,
    Piece,
    Plan,
    PlannedStep,
    Position,
    look_up,
)
from paceline.data.samples import Samples
from paceline.data.workers import Failure, Workers, refuse_unsendable, worker_number
from paceline.errors import PacelineError, StepError
from paceline.job.job import Job

# One micro-batch: seed, epoch, first place, end place (exclusive).
Task = tuple[int, int, int, int]

# Sample ids are computed for this many places at once: enough to spread numpy's cost per call over many
# micro-batches, and few enough to take less than a millisecond.
_BLOCK = 1 << 14


class Loader(ABC):
    """Gives the steps of a training on this rank."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._run = 0

    @abstractmethod
    def steps(self, position: Position, epochs: int, equal: bool) -> Iterator[PlannedStep]:
        """The steps from `position` to the end of epoch `epochs - 1`.

        With `equal`, each step has the same number of micro-batches on all ranks.
        """

    def record_delivered(self, ids: torch.Tensor) -> None:  # noqa: B027 - a place for a hook
        """Called when the loop gets these samples, int64 of one dimension; not for padding. For `verify`."""

    def close(self) -> None:
        """End the loader workers."""
        self._run += 1

    def _start_run(self) -> int:
        """Start an iteration, which ends any earlier one. Returns its number for `_refuse_unless_current`."""
        self._run += 1
        return self._run

    def _refuse_unless_current(self, run: int) -> None:
        if run != self._run:
            raise StepError(
                "this iteration over the batches has ended: a later one was started, or they were closed.",
                why="the batches are read for one iteration at a time.",
                fix="end one iteration before you start the next.",
            )


class MapLoader(Loader):
    """Reads each micro-batch when the loop asks for it, or ahead in loader workers, also over ends of epochs.

    Attributes:
        plan: which samples this rank gets.
    """

    def __init__(
        self,
        job: Job,
        plan: Plan,
        samples: Samples,
        workers: int,
        init: Callable[[int], Any] | None = None,
    ) -> None:
        super().__init__(job.device)
        self.plan = plan
        self._job, self._samples, self._init = job, samples, init
        self._work = work = SampleWork(samples, plan)
        self._workers = Workers(job, work, workers, tasks=True, init=init) if workers else None
        self._moves = self._workers is not None or samples.ids_device != job.device
        self._pins = job.device.type == "cuda" and samples.ids_device.type == "cpu"

    def steps(self, position: Position, epochs: int, equal: bool) -> Iterator[PlannedStep]:
        """The steps from `position` to the end of epoch `epochs - 1`."""
        plan, seed = self.plan, position.seed
        run = self._start_run()
        # All steps but the last of an epoch have the same pieces.
        pieces_of = functools.cache(lambda n: list(plan.micro_batch_ranges(n, equal)))
        if self._workers is not None:
            self._workers.start(
                (seed, epoch, offset + begin, offset + end)
                for epoch, offset, n in plan.steps(position, epochs)
                for begin, end, _ in pieces_of(n)
            )
        for epoch, offset, n in plan.steps(position, epochs):
            self._refuse_unless_current(run)
            pieces = pieces_of(n)
            micro_batches = self._micro_batches(run, (seed, epoch, offset), pieces)
            stop = offset + n
            ends = stop == plan.end(offset)
            yield PlannedStep(seed, epoch, offset, stop, n, ends, len(pieces), micro_batches)

    def _micro_batches(
        self, run: int, step: tuple[int, int, int], pieces: list[Piece]
    ) -> Iterator[MicroBatch]:
        seed, epoch, offset = step
        for number, (begin, end, is_padding) in enumerate(pieces, 1):
            self._refuse_unless_current(run)
            place = offset + begin
            if self._workers is None:
                task = (seed, epoch, place, offset + end)
                ids, batch = self._work.read(task, pin=self._pins)
            else:
                drawn, batch = self._workers.get()
                ids = torch.from_numpy(drawn)
            if self._moves:
                batch = to_device(batch, self._device, pin=self._pins and self._workers is None)
            if not is_padding:
                self.record_delivered(ids)
            places = range(place, offset + end)
            yield MicroBatch(batch, places, is_last=number == len(pieces), is_padding=is_padding)

    def read_again(self, step: PlannedStep, pieces: list[Piece]) -> list[MicroBatch]:
        """The micro-batches of a rank in a step, on this rank's device, outside of the iteration."""
        at = [(step.offset + begin, step.offset + end) for begin, end, _ in pieces]
        tasks = [(step.position.seed, step.epoch, begin, end) for begin, end in at]
        if self._workers is None:
            batches = [self._work.read(task)[1] for task in tasks]
        else:
            # In a process of its own: a file that the dataset opened here would be shared with later workers.
            reader = Workers(
                self._job, SampleWork(self._samples, self.plan), 1, tasks=True, init=self._init
            )
            try:
                reader.start(tasks)
                batches = [reader.get()[1] for _ in tasks]
            finally:
                reader.close()
        if self._moves:
            batches = [to_device(batch, self._device, pin=False) for batch in batches]
        return [
            MicroBatch(batch, range(begin, end), is_last=False, is_padding=is_padding)
            for batch, (begin, end), (_, _, is_padding) in zip(batches, at, pieces, strict=True)
        ]

    def close(self) -> None:
        """End the loader workers."""
        super().close()
        if self._workers is not None:
            self._workers.close()


class SampleWork:
    """Reads the batch at given places of an epoch, in this process or, by `[task]`, in a loader worker."""

    def __init__(self, samples: Samples, plan: Plan) -> None:
        self.dataset = samples.dataset  # a `worker_init_fn` finds it in `get_worker_info().dataset`
        self._samples = samples
        self._plan = plan
        self._epoch: tuple[int, int] | None = None  # seed and epoch of `_order`
        self._order: Order | None = None
        self._block = -1  # number of the block of places whose ids `_ids` holds
        self._ids = torch.empty(0, dtype=torch.int64)
        self._checked = False

    def __getitem__(self, task: Task) -> tuple[Int64Array, Any] | Failure:
        self._samples.errors.worker = worker_number()
        try:
            ids, batch = self.read(task)
            if not self._checked:
                refuse_unsendable(batch, self._samples.errors)
                self._checked = True
        except PacelineError as error:
            return Failure.of(error)
        return ids.numpy(), batch  # an array: sending a tensor takes a file descriptor

    def read(self, task: Task, *, pin: bool = False) -> tuple[torch.Tensor, Any]:
        """Sample ids and batch of a task. For `pin` see `Samples.read`."""
        seed, epoch, begin, end = task
        ids = self._look_up(seed, epoch, begin, end)
        place = begin if self._plan.sampled else None
        return ids, self._samples.read(seed, epoch, ids, place=place, pin=pin)

    def _look_up(self, seed: int, epoch: int, begin: int, end: int) -> torch.Tensor:
        """The sample ids at places of an epoch, on the device where `Samples.read` expects them."""
        if self._epoch != (seed, epoch):
            self._order = self._plan.order(seed, epoch)
            self._epoch, self._block = (seed, epoch), -1
        block = begin // _BLOCK
        first, stop = block * _BLOCK, (block + 1) * _BLOCK
        if end > stop:
            return self._compute(begin, end)
        if block != self._block:
            self._ids = self._compute(first, min(stop, self._plan.num_samples))
            self._block = block
        return self._ids[begin - first : end - first]

    def _compute(self, begin: int, end: int) -> torch.Tensor:
        ids = look_up(self._order, np.arange(begin, end, dtype=np.int64))
        return torch.from_numpy(ids).to(self._samples.ids_device)
