"""`clock.jsonl`: where the time of a run went, on every rank. Rank 0 writes it (metrics/clock_file.py).

Each line is a JSON object with the number of a step. A line with "run" describes the run; it comes first, and
again after each restart. A line with "link" belongs to it, and has what was measured of the connection
between the ranks. A line with "spent_s" is a `Window`: some steps in a row, about a second of them.

A window is measured as one row of numbers on each rank (`pack_row`), because numbers travel in a sum over
ranks. Rank 0 makes the window from all rows (`Window.from_rows`), and writes and reads it as a line
(`to_line`, `from_line`).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from paceline.clock.step_clock import PHASES, Times
from paceline.errors import ConfigError

FILE = "clock.jsonl"
_SPAN_RANKS = 8  # ranks whose phases of a step are kept
_SPANS = 32  # phases of one step that are kept
_HEAD = 7  # numbers of a row before the phases: steps, memory, busy, cores, collate, load, begin of the spans


@dataclass(frozen=True, kw_only=True)
class Window:
    """Some steps in a row, and where their time went.

    Args:
        step: The number of the last one.
        steps: How many. 0 if a GPU has finished none; such a window is not written.
        time: When they ended, in seconds since the epoch.
        samples: Of these steps, over all ranks.
        spent_s: By phase of `PHASES`, the seconds of each rank.
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
            in seconds since the epoch. Only of the first ranks, and only in some windows. On a GPU these are
            the times at which the host issued the work, while `spent_s` has those of the GPU.
        tokens: Over all ranks, with `Training(count="tokens")`; those of the last steps follow in the next
            window. Otherwise 0.
    """

    step: int
    steps: int
    time: float
    samples: int
    spent_s: dict[str, list[float]]
    memory_bytes: list[float]
    busy: list[float]
    cores: list[float] = field(default_factory=list)
    collate_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    spans: list[list[tuple[str, float, float]]] = field(default_factory=list)
    tokens: int = 0

    @cached_property
    def wall_s(self) -> list[float]:
        """By rank, the seconds that the steps took: the sum over the phases."""
        return [sum(phases) for phases in zip(*self.spent_s.values(), strict=True)]

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.memory_bytes)

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
        """The length of the phases that `spans` keep of a step; 0 without them."""
        return max((sum(seconds for *_, seconds in own) for own in self.spans), default=0.0)

    @classmethod
    def from_rows(
        cls,
        step: int,
        rows: Sequence[Sequence[float]],
        *,
        time: float,
        samples: int,
        tokens: int = 0,
    ) -> Window:
        """The window of what `pack_row` returned on each rank.

        Args:
            samples: Over all ranks, of the steps in the row of rank 0.
        """
        steps = int(min(row[0] for row in rows))
        # A GPU may have finished more steps than that of another rank; its row is scaled to the fewest.
        scales = [steps / max(row[0], 1) for row in rows]
        first_span = _HEAD + len(PHASES)
        spans = [_unpack_spans(row[6], row[first_span:]) for row in rows[:_SPAN_RANKS]]
        return cls(
            step=step,
            steps=steps,
            time=round(time, 4),
            samples=round(samples * scales[0]),
            tokens=tokens,
            spent_s={
                phase: [
                    round(row[number] * scale, 6) for row, scale in zip(rows, scales, strict=True)
                ]
                for number, phase in enumerate(PHASES, start=_HEAD)
            },
            memory_bytes=[int(row[1]) for row in rows],
            busy=[round(row[2], 3) for row in rows],
            cores=[round(row[3], 3) for row in rows],
            collate_s=[round(row[4] * scale, 6) for row, scale in zip(rows, scales, strict=True)],
            load_s=[round(row[5] * scale, 6) for row, scale in zip(rows, scales, strict=True)],
            spans=spans if spans[0] else [],
        )

    def to_line(self) -> dict[str, Any]:
        """The window as a line of clock.jsonl, without its `step`."""
        line: dict[str, Any] = {
            "steps": self.steps,
            "time": self.time,
            "samples": self.samples,
            "spent_s": self.spent_s,
            "memory_bytes": self.memory_bytes,
            "busy": self.busy,
            "cores": self.cores,
            "collate_s": self.collate_s,
            "load_s": self.load_s,
        }
        more = {"tokens": self.tokens, "spans": self.spans}
        return line | {name: value for name, value in more.items() if value}

    @classmethod
    def from_line(cls, line: Mapping[str, Any]) -> Window:
        """The window of a line, with its `step`.

        Raises:
            ValueError, KeyError, TypeError: the line has another form.
        """
        num_ranks = len(line["memory_bytes"])
        # A version with fewer phases did not write all of them.
        found = {phase: [float(s) for s in line["spent_s"].get(phase, ())] for phase in PHASES}
        window = cls(
            step=int(line["step"]),
            steps=int(line["steps"]),
            time=float(line["time"]),
            samples=int(line["samples"]),
            tokens=int(line.get("tokens", 0)),
            spent_s={phase: seconds or [0.0] * num_ranks for phase, seconds in found.items()},
            memory_bytes=[float(b) for b in line["memory_bytes"]],
            busy=[float(b) for b in line["busy"]],
            cores=[float(n) for n in line.get("cores", ())],
            collate_s=[float(s) for s in line.get("collate_s", ())],
            load_s=[float(s) for s in line.get("load_s", ())],
            spans=[
                [(str(p), float(at), float(s)) for p, at, s in rank]
                for rank in line.get("spans", ())
            ],
        )
        by_rank = [*window.spent_s.values(), window.busy]
        if_known = [window.cores, window.collate_s, window.load_s]
        is_whole = all(len(values) == num_ranks for values in by_rank) and all(
            len(values) in (0, num_ranks) for values in if_known
        )
        if not (is_whole and num_ranks and window.steps > 0):
            raise ValueError("not a window")
        if not all(0 < seconds < math.inf for seconds in window.wall_s):
            raise ValueError("a window without time")
        return window


@dataclass(frozen=True, kw_only=True)
class Record:
    """What `clock.jsonl` of a run tells.

    Args:
        runs: What describes the run, for the first start and each restart; see `Training`. Each has the
            `step` before it. All other fields, such as the `time` of its beginning (in seconds since the
            epoch), may be missing, because an older version did not write them.
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
    """How many numbers `pack_row` returns on a rank."""
    return _HEAD + len(PHASES) + (2 * _SPANS if rank < _SPAN_RANKS else 0)


def pack_row(
    times: Times, rank: int, memory_bytes: float, busy: float, cores: float
) -> list[float]:
    """What a rank has measured of a window, as numbers; see `Window` for their meaning."""
    row = [times.steps, memory_bytes, busy, cores, times.collate_s, times.load_s]
    row += [times.began_ns / 1e9, *times.spent_s]
    if rank < _SPAN_RANKS:
        spans = times.spans[:_SPANS]
        row += [number for s in spans for number in (s.phase + 1, (s.end_ns - s.begin_ns) / 1e9)]
    return row + [0.0] * (row_size(rank) - len(row))


def add_rows(
    earlier: Sequence[Sequence[float]], later: Sequence[Sequence[float]]
) -> list[list[float]]:
    """The rows of two windows, one after the other, as the rows of one.

    Steps and seconds are added. The rest, such as the memory, is that of the later window.
    """
    is_added = {0, 4, 5, *range(_HEAD, _HEAD + len(PHASES))}
    return [
        [
            a + b if number in is_added else b
            for number, (a, b) in enumerate(zip(*both, strict=True))
        ]
        for both in zip(earlier, later, strict=True)
    ]


def _unpack_spans(began: float, numbers: Sequence[float]) -> list[tuple[str, float, float]]:
    spans = []
    for phase, seconds in zip(numbers[::2], numbers[1::2], strict=True):
        if phase:  # otherwise there are fewer spans than numbers
            spans.append((PHASES[int(phase) - 1], round(began, 6), round(seconds, 6)))
            began += seconds  # a phase begins when the one before it ends
    return spans


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
                windows.append(Window.from_line(entry))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError):
            skipped += 1
    return Record(runs=runs, windows=windows, skipped=skipped)
