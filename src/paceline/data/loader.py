"""Steps over a map-style dataset, read in this process when needed, or ahead in loader workers."""

from __future__ import annotations

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
    Plan,
    PlannedStep,
    Position,
    look_up,
    max_micro_batches,
    num_micro_batches,
)
from paceline.data.samples import Samples
from paceline.data.workers import Failure, Workers, refuse_unsendable, worker_number
from paceline.errors import PacelineError, StepError
from paceline.job.job import Job

# One micro-batch: seed, epoch, first place, end place (exclusive).
Task = tuple[int, int, int, int]

# Small rows of a dataset's tensors are read for several micro-batches in one call, up to this size.
_READ_BYTES = 1 << 18
_ALIGNMENT = 64  # bytes; torch allocates CPU memory at multiples of it


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
        """Called when the loop gets these samples (int64, one dimension), but not ghosts; for `verify`."""

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


class LocalLoader(Loader):
    """Reads each micro-batch when the loop asks for it.

    Attributes:
        plan: which samples this rank gets.
    """

    def __init__(self, job: Job, plan: Plan, samples: Samples) -> None:
        super().__init__(job.device)
        self.plan = plan
        self._samples = samples
        self._ids_device = samples.ids_device
        self._moves = self._ids_device != job.device
        self._pins = self._ids_device.type == "cpu" and job.device.type == "cuda"
        row_bytes = sum(t[:1].numel() * t.element_size() for t in samples.tensors or ())
        self._rows_per_read = 0 if self._moves else _READ_BYTES // max(row_bytes, 1)
        self._read_ids: torch.Tensor | None = None
        self._read_begin = self._read_end = 0
        self._read_rows: list[torch.Tensor] = []

    def steps(self, position: Position, epochs: int, equal: bool) -> Iterator[PlannedStep]:
        """The steps from `position` to the end of epoch `epochs - 1`."""
        plan, seed = self.plan, position.seed
        run = self._start_run()
        for block in plan.blocks(position, epochs):
            ids = torch.from_numpy(block.ids).to(self._ids_device)
            offset, begin, epoch_end = block.offset, 0, plan.end(block.offset)
            for count, first in zip(block.counts, block.firsts, strict=True):
                self._refuse_unless_current(run)
                n = min(plan.global_batch, epoch_end - offset)
                if equal:
                    number = max_micro_batches(n, plan.micro_batch, plan.size)
                else:
                    number = num_micro_batches(count, plan.micro_batch)
                step, end = (seed, block.epoch, offset), begin + count
                micro_batches = self._micro_batches(
                    step, ids, begin, end, first, number, block.order
                )
                stop = offset + n
                yield PlannedStep(
                    seed, block.epoch, offset, stop, n, stop == epoch_end, number, micro_batches
                )
                offset = stop
                begin = end

    def _micro_batches(
        self,
        step: tuple[int, int, int],
        ids: torch.Tensor,
        begin: int,
        end: int,
        first: int,
        number: int,
        order: Order | None,
    ) -> Iterator[MicroBatch]:
        """The `number` micro-batches of a step: `ids[begin:end]`, from place `first` on, then its ghosts."""
        seed, epoch, offset = step
        micro_batch, shift = self.plan.micro_batch, first - begin
        for start in range(begin, end, micro_batch):
            number -= 1
            stop = min(start + micro_batch, end)
            if self._samples.tensors is not None and stop - start < self._rows_per_read:
                batch = self._rows(seed, epoch, ids, start, stop)
            else:
                batch = self._read(seed, epoch, ids[start:stop], start + shift)
            self.record_delivered(ids[start:stop])
            yield MicroBatch(batch, stop - start, start + shift, number == 0, False)
        while number:
            number -= 1
            ghost = torch.from_numpy(look_up(order, np.array([offset]))).to(self._ids_device)
            yield MicroBatch(self._read(seed, epoch, ghost, offset), 1, offset, number == 0, True)

    def _rows(
        self, seed: int, epoch: int, ids: torch.Tensor, begin: int, end: int
    ) -> list[torch.Tensor]:
        """The rows of `ids[begin:end]` in each tensor of the dataset, read together with later rows."""
        if self._read_ids is not ids or begin < self._read_begin or end > self._read_end:
            self._read_ids, self._read_begin = ids, begin
            self._read_end = min(begin + self._rows_per_read, len(ids))
            self._read_rows = self._samples.read(seed, epoch, ids[begin : self._read_end])
        begin, end = begin - self._read_begin, end - self._read_begin
        # `.data` gives each batch a version counter of its own. Otherwise autograd would refuse the backward
        # of a batch after another one was changed in place.
        pieces = [rows.data[begin:end] for rows in self._read_rows]
        # The result of `index_select` begins at an aligned address. Where a slice does not, some kernels
        # round otherwise, so that equal samples would not give equal bits.
        return [p if p.data_ptr() % _ALIGNMENT == 0 else p.clone() for p in pieces]

    def _read(self, seed: int, epoch: int, ids: torch.Tensor, place: int) -> Any:
        batch = self._samples.read(
            seed, epoch, ids, place=place if self.plan.sampled else None, pin=self._pins
        )
        return to_device(batch, self._device, pin=self._pins) if self._moves else batch


class WorkerLoader(Loader):
    """Lets loader workers read micro-batches ahead, also beyond the end of an epoch.

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
        self._workers = Workers(job, SampleWork(samples, plan), workers, tasks=True, init=init)
        self._received = 0

    def steps(self, position: Position, epochs: int, equal: bool) -> Iterator[PlannedStep]:
        """The steps from `position` to the end of epoch `epochs - 1`."""
        plan, seed = self.plan, position.seed
        self._workers.start(_tasks(plan, position, epochs, equal))
        self._received = 0
        run = self._start_run()
        task = 0
        for epoch, offset, n in plan.steps(position, epochs):
            self._refuse_unless_current(run)
            pieces = list(plan.micro_batch_ranges(offset, n, equal))
            micro_batches = self._micro_batches(run, task, pieces)
            stop = offset + n
            ends = stop == plan.end(offset)
            yield PlannedStep(seed, epoch, offset, stop, n, ends, len(pieces), micro_batches)
            task += len(pieces)

    def _micro_batches(
        self, run: int, first_task: int, pieces: list[tuple[int, int, bool]]
    ) -> Iterator[MicroBatch]:
        left = len(pieces)
        for task, (begin, end, is_ghost) in enumerate(pieces, start=first_task):
            left -= 1
            self._refuse_unless_current(run)
            ids, batch = self._take(task)
            batch = to_device(batch, self._device, pin=False)
            if not is_ghost:
                self.record_delivered(torch.from_numpy(ids))
            yield MicroBatch(batch, end - begin, begin, left == 0, is_ghost)

    def _take(self, task: int) -> tuple[Int64Array, Any]:
        """The result of this task. Results of earlier ones, which the loop did not read, are dropped."""
        if self._received > task:
            raise StepError(
                "the micro-batches of a step were read after those of a later step.",
                why="the loader workers read them in the order of the steps, and they are not kept.",
                fix="read the micro-batches of each step before the next step, or use workers=0.",
            )
        while True:
            result: tuple[Int64Array, Any] = self._workers.get()
            self._received += 1
            if self._received > task:
                return result

    def close(self) -> None:
        """End the loader workers."""
        super().close()
        self._workers.close()


def _tasks(plan: Plan, position: Position, epochs: int, equal: bool) -> Iterator[Task]:
    for epoch, offset, n in plan.steps(position, epochs):
        for begin, end, _ in plan.micro_batch_ranges(offset, n, equal):
            yield position.seed, epoch, begin, end


class SampleWork:
    """Runs in a loader worker: reads the batch at given places of an epoch. Returns sample ids and batch."""

    def __init__(self, samples: Samples, plan: Plan) -> None:
        self.dataset = samples.dataset  # a `worker_init_fn` finds it in `get_worker_info().dataset`
        self._samples = samples
        self._plan = plan
        self._order_of: tuple[int, int] | None = None
        self._order: Order | None = None
        self._checked = False

    def __getitem__(self, task: Task) -> tuple[Int64Array, Any] | Failure:
        self._samples.errors.worker = worker_number()
        try:
            result = self.read(task)
            if not self._checked:
                refuse_unsendable(result[1], self._samples.errors)
                self._checked = True
        except PacelineError as error:
            return Failure.of(error)
        return result

    def read(self, task: Task) -> tuple[Int64Array, Any]:
        """Sample ids and batch of a task."""
        seed, epoch, begin, end = task
        if self._order_of != (seed, epoch):
            self._order = self._plan.order(seed, epoch)
            self._order_of = (seed, epoch)
        ids = look_up(self._order, np.arange(begin, end, dtype=np.int64))
        place = begin if self._plan.sampled else None
        places = torch.from_numpy(ids).to(self._samples.ids_device)
        return ids, self._samples.read(seed, epoch, places, place=place)
