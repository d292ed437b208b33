"""The cost of `reproducible=True` on one and two ranks.

    python benchmarks/reproducible.py [--steps 20] [--rounds 7]

    comm  mostly communication: MLP 4 x 1024, batch 128 (16.8 MB of gradients)
    comp  mostly computation: transformer with d 256 and 4 layers, batch 8 x 128 tokens

Each rank has one micro-batch per step, one thread and AdamW. Normal and reproducible mode take turns in the
same processes. The table shows medians over rounds, and the ratio with the middle half of the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from tables import publish
from torch.utils.data import TensorDataset
from workloads import Transformer, mlp

import paceline
from paceline.testing import run_ranks

WORKLOADS: dict[str, tuple[Any, int, tuple[int, ...]]] = {
    "comm": (mlp, 128, (1024,)),
    "comp": (Transformer, 8, (128, 256)),
}


def run_side(job: Any, name: str, reproducible: bool, steps: int) -> float:
    """The median step time of one mode in ms."""
    make, batch, shape = WORKLOADS[name]
    torch.manual_seed(0)
    model = paceline.ddp(job, make())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = TensorDataset(torch.randn(batch * 2, *shape), torch.randn(batch * 2, *shape))
    batches = paceline.Batches(
        job, data, global_batch=batch, micro_batch=batch // job.world_size, sample_randomness=False
    )
    training = paceline.Training(job, model, optimizer, batches, reproducible=reproducible)
    times, began = [], time.perf_counter()
    for step in training.steps(until=steps):
        for x, y in step:
            step.backward(F.mse_loss(model(x), y, reduction="sum"), count=len(y), reduction="sum")
        step.update()
        now = time.perf_counter()
        times.append(now - began)
        began = now
    return 1e3 * statistics.median(times[3:])


def measure(job: Any, steps: int, rounds: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    rows = []
    for name in WORKLOADS:
        pairs = []
        for number in range(rounds + 1):
            pair = [run_side(job, name, reproducible, steps) for reproducible in (False, True)]
            if number:  # the first round warms up
                pairs.append(pair)
        ratios = sorted(exact / normal for normal, exact in pairs)
        rows.append(
            {
                "workload": name,
                "ranks": job.world_size,
                "normal_ms": statistics.median(normal for normal, _ in pairs),
                "reproducible_ms": statistics.median(exact for _, exact in pairs),
                "ratio": statistics.median(ratios),
                "middle_half": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
            }
        )
    return rows


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--rounds", type=int, default=7)
    args = options.parse_args()
    rows = []
    for nproc in (1, 2):
        rows += run_ranks(
            measure, args.steps, args.rounds, nproc=nproc, timeout_s=600, deadline_s=3600
        )[0]
    publish("reproducible", rows, rounds=args.rounds)


if __name__ == "__main__":
    main()
