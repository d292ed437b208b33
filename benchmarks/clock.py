"""Cost of the step clock: steps with it against steps without it, in the same training.

    python benchmarks/clock.py [--steps 6000]

The workload is `tiny` of workloads.py: MLP 32-32-8, batch 16, AdamW; one process, and two ranks. Blocks of 50
steps take turns, so both sides see the same machine. A row has the median time of a step without the clock,
and the ratio of the medians. The report is written to a folder, as in real use. Both sides have what happens
once a second (the exchange of the times, the line of clock.jsonl).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import torch.nn.functional as F
from tables import publish
from workloads import WORKLOADS

import paceline
from paceline.clock.step_clock import StepClock
from paceline.testing import run_ranks

BLOCK = 50
_METHODS = ("enter", "begin", "end", "end_step")


def _switch(on: bool, saved: dict[str, Any]) -> None:
    for name in _METHODS:
        setattr(StepClock, name, saved[name] if on else lambda *_: -1)


def measure(job: Any, steps: int, folder: str) -> list[float]:
    """Median seconds of a step without and with the clock."""
    saved = {name: getattr(StepClock, name) for name in _METHODS}
    work = WORKLOADS["tiny"]
    data = work.data(1, 64)
    model = paceline.ddp(job, work.make())
    batches = paceline.Batches(job, data, global_batch=work.batch, sample_randomness=False)
    training = paceline.Training(job, model, work.optimizer(model), batches)
    training.report(folder)
    times: tuple[list[float], list[float]] = ([], [])
    began = time.perf_counter()
    for step in training.steps(until=steps):
        for x, y in step:
            loss = F.mse_loss(model(x), y, reduction="sum")
            step.backward(loss, count=len(y), reduction="sum")
        step.update()
        now = time.perf_counter()
        block, at = divmod(step.number, BLOCK)
        if block > 3 and at:  # without the warm-up, and without the step that switches
            times[block % 2].append(now - began)
        if at == BLOCK - 1:
            _switch((block + 1) % 2 == 1, saved)
        began = time.perf_counter()
    _switch(True, saved)
    return [statistics.median(side) for side in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=6000)
    args = parser.parse_args()
    rows = []
    for ranks in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            results = run_ranks(measure, args.steps, folder, nproc=ranks)
        off, on = results[0]
        rows.append(
            {
                "ranks": ranks,
                "us without": off * 1e6,
                "us more": (on - off) * 1e6,
                "ratio": on / off,
            }
        )
    publish("clock", rows, steps=args.steps)


if __name__ == "__main__":
    main()
