"""Time from `paceline run` to the end of the first step: a new training, and one that resumes 210 MB.

    python benchmarks/resume.py [--nproc 2] [--rounds 7]

The model is an MLP. Its parameters and AdamW moments take 210 MB.

    new      a new training
    resumed  a training that reads, verifies and loads a checkpoint first
    late     the same with a checkpoint of epoch 100,000; a data position is a number, so no step is replayed

The floor is the time of "new" plus one copy of 210 MB in memory. The sides take turns. The table shows
medians over rounds, and the ratio to the floor in the same round.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tables import publish, ratio_row
from torch.utils.data import TensorDataset

import paceline

LATE = 100_000


def make(job: Any, folder: Path) -> paceline.Training:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(1208, 1208) for _ in range(12)]
    model = paceline.ddp(job, torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batches = paceline.Batches(job, TensorDataset(torch.randn(64, 1208)), global_batch=32)
    checkpoints = paceline.Checkpoints(folder)
    return paceline.Training(job, model, optimizer, batches, checkpoints=checkpoints)


def train(training: paceline.Training, began: float) -> None:
    """Train one step, and print the seconds since the start of the launcher."""
    for step in training.steps(until=10**9):
        for (x,) in step:
            step.backward(training.models[0](x).square().sum(), count=len(x), reduction="sum")
        step.update()
        # A single write, so that the output of another rank cannot split the line.
        os.write(1, f"took {time.time() - began} after step {step.number - 1}\n".encode())
        os._exit(0)


def prepare(training: paceline.Training, folder: Path) -> None:
    """Save a checkpoint after two steps, and a copy of it with the position of a late epoch."""
    for step in training.steps(until=2):
        for (x,) in step:
            step.backward(training.models[0](x).square().sum(), count=len(x), reduction="sum")
        step.update()
    state = training.state_dict()
    state |= {"step": 2 * LATE, "position": [training.job.seed, LATE, 0]}
    paceline.Checkpoints(folder / "late").save(training.job, 2 * LATE, state)


def launch(nproc: int, folder: Path, side: str) -> float:
    """Seconds from the start of the launcher until every rank has trained one step."""
    words = [sys.executable, "-m", "paceline", "run", f"--nproc-per-node={nproc}", __file__]
    done = subprocess.run(
        [*words, "--rank", side, f"{time.time()}", str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120,
    )
    found = [line.split() for line in done.stdout.splitlines() if "took" in line]
    expected = {"new": 0, "resumed": 2, "late": 2 * LATE, "prepare": 0}[side]
    assert all(int(words[-1]) == expected for words in found), done.stdout
    return max((float(words[words.index("took") + 1]) for words in found), default=0.0)


def copy_s() -> float:
    """Seconds to copy 210 MiB between two allocated tensors."""
    source = torch.ones(210 << 20, dtype=torch.uint8)
    target = source.clone()
    began = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - began


def as_rank(side: str, began: float, folder: Path) -> None:
    with paceline.join(seed=1, device="cpu") as job:
        kept = folder / {"prepare": "resumed"}.get(side, side)
        training = make(job, kept)
        if side == "prepare":
            prepare(training, folder)
        else:
            train(training, began)


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        as_rank(sys.argv[2], float(sys.argv[3]), Path(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    found: dict[str, list[float]] = {"copy": [], "new": [], "resumed": [], "late": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        launch(options.nproc, folder, "prepare")
        for _, side in itertools.product(range(options.rounds), found):
            found[side].append(copy_s() if side == "copy" else launch(options.nproc, folder, side))
            shutil.rmtree(folder / "new", ignore_errors=True)
    floors = [new + copy for new, copy in zip(found["new"], found["copy"], strict=True)]
    rows = []
    for side, values in found.items():
        row = {"side": side, "seconds": statistics.median(values)}
        if side in ("resumed", "late"):
            row |= ratio_row(values, floors, "of_floor")
        rows.append(row)
    publish("resume", rows, ranks=options.nproc, rounds=options.rounds)


if __name__ == "__main__":
    main()
