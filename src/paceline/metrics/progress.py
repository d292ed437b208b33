"""The progress of a training: in place in a terminal or a notebook, as plain lines elsewhere.

It is drawn by the thread that trains, twice a second at most; a plain line is printed each 5 s.
"""

from __future__ import annotations

import io
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from rich.console import Console, Group
from rich.live import Live

from paceline.clock.record import Window
from paceline.metrics import live
from paceline.metrics.logger import Values

_INTERVAL_S, _PLAIN_INTERVAL_S = 0.5, 5.0  # between two updates in place, and between two lines
_CELL_COLUMNS = 100  # of a notebook


class Progress:
    """The progress of a training on standard error or in the cell of a notebook. Only rank 0 has one.

    Attributes:
        values: What was logged last.
    """

    def __init__(self) -> None:
        self.values: Values = {}
        self._console = Console(stderr=True)
        self._live: Live | None = None
        self._cell: Any = None  # an output of a notebook's cell; it needs no widgets
        self._run: Mapping[str, Any] = {}
        self._windows: Sequence[Window] = ()
        self._step = self._epoch = 0
        self._drawn_at = 0.0
        self._is_drawn = True  # nothing has changed since

    def begin(self, step: int, run: Mapping[str, Any], windows: Sequence[Window]) -> None:
        """Start at `step`.

        Args:
            run: What describes the run, see `Record`.
            windows: Where the time goes; the caller appends to them.
        """
        self._step, self._run, self._windows = step, run, windows
        self._drawn_at = time.monotonic()
        if self._console.is_jupyter:
            notebook = import_module("IPython.display")  # only notebooks have it
            self._cell = notebook.display({"text/plain": ""}, raw=True, display_id=True)
        elif self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()

    def show(self, step: int, epoch: int) -> None:
        """Show the newest step and its epoch (from 0), if the last time is long enough ago."""
        self._step, self._epoch, self._is_drawn = step, epoch, False
        is_plain = self._live is None and self._cell is None
        interval_s = _PLAIN_INTERVAL_S if is_plain else _INTERVAL_S
        if time.monotonic() - self._drawn_at >= interval_s:
            self._draw()

    def end(self) -> None:
        """Leave the display with the newest step, or print a last line."""
        if not self._is_drawn:
            self._draw()
        if self._live is not None:
            self._live.stop()
        self._live = self._cell = None

    def _draw(self) -> None:
        self._drawn_at, self._is_drawn = time.monotonic(), True
        known = {"epoch": self._epoch, **self.values}
        if self._live is None and self._cell is None:
            total = f"/{total}" if (total := self._run.get("total_steps")) else ""
            text = f"step {self._step}{total}  {live.describe(self._run, self._windows, known)}"
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)
            return
        frame = Group(*live.status(self._run, self._windows, known, step=self._step))
        if self._live is not None:
            self._live.update(frame, refresh=True)
            return
        page = Console(
            file=io.StringIO(), width=_CELL_COLUMNS, force_jupyter=False, color_system=None
        )
        with page.capture() as text_of_cell:
            page.print(frame)
        self._cell.update({"text/plain": text_of_cell.get()}, raw=True)
