"""Memory that a training step takes: Paceline and plain DDP compared with a loop without communication.

    python benchmarks/memory.py [--ranks 2] [--width 2048] [--rounds 7]

An MLP (8 layers of `width`, AdamW, batch 16) trains for a few steps in new processes. Before the update of
the last step, when all gradients exist, each rank reads its proportional set size (PSS), which divides shared
memory among the processes that map it. The sides take turns. The table shows the mean over ranks, and the
median over rounds.

    alone                    no process group, no DDP: the memory of the model itself
    plain DDP                torch's DDP over Gloo with default settings
    plain DDP, bucket views  the same with `gradient_as_bucket_view`
    paceline                 `paceline.ddp` over `shm`, and `paceline.Training`
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tables import publish
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import paceline
from paceline.testing import run_ranks

SIDES = ("alone", "plain DDP", "plain DDP, bucket views", "paceline")
BATCH, STEPS = 16, 8


def pss_mb() -> float:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("the kernel does not report Pss")


def measure(job: Any, side: str, width: int) -> float:
    """The PSS in MiB before the update of the last step."""
    torch.set_num_threads(1)
    model: nn.Module = nn.Sequential(*[nn.Linear(width, width) for _ in range(8)])
    data = TensorDataset(torch.randn(BATCH * job.world_size * STEPS, width))
    found = 0.0
    if side == "paceline":
        model = paceline.ddp(job, model)
        optimizer = torch.optim.AdamW(model.parameters())
        batches = paceline.Batches(job, data, global_batch=BATCH * job.world_size)
        for step in paceline.Training(job, model, optimizer, batches).steps(epochs=1):
            for (x,) in step:
                step.backward(
                    F.mse_loss(model(x), x, reduction="sum"), count=len(x), reduction="sum"
                )
            found = pss_mb()
            step.update()
        return found
    if side != "alone":
        view = side == "plain DDP, bucket views"
        model = DistributedDataParallel(model, gradient_as_bucket_view=view)
    optimizer = torch.optim.AdamW(model.parameters())
    for (x,) in torch.utils.data.DataLoader(data, batch_size=BATCH):
        F.mse_loss(model(x), x).backward()
        found = pss_mb()
        optimizer.step()
        optimizer.zero_grad()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(options.rounds):
        for side in SIDES:
            os.environ["PACELINE_BACKEND"] = "shm" if side == "paceline" else "gloo"
            ranks = run_ranks(measure, side, options.width, nproc=options.ranks, deadline_s=900)
            found[side].append(statistics.mean(ranks))
    alone = statistics.median(found["alone"])
    rows = [
        {"side": side, "pss_mb": mb, "over_alone": mb / alone - 1}
        for side, mb in ((side, statistics.median(values)) for side, values in found.items())
    ]
    gradients_mb = 8 * options.width * (options.width + 1) * 4 / 2**20
    publish("memory", rows, ranks=options.ranks, gradients_mb=gradients_mb)


if __name__ == "__main__":
    main()
