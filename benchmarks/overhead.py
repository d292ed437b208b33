"""Overhead of a training step compared with a plain PyTorch loop, in one process.

    python benchmarks/overhead.py [--steps 400] [--rounds 9]

The workload is `tiny` of workloads.py: MLP 32-32-8, batch 16, AdamW. All sides run in one process with one
thread and take turns in each round. A round reports the median step time. The table shows medians over
rounds, and the difference and ratio to the plain loop. The sides are those of `frameworks.py`; the frameworks
take part if they are installed (`pip install 'paceline[bench]'`). All sides must end with the same weights.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from frameworks import DISTINCT, Rank, installed, quiet, refuse_other_weights
from tables import publish, ratio_row
from workloads import WORKLOADS, order, timed

import paceline

SIDES = ["plain_loop", *(side for side in installed() if side != "plain_ddp")]


def measure(steps: int, rounds: int) -> dict[str, list[float]]:
    """The median step time in us for each side and round."""
    batch = WORKLOADS["tiny"].batch
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    weights = {}
    # One job for all rounds: Lightning sets LOCAL_RANK, and `join` would then expect a launcher.
    with paceline.join() as job:
        mine = order(job, batch * DISTINCT, batch, steps)
        for number in range(rounds + 1):
            for side in SIDES:
                rank = Rank("tiny", mine, ranks=1)
                times = timed(rank.paceline_in(job)) if side == "paceline" else rank.run(side)
                weights[side] = rank.model.state_dict()
                if number:  # the first round warms up
                    found[side].append(1e6 * statistics.median(times[steps // 10 :]))
    refuse_other_weights(weights)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    found = measure(options.steps, options.rounds)
    base = found["plain_loop"]
    rows: list[dict[str, Any]] = [
        {
            "side": side,
            "step_us": statistics.median(times),
            "over_us": statistics.median(t - b for t, b in zip(times, base, strict=True)),
            **ratio_row(times, base),
        }
        for side, times in found.items()
    ]
    publish("overhead", rows, rounds=options.rounds)


if __name__ == "__main__":
    main()
