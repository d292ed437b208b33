"""Read a run's folder: what it holds, and a sentence about what it lacks. Never fails on a damaged file."""

from __future__ import annotations

import json
import math
import os
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from paceline.checkpoint.manifest import Damaged
from paceline.checkpoint.store import committed, open_store, read_manifest
from paceline.clock import record as clock_record
from paceline.clock.judge import Finding, judge
from paceline.clock.record import Record, Window
from paceline.clock.step_clock import PHASES
from paceline.errors import ConfigError, PacelineError
from paceline.metrics.flops import utilisation
from paceline.metrics.json_lines import METRICS, OWN_NAMES

_POINTS = 600  # of a curve
_WINDOWS = 240  # in a chart
_RUN = re.compile(rb'\{"step": \d+, "run"')  # a line that describes the run


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

    @cached_property
    def findings(self) -> list[Finding] | None:
        """What limits the run; None if too little was measured."""
        return judge(self.record)

    @property
    def restarts(self) -> list[dict[str, Any]]:
        """What describes the starts after the first, without further loops of one process."""
        return [run for run in self.record.runs[1:] if not run.get("loop")]


def load(folder: str) -> Run:
    """Read a run's folder.

    Raises:
        ConfigError: it does not exist, or holds nothing that Paceline writes.
    """
    return RunReader(folder).read()


class RunReader:
    """Reads a run's folder, several times while the run goes on. Each time it reads only the new lines.

    Args:
        most_windows: How many of the newest windows are kept, and lines of metrics.jsonl; None for all.
    """

    def __init__(self, folder: str, most_windows: int | None = None) -> None:
        self._folder = folder
        self._most = most_windows
        self._clock = _NewLines(Path(folder) / clock_record.FILE)
        self._metrics = _NewLines(Path(folder) / METRICS)
        self._record = Record(runs=[], windows=[])
        self._logged: list[dict[str, Any]] = []
        self._damaged = 0  # lines of metrics.jsonl

    def read(self) -> Run:
        """What the folder holds now.

        Raises:
            ConfigError: it does not exist, holds nothing that Paceline writes, or cannot be read.
        """
        path = Path(self._folder)
        if not path.is_dir():
            problem = "is a file, not the folder of a run" if path.exists() else "does not exist"
            raise ConfigError(
                f"{self._folder} {problem}.",
                fix="give the folder of `training.report` or `Trainer`.",
            )
        try:
            self._read_clock()
            self._read_metrics()
        except OSError as error:
            raise ConfigError(
                f"{error.filename} cannot be read: {error.strerror}.",
                fix="read it as a user who may.",
            ) from error
        checkpoints, damaged = _checkpoints(path)
        files = (self._clock, self._metrics)
        if not (checkpoints or any(file.written for file in files)):
            raise ConfigError(
                f"{self._folder} is not the folder of a run: it holds no {METRICS}, no {clock_record.FILE} "
                "and no checkpoint.",
                fix="give the folder of `training.report` or `Trainer`.",
            )
        return Run(
            name=self._folder,
            record=self._record,
            curves=_curves(self._logged),
            last=self._logged[-1] if self._logged else {},
            checkpoints=checkpoints,
            missing=[*self._missing(), *damaged],
            written=max(file.written for file in files),
        )

    def _read_clock(self) -> None:
        lines, is_new = self._clock.read(self._most)
        if is_new:
            self._record = Record(runs=[], windows=[])
        record = clock_record.read_lines(lines, self._record)
        if self._most is not None:
            record = replace(record, windows=record.windows[-self._most :])
        self._record = record

    def _read_metrics(self) -> None:
        lines, is_new = self._metrics.read(self._most)
        if is_new:
            self._logged, self._damaged = [], 0
        for line in lines:
            try:
                entry = json.loads(line)
                if type(entry["step"]) is not int:
                    raise ValueError("not a step")
            except (ValueError, KeyError, TypeError):
                self._damaged += 1
            else:
                self._logged.append(entry)
        if self._most is not None:
            del self._logged[: -self._most]

    def _missing(self) -> list[str]:
        """Sentences about what the folder lacks."""
        missing = []
        if self._clock.written:
            if not self._record.windows:
                missing.append("No step has been measured yet.")
        else:
            missing.append(
                f"There is no {clock_record.FILE}: the run was made by an older version, or has no step yet. "
                "So it is not known where its time went."
            )
        damaged = ((clock_record.FILE, self._record.skipped), (METRICS, self._damaged))
        for name, count in damaged:
            if count:
                lines = "1 line" if count == 1 else f"{count} lines"
                missing.append(f"Damaged and left out: {lines} of {name}.")
        for file in (self._clock, self._metrics):
            if file.is_torn:
                missing.append(
                    f"The last line of {file.name} is incomplete: the run writes it now, or was interrupted."
                )
        if not self._logged:
            missing.append(f"There are no logged values: {METRICS} is missing or empty.")
        return missing


class _NewLines:
    """The lines of a file that a run appends to, or replaces when it starts again.

    Attributes:
        name: Of the file.
        is_torn: Whether its last line is incomplete, which is left for the next call.
        written: When it was last written, in seconds since the epoch; 0 if it does not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.name = path.name
        self._file = (0, 0)  # device and inode
        self._end = 0  # of what has been read
        self.is_torn = False
        self.written = 0.0

    def read(self, most: int | None) -> tuple[list[bytes], bool]:
        """The lines since the last call, and whether they are those of another file than then.

        Args:
            most: How many of the newest lines; None for all. In any case all lines that describe the run are
                returned, before the others.
        """
        described: list[bytes] = []
        newest: deque[bytes] = deque(maxlen=most)
        try:
            with self._path.open("rb") as file:
                state = os.fstat(file.fileno())
                is_new = (state.st_dev, state.st_ino) != self._file or state.st_size < self._end
                self._file = state.st_dev, state.st_ino
                self.written = state.st_mtime
                if is_new:
                    self._end = 0
                file.seek(self._end)
                self.is_torn = False
                for line in file:
                    if not line.endswith(b"\n"):
                        self.is_torn = True
                        break
                    self._end += len(line)
                    (described if _RUN.match(line) else newest).append(line)
        except FileNotFoundError:
            return [], False
        return [*described, *newest], is_new


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
