"""`clock.jsonl`: where the time of a run went, on every rank. Rank 0 writes it (metrics/clock_file.py).

Each line is a JSON object with the number of a step. A line with "run" describes the run; it comes first, and
again after each restart. A line with "spent_s" is a `Window`: some steps in a row, about a second of them. A
line with "end" tells how the training loop ended; there is none if its process was killed.

A window is measured as one row of numbers on each rank (`pack_row`), because numbers travel in a sum over
ranks. Rank 0 makes the window from all rows (`Window.from_rows`), and writes and reads it as a line
(`to_line`, `from_line`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from paceline.clock.step_clock import PHASES, Times

FILE = "clock.jsonl"
_HEAD = 4  # numbers of a row before the phases
ROW_SIZE = _HEAD + len(PHASES)  # numbers of a row


def pack_row(times: Times, memory_bytes: float, busy: float) -> list[float]:
    """What a rank has measured of a window, as numbers; see `Window` for their meaning."""
    return [times.steps, times.wait_s, memory_bytes, busy, *times.spent_s]


@dataclass(frozen=True, kw_only=True)
class Window:
    """Some steps in a row, and where their time went.

    Args:
        step: The number of the last one.
        steps: How many.
        time: When they ended, in seconds since the epoch.
        samples: Of these steps, over all ranks.
        tokens: Over all ranks, with `Training(count="tokens")`; those of the last steps follow in the next
            window. Otherwise 0.
        spent_s: By phase of `PHASES`, the seconds of each rank.
        exposed_s: Seconds of communication in one step on the rank that waited least in it: the other ranks
            waited as long for the communication itself, and beyond that for a slower rank.
        memory_bytes: By rank: of the GPU with CUDA, else of the process.
        busy: By rank: the share of time that the GPU was busy (-1 if unknown), or the number of cores
            that it used.
    """

    step: int
    steps: int
    time: float
    samples: int
    tokens: int = 0
    spent_s: dict[str, list[float]]
    exposed_s: float = 0.0
    memory_bytes: list[float]
    busy: list[float]

    @cached_property
    def wall_s(self) -> list[float]:
        """By rank, the seconds that the steps took: the sum over the phases."""
        return [sum(phases) for phases in zip(*self.spent_s.values(), strict=True)]

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.memory_bytes)

    @property
    def unit(self) -> str:
        """What `rate` counts: "tokens" where the run counts them, otherwise "samples"."""
        return "tokens" if self.tokens else "samples"

    @property
    def rate(self) -> float:
        """Tokens or samples per second, over all ranks."""
        return (self.tokens or self.samples) * self.num_ranks / sum(self.wall_s)

    def per_step(self, phase: str, rank: int) -> float:
        """Seconds in a phase for each step, on a rank."""
        return self.spent_s[phase][rank] / self.steps

    @property
    def step_s(self) -> float:
        """Seconds of one step; the mean over ranks."""
        return sum(self.wall_s) / self.num_ranks / self.steps

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
            samples: Over all ranks.
        """
        return cls(
            step=step,
            steps=int(rows[0][0]),
            time=round(time, 4),
            samples=samples,
            tokens=tokens,
            spent_s={
                phase: [round(row[number], 6) for row in rows]
                for number, phase in enumerate(PHASES, start=_HEAD)
            },
            exposed_s=round(min(row[1] for row in rows), 6),
            memory_bytes=[int(row[2]) for row in rows],
            busy=[round(row[3], 3) for row in rows],
        )

    def to_line(self) -> dict[str, Any]:
        """The window as a line of clock.jsonl, without its `step`."""
        line = asdict(self)
        del line["step"]
        return line

    @classmethod
    def from_line(cls, line: Mapping[str, Any]) -> Window:
        """The window of a line, with its `step`.

        Raises:
            ValueError, KeyError, TypeError: the line has another form.
        """
        window = cls(
            step=int(line["step"]),
            steps=int(line["steps"]),
            time=float(line["time"]),
            samples=int(line["samples"]),
            tokens=int(line["tokens"]),
            spent_s={phase: [float(s) for s in line["spent_s"][phase]] for phase in PHASES},
            exposed_s=float(line["exposed_s"]),
            memory_bytes=[float(b) for b in line["memory_bytes"]],
            busy=[float(b) for b in line["busy"]],
        )
        num_ranks = window.num_ranks
        if not (num_ranks and window.steps > 0) or any(
            len(values) != num_ranks for values in (*window.spent_s.values(), window.busy)
        ):
            raise ValueError("not a window")
        if not all(0 < seconds < math.inf for seconds in window.wall_s):
            raise ValueError("a window without time")
        return window


@dataclass(kw_only=True)
class Record:
    """What `clock.jsonl` of a run tells.

    Args:
        runs: What describes the run, for the first start and each restart; see `Training`. Each has the
            `step` before it. All other fields, such as the `time` of its beginning (in seconds since the
            epoch), may be missing in a file that is not of this version.
        windows: In the order of the steps.
        end: How the newest start ended, such as "stopped early"; empty while it goes on, or if it was killed.
        skipped: Number of lines that could not be read, such as the last one while it is written.
    """

    runs: list[dict[str, Any]]
    windows: list[Window]
    end: str = ""
    skipped: int = 0

    @property
    def run(self) -> dict[str, Any]:
        """What describes the newest start; empty if unknown."""
        return self.runs[-1] if self.runs else {}


def read_lines(lines: Iterable[bytes]) -> Record:
    """The record of these lines. Damaged ones are skipped and counted."""
    record = Record(runs=[], windows=[])
    for line in lines:
        try:
            entry = json.loads(line)
            if "run" in entry:
                record.runs.append(dict(entry["run"]) | {"step": int(entry["step"])})
                record.end = ""
            elif "end" in entry:
                record.end = str(entry["end"])
            else:
                record.windows.append(Window.from_line(entry))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError):
            record.skipped += 1
    return record
