"""`workers="auto"`: how many loader workers a rank needs, from what its first steps took.

What is read does not depend on it, so each rank decides for itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from paceline import log
from paceline.data.coverage import Audit
from paceline.data.maploader import LocalLoader, WorkerLoader
from paceline.data.plan import Plan, Position
from paceline.data.samples import Samples
from paceline.data.steps import PlannedStep
from paceline.job.job import Job
from paceline.machine import usable_cores

_SKIPPED_STEPS = 4  # in which caches are filled
_WINDOWS = 5  # of which the median counts, since a neighbour that takes a core for a moment is in one or two
_WINDOW_STEPS = 3
_TOLERATED = 0.01  # of a step's time
_MOST = 16
_MARGIN = 1.5  # over what would just do, since steps and samples differ


class AutoLoader:
    """Reads in this process, and after a few steps in as many workers as keep the loop from waiting.

    Attributes:
        workers: How many there are; None while it is being measured.
    """

    def __init__(self, job: Job, plan: Plan, samples: Samples) -> None:
        self.workers: int | None = None
        self._job = job
        self._samples = samples
        self._loader: LocalLoader | WorkerLoader = LocalLoader(job, plan, samples)

    @property
    def audit(self) -> Audit | None:
        """Where to note what was handed out; None notes nothing."""
        return self._loader.audit

    @audit.setter
    def audit(self, audit: Audit | None) -> None:
        self._loader.audit = audit

    @property
    def plan(self) -> Plan:
        """Which samples are this rank's."""
        return self._loader.plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        self._loader.plan = plan

    def steps(self, position: Position, epochs: int, equal: bool) -> Iterator[PlannedStep]:
        """The steps from `position` to the end of epoch `epochs`."""
        if self.workers is None:
            clock = _Clock()
            windows: list[_Window] = []
            steps = self._loader.steps(position, epochs, equal)
            for number, step in enumerate(steps, start=1):
                step.wrap(clock.timed)
                yield step
                position = step.next_position
                timed = number - _SKIPPED_STEPS
                if timed >= 0 and timed % _WINDOW_STEPS == 0:
                    windows.append(clock.window())
                if timed == _WINDOWS * _WINDOW_STEPS:
                    break
            else:
                return
            self._choose(windows[1:])  # the first holds the skipped steps
        yield from self._loader.steps(position, epochs, equal)

    def _choose(self, windows: list[_Window]) -> None:
        by_share = sorted(windows, key=lambda window: window.load_s / window.wall_s)
        load_s, cpu_s, step_s = (seconds / _WINDOW_STEPS for seconds in by_share[len(windows) // 2])
        own_s = step_s - load_s
        if load_s <= _TOLERATED * step_s:
            self.workers = 0
        else:
            # Cores that compute are not taken from it: that would change threads, and with them bits.
            on_cpu = self._job.device.type == "cpu"
            share = max(1, usable_cores() // self._job.local_world_size)
            lanes = share if not on_cpu else _MOST if cpu_s < load_s / 2 else 0
            self.workers = min(lanes, _MOST, math.ceil(_MARGIN * load_s / max(own_s, 1e-9)))
        if self._job.rank == 0:
            log.logger.info(
                "loader workers: %d; a step of this rank reads for %.1f ms and computes for %.1f ms.",
                *(self.workers, 1e3 * load_s, 1e3 * own_s),
            )
        if self.workers:
            audit, plan = self.audit, self.plan
            self._loader = WorkerLoader(self._job, plan, self._samples, self.workers)
            self._loader.audit = audit

    def close(self) -> None:
        """End the workers, if there are any."""
        self._loader.close()


class _Window(NamedTuple):
    """Seconds of some steps: reading, by the wall and by this thread's processor; and all of them."""

    load_s: float
    cpu_s: float
    wall_s: float


class _Clock:
    """Adds up what an iterator takes, window by window."""

    def __init__(self) -> None:
        self._restart()

    def _restart(self) -> None:
        self._load_s = self._cpu_s = 0.0
        self._began = time.perf_counter()

    def timed(self, items: Iterator[Any]) -> Iterator[Any]:
        while True:
            wall, cpu = time.perf_counter(), time.thread_time()
            item = next(items, None)
            self._load_s += time.perf_counter() - wall
            self._cpu_s += time.thread_time() - cpu
            if item is None:
                return
            yield item

    def window(self) -> _Window:
        """What was taken since the last window; the next begins here."""
        window = _Window(self._load_s, self._cpu_s, time.perf_counter() - self._began)
        self._restart()
        return window
