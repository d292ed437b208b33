"""Read a run's folder: what it holds, and a sentence about what it lacks. Never fails on a damaged file."""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from paceline.checkpoint.manifest import Damaged
from paceline.checkpoint.store import committed, open_store, read_manifest
from paceline.clock import record as clock_record
from paceline.clock.judge import Finding, judge, num_newest
from paceline.clock.record import Record, Window
from paceline.clock.step_clock import PHASES
from paceline.errors import ConfigError, PacelineError, count_of
from paceline.metrics.json_lines import METRICS, OWN_NAMES

_POINTS = 600  # of a curve
_WINDOWS = 240  # in a chart
_LAST_LINES = 10  # of metrics.jsonl
_RUN = b'"run": {'  # in a line that describes the run


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run's folder holds.

    Args:
        name: The folder, as given.
        record: Where the time went; without windows if that is unknown.
        curves: By name of a logged value: (step, value).
        last: The last line of metrics.jsonl; empty without one.
        checkpoints: (step, bytes, seconds since the epoch), oldest first.
        missing: Sentences about what the folder lacks.
        written: When a line was last written, in seconds since the epoch; 0 if there is none.
    """

    name: str
    record: Record
    curves: dict[str, list[tuple[int, float]]]
    last: dict[str, Any]
    checkpoints: list[tuple[int, int, float]]
    missing: list[str] = field(default_factory=list)
    written: float = 0.0

    @property
    def steps(self) -> int:
        """Number of the last step that is known."""
        windows = self.record.windows
        return max(int(self.last.get("step", 0)), windows[-1].step if windows else 0)

    @property
    def total_steps(self) -> int | None:
        """Number of the step at which the run ends; None if unknown."""
        total = self.record.run.get("total_steps")
        return total if isinstance(total, int) else None

    @cached_property
    def seconds(self) -> float:
        """Seconds in the training loop, over all starts."""
        return sum(sum(w.wall_s) / w.num_ranks for w in self.record.windows)

    @cached_property
    def phases_s(self) -> dict[str, float]:
        """By phase that occurred: its seconds, over all starts; the mean over ranks."""
        spent_s = {
            phase: sum(sum(w.spent_s[phase]) / w.num_ranks for w in self.record.windows)
            for phase in PHASES
        }
        return {phase: seconds for phase, seconds in spent_s.items() if seconds}

    @property
    def rate(self) -> float:
        """Samples (or tokens) per second of the median window; 0 if unknown."""
        rates = sorted(window.rate for window in self.record.windows)
        return rates[len(rates) // 2] if rates else 0.0

    @property
    def unit(self) -> str:
        """What `rate` counts: "samples" or "tokens"."""
        return self.record.windows[-1].unit if self.record.windows else "samples"

    @cached_property
    def findings(self) -> list[Finding] | None:
        """What limits the run; None if too little was measured."""
        return judge(self.record)

    @property
    def restarts(self) -> list[dict[str, Any]]:
        """What describes the starts after the first, without further loops of one process."""
        return [run for run in self.record.runs[1:] if not run.get("loop")]


def load(folder: str, *, newest_only: bool = False) -> Run:
    """Read a run's folder.

    Args:
        newest_only: Whether to read only the windows that the advice of the training itself is about, and
            the last lines of metrics.jsonl.

    Raises:
        ConfigError: it does not exist, holds nothing that Paceline writes, or cannot be read.
    """
    path = Path(folder)
    if not path.is_dir():
        problem = "is a file, not the folder of a run" if path.exists() else "does not exist"
        raise ConfigError(
            f"{folder} {problem}.", fix="give the folder of `training.report` or `Trainer`."
        )
    try:
        clock = _read_lines(path / clock_record.FILE)
        metrics = _read_lines(path / METRICS, _LAST_LINES if newest_only else None)
    except OSError as error:
        raise ConfigError(
            f"{error.filename} cannot be read: {error.strerror}.", fix="read it as a user who may."
        ) from error
    checkpoints, damaged = _checkpoints(path)
    if not (checkpoints or clock or metrics):
        raise ConfigError(
            f"{folder} is not the folder of a run: it holds no {METRICS}, no {clock_record.FILE} "
            "and no checkpoint.",
            fix="give the folder of `training.report` or `Trainer`.",
        )
    lines = clock.lines if clock else ()
    record = clock_record.read_lines(_newest(lines) if newest_only else lines)
    logged = [entry for line in metrics.lines if (entry := _entry(line))] if metrics else []
    missing = []
    if not clock:
        missing.append(
            f"There is no {clock_record.FILE}: the run was made by an older version, or has no step yet. "
            "So it is not known where its time went."
        )
    elif not record.windows:
        missing.append("No step has been measured yet.")
    damaged_lines = len(metrics.lines) - len(logged) if metrics else 0
    for name, count in ((clock_record.FILE, record.skipped), (METRICS, damaged_lines)):
        if count:
            missing.append(f"Damaged and left out: {count_of(count, 'line')} of {name}.")
    missing += [
        f"The last line of {file.name} is incomplete: the run writes it now, or was interrupted."
        for file in (clock, metrics)
        if file and file.is_torn
    ]
    if not logged:
        missing.append(f"There are no logged values: {METRICS} is missing or empty.")
    return Run(
        name=folder,
        record=record,
        curves=_curves(logged),
        last=logged[-1] if logged else {},
        checkpoints=checkpoints,
        missing=[*missing, *damaged],
        written=max((file.written for file in (clock, metrics) if file), default=0.0),
    )


@dataclass(frozen=True)
class _File:
    """The lines of a file, without the last one if it is incomplete, and when it was last written."""

    name: str
    lines: Sequence[bytes]
    is_torn: bool
    written: float


def _read_lines(path: Path, newest: int | None = None) -> _File | None:
    """The lines of a file, or the newest ones; None without a file."""
    try:
        with path.open("rb") as file:
            written = os.fstat(file.fileno()).st_mtime
            lines = deque(file, maxlen=newest)
    except FileNotFoundError:
        return None
    is_torn = bool(lines) and not lines[-1].endswith(b"\n")
    if is_torn:
        lines.pop()
    return _File(path.name, lines, is_torn, written)


def _newest(lines: Sequence[bytes]) -> list[bytes]:
    """The lines that describe the run, and of the others the newest."""
    starts = [line for line in lines if _RUN in line]
    first = len(lines) - num_newest(clock_record.read_lines(starts).run.get("world_size", 1))
    return [line for number, line in enumerate(lines) if number >= first or _RUN in line]


def _entry(line: bytes) -> dict[str, Any] | None:
    """A line of metrics.jsonl; None if it is damaged."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and type(entry.get("step")) is int else None


def _curves(lines: Sequence[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    points: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        for name, value in line.items():
            if name in OWN_NAMES or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if math.isfinite(value):
                points.setdefault(name, []).append((line["step"], float(value)))
    return points


def thin(curve: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most some hundred points: the mean of neighbours, at the step of the last of them."""
    size = -(-len(curve) // _POINTS)
    groups = [curve[first : first + size] for first in range(0, len(curve), max(size, 1))]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]


def thin_windows(windows: Sequence[Window]) -> list[Window]:
    """Some hundred windows: neighbours with the same number of ranks become one."""
    size = max(1, -(-len(windows) // _WINDOWS))
    merged = []
    for _, same in groupby(windows, key=lambda window: window.num_ranks):
        own = list(same)
        merged += [merge(own[first : first + size]) for first in range(0, len(own), size)]
    return merged


def merge(windows: Sequence[Window]) -> Window:
    """One window over several with the same number of ranks."""
    last, ranks = windows[-1], range(windows[0].num_ranks)
    return Window(
        step=last.step,
        steps=sum(w.steps for w in windows),
        time=last.time,
        samples=sum(w.samples for w in windows),
        tokens=sum(w.tokens for w in windows),
        spent_s={
            phase: [sum(w.spent_s[phase][rank] for w in windows) for rank in ranks]
            for phase in PHASES
        },
        memory_bytes=[max(w.memory_bytes[rank] for w in windows) for rank in ranks],
        busy=[sum(w.busy[rank] for w in windows) / len(windows) for rank in ranks],
    )


def _checkpoints(path: Path) -> tuple[list[tuple[int, int, float]], list[str]]:
    """Those of the folder itself, or of its folder "checkpoints", and sentences about the damaged ones."""
    found: list[tuple[int, int, float]] = []
    damaged: list[str] = []
    for folder in (path, path / "checkpoints"):
        if not folder.is_dir():
            continue
        store = open_store(str(folder))
        for step in committed(store):
            try:
                manifest = read_manifest(store, step)
            except (Damaged, PacelineError, OSError) as error:
                if step in committed(store):  # otherwise the run has just removed it
                    why = str(error).splitlines()[0].removesuffix(".")
                    damaged.append(f"The checkpoint of step {step:,} is left out: {why}.")
                continue
            found.append((step, manifest.size_bytes, manifest.saved_at))
    return sorted(found), damaged
