"""Steps over a stream: what the readers of all ranks bring, agreed on ahead of the loop.

How many samples a step has, and whether another follows, is known to all ranks before the loop sees
it: one small asynchronous reduction a step on the control group, started a step ahead, so that nobody
waits for it. It also finds ranks whose streams differ, which would otherwise hang.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset
from torch.utils.data._utils import worker as torch_worker

from paceline import log
from paceline.data.coverage import Audit
from paceline.data.device import moved
from paceline.data.plan import Position, micro_batches
from paceline.data.reader import End, Part, StreamPlan, StreamReader
from paceline.data.samples import Collate
from paceline.data.steps import MicroBatch, PlannedStep
from paceline.data.workers import Failure, Workers, refuse_unsendable
from paceline.errors import DataError, PacelineError, RankDisagreement, StepError, place
from paceline.job.job import Job

_NOTHING = Part(0, ())

# A warning and no error: a dataset may draw from a generator of its own and still be the same stream.
_DIFFERENT = (
    "the stream begins with different samples on different ranks or loader workers. Each of them reads "
    "the whole stream and keeps its share, so a dataset that splits or shuffles itself by rank or "
    "worker loses samples. Have it give the whole stream in one order, or offer "
    "`shard(index, count)`; see docs/data.md."
)


@dataclass
class _Ahead:
    """A step that was read, its samples over all ranks not yet known."""

    part: Part
    seen: torch.Tensor
    work: Any


class StreamLoader:
    """Reads a stream in this process, or ahead in workers.

    Attributes:
        audit: where to note what was handed out; None notes nothing.

    Collective: see `steps`.
    """

    def __init__(
        self,
        job: Job,
        dataset: Any,
        plan: StreamPlan,
        *,
        workers: int,
        sample_randomness: bool,
        collate: Collate | None,
    ) -> None:
        self.audit: Audit | None = None
        self._job = job
        self._plan = plan
        self._reader = StreamReader(
            dataset, plan, sample_randomness=sample_randomness, collate=collate
        )
        self._num_workers = workers
        self._workers: Workers | None = None
        self._ghost: Any = None
        self._run = 0

    def steps(self, position: Position, epochs: int, equal: bool) -> Iterator[PlannedStep]:
        """The steps from `position` to the end of epoch `epochs`.

        Raises:
            DataError: the stream is empty, or shorter than `position` says.
            RankDisagreement: the ranks read streams of different length.

        Collective: all ranks iterate alike; one asynchronous reduction a step.
        """
        if position.offset:
            log.logger.info(
                "reading %d samples of the stream to get to where training stands.",
                position.offset,
            )
        self._run = run = self._run + 1
        parts = self._parts(position, epochs, equal)
        for epoch in range(position.epoch, epochs):
            offset = position.offset if epoch == position.epoch else 0
            for part, n, ends in self._agreed(parts, epoch, offset):
                if run != self._run:
                    raise StepError("these batches have been started again elsewhere.")
                pieces = len(part.micros)
                if equal:
                    most = -(-n // self._plan.world_size)
                    pieces = max(pieces, micro_batches(most, self._plan.micro_batch))
                micros = self._micros(part, offset, pieces)
                yield PlannedStep(position.seed, epoch, offset, n, ends, pieces, micros)
                offset += n

    def _agreed(
        self, parts: Iterator[Part | End], epoch: int, offset: int
    ) -> Iterator[tuple[Part, int, bool]]:
        """The steps of one epoch: this rank's part, samples over all ranks, whether it is the last."""
        ahead: deque[_Ahead] = deque()
        ended = False

        def look() -> None:
            nonlocal ended
            part = _NOTHING if ended else next(parts)
            if isinstance(part, End):
                ended, part = True, _NOTHING
            ahead.append(self._started(part))

        look()
        look()
        n = self._finished(ahead[0], epoch, offset)
        if n == 0:
            raise self._too_short(epoch, offset)
        while n:
            if self._job.control is not None:
                look()  # one more, so that the reduction below has had a step's time
            step = ahead.popleft()
            following = self._finished(ahead[0], epoch, offset + n)
            yield step.part, n, following == 0
            offset, n = offset + n, following
            if self._job.control is None:
                look()
        while not ended:
            # Not every rank has come across its end: one without a place in the last step has not.
            part = next(parts)
            ended = isinstance(part, End)
            if isinstance(part, Part) and part.seen:
                raise self._uneven_shards(epoch, offset)

    def _started(self, part: Part) -> _Ahead:
        seen = torch.zeros(self._plan.world_size, 2, dtype=torch.int64)
        seen[self._plan.rank, 0] = part.seen
        seen[self._plan.rank, 1] = part.mark
        work = None
        if self._job.control is not None:
            work = dist.all_reduce(seen, group=self._job.control, async_op=True)
        return _Ahead(part, seen, work)

    def _finished(self, step: _Ahead, epoch: int, offset: int) -> int:
        if step.work is not None:
            try:
                step.work.wait()
            except RuntimeError as error:
                self._job.reraise(error)
        seen: list[int] = step.seen[:, 0].tolist()
        if self._reader.sharded:
            return sum(seen)
        if any(n != seen[0] for n in seen):
            raise RankDisagreement(
                f"the ranks read streams of different length: in the step from sample {offset} of "
                f"epoch {epoch} they found {seen} samples.",
                where=place(self._plan.rank, self._plan.world_size),
                why="the dataset splits itself over ranks, or its length depends on chance.",
                fix="have it give the whole stream on every rank, or offer `shard(index, count)`.",
                values=seen,
            )
        if len(set(step.seen[:, 1].tolist())) > 1:
            log.once(_DIFFERENT)
        return seen[0]

    def _uneven_shards(self, epoch: int, offset: int) -> DataError:
        return DataError(
            f"the shard of rank {self._plan.rank} goes on after sample {offset} of epoch {epoch}, "
            "where others have ended.",
            where=place(self._plan.rank, self._plan.world_size),
            why="`shard(index, count)` must give the items index, index + count, ... of one stream.",
        )

    def _too_short(self, epoch: int, offset: int) -> DataError:
        where = place(self._plan.rank, self._plan.world_size)
        if offset:
            return DataError(
                f"the stream has ended before sample {offset} of epoch {epoch}.",
                where=where,
                why="it is shorter than it was when this position was taken.",
            )
        return DataError(f"the stream gave no sample in epoch {epoch}.", where=where)

    def _micros(self, part: Part, offset: int, pieces: int) -> Iterator[MicroBatch]:
        if part.ghost is not None:
            self._ghost = part.ghost
        for places, batch in part.micros:
            pieces -= 1
            if self.audit is not None:
                self.audit.saw(torch.tensor(places, dtype=torch.int64))
            yield MicroBatch(self._moved(batch), len(places), places[0], pieces == 0, False)
        while pieces:
            pieces -= 1
            if self._ghost is None:
                raise DataError(
                    "this rank has no sample to keep the others company with.",
                    where=place(self._plan.rank, self._plan.world_size),
                    why="its shard of the stream has given none so far.",
                    fix="use fewer ranks, or a stream with more samples than ranks.",
                )
            yield MicroBatch(self._moved(self._ghost), 1, offset, pieces == 0, True)

    def _moved(self, batch: Any) -> Any:
        device = self._job.device
        if device.type == "cpu":
            return batch
        return moved(batch, device, pin=device.type == "cuda" and self._workers is None)

    def _parts(self, position: Position, epochs: int, equal: bool) -> Iterator[Part | End]:
        """This rank's parts in the order of the steps, with one `End` after each epoch."""
        if not self._num_workers:
            yield from self._reader.parts(position, epochs, equal, worker=None, workers=1)
            return
        self.close()
        work = _Work(self._reader, position, epochs, equal)
        self._workers = workers = Workers(self._job, work, self._num_workers, tasks=False)
        workers.start()
        for _ in range(position.epoch, epochs):
            marks = set()
            while not isinstance(result := workers.get(), End):
                marks.add(result.mark)
                if len(marks) > 1:
                    log.once(_DIFFERENT)
                yield result
            for _ in range(self._num_workers - 1):
                other = workers.get()
                if other != result:
                    raise self._workers_differ(result, other)
            yield result

    def _workers_differ(self, one: Any, other: Any) -> PacelineError:
        return DataError(
            f"the loader workers of a rank read streams of different length: {one}, {other}.",
            where=place(self._plan.rank, self._plan.world_size),
            why="the dataset splits itself over workers, or its length depends on chance.",
            fix="have it give the whole stream in every worker.",
        )

    def close(self) -> None:
        """End the workers."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None


class _Work(IterableDataset[Any]):
    """What a worker holds."""

    def __init__(self, reader: StreamReader, position: Position, epochs: int, equal: bool) -> None:
        self._reader = reader
        self._run = position, epochs, equal

    def __iter__(self) -> Iterator[Part | End | Failure]:
        info = torch_worker.get_worker_info()
        assert info is not None
        # Many datasets split themselves by this; they would then give a share of a share.
        torch_worker._worker_info = None
        checked = False
        plan = self._reader._plan
        try:
            for part in self._reader.parts(*self._run, worker=info.id, workers=info.num_workers):
                if not checked:
                    refuse_unsendable(
                        part, rank=plan.rank, world_size=plan.world_size, worker=info.id
                    )
                    checked = True
                yield part
        except PacelineError as error:
            yield Failure.of(error)
