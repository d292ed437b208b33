"""Write a run's metrics to JSON lines, a progress bar and loggers. Only rank 0 writes.

Values are kept while a step runs, and written when the control word has summed the losses of all ranks, so no
rank waits. A line of metrics.jsonl has the step, the epoch, `time_s` since the start, and the logged values.
`ClockFile` has the other half of a report: where the time goes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.clock import record
from paceline.errors import ConfigError, refuse_different_values
from paceline.job import collectives
from paceline.job.job import Job
from paceline.metrics import flops as model_flops
from paceline.metrics.clock_file import ClockFile
from paceline.metrics.json_lines import METRICS, OWN_NAMES, JSONLines, keep_earlier, write_line
from paceline.metrics.logger import BackgroundLogger, Logger, close_all
from paceline.metrics.step_loss import StepLoss, StepTotal


class Report:
    """What `training.log` was given, and where it goes.

    Attributes:
        clock: Where the time of the steps goes.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.clock = ClockFile(job)
        self._has_destination = False
        # By step: its epoch, and what was logged.
        self._pending: dict[int, tuple[int, dict[str, Any]]] = {}
        # By step and name, on every rank: how the ranks' values are combined.
        self._reduced: dict[int, dict[str, tuple[str, Any]]] = {}
        self._lines: JSONLines | None = None
        self._loggers: list[BackgroundLogger] = []
        self._progress: Any = None  # a `Progress`; rich, which it imports, takes 30 ms
        self._step = 0  # the last one
        self._flops: float | None = None
        self._counts_tokens = False
        self._began = time.perf_counter()  # `time_s` counts from here
        self._time_s = 0.0  # of the last line

    def open(
        self,
        folder: str | Path | None,
        *,
        progress: bool,
        loggers: Sequence[Logger],
        flops: float | None = None,
    ) -> None:
        """Choose the destinations; see `Training.report`.

        Raises:
            ConfigError: the folder cannot be made, or a logger lacks a method.
        """
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
            path = Path(folder) / METRICS
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"the folder {folder} cannot be made: {error.strerror}.",
                    fix="choose a folder that rank 0 may write to.",
                ) from error
            self._lines = JSONLines(path)
            self.clock.open(path.with_name(record.FILE))
        if progress:
            from paceline.metrics.progress import Progress

            self._progress = Progress()
        self._loggers = [BackgroundLogger(logger) for logger in loggers]
        self.clock.is_shown = progress or any(logger.takes_times for logger in self._loggers)
        self._flops = flops
        self._has_destination = bool(self._lines or self._progress or self._loggers)

    def begin(
        self,
        step: int,
        total: int | None,
        facts: Callable[[], dict[str, Any]],
        *,
        counts_tokens: bool = False,
    ) -> None:
        """Start after `step`. Lines of later steps, which an interrupted run wrote, are removed.

        A run that starts at step 0 is a new one: the files of an earlier run are kept under another name.

        Args:
            total: Number of the last step; None if the end is not known.
            facts: Returns what describes this run in clock.jsonl.
            counts_tokens: Whether losses are means over tokens.
        """
        self._counts_tokens = counts_tokens
        self.forget_pending()  # a loop before may have been left with `break`
        if not self._has_destination:
            return
        self.end("left by `break`")
        self._step = step
        began = time.perf_counter()
        run = {"total_steps": total, **facts(), **model_flops.facts(self._flops, self._job.device)}
        try:
            if self._lines is not None:
                if step == 0:
                    keep_earlier([self._lines.path, self._lines.path.with_name(record.FILE)])
                self._time_s = self._lines.rewind(step)
            self.clock.begin(step, run)
        except OSError as error:
            raise ConfigError(
                f"the folder of the report cannot be written to: {error}.",
                fix="choose a folder with space that rank 0 may write to.",
            ) from error
        self._began = began - self._time_s  # time continues from the last line
        if self._progress is not None:
            self._progress.begin(step, self.clock.run, self.clock.windows)

    def forget_pending(self, last: float = math.inf) -> None:
        """Drop the values of the steps up to `last`, whose losses will not come."""
        self._pending = {step: kept for step, kept in self._pending.items() if step > last}
        self._reduced = {step: kept for step, kept in self._reduced.items() if step > last}

    def end_step(self, step: int, epoch: int, num_samples: int) -> None:
        """Count the samples of a step that has ended, over all ranks, and show the step."""
        self.clock.count(num_samples)
        self._step = step
        if self._progress is not None:
            self._progress.show(step, epoch)

    def keep_values(self, step: int, epoch: int, values: dict[str, Any], reduce: str) -> None:
        """Keep values of a step until the control word with its loss has come."""
        if reduce != "rank0":
            of_step = self._reduced.setdefault(step, {})
            of_step |= {name: (reduce, _copied(value)) for name, value in values.items()}
        if not self._has_destination:
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
        if not self._has_destination:
            return
        now = time.perf_counter()
        for total in totals:
            pending = self._pending.pop(total.step, None)
            if pending is None:
                continue
            epoch, values = pending
            mean = total.loss_sum / total.count if total.count else float("nan")
            numbers = {name: _number(value, mean) for name, value in values.items()}
            self._time_s = round(now - self._began, 4)
            line = {"epoch": epoch, "time_s": self._time_s, **numbers}
            write_line(self._lines, total.step, line)
            for logger in self._loggers:
                logger.log(total.step, line)
            if self._progress is not None:
                self._progress.values = numbers
        if self._counts_tokens:
            self.clock.count_tokens(round(sum(total.count for total in totals)))

    def write_times(self, step: int, rows: list[list[float]]) -> None:
        """Write where the time of the steps up to `step` went, from the rows of all ranks."""
        window = self.clock.write(step, rows) if self._has_destination else None
        if window is None:
            return
        line = window.to_line()
        for logger in self._loggers:
            logger.times(step, line)

    def end(self, how: str) -> None:
        """End the progress bar and close the files; `begin` opens them again.

        Args:
            how: How the loop ended, in words.
        """
        if self._progress is not None:
            self._progress.end()
        if self._lines is not None:
            self._lines.close()
        self.clock.end(self._step, how)

    def close(self) -> None:
        """Close all destinations, at the end of the job."""
        self.end("failed or interrupted" if self._job.failed else "left by `break`")
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
        if name in OWN_NAMES:
            raise ConfigError(
                f"Paceline writes {name!r} itself.", fix="log your value under another name."
            )
        if not _is_number(value):
            got = type(value).__name__
            if isinstance(value, torch.Tensor | np.ndarray):
                got = f"{math.prod(value.shape)} numbers of type {value.dtype}"
            raise ConfigError(
                f"{name!r} must be one number, got {got}.",
                fix="log its mean, or each element under its own name.",
            )


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    if isinstance(value, np.ndarray):
        return value.size == 1 and isinstance(value.item(), Real)
    return isinstance(value, Real | StepLoss)


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
