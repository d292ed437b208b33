"""What a report says: sections with sentences, tables and charts. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.clock.judge import CHECKED
from paceline.clock.step_clock import PHASES
from paceline.errors import count_of
from paceline.machine import format_bytes
from paceline.metrics.flops import utilisation
from paceline.report import charts
from paceline.report.run import Run, merge, thin, thin_windows

_SHOWN_RANKS = 16  # more are summarised
_SHOWN_EVENTS = 20
# What describes a start, but is no setting.
_NO_SETTINGS = ("time", "step", "total_steps", "buckets", "blocks", "powersgd_bytes")


@dataclass(frozen=True)
class Table:
    """Rows of text; the first column names the row."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Section:
    """One heading and what is below it.

    Args:
        text: Sentences.
        table: The figures.
        chart: A specification of Vega-Lite; the table sums up its figures.
        alt: What the chart shows, in words.
    """

    title: str
    text: Sequence[str] = ()
    table: Table | None = None
    chart: charts.Spec | None = None
    alt: str = ""


def title(run: Run) -> str:
    """What the report is about: the script, or else the folder."""
    return f"Paceline report: {run.record.run.get('script') or run.name}"


def sections(run: Run) -> list[Section]:
    """The report about a run."""
    parts = (_curves, _throughput, _breakdown, _ranks, _events, _environment)
    return [_summary(run), *(section for part in parts for section in part(run))]


def _summary(run: Run) -> Section:
    used = utilisation(run.record.run, run.rate) if run.rate else ""
    starts = [start["time"] for start in run.record.runs if "time" in start]
    rows = [
        ["folder", run.name],
        ["began", _clock(starts[0]) if starts else "unknown"],
        ["last line written", _clock(run.written) if run.written else "never"],
        ["steps", _progress(run)],
        ["time in the loop", _duration(run.seconds)],
        [f"{run.unit} per second", _number(run.rate)],
        *([["use of the devices", used]] if used else []),
        ["ranks", str(run.record.run.get("world_size", "unknown"))],
        ["starts", str(len(run.record.runs) or "unknown")],
        ["checkpoints", str(len(run.checkpoints))],
        ["last loss", _number(run.last["loss"]) if "loss" in run.last else "not logged"],
    ]
    text = [f"{finding}." for finding in run.findings or ()]
    if run.findings is None and run.record.windows:
        text.append("The time since the last start is too short for advice.")
    elif run.findings == []:
        text.append(f"No bottleneck found. Checked: {CHECKED}.")
    if run.total_steps and run.steps < run.total_steps and run.written:
        end = f" The training ended: {run.record.end}." if run.record.end else ""
        text.append(f"The run has not reached its last step.{end}")
    return Section(title="Summary", text=[*text, *run.missing], table=Table(["", ""], rows))


def _progress(run: Run) -> str:
    return f"{run.steps:,} of {run.total_steps:,}" if run.total_steps else f"{run.steps:,}"


def _curves(run: Run) -> Iterator[Section]:
    for name in sorted(run.curves, key=lambda name: (name != "loss", name)):
        values = [value for _, value in run.curves[name]]
        row = map(_number, (values[0], min(values), max(values), values[-1]))
        yield Section(
            title="Loss" if name == "loss" else name,
            table=Table(["first", "lowest", "highest", "last"], [list(row)]),
            chart=charts.curve(thin(run.curves[name]), name),
            alt=f"{name} over the steps",
        )


def _throughput(run: Run) -> Iterator[Section]:
    windows = thin_windows(run.record.windows)
    if windows:
        what = f"{run.unit} per second"
        yield Section(
            title="Throughput",
            table=Table([f"{what}, median"], [[_number(run.rate)]]),
            chart=charts.curve([(window.step, window.rate) for window in windows], what),
            alt=f"{what} over the steps",
        )


def _breakdown(run: Run) -> Iterator[Section]:
    windows = thin_windows(run.record.windows)
    if not windows:
        return
    first = run.record.windows[0]
    # An area begins at the first step of its window, and the last one needs an end.
    begins = [first.step - first.steps, *(window.step for window in windows)]
    values = [
        {"step": begin, "ms": 1e3 * sum(window.spent_s[phase]) / n, **_phase(phase)}
        for begin, window in zip(begins, [*windows, windows[-1]], strict=True)
        if (n := window.num_ranks * window.steps)
        for phase in run.phases_s
    ]
    steps = sum(w.steps for w in run.record.windows)
    rows = [
        [phase, _ms(seconds / steps), f"{100 * seconds / run.seconds:.1f} %"]
        for phase, seconds in run.phases_s.items()
    ]
    yield Section(
        title="Where the time goes",
        text=[
            "Mean over the ranks. Communication: time in which a rank waits for others and computes nothing."
        ],
        table=Table(["phase", "ms of one step", "share"], rows),
        chart=charts.breakdown(values),
        alt="the milliseconds of each phase of a step, over the steps",
    )


def _phase(name: str) -> dict[str, Any]:
    return {"phase": name, "order": PHASES.index(name)}


def _ranks(run: Run) -> Iterator[Section]:
    windows = run.record.windows
    if not windows:
        return
    # The windows with as many ranks as the last one.
    whole = merge([w for w in windows if w.num_ranks == windows[-1].num_ranks])
    ranks = range(whole.num_ranks)
    waits = [whole.spent_s["communication"][rank] / whole.steps for rank in ranks]
    own = [whole.wall_s[rank] / whole.steps - waits[rank] for rank in ranks]
    slowest = sorted(ranks, key=lambda rank: -own[rank])
    shown = sorted(slowest[:_SHOWN_RANKS])
    text = []
    if run.findings is not None and len(ranks) > 1:
        slow = [f"{each.title}." for each in run.findings if each.kind == "straggler"]
        text += slow or ["No rank holds up the others."]
    if len(ranks) > len(shown):
        text.append(f"The {len(shown)} slowest of {len(ranks)} ranks are shown.")
    values = [
        {"row": str(rank), "ms": 1e3 * whole.spent_s[phase][rank] / whole.steps, **_phase(phase)}
        for rank in shown
        for phase in PHASES
        if sum(whole.spent_s[phase])
    ]
    on_cpu = run.record.run.get("device", "cpu") == "cpu"
    rows = [
        [
            str(rank),
            _ms(own[rank]),
            _ms(waits[rank]),
            _busy(whole.busy[rank], on_cpu=on_cpu),
            format_bytes(int(whole.memory_bytes[rank])),
        ]
        for rank in shown
    ]
    busy = "cores in use" if on_cpu else "GPU busy"
    head = ["rank", "own work, ms of a step", "waiting, ms", busy, "most memory"]
    yield Section(
        title="Ranks",
        text=text,
        table=Table(head, rows),
        chart=charts.bars(values),
        alt="the milliseconds of each phase of a step, one bar for each rank",
    )


def _busy(value: float, *, on_cpu: bool) -> str:
    if value < 0:
        return "unknown"
    return f"{value:.2f}" if on_cpu else f"{100 * value:.0f} %"


def _events(run: Run) -> Iterator[Section]:
    """Restarts, checkpoints and evaluations in the order of time."""
    found: list[tuple[float, str, str]] = [
        (each["time"], "restart", f"started again after step {each['step']:,}")
        for each in run.restarts
        if "time" in each
    ]
    found += [
        (at, "checkpoint", f"step {step:,}, {format_bytes(size)}")
        for step, size, at in run.checkpoints
    ]
    found += [
        (w.time, "evaluation", f"{_ms(seconds)} ms, up to step {w.step:,}")
        for w in run.record.windows
        if (seconds := max(w.spent_s["evaluation"])) > 0
    ]
    if not found:
        return
    text = f"{count_of(len(run.restarts), 'restart')}."
    if len(found) > _SHOWN_EVENTS:
        text += f" The table lists the last {_SHOWN_EVENTS} of {len(found)} events."
    rows = [[_clock(at), kind, what] for at, kind, what in sorted(found)[-_SHOWN_EVENTS:]]
    yield Section(
        title="Restarts, checkpoints and evaluations",
        text=[text],
        table=Table(["time", "event", "what"], rows),
    )


def _environment(run: Run) -> Iterator[Section]:
    rows = [
        [key, str(value)]
        for key, value in run.record.run.items()
        if value is not None and key not in _NO_SETTINGS
    ]
    if rows:
        yield Section(title="Environment", table=Table(["setting", "value"], rows))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.3g}" if seconds < 1 else f"{1e3 * seconds:,.0f}"


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    minutes, rest = divmod(rest, 60)
    if hours:
        return f"{hours} h {minutes} min"
    if minutes:
        return f"{minutes} min {rest} s"
    return f"{seconds:.1f} s" if seconds else "unknown"


def _number(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, int | float) else str(value)


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
