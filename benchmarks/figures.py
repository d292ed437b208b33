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
    "plain_loop": "plain loop",
    "plain_ddp": "plain DDP",
    "paceline": "Paceline",
    "accelerate": "Accelerate",
    "fabric": "Lightning Fabric",
    "trainer": "Lightning Trainer",
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


def plain(key: str) -> Cell:
    return lambda row: str(row[key])


def side(row: Row) -> str:
    return SIDES.get(row["side"], row["side"])


TABLES: dict[str, dict[str, Cell]] = {
    "overhead": {
        "side": side,
        "step": time("step_us"),
        "ratio to the plain loop": ratio("ratio", "ratio_spread", 3),
    },
    "steps": {
        "workload": plain("workload"),
        "side": side,
        "step": time("us"),
        "ratio to plain DDP": ratio("of_plain_ddp", "of_plain_ddp_spread"),
    },
    "gpu": {
        "workload": plain("workload"),
        "side": side,
        "step": time("step_ms", 1e3),
        "ratio to the plain loop": ratio("ratio", "ratio_spread"),
    },
    "frameworks": {
        "workload": plain("workload"),
        "side": side,
        "step": time("step_us"),
        "ratio to plain DDP": ratio("ratio", "ratio_spread"),
    },
    "reproducible": {
        "workload": plain("workload"),
        "ranks": plain("ranks"),
        "normal": time("normal_ms", 1e3),
        "reproducible": time("reproducible_ms", 1e3),
        "ratio": ratio("ratio", "ratio_spread"),
    },
    "start": {
        "side": lambda row: f"`{row['side']}`",
        "first all-reduce": time("first_s", 1e6),
        "end of the command": time("whole_s", 1e6),
    },
    "plan": {
        "hosts": plain("hosts"),
        "link": plain("link"),
        "strategy": plain("strategy"),
        "predicted": time("predicted_ms", 1e3),
        "measured": time("measured_ms", 1e3),
        "error": lambda row: f"{100 * row['error']:+.0f} %",
    },
    "in_place": {
        "state": plain("state"),
        "restart": time("restart_s", 1e6),
        "in place": time("in place_s", 1e6),
        "ratio": ratio("ratio"),
        "step without a failure": lambda row: (
            ratio("step_ratio", "step_ratio_spread", 3)(row) if "step_ratio" in row else ""
        ),
    },
    "compression": {
        "network": plain("network"),
        "`compress`": plain("compress"),
        "sent, MiB a step": lambda row: f"{row['sent_mib']:.3g}" if row["sent_mib"] else "",
        "step": time("step_ms", 1e3),
        "ratio": ratio("ratio", "ratio_spread"),
    },
    "diloco": {
        "side": plain("what"),
        "step": lambda row: duration(row["step_ms"] * 1e3) if "step_ms" in row else "",
        "computes": lambda row: f"{100 * row['computes']:.0f} %" if "computes" in row else "",
        "sent, KiB a step": lambda row: f"{row['sent_kib']:.0f}" if "sent_kib" in row else "",
        "evaluation loss": lambda row: f"{row['loss']:.4f}",
        "ratio": lambda row: f"{row['ratio']:.3f}" if "ratio" in row else "",
    },
}


def table(name: str) -> str:
    """The table of `results/NAME.json`, and a line with the machine and the date."""
    report = json.loads((ROOT / "benchmarks/results" / f"{name}.json").read_text())
    columns = TABLES[name]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += [f"| {' | '.join(cell(row) for cell in columns.values())} |" for row in report["rows"]]
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
