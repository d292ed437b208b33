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
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

_MAX_EVENTS = 20_000  # of a device, that wait to be read
_SAMPLED_EVERY = 100  # steps; an event costs some microseconds of the host

# In the order in which reports show them.
PHASES = (
    "data",  # wait for samples, and their copy to the device
    "forward",
    "backward",
    "communication",  # time in which the main thread, or the device, waits for other ranks
    "optimizer",
    "checkpoint",
    "evaluation",
    "other",  # the rest of the loop body
)
DATA, FORWARD, BACKWARD, COMMUNICATION, OPTIMIZER, CHECKPOINT, EVALUATION, OTHER = range(8)
# A wait inside of these phases counts for them: an evaluation that gathers its results is evaluation.
_WHOLE = frozenset((CHECKPOINT, EVALUATION))


@dataclass(frozen=True, kw_only=True)
class Times:
    """Where the time of some steps went, on this rank.

    Args:
        steps: Their number.
        spent_s: Seconds in each phase of `PHASES`. They add up to the time that the steps took.
        wait_s: Seconds of communication in one step, which is the same one on all ranks. On a GPU it is the
            mean over the steps.
    """

    steps: int
    spent_s: list[float]
    wait_s: float = 0.0


class StepClock:
    """Adds up the time of each phase; see the top of this file.

    Attributes:
        phase: The current phase, an index of `PHASES`.
    """

    __slots__ = (
        "_began",
        "_device",
        "_is_sampled",
        "_since",
        "_spent",
        "_steps",
        "_thread",
        "_wait_ns",
        "_waited_ns",
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
        self._steps = 0
        self._wait_ns = self._waited_ns = (
            0  # communication in the newest step until the second; before it
        )
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
        if self._is_sampled and self._device is not None:
            self._device.mark(was)
        self._since = now
        self.phase = phase
        return was

    def begin(self, phase: int) -> int:
        """Begin a phase inside of another; from any thread. Returns what `end` needs.

        It has no effect in other threads than the one that trains, outside of a training loop, and in a
        phase that counts as a whole, such as an evaluation.
        """
        if self._thread != threading.get_ident() or self.phase in _WHOLE or self.phase == phase:
            return -1
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
        if self._is_sampled and self._device is not None:
            self.enter(self.phase)
            self._device.end_step()
        if self._steps < 2:  # the first step also has the exchange of the times before
            waited_ns = self._spent[COMMUNICATION]
            self._wait_ns = waited_ns - self._waited_ns
            self._waited_ns = waited_ns
        self._steps += 1
        self._begin_step()

    def _begin_step(self) -> None:
        """Decide whether the step that begins records events of a device."""
        self._is_sampled = self._steps < 2 or self._steps % _SAMPLED_EVERY == 0
        if self._is_sampled and self._device is not None:
            self._device.mark(-1)

    def elapsed_s(self) -> float:
        """Seconds since the last `take`."""
        return (time.perf_counter_ns() - self._began) / 1e9

    def take(self) -> Times:
        """The times since the last `take`. The clock starts again at 0."""
        self.enter(self.phase)
        spent_ns: list[float] = list(self._spent)
        wait_ns: float = self._wait_ns
        if self._device is not None:
            _divide(spent_ns, self._device.take())
            wait_ns = spent_ns[COMMUNICATION] / max(self._steps, 1)
        times = Times(
            steps=self._steps, spent_s=[ns / 1e9 for ns in spent_ns], wait_s=wait_ns / 1e9
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
        self._newest = [0.0] * len(PHASES)

    def mark(self, phase: int) -> None:
        """Record the end of a phase, or with -1 the begin of a sampled step, in the current stream."""
        event = self._free.pop() if self._free else self._new_event()
        event.record()
        self._pending.append((phase, event, False))

    def end_step(self) -> None:
        """The phase that was marked last ends a sampled step."""
        phase, event, _ = self._pending.pop()
        self._pending.append((phase, event, True))
        if len(self._pending) > _MAX_EVENTS:
            self.take()  # the times are not read

    def take(self) -> list[float]:
        """ns in each phase of the sampled steps that the device has finished since the last call.

        If it has finished none, the result is that of the last call; 0 everywhere at first.
        """
        finished = [
            index for index, (_, event, ends) in enumerate(self._pending) if ends and event.query()
        ]
        if not finished:
            return self._newest
        spent = [0.0] * len(PHASES)
        last: Any = None
        for _ in range(finished[-1] + 1):
            phase, event, _ = self._pending.popleft()
            if phase >= 0:
                spent[phase] += last.elapsed_time(event) * 1e6  # from ms
            self._free.append(event)
            last = event
        self._newest = spent
        return spent


clock = StepClock()
