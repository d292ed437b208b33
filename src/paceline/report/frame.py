"""One frame of `paceline top`: how far a run is, how fast, and where the time of each rank goes."""

from __future__ import annotations

import datetime

from rich.console import Group, RenderableType
from rich.text import Text

from paceline.errors import count_of
from paceline.metrics import live
from paceline.report.run import Run, load

_RECENT = 10  # windows that tell how often a line comes
# The frame says so if no new line came for this many seconds, and for this many of the usual intervals.
_QUIET_S, _QUIET_INTERVALS = 5.0, 3.0


def read(folder: str, now: float) -> RenderableType:
    """The frame of a run's folder as it is now.

    Args:
        now: Seconds since the epoch.

    Raises:
        ConfigError: it does not exist, or holds nothing that Paceline writes.
    """
    run = load(folder, newest_only=True)
    silence_s = max(0.0, now - run.written) if run.written else 0.0
    facts = run.record.run
    status = live.status(
        facts,
        run.record.windows,
        run.last,
        step=run.steps,
        state=_state(run, silence_s),
    )
    return Group(
        live.line(_title(run), "bold"),
        *status,
        live.line(_events(run, now)),
        *_verdict(run),
        *(Text(sentence, "yellow") for sentence in run.missing),
    )


def _title(run: Run) -> str:
    facts, windows = run.record.run, run.record.windows
    ranks = facts.get("world_size", windows[-1].num_ranks if windows else None)
    words = [facts.get("script"), ranks and count_of(f"{ranks:,}", "rank"), facts.get("device")]
    return "  ".join([*(str(word) for word in words if word), run.name])  # the end may be cut


def _state(run: Run, silence_s: float) -> str:
    """What takes the place of the time left; empty if nothing does."""
    windows = run.record.windows[-_RECENT:]
    if run.total_steps and run.steps >= run.total_steps:
        return "finished"
    if run.record.end:
        return f"ended: {run.record.end}"
    usual_s = 0.0
    if len(windows) > 1:
        usual_s = (windows[-1].time - windows[0].time) / (len(windows) - 1)
    if silence_s > max(_QUIET_S, _QUIET_INTERVALS * usual_s):
        return f"no new line for {silence_s:,.0f} s"
    return "starting" if run.record.runs and not windows else ""


def _verdict(run: Run) -> list[Text]:
    """What limits the run; nothing before enough was measured."""
    if run.findings is None:
        return []
    if not run.findings:
        return [live.line("no bottleneck found", "green")]
    return [Text(f"advice: {run.findings[0]}", "bold yellow")]


def _events(run: Run, now: float) -> str:
    words = ["no checkpoint in this folder"]
    if run.checkpoints:
        step, _, saved = run.checkpoints[-1]
        age = datetime.timedelta(seconds=max(0, round(now - saved)))
        words = [f"checkpoint of step {step:,}, {age} ago"]
    restarts = run.record.run.get("restarts")
    if isinstance(restarts, int):
        words.append(count_of(restarts, "restart"))
    return "  ".join(words)
