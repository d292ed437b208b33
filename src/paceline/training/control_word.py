"""The control word: one small exchange after which all ranks have the same knowledge about a step.

It carries the requests of the ranks (see `Requests`), the losses of the steps since the last word, and the
duration of a step, summed over ranks. A word is sent every k steps; all ranks choose the same k so that about
16 words a second are sent, or 8 through shared memory. Through shared memory it is read at once, because the
ranks have just exchanged gradients and a Gloo thread would use their cores. Otherwise it is sent over a Gloo
group and read when the next one is due, so no rank waits for it. All ranks read it after the same step. At
the end of an epoch and of the training a word is sent and read at once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from paceline.clock.record import row_size
from paceline.errors import NonFinite, name_ranks
from paceline.job.job import Job
from paceline.job.preemption import notice
from paceline.metrics.step_loss import StepTotal
from paceline.shm.group import ShmGroup
from paceline.training import weight

# A stop takes up to two words and a step, or one word and a step through shared memory: less than 0.2 s if a
# step takes less than 0.06 s.
_WORDS_PER_S = 16.0
_WORDS_PER_S_IN_MEMORY = 8.0
_MAX_STEPS_PER_WORD = 128
_MAX_RANKS_NAMED = 50  # a float64 represents sums of distinct powers of two below 2^53 exactly


@dataclass(slots=True)
class Requests:
    """What ranks ask of all ranks. If one rank asks, all ranks do it, after the same step.

    Attributes:
        stop: End the loop.
        preempt: End the loop, because a rank got a preemption signal.
        save: Save the step.
        save_failed: Finish the save in the background, which has failed on a rank.
        reduce: Combine logged values over ranks.
        times: Send where the time went, with the word after this one.
        best: With `save`, keep the checkpoint as the best one. Not sent, because all ranks ask for it.
    """

    stop: bool = False
    preempt: bool = False
    save: bool = False
    save_failed: bool = False
    reduce: bool = False
    times: bool = False
    best: bool = False

    def pack(self) -> list[float]:
        """The requests as numbers, whose sums over ranks `unpack` reads."""
        return [self.stop, self.preempt, self.save, self.save_failed, self.reduce, self.times]

    @classmethod
    def unpack(cls, sums: list[float]) -> Requests:
        """The requests of any rank."""
        return cls(*(number > 0 for number in sums))


# Numbers before the losses: the time of a step, and the requests.
_HEAD = 1 + len(Requests().pack())


@dataclass(frozen=True, kw_only=True)
class Word:
    """What all ranks know after an exchange.

    Attributes:
        requests: The requests of any rank.
        step: The last step before the word.
        totals: The losses of the steps since the word before.
        times: A row of each rank about where its time went, see `clock/record.py`; usually empty.
    """

    requests: Requests
    step: int
    totals: list[StepTotal]
    times: list[list[float]]


@dataclass(frozen=True, slots=True)
class _SentWord:
    """A word that was sent and not read yet.

    Attributes:
        work: The exchange in progress; None if it happens when the word is read, or with one rank.
        numbers: What is summed over ranks: the time of a step, the requests, then for each step its loss,
            its count and the ranks whose loss is not finite, then the rows of the ranks about their time.
        first, size: Number of the first step whose loss it carries, and how many steps.
    """

    work: dist.Work | None
    numbers: torch.Tensor
    first: int
    size: int


class _Exchange:
    """How words are summed over the ranks of a job: at once, when they are read, or in the background.

    Attributes:
        at_once: Whether a word is read as soon as it is sent: the ranks share memory, or there is one rank.
        words_per_s: About how many words are sent in a second.
    """

    def __init__(self, job: Job) -> None:
        shared = isinstance(job.group, ShmGroup)
        self._group = job.group if shared else job.control
        self.at_once = self._group is None or shared
        self.words_per_s = _WORDS_PER_S_IN_MEMORY if shared else _WORDS_PER_S

    def start(self, word: torch.Tensor) -> dist.Work | None:
        """Begin to sum a word in place; None if `finish` does it all."""
        return None if self.at_once else dist.all_reduce(word, group=self._group, async_op=True)

    def finish(self, word: torch.Tensor, work: dist.Work | None) -> None:
        """Sum a word in place, or wait until that is done."""
        if work is not None:
            work.wait()
        elif self._group is not None:
            dist.all_reduce(word, group=self._group)


class Control:
    """Collects the values of this rank, and exchanges them.

    Attributes:
        own: The requests of this rank, sent with the next word.
        agreed: The requests that all ranks know of and have not carried out yet, equal on all ranks. They
            come from words, and from calls that all ranks make in the same step.
        own_times: Returns the row of this rank for a word with times.

    All ranks call `end_step` after every step, with equal `step` and `now`; `loss` and `count` are this
    rank's.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._exchange = _Exchange(job)
        self.own, self.agreed = Requests(), Requests()
        self.own_times: Callable[[], list[float]] = list
        self._losses: list[torch.Tensor | None] = []
        self._counts: list[float | torch.Tensor] = []
        self._first = 0
        self._every = 1
        self._due = 0
        self._began = time.perf_counter()
        self._in_flight: _SentWord | None = None

    def begin_loop(self, step: int) -> None:
        """Discard what is left of an earlier loop; the next step is `step` + 1. All ranks call it."""
        self.own, self.agreed = Requests(), Requests()
        self._every = 1
        self._discard_word()
        self._begin_word(step)

    def _begin_word(self, step: int) -> None:
        """Collect losses for the next word, from `step` + 1 on."""
        self._losses, self._counts = [], []
        self._first = step + 1
        self._due = step + self._every
        self._began = time.perf_counter()

    def end_step(
        self, step: int, loss: torch.Tensor | None, count: float | torch.Tensor, *, now: bool
    ) -> list[Word]:
        """Add the loss of a step, and return the words that are due, at most two.

        Args:
            loss: This rank's sum, shape (), on any device; None if it had no sample.
            now: Send and read at once; equal on all ranks.

        Raises:
            NonFinite: on all ranks, if the loss of a step was NaN or infinite on any.
        """
        self._losses.append(loss)
        self._counts.append(count)
        alone = self._job.control is None
        if step < self._due and not now and not (alone and (self.own.stop or notice.received)):
            return []
        words = self._read()
        self._send(step)
        if now or self._exchange.at_once:
            words += self._read()
        return words

    def flush(self, step: int) -> list[Word]:
        """Exchange what is left after the last step, `step`; returns the words, at most two."""
        words = self._read()
        if self._losses or self.agreed.times:
            self._send(step)
            words += self._read()
        return words

    def _send(self, step: int) -> None:
        size = len(self._losses)
        elapsed = time.perf_counter() - self._began
        sums = _to_host(self._losses)
        self.own.preempt = bool(notice.received)
        # The word before has just brought this save; rank 0 asked again while that word was on its way.
        self.own.save &= not self.agreed.save
        requests, self.own = self.own.pack(), Requests()
        # A NaN spreads to all ranks within a step, so each step carries which ranks had one.
        rank = self._job.rank
        bit = float(1 << rank) if rank < _MAX_RANKS_NAMED else 0.0
        counts = [float(count) for count in self._counts]
        if not self._job.data.reports:  # another rank has the same samples, and reports their loss
            sums, counts = [0.0] * size, [0.0] * size
        bits = [0.0 if math.isfinite(value) else bit for value in sums]
        rows = self._own_row() if self.agreed.times else []
        # One tensor from one list: each further operation of torch costs microseconds.
        word = torch.tensor(
            [elapsed / max(size, 1), *requests, *sums, *counts, *bits, *rows], dtype=torch.float64
        )
        self._in_flight = _SentWord(self._exchange.start(word), word, self._first, size)
        self._begin_word(step)

    def _read(self) -> list[Word]:
        sent, self._in_flight = self._in_flight, None
        if sent is None:
            return []
        first, size = sent.first, sent.size
        try:
            self._exchange.finish(sent.numbers, sent.work)
        except RuntimeError as error:
            self._job.reraise(error)
        numbers = sent.numbers.tolist()
        rows = self._split_rows(numbers[_HEAD + 3 * size :])
        step_s = numbers[0] / self._job.world_size
        sums, counts, bits = (numbers[_HEAD + i * size : _HEAD + (i + 1) * size] for i in range(3))
        for i, total in enumerate(sums):
            if counts[i] == 0:
                raise weight.zero_count_error(first + i)
            if not math.isfinite(total):
                raise _non_finite(first + i, total, int(bits[i]))
        totals = [StepTotal(step=first + i, loss_sum=sums[i], count=counts[i]) for i in range(size)]
        if size:  # else it was sent at once after another word
            steps = round(1 / (self._exchange.words_per_s * max(step_s, 1e-6)))
            self._every = min(_MAX_STEPS_PER_WORD, max(1, steps))
        self._due = self._first - 1 + self._every
        requests = Requests.unpack(numbers[1:_HEAD])
        self.agreed.stop |= requests.stop or requests.preempt
        self.agreed.preempt |= requests.preempt
        self.agreed.save |= requests.save
        self.agreed.times = requests.times  # the next word carries them
        return [Word(requests=requests, step=first + size - 1, totals=totals, times=rows)]

    def _discard_word(self) -> None:
        """Leave the word in flight unread: it belongs to a loop that was left."""
        sent, self._in_flight = self._in_flight, None
        try:
            if sent is not None and sent.work is not None:
                sent.work.wait()
        except RuntimeError as error:
            self._job.reraise(error)

    def _own_row(self) -> list[float]:
        """This rank's row among zeros, so that the sum over ranks has the rows of all."""
        sizes = [row_size(rank) for rank in range(self._job.world_size)]
        rank = self._job.rank
        return [0.0] * sum(sizes[:rank]) + self.own_times() + [0.0] * sum(sizes[rank + 1 :])

    def _split_rows(self, numbers: list[float]) -> list[list[float]]:
        rows: list[list[float]] = []
        while numbers:
            size = row_size(len(rows))
            rows.append(numbers[:size])
            numbers = numbers[size:]
        return rows


def _non_finite(step: int, total: float, rank_bits: int) -> NonFinite:
    ranks = [rank for rank in range(_MAX_RANKS_NAMED) if rank_bits >> rank & 1]
    return NonFinite(
        f"the loss became {total} in step {step}.",
        where=name_ranks(ranks) if ranks else "",
        fix="lower the learning rate, clip the gradients, or look at this step's samples.",
        quantity="loss",
        step=step,
        ranks=ranks,
    )


def _to_host(losses: list[torch.Tensor | None]) -> list[float]:
    """The losses as numbers, with one copy for all that are on a device."""
    present = [loss for loss in losses if loss is not None]
    if all(loss.device.type == "cpu" for loss in present):
        values = iter([loss.item() for loss in present])
    else:
        values = iter(torch.stack(present).double().tolist())
    return [0.0 if loss is None else next(values) for loss in losses]
