"""DataParallel in one process beside DistributedDataParallel and paceline.ddp, on the GPUs of one machine.

    python benchmarks/dp_vs_ddp.py [--rounds 9] [--steps 20] [--width 512] [--batch 64]

A GPT of 4 blocks trains on random tokens with AdamW: the same model and the same global batch for each side.
Rank 0 runs DataParallel on all devices while the other ranks wait on the host. The sides take turns, a round
of steps each, and their losses must agree. The table shows medians over rounds, and the ratio to
DistributedDataParallel with its quartiles. With fewer than two CUDA devices there is nothing to compare.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tables import publish
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import TensorDataset

import paceline
from paceline.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from gpt_3d import GPT, LENGTH, SYMBOLS

SIDES = ("DataParallel", "DistributedDataParallel", "paceline.ddp")
BASE = "DistributedDataParallel"
HEADS, WARM_UP = 4, 3

Step = Callable[[], Any]  # runs one optimizer step and returns the loss, which `float` reads


def by_torch(model: nn.Module, ids: torch.Tensor, batch: int, rows: torch.Tensor) -> Step:
    """A loop in plain torch; this process gets the `rows` of each global batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    at = 0

    def step() -> torch.Tensor:
        nonlocal at
        chunk = ids[at : at + batch][rows]
        at += batch
        loss = F.cross_entropy(model(chunk[:, :-1]).flatten(0, 1), chunk[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def by_paceline(job: paceline.Job, model: nn.Module, ids: torch.Tensor, batch: int) -> Step:
    model = paceline.ddp(job, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(ids[:, :-1].cpu(), ids[:, 1:].cpu())
    batches = paceline.Batches(job, data, global_batch=batch, shuffle=False)
    steps: Iterator[paceline.Step] = paceline.Training(job, model, optimizer, batches).steps()

    def loss_of(batch: Any) -> torch.Tensor:
        logits = model(batch[0]).flatten(0, 1)
        return F.cross_entropy(logits, batch[1].flatten(), reduction="sum") / LENGTH

    def step() -> paceline.StepLoss:
        each = next(steps)
        each.run(loss_of)
        each.update()
        return each.loss

    return step


def work(job: paceline.Job, width: int, batch: int, rounds: int, steps: int) -> dict[str, Any]:
    """One rank: milliseconds of a step in each round by side, and the last losses of the warm-up."""
    generator = torch.Generator().manual_seed(1)
    count = batch * (WARM_UP + rounds * steps)
    ids = torch.randint(0, len(SYMBOLS), (count, LENGTH + 1), generator=generator).to(job.device)

    def model() -> nn.Module:
        torch.manual_seed(0)
        return GPT(width, HEADS, depth=4).to(job.device)

    own = torch.arange(job.rank, batch, job.world_size, device=job.device)
    sides: dict[str, Step] = {}
    if job.rank == 0:
        everything = torch.arange(batch, device=job.device)
        sides["DataParallel"] = by_torch(DataParallel(model()), ids, batch, everything)
    devices = [job.device] if job.device.type == "cuda" else None
    wrapped = DistributedDataParallel(model(), device_ids=devices, gradient_as_bucket_view=True)
    sides["DistributedDataParallel"] = by_torch(wrapped, ids, batch, own)
    sides["paceline.ddp"] = by_paceline(job, model(), ids, batch)

    def run(name: str, count: int) -> tuple[float, float]:
        # On the host: a barrier of NCCL would occupy the devices that DataParallel uses.
        dist.barrier(group=job.control)
        began, loss = time.perf_counter(), torch.zeros(())
        for _ in range(count if name in sides else 0):
            loss = sides[name]()
        if job.device.type == "cuda":
            torch.cuda.synchronize(job.device)
        took = 1e3 * (time.perf_counter() - began) / count
        return took, float(loss)

    losses = {name: run(name, WARM_UP)[1] for name in SIDES}
    times: dict[str, list[float]] = {name: [] for name in SIDES}
    for _ in range(rounds):
        for name in SIDES:
            times[name].append(run(name, steps)[0])
    return {"times": times, "losses": losses}


def compare(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the table, from the times of rank 0."""
    losses = {name: ranks[0]["losses"][name] for name in SIDES}
    losses[BASE] = statistics.mean(rank["losses"][BASE] for rank in ranks)  # of equal parts
    if max(losses.values()) - min(losses.values()) > 1e-3 * losses[BASE]:
        raise SystemExit(f"the losses differ: {losses}")
    times = ranks[0]["times"]
    rows = []
    for name in SIDES:
        ratios = [own / base for own, base in zip(times[name], times[BASE], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        row = {"side": name, "step_ms": statistics.median(times[name]), "ratio": middle}
        rows.append({**row, "quartiles": [low, high]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=64, help="samples of a step on each device")
    options = parser.parse_args()
    devices = torch.cuda.device_count()
    if devices < 2:
        print(f"skipped: DataParallel needs at least 2 CUDA devices, this machine has {devices}")
        return
    arguments = (options.width, options.batch * devices, options.rounds, options.steps)
    ranks = run_ranks(work, *arguments, nproc=devices, deadline_s=1800)
    about = {"gpus": devices, "gpu": torch.cuda.get_device_name()}
    publish("dp_vs_ddp", compare(ranks), batch=arguments[1], width=options.width, **about)


if __name__ == "__main__":
    main()
