"""What a report says: sections with sentences, tables and charts, for one run or two. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.clock.judge import CHECKED
from paceline.clock.record import Window
from paceline.clock.step_clock import PHASES
from paceline.machine import format_bytes
from paceline.report import charts
from paceline.report.run import Run, merge, thin, thin_windows

_SHOWN_RANKS = 16  # more are summarised
_SHOWN_EVENTS = 20  # besides restarts
# What describes a start, but is no setting.
_NO_SETTINGS = ("time", "step", "total_steps")


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
    level: int = field(default=2)


def sections(run: Run, other: Run | None = None) -> list[Section]:
    """The report about a run, or about two runs side by side."""
    runs = [run] if other is None else [run, other]
    found = [_summary(runs)]
    if other is not None:
        found.append(_differences(run, other))
    found += _curves(runs)
    for each in runs:
        name = f": {each.name}" if other is not None else ""
        parts = (_breakdown, _ranks, _events, _memory, _environment)
        found += [part for make in parts for part in make(each, name)]
    return found


def _summary(runs: Sequence[Run]) -> Section:
    facts: list[tuple[str, Callable[[Run], str]]] = [
        ("steps", _progress),
        ("time in the loop", lambda run: _duration(run.seconds)),
        ("samples per second", lambda run: _number(run.samples_per_s)),
        *(
            [("use of the devices", lambda run: run.utilisation or "unknown")]
            if any(run.utilisation for run in runs)
            else []
        ),
        ("ranks", lambda run: str(run.record.run.get("world_size", "unknown"))),
        ("starts", lambda run: str(len(run.record.runs) or "unknown")),
        ("checkpoints", lambda run: str(len(run.checkpoints))),
        (
            "last loss",
            lambda run: _number(run.last["loss"]) if "loss" in run.last else "not logged",
        ),
    ]
    facts += [
        (phase, _share_of(phase)) for phase in PHASES if any(phase in r.phases_s for r in runs)
    ]
    text = []
    for run in runs:
        whose = f"{run.name}: " if len(runs) > 1 else ""
        text += [f"{whose}{finding}." for finding in run.findings or ()]
        if run.findings is None and run.record.windows:
            text.append(f"{whose}The time since the last start is too short for advice.")
        elif run.findings == []:
            text.append(f"{whose}No bottleneck found. Checked: {CHECKED}.")
        if run.total_steps and run.steps < run.total_steps and run.written:
            text.append(
                f"{whose}The run has not reached its last step: {_progress(run)} steps, the last line was "
                f"written at {_clock(run.written)}."
            )
        text += [whose + sentence for sentence in run.missing]
    rows = [[name, *(value(run) for run in runs)] for name, value in facts]
    return Section(title="Summary", text=text, table=Table(["", *(r.name for r in runs)], rows))


def _progress(run: Run) -> str:
    return f"{run.steps:,} of {run.total_steps:,}" if run.total_steps else f"{run.steps:,}"


def _share_of(phase: str) -> Callable[[Run], str]:
    def text(run: Run) -> str:
        return _percent(run.phases_s.get(phase, 0.0) / run.seconds) if run.seconds else "unknown"

    return text


def _differences(run: Run, other: Run) -> Section:
    first, second = run.record.run, other.record.run
    names = [
        n for n in {**first, **second} if n not in _NO_SETTINGS and first.get(n) != second.get(n)
    ]
    rows = [[name, str(first.get(name, "-")), str(second.get(name, "-"))] for name in names]
    text = [] if rows else ["The two runs have the same settings."]
    if run.samples_per_s and other.samples_per_s:
        ratio = other.samples_per_s / run.samples_per_s
        text.append(
            f"{other.name} trains {ratio:.2f} times as many samples per second as {run.name}."
        )
    return Section(
        title="What differs",
        text=text,
        table=Table(["setting", run.name, other.name], rows) if rows else None,
    )


def _curves(runs: Sequence[Run]) -> Iterator[Section]:
    names = sorted({name for run in runs for name in run.curves}, key=lambda n: (n != "loss", n))
    for name in names:
        values = [
            {"step": step, "value": value, "run": run.name}
            for run in runs
            for step, value in thin(run.curves.get(name, ()))
        ]
        rows = [
            [run.name, *map(_number, (curve[0], min(curve), max(curve), curve[-1]))]
            for run in runs
            if (curve := [value for _, value in run.curves.get(name, ())])
        ]
        yield Section(
            title=name.capitalize() if name == "loss" else name,
            table=Table(["run", "first", "lowest", "highest", "last"], rows),
            chart=charts.curve(values, name),
            alt=f"{name} over the steps",
            level=3 if name != "loss" else 2,
        )
    values = [
        {"step": w.step, "value": w.samples * w.num_ranks / sum(w.wall_s), "run": run.name}
        for run in runs
        for w in thin_windows(run.record.windows)
    ]
    if values:
        rows = [[run.name, _number(run.samples_per_s)] for run in runs if run.record.windows]
        yield Section(
            title="Throughput",
            table=Table(["run", "samples per second, median"], rows),
            chart=charts.curve(values, "samples per second"),
            alt="samples per second over the steps",
        )


def _order(phase: str) -> int:
    return PHASES.index(phase)


def _breakdown(run: Run, name: str) -> Iterator[Section]:
    if not run.record.windows:
        return
    values = [
        {
            "step": w.step,
            "phase": phase,
            "ms": 1e3 * sum(spent) / w.num_ranks / w.steps,
            "order": _order(phase),
        }
        for w in thin_windows(run.record.windows)
        for phase, spent in w.spent_s.items()
        if phase in run.phases_s
    ]
    steps = sum(w.steps for w in run.record.windows)
    first = run.record.windows[0]
    begin = first.step - first.steps
    values = [v | {"step": begin} for v in values if v["step"] == values[0]["step"]] + values
    rows = [
        [phase, _ms(seconds / steps), _percent(seconds / run.seconds)]
        for phase, seconds in run.phases_s.items()
    ]
    yield Section(
        title=f"Where the time goes{name}",
        text=[
            "Mean over the ranks. Communication: time in which a rank waits for others and computes nothing."
        ],
        table=Table(["phase", "ms of one step", "share"], rows),
        chart=charts.breakdown(values),
        alt="the milliseconds of each phase of a step, over the steps",
    )


def _same_size(run: Run) -> list[Window]:
    """The windows with as many ranks as the last one."""
    windows = run.record.windows
    return [w for w in windows if w.num_ranks == windows[-1].num_ranks] if windows else []


def _ranks(run: Run, name: str) -> Iterator[Section]:
    windows = _same_size(run)
    if not windows or windows[-1].num_ranks < 2:
        return
    whole = merge(windows)
    ranks = range(whole.num_ranks)
    waits = [wait / whole.steps for wait in whole.spent_s["communication"]]
    own = [whole.wall_s[rank] / whole.steps - waits[rank] for rank in ranks]
    slowest = sorted(ranks, key=lambda rank: -own[rank])
    shown = sorted(slowest[:_SHOWN_RANKS] if len(ranks) > _SHOWN_RANKS else ranks)
    text = [f"{each.title}." for each in run.findings or () if each.kind == "straggler"]
    if run.findings is not None and not text:
        text.append("No rank holds up the others.")
    if len(ranks) > len(shown):
        quantiles = sorted(own)
        low, high = quantiles[len(own) // 10], quantiles[-1 - len(own) // 10]
        text.append(
            f"The {len(shown)} slowest of {len(ranks)} ranks are shown. The own work of 80 % of all ranks "
            f"takes {_ms(low)} to {_ms(high)} ms of a step."
        )
    values = [
        {"row": str(rank), "phase": p, "ms": 1e3 * s[rank] / whole.steps, "order": _order(p)}
        for rank in shown
        for p, s in whole.spent_s.items()
        if sum(s)
    ]
    rows = [[str(r), _ms(own[r]), _ms(waits[r]), _busy(run, whole.busy[r])] for r in shown]
    yield Section(
        title=f"Ranks{name}",
        text=text,
        table=Table(["rank", "own work, ms of a step", "waiting, ms", _busy_name(run)], rows),
        chart=charts.bars(values, "rank"),
        alt="the milliseconds of each phase of a step, one bar for each rank",
    )


def _busy_name(run: Run) -> str:
    return "cores in use" if run.record.run.get("device", "cpu") == "cpu" else "GPU busy"


def _busy(run: Run, value: float) -> str:
    if value < 0:
        return "unknown"
    return f"{value:.2f}" if _busy_name(run) == "cores in use" else f"{100 * value:.0f} %"


def _events(run: Run, name: str) -> Iterator[Section]:
    starts = [each["time"] for each in run.record.runs if "time" in each]
    windows = run.record.windows
    if not starts:
        return
    found: list[tuple[float, str, str]] = [
        (each["time"], "restart", f"started again after step {each['step']:,}")
        for each in run.restarts
        if "time" in each
    ]
    found += [
        (at, "checkpoint", f"step {step:,}, {format_bytes(size)}")
        for step, size, at in run.checkpoints
    ]
    for phase in ("evaluation", "checkpoint"):
        stalls = [
            (w.time, max(w.spent_s[phase]), w.step) for w in windows if max(w.spent_s[phase]) > 0
        ]
        kind = "evaluation" if phase == "evaluation" else "blocked by a checkpoint"
        found += [(at, kind, f"{_ms(s)} ms, up to step {step:,}") for at, s, step in stalls]
    if not found:
        return
    found.sort()
    unit, unit_s = ("minutes", 60) if found[-1][0] - starts[0] > 120 else ("seconds", 1)
    values = [
        {"passed": round((at - starts[0]) / unit_s, 4), "kind": kind, "text": what}
        for at, kind, what in found
    ]
    restarts = [event for event in found if event[1] == "restart"]
    others = [event for event in found if event[1] != "restart"]
    text = f"{len(restarts) or 'No'} restart{'' if len(restarts) == 1 else 's'}."
    if len(others) > _SHOWN_EVENTS:
        text += f" The table lists the last {_SHOWN_EVENTS} other events."
    rows = [[_clock(at), kind, what] for at, kind, what in restarts + others[-_SHOWN_EVENTS:]]
    yield Section(
        title=f"Restarts, checkpoints and evaluations{name}",
        text=[text],
        table=Table(["time", "event", "what"], rows),
        chart=charts.events(values, unit),
        alt="restarts, checkpoints and evaluations in time",
    )


def _memory(run: Run, name: str) -> Iterator[Section]:
    windows = _same_size(run)
    if not windows:
        return
    whole = merge(windows)
    largest = sorted(range(whole.num_ranks), key=lambda rank: -whole.memory_bytes[rank])[
        :_SHOWN_RANKS
    ]
    values = [
        {"step": w.step, "value": w.memory_bytes[rank] / 2**20, "run": f"rank {rank}"}
        for w in thin_windows(windows)
        for rank in sorted(largest[:4])
    ]
    rows = [[str(rank), format_bytes(int(whole.memory_bytes[rank]))] for rank in sorted(largest)]
    yield Section(
        title=f"Memory{name}",
        table=Table(["rank", "most memory"], rows),
        chart=charts.curve(values, "MiB"),
        alt="memory in use over the steps, of the ranks that use most",
    )


def _environment(run: Run, name: str) -> Iterator[Section]:
    facts = run.record.run
    if facts:
        rows = [
            [key, str(value)]
            for key, value in facts.items()
            if value is not None and key not in _NO_SETTINGS
        ]
        yield Section(title=f"Environment{name}", table=Table(["setting", "value"], rows))


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.3g}" if seconds < 1 else f"{1e3 * seconds:,.0f}"


def _duration(seconds: float) -> str:
    if not seconds:
        return "unknown"
    hours, rest = divmod(round(seconds), 3600)
    minutes, rest = divmod(rest, 60)
    return (
        f"{hours} h {minutes} min"
        if hours
        else f"{minutes} min {rest} s"
        if minutes
        else f"{seconds:.1f} s"
    )


def _number(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, int | float) else str(value)


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
