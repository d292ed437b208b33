"""A live display in a terminal or a notebook, plain lines elsewhere. A front to `rich.progress`."""

from __future__ import annotations

import io
import time
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress
from rich.table import Column

from paceline.clock.record import Window
from paceline.metrics.live import RankBars
from paceline.metrics.logger import Values

_PLAIN_INTERVAL_S = 5.0  # between two lines without a terminal
_CELL_INTERVAL_S = 0.5  # between two updates of a cell of a notebook
_CELL_COLUMNS = 100


class _Display(RichProgress):
    """A progress bar with lines below it."""

    below: RenderableType = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        """What is drawn, from top to bottom."""
        yield self.make_tasks_table(self.tasks)
        if self.below:
            yield self.below


class _Cell:
    """An output of a notebook's cell that shows a display as text. It needs no widgets."""

    def __init__(self) -> None:
        notebook = import_module("IPython.display")  # only notebooks have it
        self._handle = notebook.display({"text/plain": ""}, raw=True, display_id=True)
        self._shown_at = 0.0

    def show(self, display: _Display, *, now: bool = False) -> None:
        """Replace the text, if the last time is long enough ago or `now` is set."""
        if not now and time.monotonic() - self._shown_at < _CELL_INTERVAL_S:
            return
        self._shown_at = time.monotonic()
        page = Console(
            file=io.StringIO(), width=_CELL_COLUMNS, force_jupyter=False, color_system=None
        )
        with page.capture() as text:
            page.print(Group(*display.get_renderables()))
        self._handle.update({"text/plain": text.get()}, raw=True)


class Progress:
    """The progress of a training on standard error or in the cell of a notebook. Only rank 0 has one."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bar: _Display | None = None
        self._cell: _Cell | None = None
        self._task: Any = None
        self._total: int | None = None
        self._printed_at = 0.0
        self._last: str | None = None

    @property
    def is_drawn(self) -> bool:
        """Whether the display is updated in place: in a terminal or a notebook. Otherwise it prints lines."""
        return self._console.is_terminal or self._console.is_jupyter

    def begin(self, step: int, total: int | None) -> None:
        """Start at `step` of `total` steps; None if the end is not known."""
        self._total = total
        self._printed_at = time.monotonic()
        if not self.is_drawn:
            return
        # If the line is too long for the terminal, the values are cut, not the progress.
        whole, rest = Column(no_wrap=True, overflow="crop"), Column(ratio=1, no_wrap=True)
        self._bar = _Display(
            TextColumn("step", table_column=whole.copy()),
            MofNCompleteColumn(table_column=whole.copy()),
            BarColumn(bar_width=20, table_column=whole.copy()),
            TimeRemainingColumn(table_column=whole.copy()),
            TextColumn("{task.fields[values]}", table_column=rest, markup=False),
            console=self._console,
            expand=True,
        )
        self._task = self._bar.add_task("train", total=total, completed=step, values="")
        if self._console.is_jupyter:
            self._cell = _Cell()
        else:
            self._bar.start()

    def show(self, step: int, epoch: int, values: Values, rate: str) -> None:
        """Show the newest step, its epoch (from 0), the values that were logged last, and the rate."""
        shown = [f"{name} {value:.4g}" for name, value in values.items()]
        text = "  ".join([f"epoch {epoch + 1}", rate, *shown])  # the end may be cut
        if self._bar is not None:
            self._bar.update(self._task, completed=step, values=text)
            if self._cell is not None:
                self._cell.show(self._bar)
            return
        of = f"/{self._total}" if self._total else ""
        self._last = f"step {step}{of}  {text}"
        if time.monotonic() - self._printed_at >= _PLAIN_INTERVAL_S:
            self._print()

    def show_ranks(self, window: Window, device: str) -> None:
        """Show below the bar where the time of each rank goes; `device` is the type of theirs."""
        if self._bar is not None:
            self._bar.below = RankBars(window, device)

    def end(self) -> None:
        """Leave the display as it is now, or print the last line."""
        if self._bar is not None:
            if self._cell is not None:
                self._cell.show(self._bar, now=True)
                self._cell = None
            else:
                self._bar.stop()
            self._bar = None
        elif self._last is not None:
            self._print()

    def _print(self) -> None:
        self._console.print(self._last, highlight=False, markup=False, soft_wrap=True)
        self._last = None
        self._printed_at = time.monotonic()
