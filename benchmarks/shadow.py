"""What `Checkpoints(shadow=True)` costs a training, and how often it keeps a state.

    python benchmarks/shadow.py [--ranks 2] [--rounds 9]

Two trainings of the same model live in the same processes, one with a shadow, and take turns, round after
round; a round gives the mean of its steps, of the slowest rank. **small**: MLP 64-256-64. **large**: an MLP
whose parameters and AdamW moments are 210 MB. The table has medians over rounds, the ratio of each round with
its middle half, and steps from one kept state to the next.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tables import publish
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.testing import run_ranks

MODELS = {"small": ((64, 256, 64), 400), "large": ((1208,) * 13, 30)}  # widths, steps a round
BATCH = 16


def loop(job: Any, widths: tuple[int, ...], folder: str, shadow: bool) -> Iterator[Any]:
    torch.manual_seed(0)
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    model = paceline.ddp(job, nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = TensorDataset(torch.randn(BATCH * job.world_size * 8, widths[0]))
    batches = paceline.Batches(job, data, global_batch=BATCH * job.world_size)
    kept = paceline.Checkpoints(folder, shadow=shadow)
    training = paceline.Training(job, model, optimizer, batches, checkpoints=kept)
    for step in training.steps(until=10**9):
        for (x,) in step:
            step.backward(F.mse_loss(model(x), x, reduction="sum"), count=len(x))
        step.update()
        yield training


def measure(
    job: Any, name: str, rounds: int, folder: str, memory: str
) -> tuple[dict[str, list[float]], float]:
    """Mean step of each round in us for both sides, and steps between two kept states."""
    torch.set_num_threads(1)
    os.environ["PACELINE_SHADOW"] = memory
    widths, steps = MODELS[name]
    sides = {
        word: loop(job, widths, f"{folder}/{word}", word == "shadow")
        for word in ("without", "shadow")
    }
    found: dict[str, list[float]] = {side: [] for side in sides}
    seen: list[int] = []
    for number in range(rounds + 1):
        for side, each in sides.items():
            dist.barrier(group=job.control)
            began = time.perf_counter()
            for _ in range(steps):
                training = next(each)
                if number and side == "shadow":
                    seen.append(training.saving._shadow.kept.last_saved)
            slowest = torch.tensor((time.perf_counter() - began) / steps)
            dist.all_reduce(slowest, dist.ReduceOp.MAX, group=job.control)
            if number:
                found[side].append(1e6 * slowest.item())
    for each in sides.values():
        each.close()  # neither is to be saved in the end
    return found, len(seen) / max(1, len(set(seen)) - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    rows = []
    for name in MODELS:
        with (
            tempfile.TemporaryDirectory() as folder,
            tempfile.TemporaryDirectory(prefix="paceline-", dir="/dev/shm") as memory,
        ):
            found, every = run_ranks(
                measure,
                *(name, options.rounds, folder, memory),
                nproc=options.ranks,
                deadline_s=1200,
            )[0]
        pairs = zip(found["shadow"], found["without"], strict=True)
        ratios = sorted(ours / plain for ours, plain in pairs)
        cut = len(ratios) // 4
        rows.append(
            {
                "model": name,
                "step_us": statistics.median(found["without"]),
                "with_shadow_us": statistics.median(found["shadow"]),
                "ratio": statistics.median(ratios),
                "spread": [ratios[cut], ratios[-1 - cut]],
                "steps_between": every,
            }
        )
    publish("shadow", rows, ranks=options.ranks, rounds=options.rounds)


if __name__ == "__main__":
    main()
