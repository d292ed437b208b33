"""Writes the folder of a run, as a training does, with given times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.clock import record
from paceline.clock.record import Window
from paceline.clock.step_clock import PHASES, Times
from paceline.metrics.json_lines import JSONLines


def write_folder(
    folder: Path,
    spent_s: Sequence[Mapping[str, float]],
    *,
    steps: int,
    window: int,
    tokens: int = 0,
    **facts: Any,
) -> None:
    """A run that ends each window at second `step` after its begin. A rank uses 2 GB and half a core.

    Args:
        spent_s: By rank, the seconds of each phase in one step.
        tokens: Of a window.
        facts: What describes the run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    clock, metrics = JSONLines(folder / record.FILE), JSONLines(folder / "metrics.jsonl")
    known = {"time": 1e9, "total_steps": steps, "world_size": len(spent_s), "device": "cpu"}
    clock.log(0, {"run": known | facts})
    for step in range(1, steps + 1):
        metrics.log(step, {"epoch": 1, "time_s": step / 100, "loss": 1 / step, "note": "text"})
    times = [
        Times(steps=window, spent_s=[window * rank.get(phase, 0.0) for phase in PHASES])
        for rank in spent_s
    ]
    rows = [record.pack_row(each, 2e9, 0.5) for each in times]
    for step in range(window, steps + 1, window):
        whole = Window.from_rows(step, rows, time=1e9 + step, samples=8 * window)
        clock.log(step, whole.to_line() | {"tokens": tokens})
    clock.close()
    metrics.close()
