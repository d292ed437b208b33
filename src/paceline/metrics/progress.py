"""A progress bar in a terminal, plain lines elsewhere. A front to `rich.progress`."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress
from rich.table import Column

from paceline.metrics.logger import Values

_PLAIN_INTERVAL_S = 5.0  # between two lines without a terminal


class Progress:
    """Shows the progress of a training on standard error. Only rank 0 has one."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bar: RichProgress | None = None
        self._task: Any = None
        self._total: int | None = None
        self._printed_at = 0.0
        self._last: str | None = None

    def begin(self, step: int, total: int | None) -> None:
        """Start at `step` of `total` steps; None if the end is not known."""
        self._total = total
        self._printed_at = time.monotonic()
        if not self._console.is_terminal:
            return
        # If the line is too long for the terminal, the values are cut, not the progress.
        whole, rest = Column(no_wrap=True, overflow="crop"), Column(ratio=1, no_wrap=True)
        self._bar = RichProgress(
            TextColumn("step", table_column=whole.copy()),
            MofNCompleteColumn(table_column=whole.copy()),
            BarColumn(bar_width=20, table_column=whole.copy()),
            TimeRemainingColumn(table_column=whole.copy()),
            TextColumn("{task.fields[values]}", table_column=rest, markup=False),
            console=self._console,
            expand=True,
        )
        self._task = self._bar.add_task("train", total=total, completed=step, values="")
        self._bar.start()

    def show(self, step: int, epoch: int, values: Values, samples_per_s: float) -> None:
        """Show the newest step, its epoch (from 0), the values that were logged last, and the rate."""
        shown = [
            f"{name} {value}" if isinstance(value, str) else f"{name} {value:.4g}"
            for name, value in values.items()
        ]
        text = "  ".join([f"epoch {epoch + 1}", *shown, f"{samples_per_s:,.0f} samples/s"])
        if self._bar is not None:
            self._bar.update(self._task, completed=step, values=text)
            return
        of = f"/{self._total}" if self._total else ""
        self._last = f"step {step}{of}  {text}"
        if time.monotonic() - self._printed_at >= _PLAIN_INTERVAL_S:
            self._print()

    def end(self) -> None:
        """Remove the bar, or print the last line."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        elif self._last is not None:
            self._print()

    def _print(self) -> None:
        self._console.print(self._last, highlight=False, markup=False, soft_wrap=True)
        self._last = None
        self._printed_at = time.monotonic()
