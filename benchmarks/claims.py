"""Figures that tutorials on distributed training give, beside what the benchmarks here have measured.

    python benchmarks/claims.py

Measures nothing itself: it reads `results/*.json`, the newest run of each benchmark. A figure that needs
hardware which no benchmark has seen yet is shown without a measurement.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tables import FOLDER, publish

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Claim:
    """A figure of the tutorials.

    Args:
        what: What is compared.
        said: The figure, lowest and highest; None if there is no highest.
        unit: After the numbers.
        benchmark: The file in `benchmarks/` that measures it.
        case: The workload, in words.
        values: The measured values, from the rows of the benchmark.
        lesson: What a user should take from it.
    """

    what: str
    said: tuple[float, float | None]
    unit: str
    benchmark: str
    case: str
    values: Callable[[Rows], Iterable[float]]
    lesson: str


def _where(rows: Rows, key: str, **wanted: Any) -> list[float]:
    return [row[key] for row in rows if all(row[name] == value for name, value in wanted.items())]


def _saved(rows: Rows) -> list[float]:
    return [
        100 * (1 - row["ratio"])
        for row in rows
        if row["network"].startswith("link") and row["compress"] in ("fp16", "bf16")
    ]


CLAIMS = (
    Claim(
        "DDP, times as fast as `DataParallel`",
        (1.5, 3.0),
        "x",
        "dp_vs_ddp",
        "a GPT on several GPUs",
        lambda rows: [1 / _where(rows, "ratio", side="ddp")[0]],
        "needs two GPUs",
    ),
    Claim(
        "mixed precision, times as fast as fp32",
        (1.8, 2.5),
        "x",
        "precision",
        "bf16, wide linear layers (`amx`), CPUs with AMX, 1 and 2 ranks",
        lambda rows: _where(rows, "gain", workload="amx", side="bf16"),
        "only where matrix products take most of the time",
    ),
    Claim(
        "mixed precision, times as fast as fp32",
        (1.8, 2.5),
        "x",
        "precision",
        "bf16, a small transformer (`comp`), 1 and 2 ranks",
        lambda rows: _where(rows, "gain", workload="comp", side="bf16"),
        "attention and norms gain little",
    ),
    Claim(
        "mixed precision, times as fast as fp32",
        (1.8, 2.5),
        "x",
        "precision",
        "bf16, a tiny MLP, one process",
        lambda rows: _where(rows, "gain", workload="tiny", side="bf16", ranks=1),
        "small models become slower",
    ),
    Claim(
        "step time saved by tuned communication",
        (30, 50),
        " %",
        "compression",
        "`compress` with fp16 and bf16, 33 MiB of gradients, a link of 1 Gbit/s",
        _saved,
        "on a slow network; on loopback compression saves nothing",
    ),
    Claim(
        "efficiency of two ranks (near-linear scaling)",
        (90, None),
        " %",
        "steps",
        "a small transformer (`comp`), 2 ranks",
        lambda rows: [100 * e for e in _where(rows, "efficiency", workload="comp", side="ddp")],
        "with enough computation in a step",
    ),
    Claim(
        "efficiency of two ranks (near-linear scaling)",
        (90, None),
        " %",
        "steps",
        "16.8 MB of gradients, little computation (`comm`), 2 ranks",
        lambda rows: [100 * e for e in _where(rows, "efficiency", workload="comm", side="ddp")],
        "not with little computation per gradient",
    ),
    Claim(
        "time in which devices compute",
        (70, None),
        " %",
        "steps",
        "three models on 2 ranks: the step without communication, of the whole step",
        lambda rows: [100 * e for e in _where(rows, "efficiency", side="ddp")],
        "tiny models wait for communication a third of the time",
    ),
)


def row_of(claim: Claim, rows: Rows | None, about: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a claim; without `rows` it was not measured."""
    low, high = claim.said
    row = {
        "what": claim.what,
        "said": f"{low:g}{claim.unit} or more"
        if high is None
        else f"{low:g} to {high:g}{claim.unit}",
        "case": claim.case,
        "benchmark": claim.benchmark,
        "lesson": claim.lesson,
    }
    if rows is None:
        return {**row, "measured": "not measured", "verdict": "unknown", "date": ""}
    values = sorted(claim.values(rows))
    texts = list(dict.fromkeys(f"{value:.3g}" for value in (values[0], values[-1])))
    if values[-1] < low:
        verdict = "less"
    elif high is not None and values[0] > high:
        verdict = "more"
    elif values[0] < low:
        verdict = "in part"
    else:
        verdict = "holds"
    return {
        **row,
        "measured": " to ".join(texts) + claim.unit,
        "verdict": verdict,
        "date": f"{about['date']}, {about['machine'].replace('x86_64, ', '')}",
    }


def main() -> None:
    rows = []
    for claim in CLAIMS:
        path = FOLDER / f"{claim.benchmark}.json"
        report = json.loads(path.read_text()) if path.exists() else {"rows": None, "about": {}}
        rows.append(row_of(claim, report["rows"], report["about"]))
    publish("claims", rows)


if __name__ == "__main__":
    main()
