"""Write the tables of figures in the documentation from benchmarks/results/*.json.

    python benchmarks/figures.py

In a page, the lines between `<!-- figures: NAME -->` and `<!-- end of figures -->` are replaced. A test
compares the pages with the results.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Row = Mapping[str, Any]
Cell = Callable[[Row], str]

SIDES = {
    "plain_ddp": "plain DDP",
    "ddp": "the same loop, `paceline.ddp`",
    "paceline": "Paceline",
    "alone": "alone",
    "no save": "no save",
    "accelerate": "Accelerate",
    "fabric": "Lightning Fabric",
    "trainer": "Lightning Trainer",
    "lightning trainer": "Lightning Trainer",
    "shm": "`shm`",
    "shm, gradient": "`shm`, gradient",
    "gloo": "Gloo",
    "mpi": "MPICH, without torch",
    "mpi backend": "`mpi` over MPICH",
}


def duration(microseconds: float) -> str:
    """Three digits, in us, ms or s."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= size:
            return f"{microseconds / size:#.3g}".rstrip(".") + f" {unit}"
    return f"{microseconds:#.3g}".rstrip(".") + " us"


def time(key: str, in_us: float = 1) -> Cell:
    """A column of times; `in_us` is the unit of the results in microseconds."""
    return lambda row: duration(row[key] * in_us)


def ratio(key: str, spread: str | None = None, digits: int = 2) -> Cell:
    """A column of ratios, with the middle half of the rounds in brackets."""

    def cell(row: Row) -> str:
        text = f"{row[key]:.{digits}f}"
        if spread is None or row[key] == row[spread][0] == row[spread][1]:
            return text
        low, high = row[spread]
        return f"{text} ({low:.{digits}f} to {high:.{digits}f})"

    return cell


def percent(key: str, digits: int = 1) -> Cell:
    return lambda row: f"{100 * row[key]:.{digits}f} %"


def plain(key: str) -> Cell:
    return lambda row: str(row[key])


def side(row: Row) -> str:
    return SIDES.get(row["side"], row["side"])


def size(row: Row) -> str:
    count = row["bytes"]
    return f"{count // 2**20} MiB" if count >= 2**20 else f"{count // 2**10} KiB"


TABLES: dict[str, dict[str, Cell]] = {
    "overhead": {
        "compared": plain("of"),
        "side": side,
        "step": time("step_us"),
        "ratio to the plain loop": ratio("ratio", "ratio_spread", 3),
    },
    "gpu": {
        "workload": plain("workload"),
        "side": side,
        "step": time("step_ms", 1e3),
        "ratio to the plain loop": ratio("ratio", "ratio_spread"),
    },
    "checkpoint_gpu": {
        "side": lambda row: SIDES.get(row["side"], f"`{row['side']}`"),
        "the save stops training for": lambda row: (
            "-" if row["side"] == "no save" else duration(1e3 * row["stall_ms"])
        ),
        "later steps": ratio("later_steps", "later_steps_spread"),
    },
    "clock": {
        "ranks": plain("ranks"),
        "step without the clock": time("us without"),
        "more with it": time("us more"),
        "ratio": ratio("ratio", None, 3),
    },
    "steps": {
        "workload": plain("workload"),
        "side": side,
        "step": time("us"),
        "ratio to plain DDP": ratio("of_plain_ddp", "of_plain_ddp_spread"),
        "efficiency": ratio("efficiency", "efficiency_spread"),
    },
    "frameworks": {
        "workload": plain("workload"),
        "side": side,
        "step": time("step_us"),
        "ratio to plain DDP": ratio("of_plain_ddp", "spread"),
    },
    "memory": {
        "side": side,
        "PSS of a rank": lambda row: f"{row['pss_mb']:.0f} MiB",
        "more than alone": percent("over_alone"),
    },
    "reproducible": {
        "workload": plain("workload"),
        "ranks": plain("ranks"),
        "normal": time("normal_ms", 1e3),
        "reproducible": time("reproducible_ms", 1e3),
        "ratio": ratio("ratio", "middle_half"),
    },
    "allreduce": {
        "ranks": plain("ranks"),
        "size": size,
        "side": side,
        "a call": time("call_us"),
        "ratio to `shm`": ratio("ratio_to_shm", "ratio_spread"),
    },
    "loader": {
        "example": plain("example"),
        "step": time("step_ms", 1e3),
        "waiting, all steps": percent("waiting", 2),
        "waiting, median step": percent("median_step", 2),
    },
    "start": {
        "side": lambda row: f"`{row['side']}`",
        "first all-reduce": time("first_s", 1e6),
        "end of the command": time("whole_s", 1e6),
    },
    "precision": {
        "workload": plain("workload"),
        "ranks": plain("ranks"),
        "side": side,
        "step": time("ms", 1e3),
        "speed relative to plain fp32": ratio("gain", "gain_spread"),
    },
    "compression": {
        "network": plain("network"),
        "`compress`": plain("compress"),
        "MiB sent per step": lambda row: f"{row['sent_mib']:.3g}",
        "relative error": lambda row: f"{row['relative_error']:.4f}",
        "step": time("step_ms", 1e3),
        "ratio": ratio("ratio", "quartiles"),
    },
    "layouts": {
        "layout": plain("layout"),
        "step by hand": time("hand_ms", 1e3),
        "step": time("paceline_ms", 1e3),
        "ratio": ratio("ratio", "quartiles", 3),
        "held": lambda row: f"{row['held_mb']:.1f} MiB",
        "part of DDP's": lambda row: f"{row['of_ddp']:.3f}",
    },
    "claims": {
        "figure": plain("what"),
        "tutorials": plain("said"),
        "measured": plain("measured"),
        "": plain("verdict"),
        "where": lambda row: f"{row['case']}{': ' + row['date'] if row['date'] else ''}",
        "lesson": plain("lesson"),
    },
    "mixed": {
        "fault": plain("kind"),
        "recovered": plain("recovered"),
        "median": time("median_s", 1e6),
        "9 of 10": time("p90_s", 1e6),
        "longest": time("max_s", 1e6),
    },
    "preempt": {
        "fault": plain("kind"),
        "ended well": plain("recovered"),
        "median": time("median_s", 1e6),
        "longest": time("max_s", 1e6),
    },
}


def table(name: str) -> str:
    """The table of `results/NAME.json`, and a line with the machine and the date."""
    report = json.loads((ROOT / "benchmarks/results" / f"{name}.json").read_text())
    columns = TABLES[name]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += [f"| {' | '.join(cell(row) for cell in columns.values())} |" for row in report["rows"]]
    if "date" in report["rows"][0]:
        return "\n".join(lines)  # each row has its own
    about = report["about"]
    machine = about.get("machine", "processor not recorded").replace("x86_64, ", "")
    facts = [about["date"], machine, f"{about['cores']} cores", f"torch {about['torch']}"]
    if isinstance(about.get("load"), list):
        facts.append(f"load {about['load'][0]}")
    if "gpu" in about:
        facts.insert(1, about["gpu"])
    if "rounds" in about:
        facts.append(f"{about['rounds']} rounds")
    return "\n".join([*lines, "", f"Measured: {', '.join(facts)}."])


BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->)", re.S)


def fill(page: str) -> str:
    """The text of a page with its tables written anew."""
    return BLOCK.sub(lambda found: f"{found[1]}\n{table(found[2])}\n\n{found[3]}", page)


def main() -> None:
    for path in sorted((ROOT / "docs").rglob("*.md")):
        text = path.read_text()
        if (filled := fill(text)) != text:
            path.write_text(filled)
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
