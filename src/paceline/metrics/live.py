"""What a training does now, as lines for a terminal: progress, rate, and where the time of each rank goes.

The display of a training and `paceline top` show it. The bar of a rank is made of letters, so that it can be
read without colours and copied from a terminal as text.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paceline.clock.record import Window
from paceline.metrics.flops import utilisation
from paceline.metrics.json_lines import OWN_NAMES

# The parts of a bar: letter, name, style, and the phases of the clock that it shows.
_PARTS = (
    ("=", "compute", "green", ("forward", "backward", "optimizer")),
    ("D", "wait for data", "yellow", ("data",)),
    ("C", "communication", "magenta", ("communication",)),
    (".", "other", "dim", ("checkpoint", "evaluation", "other")),
)
_MOST_ROWS = 8  # with more ranks: the slowest ones, and the fastest for comparison
_LONGEST_BAR, _SHORTEST_BAR = 50, 10  # letters
_PROGRESS_BAR = 20  # columns
_RECENT = 10  # windows that the time left follows from


def status(
    run: Mapping[str, Any],
    windows: Sequence[Window],
    last: Mapping[str, Any],
    *,
    step: int,
    state: str = "",
) -> Iterator[RenderableType]:
    """What is known, as lines that fit the terminal.

    Args:
        run: What describes the run, see `Record`.
        windows: The newest ones.
        last: What was logged last, and `epoch` (from 0).
        step: The newest one.
        state: Takes the place of the time left.
    """
    total = run.get("total_steps")
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    if total:
        grid.add_column(max_width=_PROGRESS_BAR)  # narrower in a narrow terminal; the texts are not
        grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    cells: list[RenderableType] = [line(f"step {step:,}")]
    if total:
        share = f"{min(1.0, step / total):.0%}"
        bar = ProgressBar(total=total, completed=step)
        cells = [line(f"step {step:,}/{total:,}"), bar, line(share)]
        state = state or _time_left(windows, total - step)
    grid.add_row(*cells, line(state))
    yield grid
    if values := describe(run, windows, last):
        yield line(values)
    if windows:
        yield RankBars(windows[-1], str(run.get("device", "cpu")))


def describe(run: Mapping[str, Any], windows: Sequence[Window], last: Mapping[str, Any]) -> str:
    """The epoch, the rate, and the values that were logged last."""
    words = []
    if isinstance(epoch := last.get("epoch"), int):
        words.append(f"epoch {epoch}")
    if windows:
        rate = windows[-1].rate
        words.append(f"{rate:,.0f} {windows[-1].unit}/s")
        if used := utilisation(run, rate):
            words.append(used)
    for name, value in last.items():  # at the end, because it may be cut
        if name not in OWN_NAMES:
            shown = f"{value:.4g}" if isinstance(value, int | float) else value
            words.append(f"{name} {shown}")
    return "  ".join(words)


def line(text: str, style: str = "") -> Text:
    """A text that is cut at the end of the line."""
    return Text(text, style, no_wrap=True, overflow="ellipsis")


def _time_left(windows: Sequence[Window], steps: int) -> str:
    first = windows[max(-_RECENT, -len(windows))] if windows else None
    if first is None or windows[-1].step == first.step or steps <= 0:
        return ""
    step_s = (windows[-1].time - first.time) / (windows[-1].step - first.step)
    return f"{datetime.timedelta(seconds=round(steps * step_s))} left"


class RankBars:
    """A row for each rank, or for some of many, and a line that explains the letters. A renderable of rich.

    Args:
        window: The steps that it shows.
        device: Where they ran: "cpu", "cuda", ...; it tells what `window.busy` means.
    """

    def __init__(self, window: Window, device: str) -> None:
        self._window, self._device = window, device

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """The lines, each cut to the width of the terminal."""
        width = options.max_width
        shown = choose_ranks(self._own_times())
        digits = len(str(max(shown)))
        rows = [(f"rank {rank:{digits}}", rank, self._usage(rank)) for rank in shown]
        labels = max(len(label) for label, *_ in rows)
        usages = max(len(usage) for *_, usage in rows)
        length = width - labels - usages - 3
        if length < _SHORTEST_BAR:  # the bar is worth more than what follows it
            length = max(_SHORTEST_BAR, width - labels - 1)
        length = min(_LONGEST_BAR, length)
        for label, rank, usage in rows:
            row = Text(f"{label:{labels}} ", no_wrap=True, overflow="crop")
            for (letter, _, style, _), count in zip(
                _PARTS, letters(self._shares(rank), length), strict=True
            ):
                row.append(letter * count, style)
            row.append(f"  {usage}")
            yield row
        legend = Text(no_wrap=True, overflow="crop")
        for letter, name, style, _ in _PARTS:
            legend.append("  " if legend else "").append(letter, style).append(f" {name}")
        yield legend

    def _own_times(self) -> list[float]:
        """By rank, the seconds in which it did not wait for others."""
        waits = self._window.spent_s["communication"]
        return [wall - wait for wall, wait in zip(self._window.wall_s, waits, strict=True)]

    def _shares(self, rank: int) -> list[float]:
        spent = self._window.spent_s
        return [sum(spent[phase][rank] for phase in phases) for *_, phases in _PARTS]

    def _usage(self, rank: int) -> str:
        window = self._window
        busy = window.busy[rank]
        if self._device == "cpu":
            used = f"{busy:.1f} cores"
        else:
            used = f"{busy:4.0%} busy" if busy >= 0 else ""
        return f"{window.memory_bytes[rank] / 1e9:5.1f} GB  {used}".rstrip()


def choose_ranks(own_s: Sequence[float]) -> list[int]:
    """The ranks that are shown: all of a few, or else the slowest first, and last the fastest.

    Args:
        own_s: By rank, the seconds of its own work: those in which it did not wait for other ranks.
    """
    if len(own_s) <= _MOST_ROWS:
        return list(range(len(own_s)))
    slowest_first = sorted(range(len(own_s)), key=lambda rank: -own_s[rank])
    return [*slowest_first[: _MOST_ROWS - 1], slowest_first[-1]]


def letters(shares: Sequence[float], length: int) -> list[int]:
    """How many of `length` letters each share gets; they add up to `length`, with the largest remainders."""
    total = sum(shares)
    if total <= 0:
        return [0] * (len(shares) - 1) + [length]
    exact = [share / total * length for share in shares]
    counts = [int(number) for number in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: length - sum(counts)]:
        counts[i] += 1
    return counts
