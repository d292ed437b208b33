"""One frame of `paceline top`: how far a run is, how fast, and where the time of each rank goes."""

from __future__ import annotations

import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paceline.clock.judge import CHECKPOINT
from paceline.clock.record import Window
from paceline.metrics.flops import utilisation
from paceline.metrics.json_lines import OWN_NAMES
from paceline.metrics.live import RankBars
from paceline.report.run import Run, RunReader

_RECENT = 10  # windows that the time left and the advice follow from
# The frame says so if no new line came for this many seconds, and for this many of the usual intervals.
_QUIET_S, _QUIET_INTERVALS = 5.0, 3.0
_BAR = 20  # columns of the terminal


def frame(run: Run, silence_s: float, now: float) -> RenderableType:
    """What is known of a run now.

    Args:
        silence_s: Seconds since the newest line was written.
        now: Seconds since the epoch.
    """
    parts: list[RenderableType] = [_line(_title(run), "bold"), _progress(run, silence_s)]
    if values := _values(run):
        parts.append(_line(values))
    window = _newest(run)
    if window is not None:
        parts.append(RankBars(window, str(run.record.run.get("device", "cpu"))))
    parts += [_line(_events(run, now)), *_verdict(run)]
    parts += [Text(sentence, "yellow") for sentence in run.missing]
    return Group(*parts)


def follow(folder: str) -> RunReader:
    """A reader for `read`. It keeps the newest lines only, so that long runs cost no more than short ones."""
    return RunReader(folder, most_windows=_RECENT)


def read(reader: RunReader, now: float) -> RenderableType:
    """The frame of a run's folder as it is now.

    Raises:
        ConfigError: it does not exist, or holds nothing that Paceline writes.
    """
    run = reader.read()
    return frame(run, max(0.0, now - run.written) if run.written else 0.0, now)


def _line(text: str, style: str = "") -> Text:
    return Text(text, style, no_wrap=True, overflow="ellipsis")


def _newest(run: Run) -> Window | None:
    windows = run.record.windows
    return windows[-1] if windows else None


def _title(run: Run) -> str:
    facts = run.record.run
    words = []
    if script := facts.get("script"):
        words.append(str(script))
    window = _newest(run)
    ranks = facts.get("world_size", window.num_ranks if window else None)
    if ranks is not None:
        words.append(f"{ranks:,} rank{'' if ranks == 1 else 's'}")
    if device := facts.get("device"):
        words.append(str(device))
    return "  ".join([*words, run.name])  # last, because it may be cut


def _progress(run: Run, silence_s: float) -> RenderableType:
    total = run.total_steps
    step, state = f"step {run.steps:,}", _state(run, silence_s)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    if total:
        grid.add_column(max_width=_BAR)  # narrower in a narrow terminal, while the texts are not
        grid.add_column(no_wrap=True)
        grid.add_column(no_wrap=True)
        share = f"{min(1.0, run.steps / total):.0%}"
        bar = ProgressBar(total=total, completed=run.steps)
        grid.add_row(_line(f"{step}/{total:,}"), bar, _line(share), _line(state))
    else:
        grid.add_column(no_wrap=True)
        grid.add_row(_line(step), _line(state))
    return grid


def _state(run: Run, silence_s: float) -> str:
    if run.total_steps and run.steps >= run.total_steps:
        return "finished"
    windows = run.record.windows[-_RECENT:]
    passed_s, steps = 0.0, 0
    if len(windows) > 1:
        passed_s = windows[-1].time - windows[0].time
        steps = windows[-1].step - windows[0].step
    usual_s = passed_s / (len(windows) - 1) if steps > 0 else 0.0
    if silence_s > max(_QUIET_S, _QUIET_INTERVALS * usual_s):
        return f"no new line for {silence_s:,.0f} s"
    if not windows and run.record.runs:
        return "starting"
    if not run.total_steps or steps <= 0 or passed_s <= 0:
        return ""
    left_s = round((run.total_steps - run.steps) * passed_s / steps)
    return f"{datetime.timedelta(seconds=left_s)} left"


def _values(run: Run) -> str:
    shown = []
    if isinstance(epoch := run.last.get("epoch"), int):
        shown.append(f"epoch {epoch + 1}")
    window = _newest(run)
    if window is not None and (wall_s := sum(window.wall_s) / window.num_ranks) > 0:
        unit = "tokens" if window.tokens else "samples"
        rate = (window.tokens or window.samples) / wall_s
        used = utilisation(run.record.run, rate)
        shown += [f"{rate:,.0f} {unit}/s", *([used] if used else [])]
    for name, value in run.last.items():  # last, because they may be cut
        if name not in OWN_NAMES:
            shown.append(f"{name} {_number(value)}")
    return "  ".join(shown)


def _verdict(run: Run) -> list[Text]:
    """What limits the run in the windows that are kept; nothing before enough was measured.

    Advice about checkpoints is left out: the windows are too few to tell their share.
    """
    if run.findings is None:
        return []
    found = [finding for finding in run.findings if finding.kind != CHECKPOINT]
    if not found:
        return [_line("no bottleneck found", "green")]
    return [Text(f"advice: {found[0]}", "bold yellow")]


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)


def _events(run: Run, now: float) -> str:
    words = ["no checkpoint in this folder"]
    if run.checkpoints:
        step, _, saved = run.checkpoints[-1]
        age = datetime.timedelta(seconds=max(0, round(now - saved)))
        words = [f"checkpoint of step {step:,}, {age} ago"]
    restarts = run.record.run.get("restarts")
    if isinstance(restarts, int):
        words.append(f"{restarts} restart{'' if restarts == 1 else 's'}")
    return "  ".join(words)
