"""Read a run's folder: what it holds, and a sentence about what it lacks. Never fails on a damaged file."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from paceline.checkpoint.manifest import Damaged
from paceline.checkpoint.store import folders, open_store, read_manifest
from paceline.clock import record as clock_record
from paceline.clock.record import Record, Window
from paceline.clock.step_clock import PHASES
from paceline.errors import ConfigError, PacelineError
from paceline.metrics.flops import utilisation

METRICS = "metrics.jsonl"
_POINTS = 600  # of a curve
_WINDOWS = 240  # in a chart
_NO_CURVE = ("step", "epoch", "time_s")


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
    """

    name: str
    record: Record
    curves: dict[str, list[tuple[int, float]]]
    last: dict[str, Any]
    checkpoints: list[tuple[int, int, float]]
    missing: list[str] = field(default_factory=list)

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
    def samples_per_s(self) -> float:
        """Samples per second of the median window; 0 if unknown."""
        rates = sorted(w.samples * w.num_ranks / sum(w.wall_s) for w in self.record.windows)
        return rates[len(rates) // 2] if rates else 0.0

    @property
    def utilisation(self) -> str:
        """The MFU of the median window, see `metrics/flops.py`; empty if unknown."""
        rates = sorted(
            (w.tokens or w.samples) * w.num_ranks / sum(w.wall_s) for w in self.record.windows
        )
        return utilisation(self.record.run, rates[len(rates) // 2]) if rates else ""

    @property
    def restarts(self) -> list[dict[str, Any]]:
        """What describes the starts after the first."""
        return self.record.runs[1:]


def load(folder: str) -> Run:
    """Read a run's folder.

    Raises:
        ConfigError: it does not exist, or holds nothing that Paceline writes.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ConfigError(
            f"there is no folder {folder}.",
            fix="give the folder of `training.report` or `Trainer`.",
        )
    missing: list[str] = []
    record = Record(runs=[], windows=[])
    try:
        record = clock_record.read_record(path)
    except ConfigError:
        missing.append(
            f"There is no {clock_record.FILE}: the run was made by an older version, or has no step yet. So "
            "it is not known where its time went."
        )
    else:
        if not record.windows:
            missing.append("No second of the run is measured yet.")
        if record.skipped:
            missing.append(
                f"{record.skipped} of the lines of {clock_record.FILE} cannot be read, such as the last one "
                "while it is written."
            )
    lines, damaged = _read_lines(path / METRICS)
    if damaged:
        missing.append(f"{damaged} of the lines of {METRICS} cannot be read.")
    if not lines:
        missing.append(f"There are no logged values: {METRICS} is missing or empty.")
    checkpoints = _checkpoints(path)
    if not (lines or record.runs or record.windows or checkpoints or record.skipped):
        raise ConfigError(
            f"{folder} is not the folder of a run: it holds no {METRICS}, no {clock_record.FILE} and no "
            "checkpoint.",
            fix="give the folder of `training.report` or `Trainer`.",
        )
    return Run(
        name=folder,
        record=record,
        curves=_curves(lines),
        last=lines[-1] if lines else {},
        checkpoints=checkpoints,
        missing=missing,
    )


def _read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The lines with a step, and the number of those that cannot be read."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return [], 0
    found, damaged = [], 0
    for line in lines:
        try:
            entry = json.loads(line)
            int(entry["step"])
        except (ValueError, KeyError, TypeError):
            damaged += 1
        else:
            found.append(entry)
    return found, damaged


def _curves(lines: Sequence[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    points: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        for name, value in line.items():
            if name in _NO_CURVE or isinstance(value, bool) or not isinstance(value, int | float):
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
    """At most some hundred windows: neighbours with the same number of ranks become one."""
    size = -(-len(windows) // _WINDOWS)
    merged = []
    for first in range(0, len(windows), max(size, 1)):
        group = [
            w for w in windows[first : first + size] if w.num_ranks == windows[first].num_ranks
        ]
        merged.append(merge(group))
    return merged


def merge(windows: Sequence[Window]) -> Window:
    """One window over several with the same number of ranks."""
    last, ranks = windows[-1], range(windows[0].num_ranks)
    return Window(
        step=last.step,
        steps=sum(w.steps for w in windows),
        time=last.time,
        samples=sum(w.samples for w in windows),
        wall_s=[sum(w.wall_s[rank] for w in windows) for rank in ranks],
        spent_s={
            phase: [sum(w.spent_s[phase][rank] for w in windows) for rank in ranks]
            for phase in PHASES
        },
        memory_bytes=[max(w.memory_bytes[rank] for w in windows) for rank in ranks],
        busy=[sum(w.busy[rank] for w in windows) / len(windows) for rank in ranks],
        spans=last.spans,
    )


def _checkpoints(path: Path) -> list[tuple[int, int, float]]:
    """Of the folder itself, or of its folder "checkpoints"."""
    found: list[tuple[int, int, float]] = []
    for folder in (path, path / "checkpoints"):
        if not folder.is_dir():
            continue
        store = open_store(str(folder))
        for step in folders(store):
            try:
                manifest = read_manifest(store, step)
            except (Damaged, PacelineError, OSError):
                continue
            found.append((step, manifest.size_bytes, manifest.saved_at))
    return sorted(found)
