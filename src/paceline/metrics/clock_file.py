"""`ClockFile`: where the time of a run goes. Every rank measures it; rank 0 writes clock.jsonl and judges it.

About once a second rank 0 asks for the times (`asks`). The next control word carries one row of each rank
(`own_times`), and `write` makes a `Window` from the rows.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline import log
from paceline.clock import record
from paceline.clock.judge import judge, num_newest
from paceline.clock.record import Record, Window
from paceline.clock.step_clock import clock
from paceline.job.job import Job
from paceline.metrics.json_lines import JSONLines, write_line
from paceline.metrics.usage import Usage

# From one window to the next. It grows after the first hour, which limits the size of the file.
_WINDOW_S, _LONGEST_WINDOW_S = 1.0, 10.0
_GROWS_AFTER_S = 3600.0
_RANKS_PER_S = 128  # with more ranks the windows are longer, so that the file does not grow faster


class ClockFile:
    """The windows of a run, and the file clock.jsonl if there is a folder for it.

    Attributes:
        run: What describes this run; see `Record.run`.
        windows: The newest ones.
        is_shown: Whether a display or a logger takes the windows; then there need not be a file.
    """

    def __init__(self, job: Job) -> None:
        self.run: dict[str, Any] = {}
        self.is_shown = False
        self._job = job
        self._usage = Usage(job.device)
        self._lines: JSONLines | None = None
        self._num_loops = 0
        self._has_asked = False
        self._samples = 0  # of the steps that are in no row of this rank yet
        # Of the steps since the last window: samples of those in the rows, tokens of those with known losses.
        self._row_samples = self._tokens = 0
        self._is_open = False  # whether the last loop has not ended
        self.windows: deque[Window] = deque(maxlen=num_newest(job.world_size))
        self._advised = ("", "")  # the kind and the fix that were logged last

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
        self._samples = self._row_samples = self._tokens = 0
        self.windows.clear()
        self._is_open = True
        if self._lines is not None:
            self._lines.rewind(step)
            self._lines.log(step, {"run": self.run})

    def count(self, num_samples: int) -> None:
        """Count the samples of a step that has ended, over all ranks."""
        self._samples += num_samples

    def count_tokens(self, num_tokens: int) -> None:
        """Count tokens over all ranks."""
        self._tokens += num_tokens

    def asks(self, *, is_last: bool) -> bool:
        """Whether to ask all ranks now where their time went. Only rank 0 does.

        Args:
            is_last: Whether the loop ends after this step.
        """
        if self._has_asked or not (self.is_shown or self._lines is not None):
            return False
        window_s = choose_window_s(time.time() - self.run["time"], self._job.world_size)
        self._has_asked = is_last or clock.elapsed_s() >= window_s
        return self._has_asked

    def own_times(self) -> list[float]:
        """The row of this rank: where the time of the steps since its last row went."""
        self._has_asked = False
        self._row_samples += self._samples
        self._samples = 0
        return record.pack_row(clock.take(), *self._usage.measure())

    def write(self, step: int, rows: list[list[float]]) -> Window | None:
        """Write the window up to `step`, from the rows of all ranks; None if it has no step."""
        window = Window.from_rows(
            step, rows, time=time.time(), samples=self._row_samples, tokens=self._tokens
        )
        if not window.steps:
            return None
        self._row_samples = self._tokens = 0
        self.windows.append(window)
        write_line(self._lines, step, window.to_line())
        return window

    def advise(self) -> None:
        """Log what limited the run most, if anything did."""
        findings = judge(Record(runs=[self.run], windows=list(self.windows))) or []
        if not findings:
            return
        advice = findings[0].kind, findings[0].fix
        if advice != self._advised:  # a program may have a loop for each epoch
            self._advised = advice
            log.logger.info("advice: %s.", findings[0])

    def end(self, step: int, how: str) -> None:
        """Write how the loop ended after `step`, unless that is written, and close the file.

        `begin` opens it again.
        """
        if self._is_open:
            write_line(self._lines, step, {"end": how})
        self._is_open = False
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
