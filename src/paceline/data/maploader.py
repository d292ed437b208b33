"""Steps over a dataset of known size, read in this process or ahead in loader workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from paceline.data.coverage import Audit
from paceline.data.device import moved
from paceline.data.gathering import Ahead, ahead
from paceline.data.plan import Block, Int64Array, Permutation, Plan, Position, look_up
from paceline.data.samples import Samples
from paceline.data.steps import MicroBatch, PlannedStep
from paceline.data.workers import Failure, Workers, refuse_unsendable, worker_number
from paceline.errors import PacelineError, StepError
from paceline.job.job import Job

# Of one micro-batch: seed, epoch, first place, place after the last.
Task = tuple[int, int, int, int]


class LocalLoader:
    """Reads each micro-batch when the loop asks for it.

    Attributes:
        audit: where to note what was handed out; None notes nothing.
        plan: which samples are this rank's.
    """

    def __init__(self, job: Job, plan: Plan, samples: Samples) -> None:
        self.audit: Audit | None = None
        self.plan = plan
        self._samples = samples
        self._device = job.device
        at_home = samples.tensors[0].device if samples.tensors else torch.device("cpu")
        self._ids_device = None if at_home.type == "cpu" else at_home
        self._moves = job.device.type != "cpu" and at_home.type == "cpu"
        self._pins = self._moves and job.device.type == "cuda"

    def steps(self, position: Position, epochs: int, equal: bool) -> Iterator[PlannedStep]:
        """The steps from `position` to the end of epoch `epochs`."""
        plan, size = self.plan, self.plan.num_samples
        for block in plan.blocks(position, epochs, self._ids_device):
            ready = None
            if not self._moves:
                ready = ahead(self._samples, block.ids, block.counts, plan.micro_batch)
            offset, begin = block.offset, 0
            for count in block.counts:
                n = min(plan.global_batch, size - offset)
                pieces = plan.pieces_count(n, equal)
                micros = self._micros(block, ready, begin, begin + count, offset, n, pieces)
                end = offset + n
                yield PlannedStep(block.seed, block.epoch, offset, n, end == size, pieces, micros)
                offset = end
                begin += count

    def _micros(
        self,
        block: Block,
        ready: Ahead | None,
        begin: int,
        end: int,
        offset: int,
        num_samples: int,
        pieces: int,
    ) -> Iterator[MicroBatch]:
        """The micro-batches of the step at `offset`: places `[begin, end)` of the block, then ghosts."""
        seed, epoch, _, ids, _ = block
        size = self.plan.micro_batch
        shift = offset + self.plan.share(num_samples)[0] - begin
        for at in range(begin, end, size):
            pieces -= 1
            stop = min(at + size, end)
            batch = ready.batch(at) if ready is not None else None
            if batch is None:
                batch = self._read(seed, epoch, ids[at:stop])
            if self.audit is not None:
                self.audit.saw(ids[at:stop])
            yield MicroBatch(batch, stop - at, shift + at, pieces == 0, False)
        for left in range(pieces - 1, -1, -1):
            ghost = torch.from_numpy(look_up(self.plan.order(seed, epoch), np.array([offset])))
            batch = self._read(seed, epoch, ghost.to(ids.device))
            yield MicroBatch(batch, 1, offset, left == 0, True)

    def _read(self, seed: int, epoch: int, ids: torch.Tensor) -> Any:
        batch = self._samples.read(seed, epoch, ids, pin=self._pins)
        return moved(batch, self._device, pin=self._pins) if self._moves else batch

    def close(self) -> None:
        """Nothing to end."""


class WorkerLoader:
    """Has workers read micro-batches ahead, over the ends of epochs.

    Attributes:
        audit: where to note what was handed out; None notes nothing.
        plan: which samples are this rank's.
    """

    def __init__(self, job: Job, plan: Plan, samples: Samples, workers: int) -> None:
        self.audit: Audit | None = None
        self.plan = plan
        self._device = job.device
        self._workers = Workers(job, SampleWork(samples, plan), workers, tasks=True)
        self._received = 0
        self._run = 0

    def steps(self, position: Position, epochs: int, equal: bool) -> Iterator[PlannedStep]:
        """The steps from `position` to the end of epoch `epochs`."""
        plan, seed = self.plan, position.seed
        self._workers.start(_tasks(plan, position, epochs, equal))
        self._received = 0
        self._run = run = self._run + 1
        task = 0
        for epoch, offset, n in plan.steps(position, epochs):
            if run != self._run:
                raise StepError("these batches have been started again elsewhere.")
            pieces = plan.pieces_count(n, equal)
            micros = self._micros(task, list(plan.pieces(offset, n, equal)))
            ends = offset + n == plan.num_samples
            yield PlannedStep(seed, epoch, offset, n, ends, pieces, micros)
            task += pieces

    def _micros(self, task: int, pieces: list[tuple[int, int, bool]]) -> Iterator[MicroBatch]:
        left = len(pieces)
        while pieces and self._received < task:
            self._take()  # what the loop did not read of the steps before
        for begin, end, is_ghost in pieces:
            left -= 1
            ids, batch = self._take()
            if self._device.type != "cpu":
                batch = moved(batch, self._device, pin=False)
            if self.audit is not None and not is_ghost:
                self.audit.saw(torch.from_numpy(ids))
            yield MicroBatch(batch, end - begin, begin, left == 0, is_ghost)

    def _take(self) -> tuple[Int64Array, Any]:
        result: tuple[Int64Array, Any] = self._workers.get()
        self._received += 1
        return result

    def close(self) -> None:
        """End the workers."""
        self._run += 1
        self._workers.close()


def _tasks(plan: Plan, position: Position, epochs: int, equal: bool) -> Iterator[Task]:
    for epoch, offset, n in plan.steps(position, epochs):
        for begin, end, _ in plan.pieces(offset, n, equal):
            yield position.seed, epoch, begin, end


class SampleWork:
    """What a worker holds: from places of an epoch to the ids that lie there and their batch."""

    def __init__(self, samples: Samples, plan: Plan) -> None:
        self._samples = samples
        self._plan = plan
        self._drawn: tuple[int, int] | None = None
        self._order: Permutation | None = None
        self._checked = False

    def __getitem__(self, task: Task) -> tuple[Int64Array, Any] | Failure:
        seed, epoch, begin, end = task
        worker = worker_number()
        assert worker is not None
        if self._drawn != (seed, epoch):
            self._order = self._plan.order(seed, epoch)
            self._drawn = (seed, epoch)
        ids = look_up(self._order, np.arange(begin, end, dtype=np.int64))
        try:
            self._samples.in_worker(worker)
            batch = self._samples.read(seed, epoch, torch.from_numpy(ids))
            if not self._checked:
                plan = self._plan
                refuse_unsendable(batch, rank=plan.rank, world_size=plan.world_size, worker=worker)
                self._checked = True
        except PacelineError as error:
            return Failure.of(error)
        return ids, batch
