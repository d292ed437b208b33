"""Slow down one rank in each known way, or none, and check what `paceline run` reports.

    python benchmarks/stragglers.py [--runs 3] [--ranks 2 4] [--factors 1.15 1.3 2] [--healthy-steps 1500]

Each kind runs in a script that uses paceline and in one that does not. A report is right if it names the
rank, the phase and the line. The table counts the steps until the report. A rank that is less than 1.2 times
as slow must not be reported. Wrong reports are printed to standard error.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "e2e"))

from stragglers import HEALTHY, KINDS, right, train
from tables import publish


def slow(
    folder: Path, args: argparse.Namespace, ranks: int, factor: float
) -> Iterator[dict[str, Any]]:
    for kind in KINDS:
        steps, correct, wrong = [], 0, 0
        for number in range(args.runs):
            run = train(
                folder, kind, world=ranks, factor=factor, paceline=number % 2 == 1, steps=200
            )
            if run.said and right(run, folder, kind):
                correct += 1
                steps.append(run.steps)
            elif run.said:
                wrong += 1
                print(f"{kind} x{factor}, {ranks} ranks:\n{run.said}", file=sys.stderr)
        row = {"what": "slow", "kind": kind, "factor": factor, "ranks": ranks, "runs": args.runs}
        row |= {"right": correct, "wrong": wrong}
        if steps:
            row |= {"median_steps": statistics.median(steps), "worst_steps": max(steps)}
        yield row


def healthy(folder: Path, args: argparse.Namespace, ranks: int) -> Iterator[dict[str, Any]]:
    for kind in HEALTHY:
        alarms = 0
        for number in range(args.runs):
            run = train(
                folder, kind, world=ranks, paceline=number % 2 == 1, steps=args.healthy_steps
            )
            alarms += bool(run.said)
            print(run.said, end="", file=sys.stderr)
        row = {"what": "healthy", "kind": kind, "ranks": ranks, "runs": args.runs}
        yield row | {"steps": args.healthy_steps, "alarms": alarms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--factors", nargs="*", type=float, default=[1.15, 1.3, 2.0])
    parser.add_argument("--healthy-steps", type=int, default=1500)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in args.ranks:
            for factor in args.factors:
                rows += slow(Path(folder), args, ranks, factor)
            if args.healthy_steps:
                rows += healthy(Path(folder), args, ranks)
    publish("stragglers", rows)


if __name__ == "__main__":
    main()
