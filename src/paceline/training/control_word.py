"""The control word: one small exchange after which all ranks have the same knowledge about a step.

It carries the requests of the ranks (see `Requests`), the losses of the steps since the last word, and the
duration of a step, summed over ranks. A word is sent every k steps; all ranks choose the same k so that about
ten words a second are sent. It is read when the next one is due, so no rank waits for it. All ranks read it
after the same step. At the end of an epoch and of the training a word is sent and read at once. Losses on a
device are copied when a word is sent and go with the next one, so the host does not wait for the device
either.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from paceline import log
from paceline.clock.record import ROW_SIZE
from paceline.errors import NonFinite, listed
from paceline.job import collectives
from paceline.job.exchange import WORD, Pending
from paceline.job.job import Job
from paceline.job.preemption import notice
from paceline.metrics.step_loss import StepTotal
from paceline.training import weight

# A stop takes up to two words: about 0.2 s, or two steps if that is longer.
_WORDS_PER_S = 10.0
_MAX_STEPS_PER_WORD = 128


class MicroBatchLoss(NamedTuple):
    """The loss of the samples at some places of an epoch, shape (), on any device."""

    epoch: int
    places: Sequence[int]
    loss: torch.Tensor


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
        pending: The exchange in progress; None with one rank.
        requests: Those of this rank.
        numbers: What is summed over ranks: the time of a step, the requests, then for each step its loss and
            its count, then the rows of the ranks about their time.
        step, steps: The last step before the word, and how many there were since the word before.
        first, size: Number of the first step whose loss it carries, and how many steps.
        bad: By step whose loss is NaN or infinite on this rank: the losses of its micro-batches.
    """

    pending: Pending | None
    requests: Requests
    numbers: torch.Tensor
    step: int
    steps: int
    first: int
    size: int
    bad: dict[int, list[MicroBatchLoss]]


class Control:
    """Collects the values of this rank, and exchanges them.

    Args:
        samples_at: The indices in the dataset of the samples at places of an epoch, from `(epoch, places)`.
        skips_non_finite: Whether a loss that is NaN or infinite is logged; otherwise it is an error.

    Attributes:
        own: The requests of this rank, sent with the next word.
        agreed: The requests that all ranks know of and have not carried out yet, equal on all ranks. They
            come from words, and from calls that all ranks make in the same step.
        own_times: Returns the row of this rank for a word with times.

    All ranks call `end_step` after every step, with equal `step` and `now`; `loss` and `count` are this
    rank's.
    """

    def __init__(
        self,
        job: Job,
        samples_at: Callable[[int, Sequence[int]], list[int]],
        *,
        skips_non_finite: bool,
    ) -> None:
        self._job = job
        self._samples_at = samples_at
        self._skips_non_finite = skips_non_finite
        self.own, self.agreed = Requests(), Requests()
        self.own_times: Callable[[], list[float]] = list
        self._losses: list[torch.Tensor | None] = []
        self._counts: list[float | torch.Tensor] = []
        self._micro_losses: list[list[MicroBatchLoss]] = []
        self._first = 0
        self._every = 1
        self._due = 0
        self._began = time.perf_counter()
        self._copied: _Values | None = None
        self._in_flight: _SentWord | None = None

    @property
    def asks_stop(self) -> bool:
        """Whether this rank has asked for a stop that not all ranks know of yet."""
        return self.own.stop or (self._in_flight is not None and self._in_flight.requests.stop)

    def begin_loop(self, step: int) -> None:
        """Discard what is left of an earlier loop; the next step is `step` + 1. All ranks call it."""
        self.own, self.agreed = Requests(), Requests()
        self._every = 1
        self._copied = None
        self._discard_word()
        self._begin_word(step)

    def begin_again(self, step: int) -> None:
        """The ranks have connected again after step `step`: ask again for what was asked and not done.

        Losses of earlier steps are discarded, because those of the rank that failed are lost.
        """
        own, agreed = self.own, self.agreed
        sent, self._in_flight, self._copied = self._in_flight, None, None
        for asked in (agreed, *([] if sent is None else [sent.requests])):
            own.stop |= asked.stop
            own.save |= asked.save
        # A signal is asked for until it is taken.
        agreed.stop = agreed.preempt = agreed.save = agreed.times = False
        self._every = 1
        self._begin_word(step)

    def _begin_word(self, step: int) -> None:
        """Collect losses for the next word, from `step` + 1 on."""
        self._losses, self._counts, self._micro_losses = [], [], []
        self._first = step + 1
        self._due = step + self._every
        self._began = time.perf_counter()

    def end_step(
        self,
        step: int,
        loss: torch.Tensor | None,
        count: float | torch.Tensor,
        micro_losses: list[MicroBatchLoss],
        *,
        now: bool,
    ) -> list[Word]:
        """Add the loss of a step, and return the words that are due, at most two.

        Args:
            loss: This rank's sum, shape (), on any device; None if it had no sample.
            micro_losses: Which add up to `loss`.
            now: Send and read at once; equal on all ranks.

        Raises:
            NonFinite: on all ranks, if the loss of a step was NaN or infinite on any.
        """
        self._losses.append(loss)
        self._counts.append(count)
        self._micro_losses.append(micro_losses)
        alone = self._job.exchange is None
        if step < self._due and not now and not (alone and (self.own.stop or notice.received)):
            return []
        words = self._read()
        self._send(step, now=now)
        if now or alone:
            words += self._read()
        return words

    def flush(self, step: int) -> list[Word]:
        """Exchange what is left after the last step, `step`; returns the words, at most two."""
        words = self._read()
        if self._losses or self._copied is not None or self.agreed.times:
            self._send(step, now=True)
            words += self._read()
        return words

    def _send(self, step: int, *, now: bool) -> None:
        steps = len(self._losses)
        elapsed = time.perf_counter() - self._began
        self.own.preempt = bool(notice.received)
        # This save is already scheduled; drop the duplicate request.
        self.own.save &= not self.agreed.save
        requests, self.own = self.own, Requests()
        copied = [] if self._copied is None else [self._copied]
        self._copied = None
        if steps:
            values = _Values(
                self._first, self._losses, self._counts, self._micro_losses, requests.reduce
            )
            # Alike on all ranks, also on one that had no sample: their words must be equally long.
            if now or not _is_late(self._job.device):
                copied.append(values)
            else:
                self._copied = values  # reading it now would wait for the device
        requests.reduce = any(values.reduce for values in copied)
        sums: list[float] = []
        counts: list[float] = []
        bad: dict[int, list[MicroBatchLoss]] = {}
        for values in copied:
            own_sums, own_counts = values.read()
            bad |= values.bad(own_sums)
            sums += own_sums
            counts += own_counts
        size = len(sums)
        if not self._job.data.reports:  # another rank has the same samples, and reports their loss
            sums, counts, bad = [0.0] * size, [0.0] * size, {}
        rows = self._own_row() if self.agreed.times else []
        # One tensor from one list: each further operation of torch costs microseconds.
        word = torch.tensor(
            [elapsed / max(steps, 1), *requests.pack(), *sums, *counts, *rows], dtype=torch.float64
        )
        first = copied[0].first if copied else step + 1
        exchange = self._job.exchange
        pending = None if exchange is None else exchange.send(WORD, numbers=word)
        self._in_flight = _SentWord(pending, requests, word, step, steps, first, size, bad)
        self._begin_word(step)

    def _read(self) -> list[Word]:
        sent, self._in_flight = self._in_flight, None
        if sent is None:
            return []
        first, size = sent.first, sent.size
        numbers = self._sum(sent)
        rest = numbers[_HEAD + 2 * size :]
        rows = [rest[i : i + ROW_SIZE] for i in range(0, len(rest), ROW_SIZE)]
        step_s = numbers[0] / self._job.world_size
        sums, counts = (numbers[_HEAD + i * size : _HEAD + (i + 1) * size] for i in range(2))
        for i, total in enumerate(sums):
            if counts[i] == 0:
                raise weight.zero_count_error(first + i)
            if not math.isfinite(total):
                self._report_non_finite(first + i, total, sent.bad.get(first + i, []))
        totals = [StepTotal(step=first + i, loss_sum=sums[i], count=counts[i]) for i in range(size)]
        if sent.steps:  # else it was sent at once after another word
            steps = round(1 / (_WORDS_PER_S * max(step_s, 1e-6)))
            self._every = min(_MAX_STEPS_PER_WORD, max(1, steps))
        self._due = self._first - 1 + self._every
        requests = Requests.unpack(numbers[1:_HEAD])
        self.agreed.stop |= requests.stop or requests.preempt
        self.agreed.preempt |= requests.preempt
        self.agreed.save |= requests.save
        self.agreed.times = requests.times  # the next word carries them
        return [Word(requests=requests, step=sent.step, totals=totals, times=rows)]

    def _report_non_finite(self, step: int, total: float, losses: list[MicroBatchLoss]) -> None:
        samples = self.gather_bad_samples(losses, self._job)
        if not self._skips_non_finite:
            raise NonFinite(
                f"the loss became {total} in step {step}.",
                where=name_samples(samples),
                fix="look at these samples, lower the learning rate or clip the gradients; or leave such "
                'steps out: Training(..., on_non_finite="skip").',
                quantity="loss",
                step=step,
                ranks=list(samples),
                samples=samples,
            )
        if self._job.rank == 0:
            log.logger.warning("the loss of step %d is %s: %s.", step, total, name_samples(samples))

    def gather_bad_samples(self, losses: list[MicroBatchLoss], job: Job) -> dict[int, list[int]]:
        """By rank, the samples of micro-batches whose loss is not finite. All ranks of `job` call it."""
        bad = {(each.epoch, *each.places) for each in losses if not math.isfinite(each.loss.item())}
        own = [s for epoch, *places in sorted(bad) for s in self._samples_at(epoch, places)]
        everyone = collectives.gather(job, [job.rank, own])
        return {rank: samples for rank, samples in everyone if samples}

    def _discard_word(self) -> None:
        """Leave the word in flight unread: it belongs to a loop that was left."""
        sent, self._in_flight = self._in_flight, None
        if sent is not None:
            self._sum(sent)

    def _sum(self, sent: _SentWord) -> list[float]:
        if sent.pending is None:
            numbers: list[float] = sent.numbers.tolist()
            return numbers
        assert self._job.exchange is not None
        return self._job.exchange.read_sum(sent.pending)

    def _own_row(self) -> list[float]:
        """This rank's row among zeros, so that the sum over ranks has the rows of all."""
        rows = [[0.0] * ROW_SIZE] * self._job.world_size
        rows[self._job.rank] = self.own_times()
        return [number for row in rows for number in row]


def name_samples(samples: dict[int, list[int]]) -> str:
    """Samples of ranks in words: "rank 1, sample 17"; empty without any."""
    return "; ".join(
        f"rank {rank}, sample{'s' * (len(own) > 1)} {listed(list(map(str, own)))}"
        for rank, own in samples.items()
    )


class _Values:
    """The losses and counts of some steps, which are copied from a device to the host without waiting.

    Args:
        first: Number of the first step.
        reduce: Whether a rank of these steps has logged values that are combined over ranks.
    """

    def __init__(
        self,
        first: int,
        losses: list[torch.Tensor | None],
        counts: list[float | torch.Tensor],
        micro_losses: list[list[MicroBatchLoss]],
        reduce: bool,
    ) -> None:
        self.first, self.reduce = first, reduce
        self._losses, self._counts, self._micro_losses = losses, counts, micro_losses
        self._copies: list[torch.Tensor] = []
        self._event: Any = None
        for values in (losses, counts):
            tensors = [v for v in values if isinstance(v, torch.Tensor) and _is_on_device(v)]
            if tensors:
                stacked = torch.stack(tensors).double()
                self._copies.append(stacked.to("cpu", non_blocking=True))
                self._event = _event_after(stacked.device)
            else:
                self._copies.append(torch.empty(0))

    def read(self) -> tuple[list[float], list[float]]:
        """The loss and the count of each step."""
        if self._event is not None:
            self._event.synchronize()
        losses, counts = (copy.tolist() for copy in self._copies)
        return _filled(self._losses, losses), _filled(self._counts, counts)

    def bad(self, sums: list[float]) -> dict[int, list[MicroBatchLoss]]:
        """By step whose loss is NaN or infinite: the losses of its micro-batches."""
        return {
            self.first + i: self._micro_losses[i]
            for i, value in enumerate(sums)
            if not math.isfinite(value)
        }


def _is_late(device: torch.device) -> bool:
    """Whether the device computes later than the host asks it to."""
    return device.type != "cpu"


def _is_on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type != "cpu"


def _event_after(device: torch.device) -> Any:
    """An event after what was queued on the device."""
    return torch.get_device_module(device).current_stream(device).record_event()


def _filled(values: Sequence[float | torch.Tensor | None], copies: list[float]) -> list[float]:
    """The values as numbers, those on a device from their copies."""
    rest = iter(copies)
    return [
        0.0 if value is None else next(rest) if _is_on_device(value) else float(value)
        for value in values
    ]
