"""The part of a training step in which the examples wait for samples.

    python benchmarks/loader.py [--ranks 2] [--rounds 7]

Each example that uses `Batches` runs unchanged. The benchmark measures the time to get a step and its
micro-batches, and the time from that step to the next. Steps that end an epoch are left out, because an
evaluation follows them. The table shows the rank that waits longest, as medians over rounds: the waiting part
of the total time, and of the median step, which excludes epoch starts and interruptions.
"""

from __future__ import annotations

import argparse
import json
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from tables import publish

from paceline.data.batches import Batches

EXAMPLES = Path(__file__).parent.parent / "examples"
NAMES = ("digits", "char_lm", "own_loop")
MARK = "loader waited "
T = TypeVar("T")


class Watch:
    """The time that a rank waited in each step, and the time of the step."""

    def __init__(self) -> None:
        self.current_s = 0.0
        self.waited_s: list[float] = []
        self.took_s: list[float] = []

    def asked(self, items: Iterator[T]) -> Iterator[T]:
        while True:
            began = time.perf_counter()
            item = next(items, None)
            self.current_s += time.perf_counter() - began
            if item is None:
                return
            yield item

    def iterate(self, steps: Iterator[Any]) -> Iterator[Any]:
        began = time.perf_counter()
        for step in self.asked(steps):
            step._micro_batches = self.asked(step._micro_batches)
            yield step
            if not step.ends_epoch:
                self.waited_s.append(self.current_s)
                self.took_s.append(time.perf_counter() - began)
            self.current_s, began = 0.0, time.perf_counter()


def run_example(name: str, folder: str) -> None:
    """Run one rank of an example and measure it."""
    watch, original = Watch(), Batches.iterate

    def iterate(self: Batches, *args: Any, **options: Any) -> Iterator[Any]:
        return watch.iterate(original(self, *args, **options))

    Batches.iterate = iterate  # type: ignore[method-assign]
    sys.argv = [name, "--folder", folder]
    sys.path.insert(0, str(EXAMPLES))  # as if the script had been started directly
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    waited_s, took_s = watch.waited_s, watch.took_s
    steps = len(took_s)
    usual = statistics.median(waited_s) / statistics.median(took_s)
    print(
        MARK + json.dumps([sum(waited_s) / sum(took_s), usual, sum(took_s) / steps, steps]),
        flush=True,
    )


def measure(name: str, ranks: int) -> list[float]:
    """The rank that waited longest: part of its time, part of its median step, seconds per step, steps."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "paceline", "run", f"--nproc-per-node={ranks}", __file__]
        words += ["--example", name, "--folder", folder]
        output = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout
    found = [json.loads(line.split(MARK)[1]) for line in output.splitlines() if MARK in line]
    assert len(found) == ranks, output
    return max(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--example", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.example:
        run_example(options.example, options.folder)
        return
    rows = []
    for name in NAMES:
        rounds = [measure(name, options.ranks) for _ in range(options.rounds)]
        parts, usual, step_s, steps = (sorted(column) for column in zip(*rounds, strict=True))
        rows.append(
            {
                "example": name,
                "steps": steps[0],
                "step_ms": 1e3 * statistics.median(step_s),
                "waiting": statistics.median(parts),
                "waiting_spread": [parts[0], parts[-1]],
                "median_step": statistics.median(usual),
            }
        )
    publish("loader", rows, ranks=options.ranks, rounds=options.rounds)


if __name__ == "__main__":
    main()
