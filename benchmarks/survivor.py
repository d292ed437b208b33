"""The training that `restarts.py` injects faults into.

`restarts.py` starts it with `paceline run`, with its settings as JSON in the variable SURVIVOR. It writes to
its folder: `ledger-RANK` (the samples of each step), `done-RANK` (the steps that it has completed), `losses`
(one line per step and attempt), and `kept` (checkpoints). They show whether a fault lost anything.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import TensorDataset

import paceline
from paceline.job import collectives
from paceline.testing import Fault, inject


def data(size: int) -> TensorDataset:
    x = torch.randn(size, 32, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x.sum(1) > 0).long(), torch.arange(size))


def net(width: int) -> torch.nn.Module:
    torch.manual_seed(2)
    return torch.nn.Sequential(
        torch.nn.Linear(32, width),
        torch.nn.LayerNorm(width),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(width, 2),
    )


def write(name: str, row: dict[str, Any]) -> None:
    # A single write per line: a killed process leaves no partial line.
    fd = os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(fd, json.dumps(row).encode() + b"\n")
    os.close(fd)


def main() -> None:
    settings = json.loads(os.environ["SURVIVOR"])
    faults = [Fault(**fault) for fault in settings["faults"]]
    with paceline.join(seed=7, device="cpu") as job:
        attempt = collectives.gather(job, time.time())[0]
        model = paceline.ddp(job, net(settings["width"]))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        batches = paceline.Batches(job, data(settings["samples"]), global_batch=24, micro_batch=3)
        checkpoints = paceline.Checkpoints("kept", every_steps=settings["save_every"], keep=2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
        training = paceline.Training(
            job,
            model,
            optimizer,
            batches,
            schedule=schedule,
            checkpoints=checkpoints,
            reproducible=settings["reproducible"],
        )

        def at(phase: str, number: int) -> None:
            inject(job, faults, number, phase, folder=".")

        for step in training.steps(epochs=settings["epochs"]):
            at("data", step.number)
            seen: set[int] = set()
            for x, y, which in step:
                # A step runs twice if the scale of the exact sums changes.
                ids = [number for number in which.tolist() if number not in seen]
                seen.update(ids)
                # Before the backward: with these gradients others may complete and save this step.
                row = {"attempt": attempt, "step": step.number, "epoch": step.epoch, "ids": ids}
                write(f"ledger-{job.rank}", row)
                loss = functional.cross_entropy(model(x), y, reduction="sum")
                at("forward", step.number)
                step.backward(loss, count=len(y), reduction="sum")
                time.sleep(settings["slow_s"])
            at("update", step.number)
            step.update()
            row = {"attempt": attempt, "step": step.number, "pid": os.getpid()}
            write(f"done-{job.rank}", row | {"time": time.time()})
            total = float(step.loss).hex()  # a sum over ranks, so every rank calls it
            at("end", step.number)
            if job.rank == 0:
                row = {"attempt": attempt, "step": step.number, "time": time.time()}
                write("losses", row | {"loss": total, "world": job.world_size})


if __name__ == "__main__":
    main()
