"""`ClockFile`: where the time of a run goes. Every rank measures it; rank 0 writes clock.jsonl and judges it.

About once a second rank 0 asks for the times (`asks`). The next control word carries one row of each rank
(`measure`), and `write` makes a `Window` from the rows.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline import log
from paceline.clock import record
from paceline.clock.judge import judge
from paceline.clock.record import Record, Window
from paceline.clock.step_clock import clock
from paceline.job.job import Job
from paceline.metrics.json_lines import JSONLines, write_line
from paceline.metrics.usage import Usage

# From one window to the next. It grows after the first hour, which limits the size of the file.
_WINDOW_S, _LONGEST_WINDOW_S = 1.0, 10.0
_GROWS_AFTER_S = 3600.0
_RANKS_PER_S = 128  # with more ranks the windows are longer, so that the file does not grow faster
_SPANS_EVERY = 30  # windows, from one with the phases of a step to the next; see `_keeps_spans`
_LONGER = 1.2  # a step that is longer than those kept before by this factor is kept too
_MOST_KEPT = 2000  # rows of ranks that are kept for the advice, each of about 1 KB
_LEAST_KEPT = 10  # windows that are kept for the advice


class ClockFile:
    """The windows of a run, and the file clock.jsonl if there is a folder for it.

    Attributes:
        run: What describes this run; see `Record.run`.
    """

    def __init__(self, job: Job, usage: Usage) -> None:
        self.run: dict[str, Any] = {}
        self._job = job
        self._usage = usage
        self._lines: JSONLines | None = None
        self._num_loops = 0
        self._has_asked = False
        # Of the steps that are in no row of this rank yet. A GPU finishes steps later than they are counted.
        self._samples = self._steps = 0
        # Since the last window: samples of the steps in the rows of this rank; rows of all ranks, if a GPU
        # had finished no step; and tokens of the steps whose losses are known.
        self._row_samples = 0
        self._kept_rows: list[list[float]] = []
        self._tokens = 0
        self._num_windows = 0
        self._longest_s = 0.0  # of the steps whose phases were kept, without the warm-up
        most = max(_LEAST_KEPT, _MOST_KEPT // job.world_size)
        self._windows: deque[Window] = deque(maxlen=most)  # the newest ones, for the advice
        self._advised = ("", "")  # the kind and the cure that were logged last

    def open(self, path: Path) -> None:
        """Write to this file, from `begin` on."""
        self._lines = JSONLines(path)

    def begin(self, step: int, run: Mapping[str, Any]) -> None:
        """Begin a loop after `step`, and remove the lines of later steps, which an interrupted run wrote.

        Raises:
            OSError: the file cannot be written.
        """
        self.run = {"time": time.time(), **run, "loop": self._num_loops}
        self._num_loops += 1
        self._has_asked = False
        self._samples = self._steps = self._row_samples = self._tokens = 0
        self._kept_rows = []
        self._num_windows = 0
        self._longest_s = 0.0
        self._windows.clear()
        if self._lines is not None:
            self._lines.rewind(step)
            self._lines.log(step, {"run": self.run})

    def count(self, num_samples: int) -> None:
        """Count a step that has ended, and its samples over all ranks."""
        self._samples += num_samples
        self._steps += 1

    def count_tokens(self, num_tokens: int) -> None:
        """Count tokens over all ranks."""
        self._tokens += num_tokens

    def asks(self, *, is_last: bool, is_needed: bool) -> bool:
        """Whether to ask all ranks now where their time went. Only rank 0 does.

        Args:
            is_last: Whether the loop ends after this step.
            is_needed: Whether the display or a logger takes the windows; then there need not be a file.
        """
        if self._has_asked or not (is_needed or self._lines is not None):
            return False
        window_s = choose_window_s(time.time() - self.run["time"], self._job.world_size)
        self._has_asked = is_last or clock.elapsed_s() >= window_s
        return self._has_asked

    def own_times(self) -> list[float]:
        """The row of this rank: where the time of the steps since its last row went."""
        self._has_asked = False
        times = clock.take()
        row_samples = round(self._samples * times.steps / max(self._steps, 1))
        self._row_samples += row_samples
        self._samples -= row_samples
        self._steps -= times.steps
        return record.pack_row(times, self._job.rank, *self._usage.measure())

    def write(self, step: int, rows: list[list[float]]) -> Window | None:
        """Write the window up to `step`, from the rows of all ranks.

        Returns:
            The window; None if a GPU has finished no step. Its rows then belong to the next window.
        """
        if self._kept_rows:
            rows = record.add_rows(self._kept_rows, rows)
        window = Window.from_rows(
            step, rows, time=time.time(), samples=self._row_samples, tokens=self._tokens
        )
        if not window.steps:
            self._kept_rows = rows
            return None
        self._kept_rows = []
        self._row_samples = self._tokens = 0
        self._num_windows += 1
        if self._keeps_spans(window.spans_s):
            if self._num_windows > 1:
                self._longest_s = max(self._longest_s, window.spans_s)
        else:
            window = replace(window, spans=[])
        self._windows.append(window)
        write_line(self._lines, step, window.to_line())
        return window

    def _keeps_spans(self, length_s: float) -> bool:
        """Whether the newest window keeps the phases of its second step, which take most of a line.

        The windows 1, 2, 4, 8, ... and each thirtieth do, so that short runs have some too. So does a window
        whose step is longer than all that were kept before, without the first window, which has the warm-up.
        """
        number = self._num_windows
        if number & (number - 1) == 0 or number % _SPANS_EVERY == 0:
            return True
        return length_s > _LONGER * self._longest_s

    def write_link(self, step: int, link: Mapping[str, float]) -> None:
        """Write what was measured of the connection between the ranks."""
        self.run["link"] = link
        write_line(self._lines, step, {"link": link})

    def advise(self) -> None:
        """Log what limited the run most, if anything did."""
        findings = judge(Record(runs=[self.run], windows=list(self._windows))) or []
        if not findings:
            return
        advice = findings[0].kind, findings[0].cure
        if advice != self._advised:  # a program may have a loop for each epoch
            self._advised = advice
            log.logger.info("advice: %s.", findings[0])

    def close(self) -> None:
        """Close the file; `begin` opens it again."""
        if self._lines is not None:
            self._lines.close()


def choose_window_s(passed_s: float, ranks: int) -> float:
    """Seconds from one window to the next, this long after the start of the run."""
    if passed_s < _GROWS_AFTER_S:
        # Shorter at first, so that a run of some seconds has several windows.
        window_s = min(_WINDOW_S, 0.1 + 0.1 * passed_s)
    else:
        window_s = min(_LONGEST_WINDOW_S, _WINDOW_S * passed_s / _GROWS_AFTER_S)
    return max(window_s, ranks / _RANKS_PER_S)
