"""Write a run's metrics to JSON lines, a progress bar and loggers. Only rank 0 writes.

Values are kept while a step runs, and written when the control word has summed the losses of all ranks, so no
rank waits. A line of metrics.jsonl has the step, the epoch, `time_s` since the start, and the logged values.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline import log
from paceline.clock import record
from paceline.clock.judge import judge
from paceline.clock.step_clock import clock
from paceline.errors import ConfigError, refuse_different_values
from paceline.job import collectives, current_step
from paceline.job.job import Job
from paceline.metrics import flops as model_flops
from paceline.metrics.earlier_run import keep_earlier
from paceline.metrics.json_lines import JSONLines
from paceline.metrics.logger import BackgroundLogger, Logger, close_all
from paceline.metrics.progress import Progress
from paceline.metrics.step_loss import StepLoss, StepTotal
from paceline.metrics.tensorboard import TensorBoard
from paceline.metrics.usage import Usage

_RATE_WINDOW_S = 1.0  # the rate over a shorter time varies too much to read
# From one line of clock.jsonl to the next. It grows after the first hour, which limits the size of the file.
_CLOCK_WINDOW_S, _LONGEST_WINDOW_S = 1.0, 10.0
_GROWS_AFTER_S = 3600.0
_SPANS_EVERY = 30  # lines of clock.jsonl, after the first ones; see `_keeps_spans`
_LONGER = 1.2  # than all steps kept before, so that the phases of a step are kept in any case
_MOST_KEPT = 2000  # rows of ranks that are kept for the advice, each of about 1 KB
_LEAST_KEPT = 10  # windows
_RANKS_PER_S = 128  # with more ranks it takes longer, so that the file does not grow faster

_OWN_NAMES = ("step", "epoch", "time_s")


class Report:
    """What `training.log` was given, and where it goes."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._active = False
        # By step: its epoch, and what was logged.
        self._pending: dict[int, tuple[int, dict[str, Any]]] = {}
        # By step and name, on every rank: how the ranks' values are combined.
        self._reduced: dict[int, dict[str, tuple[str, Any]]] = {}
        self._lines: JSONLines | None = None
        self._loggers: list[BackgroundLogger] = []
        self._progress: Progress | None = None
        self._began = time.perf_counter()
        self._window_began = self._began
        self._window_count = 0
        self._rate = 0.0
        self._flops: float | None = None
        self._unit = "samples"
        self._epoch = 0  # of the newest step
        self._newest: dict[str, Any] = {}  # the values that were written last
        self._clock_lines: JSONLines | None = None
        # Of the steps since the last line, how many, and of the steps in it. A GPU finishes steps later than
        # they are counted.
        self._clock_samples = self._clock_steps = self._measured_samples = 0
        self._clock_tokens = 0  # of the steps since the last line whose losses are known
        self._has_asked = False  # for the next line; `measure` answers
        self._usage = Usage(job.device)
        self._run: dict[str, Any] = {}  # the line in clock.jsonl that describes this run
        self._advised = ("", "")  # the kind and the cure that were logged last
        # The newest ones, for the advice at the end.
        kept = max(_LEAST_KEPT, _MOST_KEPT // job.world_size)
        self._num_windows = 0
        self._num_loops = 0
        self._longest_s = 0.0  # of the steps whose phases were kept, without the warm-up
        self._windows: deque[record.Window] = deque(maxlen=kept)

    def open(
        self,
        folder: str | None,
        *,
        progress: bool,
        tensorboard: bool,
        loggers: Sequence[Logger],
        flops: float | None = None,
    ) -> None:
        """Choose the destinations; see `Training.report`.

        Raises:
            ConfigError: the folder cannot be made, TensorBoard is not installed or has no folder, or a
                logger lacks a method.
        """
        if tensorboard:
            if folder is None:
                raise ConfigError("tensorboard=True needs a folder to write to.")
            loggers = [*loggers, TensorBoard(Path(folder) / "tensorboard")]
        for logger in loggers:
            methods = [getattr(logger, name, None) for name in ("log", "close")]
            if isinstance(logger, type) or not all(map(callable, methods)):
                raise ConfigError(
                    f"{logger!r} is not a logger.",
                    why="a logger has the methods `log(step, values)` and `close()`.",
                    fix="pass an object with both.",
                )
        if self._job.rank != 0:
            return
        if folder is not None:
            path = Path(folder) / "metrics.jsonl"
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"the folder {folder} cannot be made: {error.strerror}.",
                    fix="choose a folder that rank 0 may write to.",
                ) from error
            self._lines = JSONLines(path)
            self._clock_lines = JSONLines(path.with_name(record.FILE))
        if progress:
            self._progress = Progress()
        self._loggers = [BackgroundLogger(logger) for logger in loggers]
        self._flops = flops
        self._active = bool(self._lines or self._progress or self._loggers)

    def begin(
        self,
        step: int,
        total: int | None,
        facts: Callable[[], dict[str, Any]],
        *,
        unit: str = "samples",
    ) -> None:
        """Start after `step`. Lines of later steps, which an interrupted run wrote, are removed.

        A run that starts at step 0 is a new one: the files of an earlier run are kept under another name.

        Args:
            total: Number of the last step; None if the end is not known.
            facts: Returns what describes this run in clock.jsonl.
            unit: What the rate that is shown counts: "samples", or "tokens" if losses are means over tokens.
        """
        self._unit = unit
        # A loop before may have been left with `break`: its last values are lost.
        self._pending.clear()
        self._reduced.clear()
        self._has_asked = False
        self._clock_samples = self._clock_steps = self._clock_tokens = 0
        if not self._active:
            return
        self.end()
        self._began = self._window_began = time.perf_counter()
        self._window_count = 0
        self._run = {"time": time.time(), "total_steps": total, "loop": self._num_loops, **facts()}
        self._num_loops += 1
        self._run |= model_flops.facts(self._flops, self._job.device)
        self._windows.clear()
        self._num_windows = 0
        self._longest_s = 0.0
        if self._lines is not None:
            try:
                assert self._clock_lines is not None
                if step == 0:
                    keep_earlier([self._lines.path, self._clock_lines.path])
                self._began -= self._lines.rewind(step)  # time continues from the last line
                self._clock_lines.rewind(step)
                self._clock_lines.log(step, {"run": self._run})
            except OSError as error:
                raise ConfigError(
                    f"metrics.jsonl cannot be written: {error}.",
                    fix="choose a folder with space that rank 0 may write to.",
                ) from error
        if self._progress is not None:
            self._progress.begin(step, total)

    def count(self, epoch: int, num_samples: int) -> None:
        """Count the samples of a step that has ended, over all ranks, for the rate that is shown."""
        self._epoch = epoch
        if self._unit == "samples":
            self._window_count += num_samples
        self._clock_samples += num_samples
        self._clock_steps += 1

    def note(self, step: int, epoch: int, values: dict[str, Any], reduce: str) -> None:
        """Keep values of a step until the control word with its loss has come."""
        if reduce != "rank0":
            of_step = self._reduced.setdefault(step, {})
            of_step |= {name: (reduce, _copied(value)) for name, value in values.items()}
        if not self._active:
            return
        _, kept = self._pending.setdefault(step, (epoch, {}))
        kept |= {name: _copied(value) for name, value in values.items()}

    def write(self, totals: Sequence[StepTotal], *, reduce: bool) -> None:
        """Write the values of these steps.

        Args:
            reduce: Whether a rank has values of these steps that are combined over ranks; equal on all ranks.
        """
        if reduce:
            self._exchange([total.step for total in totals])
        if not self._active:
            return
        now = time.perf_counter()
        device = self._usage.gpu()
        for total in totals:
            noted = self._pending.pop(total.step, None)
            if noted is None:
                continue
            epoch, values = noted
            mean = total.loss_sum / total.count if total.count else float("nan")
            numbers = {name: _number(value, mean) for name, value in values.items()}
            self._newest = numbers | device
            line = {"epoch": epoch, "time_s": round(now - self._began, 4), **self._newest}
            self._write_line(total.step, line, self._lines)
            for logger in self._loggers:
                logger.log(total.step, line)
        if self._unit == "tokens":
            tokens = round(sum(total.count for total in totals))
            self._window_count += tokens
            self._clock_tokens += tokens
        elapsed = now - self._window_began
        if elapsed >= _RATE_WINDOW_S or not self._rate:
            self._rate = self._window_count / max(elapsed, 1e-9)
            self._window_began, self._window_count = now, 0
        if totals and self._progress is not None:
            rate = f"{self._rate:,.0f} {self._unit}/s"
            used = model_flops.utilisation(self._run, self._rate)
            self._progress.show(
                totals[-1].step, self._epoch, self._newest, f"{rate}  {used}".rstrip()
            )

    def asks_for_times(self, *, is_last: bool) -> bool:
        """Whether to ask all ranks now where their time went. Only rank 0 does."""
        shows = self._progress is not None and self._progress.is_drawn
        takes_times = shows or self._clock_lines or any(each.takes_times for each in self._loggers)
        if not takes_times or self._has_asked:
            return False
        window_s = _window_s(time.time() - self._run["time"], self._job.world_size)
        self._has_asked = is_last or clock.elapsed_s() >= window_s
        return self._has_asked

    def measure(self) -> list[float]:
        """Where the time of this rank's last steps went, as a row for `write_times`."""
        self._has_asked = False
        times = clock.take()
        finished = times.steps / max(self._clock_steps, 1)
        self._measured_samples = round(self._clock_samples * finished)
        self._clock_samples -= self._measured_samples
        self._clock_steps -= times.steps
        return record.pack(times, self._job.rank, *self._usage.measure())

    def write_link(self, step: int, link: Mapping[str, float]) -> None:
        """Write what was measured of the connection between the ranks."""
        self._run["link"] = link
        self._write_line(step, {"link": link}, self._clock_lines)

    def write_times(self, step: int, rows: list[list[float]]) -> None:
        """Write where the time of the steps up to `step` went, from the rows of all ranks."""
        line = record.line_of(rows, time.time(), self._measured_samples)
        if line["steps"]:
            if self._unit == "tokens":
                line["tokens"], self._clock_tokens = self._clock_tokens, 0
            self._num_windows += 1
            length_s = record.length_s(line.get("spans", ()))
            is_longer = self._num_windows > 1 and length_s > _LONGER * self._longest_s
            if not (is_longer or _keeps_spans(self._num_windows)):
                line.pop("spans", None)
            elif self._num_windows > 1:
                self._longest_s = max(self._longest_s, length_s)
            window = record.read_window({"step": step, **line})
            if self._progress is not None:
                self._progress.show_ranks(window, self._job.device.type)
            self._windows.append(window)
            self._write_line(step, line, self._clock_lines)
            for logger in self._loggers:
                logger.times(step, line)
        else:  # a GPU has finished none
            self._clock_samples += self._measured_samples

    def _write_line(self, step: int, line: Mapping[str, Any], lines: JSONLines | None) -> None:
        if lines is None:
            return
        try:
            lines.log(step, line)
        except OSError as error:
            log.once(
                f"{lines.path.name} cannot be written: {error}. The training goes on; the lines of the steps "
                "in which this happens are missing."
            )

    def end(self) -> None:
        """End the progress bar and close metrics.jsonl; `begin` opens them again."""
        if self._progress is not None:
            self._progress.end()
        for lines in (self._lines, self._clock_lines):
            if lines is not None:
                lines.close()

    def advise(self) -> None:
        """Log what limited the run most, if anything did. Rank 0 has the evidence, with a folder.

        A slow rank is left out if the launcher has named one, with the line of the script.
        """
        found = judge(record.Record(runs=[self._run], windows=list(self._windows))) or []
        found = [f for f in found if f.kind != "straggler" or not current_step.slow_ranks]
        if found and (found[0].kind, found[0].cure) != self._advised:
            self._advised = found[0].kind, found[0].cure  # a loop of each epoch ends often
            log.logger.info("advice: %s.", found[0])

    def close(self) -> None:
        """Close all destinations, at the end of the job."""
        self.end()
        close_all(self._loggers, failed=self._job.failed)
        self._loggers = []

    def _exchange(self, steps: list[int]) -> None:
        """Combine the values of these steps over ranks, and put the results in place of rank 0's values.

        Raises:
            RankDisagreement: on all ranks, if they logged different names.
        """
        own = [
            [step, name, how, float(value)]
            for step in steps
            for name, (how, value) in self._reduced.pop(step, {}).items()
        ]
        everyone = collectives.gather(self._job, own)
        refuse_different_values(
            "step, name and `reduce` of logged values",
            [[entry[:3] for entry in entries] for entries in everyone],
            fix="call training.log(..., reduce=...) on all ranks, with the same names.",
        )
        reported = [everyone[rank] for rank in self._job.data.reporters]
        for entries in zip(*reported, strict=True):
            step, name, how, _ = entries[0]
            total = collectives.exact_sum([value for *_, value in entries])
            if step in self._pending:
                count = len(entries) if how == "mean" else 1
                self._pending[step][1][name] = total / count


def _window_s(passed_s: float, ranks: int) -> float:
    """Seconds from one line of clock.jsonl to the next, this long after the start."""
    if (
        passed_s < _GROWS_AFTER_S
    ):  # shorter at first, so that a run of some seconds has several lines
        window_s = min(_CLOCK_WINDOW_S, 0.1 + 0.1 * passed_s)
    else:
        window_s = min(_LONGEST_WINDOW_S, _CLOCK_WINDOW_S * passed_s / _GROWS_AFTER_S)
    return max(window_s, ranks / _RANKS_PER_S)


def _keeps_spans(number: int) -> bool:
    """Whether this line of clock.jsonl, from 1, has the phases of a step in order, which take most of a line.

    Short runs have some too: 1, 2, 4, 8, ... and each 30th. `Report` also keeps those of longer steps. Of
    the steps of a line only the second one is looked at.
    """
    return number & (number - 1) == 0 or number % _SPANS_EVERY == 0


def refuse_values(values: dict[str, Any], reduce: str, step: int) -> None:
    """Raise ConfigError for values that cannot be logged in this step."""
    for name, value in values.items():
        if isinstance(value, StepLoss) and value.step != step:
            raise ConfigError(
                f"{name!r} is the loss of step {value.step}, and this is step {step}.",
                fix=f"log it in its own step, or as a number: {name}=float(...), on all ranks.",
            )
        if isinstance(value, StepLoss) and reduce != "rank0":
            raise ConfigError(
                f"{name!r} is the loss over all ranks, which is not combined again.",
                fix="log it in a call without `reduce`.",
            )
        if name in _OWN_NAMES:
            raise ConfigError(
                f"{name!r} is written in every line already.", fix="log it under another name."
            )
        size = 1
        if isinstance(value, torch.Tensor | np.ndarray):
            size = math.prod(value.shape)
        if size != 1 or not _is_number(value):
            got = f"{size} numbers" if size != 1 else type(value).__name__
            raise ConfigError(
                f"{name!r} must be one number, got {got}.",
                fix="log its mean, or each element under its own name.",
            )


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.is_complex()
    if isinstance(value, StepLoss):
        return True
    try:
        float(_copied(value))
    except (TypeError, ValueError, OverflowError):
        return False
    return hasattr(value, "__float__")  # a text such as "3" has none


def _number(value: Any, mean: float) -> float | int:
    if isinstance(value, StepLoss):
        return mean
    return value if isinstance(value, int) else float(value)


def _copied(value: Any) -> Any:
    """The value as it is now, because it is read later and the program may change a tensor or an array."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, int | StepLoss):
        return value
    return float(value.item() if isinstance(value, np.ndarray) else value)
