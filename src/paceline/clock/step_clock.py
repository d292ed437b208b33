"""`StepClock`: where the time of the steps goes, on this rank.

There is one clock in a process: `clock`. The code that trains tells it which phase begins; the time until the
next call counts for that phase. So the phases add up to the time that passed, and a switch costs less than a
microsecond. Only the main thread switches. On a GPU, which runs later than the host, the switches of about
1 % of the steps also record events in the current stream. They are read later, without waiting for the
device, and the time of all steps is divided into phases as that of these steps is.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

_MAX_EVENTS = 20_000  # of a device, that wait to be read
_SAMPLED_EVERY = 100  # steps; an event costs some microseconds of the host

# In the order in which reports show them.
PHASES = (
    "data",  # wait for samples
    "copy",  # from the host to the device
    "forward",
    "backward",
    "communication",  # time in which the main thread, or the device, waits for other ranks
    "communication_tp",  # the same, inside a layer that is split over ranks (tensor parallelism)
    "communication_pp",  # the same, for the other stages of a pipeline
    "optimizer",
    "checkpoint",
    "evaluation",
    "logging",
    "other",  # the rest of the loop body
)
DATA, COPY, FORWARD, BACKWARD, COMMUNICATION, COMMUNICATION_TP, COMMUNICATION_PP = range(7)
OPTIMIZER, CHECKPOINT, EVALUATION, LOGGING, OTHER = range(7, len(PHASES))
WAITS = PHASES[COMMUNICATION : COMMUNICATION_PP + 1]
_WAIT_PHASES = frozenset((COMMUNICATION, COMMUNICATION_TP, COMMUNICATION_PP))
# A wait inside of these phases counts for them: an evaluation that gathers its results is evaluation.
_WHOLE = frozenset((CHECKPOINT, EVALUATION, LOGGING))


class Span(NamedTuple):
    """One phase of one step. Times in ns of `time.perf_counter_ns`."""

    phase: int
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, kw_only=True)
class Times:
    """Where the time of some steps went, on this rank.

    Args:
        steps: Their number.
        spent_s: Seconds in each phase of `PHASES`. They add up to the time that the steps took.
        collate_s: What the collate function took, which is part of the phase "data".
        load_s: What loader workers took to read the batches of these steps.
        spans: The phases of the second of these steps, or of the only one, in order: the first step also has
            the exchange of the times before. On a GPU these are times of the host, unlike `spent_s`.
        began_ns: When that step began, in ns since the epoch.
    """

    steps: int
    spent_s: list[float]
    collate_s: float = 0.0
    load_s: float = 0.0
    spans: list[Span] = field(default_factory=list)
    began_ns: int = 0

    @property
    def wall_s(self) -> float:
        """Seconds that the steps took."""
        return sum(self.spent_s)


class StepClock:
    """Adds up the time of each phase; see the top of this file.

    Attributes:
        phase: The current phase, an index of `PHASES`.
        collate_ns: The time of the collate function since the last `take`; counted where it is called.
        load_ns: The time of loader workers for what they have delivered since then; counted there too.
    """

    __slots__ = (
        "_began",
        "_began_epoch_ns",
        "_device",
        "_is_sampled",
        "_num_first_spans",
        "_since",
        "_spans",
        "_spent",
        "_steps",
        "_thread",
        "collate_ns",
        "load_ns",
        "phase",
    )

    def __init__(self) -> None:
        self.phase = OTHER
        self._thread = 0  # the thread that trains; 0 outside of a training loop
        self._device: DeviceTimes | None = None
        self._clear(time.perf_counter_ns())

    def _clear(self, now: int) -> None:
        self._since = self._began = now
        self._spent = [0] * len(PHASES)
        self._steps = self.collate_ns = self.load_ns = 0
        self._spans: list[Span] = []  # of the first two steps
        self._num_first_spans = 0  # how many of them are those of the first step
        self._began_epoch_ns = time.time_ns()
        self._begin_step()

    def start(self, new_event: Callable[[], Any] | None = None) -> None:
        """Count from now on, in the thread that trains.

        Args:
            new_event: Makes events with timing of a device on which the phases run; None for the CPU.
        """
        self.phase = OTHER
        self._thread = threading.get_ident()
        self._device = None if new_event is None else DeviceTimes(new_event)
        self._clear(time.perf_counter_ns())

    def stop(self) -> None:
        """Stop: `begin` has no effect until `start` is called again."""
        self._thread = 0
        self.phase = OTHER

    def enter(self, phase: int) -> int:
        """Begin a phase; returns the one that it ends. Only from the thread that trains."""
        now = time.perf_counter_ns()
        was = self.phase
        self._spent[was] += now - self._since
        if self._is_sampled:
            self._record(Span(was, self._since, now))
        self._since = now
        self.phase = phase
        return was

    def _record(self, span: Span) -> None:
        if self._steps < 2:
            self._spans.append(span)
        if self._device is not None:
            self._device.mark(span.phase)

    def begin(self, phase: int) -> int:
        """Begin a phase inside of another; from any thread. Returns what `end` needs.

        It has no effect in other threads than the one that trains, outside of a training loop, and in a
        phase that counts as a whole, such as an evaluation.
        """
        if self._thread != threading.get_ident() or self.phase in _WHOLE:
            return -1
        if phase in _WAIT_PHASES and self.phase in _WAIT_PHASES:
            return -1  # the outer phase says more exactly what it waits for
        return self.enter(phase)

    def end(self, was: int) -> None:
        """Go on with the phase before `begin`."""
        if was >= 0:
            self.enter(was)

    def each(self, phase: int, items: Iterable[T]) -> Iterator[T]:
        """The items; the time in which they are made is a phase of its own, see `begin`."""
        iterator = iter(items)
        while True:
            was = self.begin(phase)
            try:
                item = next(iterator)
            except StopIteration:
                return
            finally:
                self.end(was)
            yield item

    @contextmanager
    def during(self, phase: int) -> Iterator[None]:
        """The block is a phase of its own; see `begin`."""
        was = self.begin(phase)
        try:
            yield
        finally:
            self.end(was)

    def end_step(self) -> None:
        """Count a step that has ended."""
        if self._is_sampled:
            self.enter(self.phase)
            if not self._steps:
                self._num_first_spans = len(self._spans)
            if self._device is not None:
                self._device.end_step()
        self._steps += 1
        self._begin_step()

    def _begin_step(self) -> None:
        """Decide whether to keep the spans, or the events of a device, of the step that begins."""
        has_device = self._device is not None
        self._is_sampled = self._steps < 2 or (has_device and self._steps % _SAMPLED_EVERY == 0)
        if self._is_sampled and self._device is not None:
            self._device.begin_step()

    def elapsed_s(self) -> float:
        """Seconds since the last `take`."""
        return (time.perf_counter_ns() - self._began) / 1e9

    def take(self) -> Times:
        """The times since the last `take`. The clock starts again at 0.

        Of a device that has finished no sampled step since, nothing is returned yet: the steps are 0.
        """
        self.enter(self.phase)
        spent_ns: list[float] = list(self._spent)
        if self._device is not None:
            on_device, has_sample = self._device.take()
            if not has_sample:
                return Times(steps=0, spent_s=[0.0] * len(PHASES))
            _divide(spent_ns, on_device)
        first = self._num_first_spans
        spans = self._spans[first:] if self._steps > 1 else self._spans[:first]
        times = Times(
            steps=self._steps,
            spent_s=[ns / 1e9 for ns in spent_ns],
            collate_s=self.collate_ns / 1e9,
            load_s=self.load_ns / 1e9,
            spans=spans,
            began_ns=self._began_epoch_ns + (spans[0].begin_ns - self._began if spans else 0),
        )
        self._clear(self._since)
        return times


def _divide(spent: list[float], on_device: list[float]) -> None:
    """Divide the time of the host into phases as that of the device, in place.

    The phases in `_WHOLE` keep theirs: they are rare, and most are in no sampled step.
    """
    phases = [phase for phase in range(len(PHASES)) if phase not in _WHOLE]
    host, device = (sum(times[phase] for phase in phases) for times in (spent, on_device))
    for phase in phases if device else ():
        spent[phase] = host * on_device[phase] / device


class DeviceTimes:
    """The time of each phase of the sampled steps in a device's stream, from events between the phases.

    Args:
        new_event: Makes an event with the methods `record`, `query` and `elapsed_time`, such as
            `functools.partial(torch.cuda.Event, enable_timing=True)`.
    """

    def __init__(self, new_event: Callable[[], Any]) -> None:
        self._new_event = new_event
        # The phase that an event ends, -1 at the begin of a step; the event; whether it ends a step.
        self._pending: deque[tuple[int, Any, bool]] = deque()
        self._free: list[Any] = []

    def begin_step(self) -> None:
        """Record the begin of a sampled step in the current stream."""
        self.mark(-1)

    def mark(self, phase: int) -> None:
        """Record the end of a phase in the current stream."""
        event = self._free.pop() if self._free else self._new_event()
        event.record()
        self._pending.append((phase, event, False))

    def end_step(self) -> None:
        """The phase that was marked last ends a sampled step."""
        phase, event, _ = self._pending.pop()
        self._pending.append((phase, event, True))
        if len(self._pending) > _MAX_EVENTS:
            self.take()  # the times are not read

    def take(self) -> tuple[list[float], bool]:
        """ns in each phase of the sampled steps that the device has finished since; whether there is one."""
        spent = [0.0] * len(PHASES)
        finished = [
            index for index, (_, event, ends) in enumerate(self._pending) if ends and event.query()
        ]
        last: Any = None
        for _ in range(finished[-1] + 1 if finished else 0):
            phase, event, _ = self._pending.popleft()
            if phase >= 0:
                spent[phase] += last.elapsed_time(event) * 1e6  # from ms
            self._free.append(event)
            last = event
        return spent, bool(finished)


clock = StepClock()
