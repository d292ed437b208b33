"""`clock.jsonl`: where the time of a run went, on every rank. Rank 0 writes it, and this file reads it.

Each line is a JSON object. A line with "run" describes the run; it comes first, and again after each restart.
A line with "link" belongs to it, and has what was measured of the connection between the ranks.
A line with "spent_s" is a window: some steps in a row, about a second of them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.clock.step_clock import PHASES, Times
from paceline.errors import ConfigError

FILE = "clock.jsonl"
_SPAN_RANKS = 8  # ranks whose phases of a step are kept
_SPANS = 32  # of one step
_HEAD = 7  # numbers before the phases: steps, memory, busy, cores, collate, load, beginning


@dataclass(frozen=True, kw_only=True)
class Window:
    """Some steps in a row, and where their time went.

    Args:
        step: The number of the last one.
        steps: How many.
        time: When they ended, in seconds since the epoch.
        samples: Of these steps, over all ranks.
        wall_s: By rank, the seconds that they took.
        spent_s: By phase of `PHASES`, the seconds of each rank. They add up to `wall_s`.
        memory_bytes: By rank: of the device, or of the process on the CPU.
        busy: By rank: the share of time that the GPU was busy (-1 if unknown), or the number of cores
            that it used.
        cores: By rank: the number of cores that the process and its loader workers used, or would have used
            if one had been free. Empty in files of an older version.
        collate_s: By rank: the seconds of the phase "data" that the collate function took. 0 with loader
            workers; empty in files of an older version.
        load_s: By rank: the seconds that its loader workers took to read the samples of these steps, added up
            over the workers; empty in files of an older version.
        spans: By rank, the phases of the second step, or of the only one: (phase, begin, seconds). `begin` is
            in seconds since the epoch. Only of the first ranks.
        tokens: Over all ranks, with `Training(count="tokens")`; those of the last steps follow in the next
            window. Otherwise 0.
    """

    step: int
    steps: int
    time: float
    samples: int
    wall_s: list[float]
    spent_s: dict[str, list[float]]
    memory_bytes: list[float]
    busy: list[float]
    cores: list[float] = field(default_factory=list)
    collate_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    spans: list[list[tuple[str, float, float]]] = field(default_factory=list)
    tokens: int = 0

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.wall_s)

    def per_step(self, phase: str, rank: int) -> float:
        """Seconds in a phase for each step, on a rank."""
        return self.spent_s[phase][rank] / self.steps

    @property
    def step_s(self) -> float:
        """Seconds of one step; the mean over ranks."""
        return sum(self.wall_s) / self.num_ranks / self.steps

    @property
    def spans_step(self) -> int:
        """The number of the step that `spans` show."""
        return self.step - self.steps + min(self.steps, 2)

    @property
    def spans_s(self) -> float:
        """The length of the step that `spans` show; 0 without them."""
        return length_s(self.spans)


@dataclass(frozen=True, kw_only=True)
class Record:
    """What `clock.jsonl` of a run tells.

    Args:
        runs: What describes the run, for the first start and each restart; see `Training`. Each has the
            `step` before it, and the `time` of its beginning, in seconds since the epoch.
        windows: In the order of the steps.
        skipped: Number of lines that could not be read, such as the last one while it is written.
    """

    runs: list[dict[str, Any]]
    windows: list[Window]
    skipped: int = 0

    @property
    def run(self) -> dict[str, Any]:
        """What describes the newest start; empty if unknown."""
        return self.runs[-1] if self.runs else {}


def row_size(rank: int) -> int:
    """How many numbers `pack` returns on a rank."""
    return _HEAD + len(PHASES) + (2 * _SPANS if rank < _SPAN_RANKS else 0)


def pack(times: Times, rank: int, memory_bytes: float, busy: float, cores: float) -> list[float]:
    """What a rank sends to rank 0 about a window, as numbers, so that it can travel in a sum over ranks."""
    row = [times.steps, memory_bytes, busy, cores, times.collate_s, times.load_s]
    row += [times.began_ns / 1e9, *times.spent_s]
    if rank < _SPAN_RANKS:
        spans = times.spans[:_SPANS]
        row += [number for s in spans for number in (s.phase + 1, (s.end_ns - s.begin_ns) / 1e9)]
    return row + [0.0] * (row_size(rank) - len(row))


def line_of(rows: Sequence[Sequence[float]], time: float, samples: int) -> dict[str, Any]:
    """The line of a window, from what `pack` returned on each rank."""
    ends = _HEAD + len(PHASES)
    steps = int(min(row[0] for row in rows))
    # A GPU may have finished more steps than that of another rank.
    spent = zip(
        *([s * steps / max(row[0], 1) for s in row[_HEAD:ends]] for row in rows), strict=True
    )
    line = {
        "steps": steps,
        "time": round(time, 4),
        "samples": samples,
        "spent_s": {
            phase: [round(s, 6) for s in values]
            for phase, values in zip(PHASES, spent, strict=True)
        },
        "memory_bytes": [int(row[1]) for row in rows],
        "busy": [round(row[2], 3) for row in rows],
        "cores": [round(row[3], 3) for row in rows],
        "collate_s": [round(row[4], 6) for row in rows],
        "load_s": [round(row[5], 6) for row in rows],
    }
    if any(rows[0][ends:]):
        line["spans"] = [_spans_of(row[6], row[ends:]) for row in rows[:_SPAN_RANKS]]
    return line


def _spans_of(began: float, numbers: Sequence[float]) -> list[tuple[str, float, float]]:
    spans = []
    for phase, seconds in zip(numbers[::2], numbers[1::2], strict=True):
        if phase:
            spans.append((PHASES[int(phase) - 1], round(began, 6), round(seconds, 6)))
            began += seconds  # a phase begins when the one before it ends
    return spans


def length_s(spans: Iterable[Iterable[tuple[str, float, float]]]) -> float:
    """The length of the step whose phases these are, by rank, in seconds; 0 without any."""
    return max((sum(seconds for *_, seconds in own) for own in spans), default=0.0)


def read_record(folder: str | Path) -> Record:
    """Read `clock.jsonl` of a run's folder. Damaged lines are skipped and counted.

    Raises:
        ConfigError: the folder does not exist, or has no such file, or it cannot be read.
    """
    path = Path(folder) / FILE
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(
            f"{os.fspath(folder)} holds no {FILE} that can be read: {error.strerror}.",
            why="rank 0 writes it into the folder that `training.report` or `Trainer` got.",
            fix="give the folder of a run that has reported steps.",
        ) from error
    return read_lines(lines, Record(runs=[], windows=[]))


def read_lines(lines: Iterable[bytes], before: Record) -> Record:
    """The record with these lines after those that it has. Damaged lines are skipped and counted."""
    runs, windows, skipped = [*before.runs], [*before.windows], before.skipped
    for line in lines:
        try:
            entry = json.loads(line)
            if "run" in entry:
                runs.append(dict(entry["run"]) | {"step": int(entry["step"])})
            elif "link" in entry:
                runs[-1]["link"] = {name: float(n) for name, n in entry["link"].items()}
            else:
                windows.append(read_window(entry))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError):
            skipped += 1
    return Record(runs=runs, windows=windows, skipped=skipped)


def read_window(entry: Mapping[str, Any]) -> Window:
    """The window of a line.

    Raises:
        ValueError, KeyError, TypeError: the line has another form.
    """
    ranks = len(entry["memory_bytes"])
    found = {phase: [float(s) for s in entry["spent_s"].get(phase, ())] for phase in PHASES}
    spent = {phase: values or [0.0] * ranks for phase, values in found.items()}
    wall_s = [sum(values[rank] for values in spent.values()) for rank in range(ranks)]
    steps = int(entry["steps"])
    busy, rest = entry["busy"], [entry.get(name, ()) for name in ("cores", "collate_s", "load_s")]
    is_whole = len(busy) == ranks and all(len(values) in (0, ranks) for values in rest)
    if not (is_whole and steps > 0 and ranks and all(0 < s < math.inf for s in wall_s)):
        raise ValueError("not a window")
    return Window(
        step=int(entry["step"]),
        steps=steps,
        time=float(entry["time"]),
        samples=int(entry["samples"]),
        tokens=int(entry.get("tokens", 0)),
        wall_s=wall_s,
        spent_s=spent,
        memory_bytes=[float(b) for b in entry["memory_bytes"]],
        busy=[float(b) for b in busy],
        cores=[float(n) for n in entry.get("cores", ())],
        collate_s=[float(s) for s in entry.get("collate_s", ())],
        load_s=[float(s) for s in entry.get("load_s", ())],
        spans=[
            [(str(p), float(at), float(s)) for p, at, s in rank] for rank in entry.get("spans", ())
        ],
    )
