"""Print the rows of a benchmark, and save them as JSON and Markdown with a description of the machine.

They are saved only in the folder that `BENCHMARK_RESULTS` names, so that a short trial changes no file.
`make bench` names `benchmarks/results`.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch


def publish(
    name: str, rows: Sequence[Mapping[str, Any]], *, as_json: bool = False, **about: Any
) -> None:
    """Print the rows, and write `NAME.json` and `NAME.md` to the folder `BENCHMARK_RESULTS`, if it is set.

    Args:
        rows: One dictionary per row. Only the Markdown rounds numbers. A list of two numbers is a range.
        as_json: Print JSON and write no file; for the tests.
        about: Further facts about the run.
    """
    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {_processor()}",
        "cores": os.cpu_count(),
        "load": [round(load, 1) for load in os.getloadavg()],
        "python": platform.python_version(),
        "torch": torch.__version__,
        **about,
    }
    report = {"about": facts, "rows": list(rows)}
    if as_json:
        print(json.dumps(report, indent=1))
        return
    names = list(dict.fromkeys(key for row in rows for key in row))
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    lines += [f"| {' | '.join(_cell(row.get(key, '')) for key in names)} |" for row in rows]
    print("\n".join(lines), flush=True)
    if not (named := os.environ.get("BENCHMARK_RESULTS")):
        return
    folder = Path(named)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    head = [f"# {name}", "", "; ".join(f"{key} {_cell(value)}" for key, value in facts.items()), ""]
    (folder / f"{name}.md").write_text("\n".join([*head, *lines]) + "\n")


def ratio_row(
    values: Sequence[float], base: Sequence[float], key: str = "ratio"
) -> dict[str, float | list[float]]:
    """The median of `values / base` over the rounds, and in `{key}_spread` its middle half.

    Args:
        values, base: One number per round. Both sides of a ratio are of the same round, so that a slower
            machine in some rounds does not change it.
    """
    ratios = sorted(value / other for value, other in zip(values, base, strict=True))
    cut = len(ratios) // 4
    return {key: statistics.median(ratios), f"{key}_spread": [ratios[cut], ratios[-1 - cut]]}


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    if isinstance(value, list | tuple):
        return (" to " if len(value) == 2 else ", ").join(map(_cell, value))
    return str(value)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
