"""The cost of saving a 210 MB checkpoint during training: Paceline, `dcp.async_save` and `torch.save`.

    python benchmarks/checkpoint.py [--rounds 9] [--nproc 1 2]

The model is an MLP, on the GPU if there is one. Its parameters and AdamW moments take 210 MB. Each round
trains 20 steps after a save.

    stall        extra time of the step boundary with the save and of the step after it
    later steps  median of the next 19 steps, as a ratio to the same steps without a save

Each round waits for the end of the write, so that no side writes during the measurement of another. The
sides take turns in one process. The table shows medians over rounds, after one warm-up round. All sides call
fsync.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from tables import publish, ratio_row
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import paceline
from paceline.job import collectives
from paceline.testing import run_ranks

WIDTH, LAYERS, STEPS = 1208, 12, 20
Wait = Callable[[], object]


def sides(
    job: Any, model: nn.Module, optimizer: Any, folder: Path
) -> dict[str, Callable[[int], Wait]]:
    """Per side: a function that begins a save and returns one that waits for its end."""
    checkpoints = paceline.Checkpoints(folder / "paceline", keep=2)
    checkpoints.resume(job)
    group = dist.new_group(backend="gloo") if job.group is not None else None

    def ours(step: int) -> Wait:
        content = {
            "models": [paceline.unwrap(model).state_dict()],
            "optimizers": [optimizer.state_dict()],
        }
        checkpoints.save(job, step, content, wait=False)
        return lambda: checkpoints.finish(job, required=True)

    def torchs(step: int) -> Wait:
        weights, moments = get_state_dict(model, optimizer)
        future = dcp.async_save(
            {"model": weights, "optimizer": moments},
            checkpoint_id=str(folder / "dcp" / str(step)),
            process_group=group,
            no_dist=group is None,
        )
        return future.result  # type: ignore[union-attr]

    def plain(step: int) -> Wait:
        if job.rank == 0:
            (folder / "plain").mkdir(exist_ok=True)
            with (folder / "plain" / str(step)).open("wb") as file:
                torch.save([model.state_dict(), optimizer.state_dict()], file)
                os.fsync(file.fileno())
        return lambda: None

    def nothing(step: int) -> Wait:
        return lambda: None

    return {"no save": nothing, "paceline": ours, "dcp.async_save": torchs, "torch.save": plain}


def measure(job: Any, rounds: int, folder: str) -> dict[str, list[tuple[float, float, float]]]:
    """Stall, median of the later steps and time until saved, in seconds, for each side and round."""
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more threads would spin while other work uses their cores
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    model = paceline.ddp(job, nn.Sequential(*layers).to(job.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x, y = torch.randn(2, 16, WIDTH, device=job.device)
    wait_for_device = torch.cuda.synchronize if job.device.type == "cuda" else lambda: None

    def step() -> float:
        began = time.perf_counter()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        wait_for_device()
        return time.perf_counter() - began

    for _ in range(3):
        step()
    chosen = sides(job, model, optimizer, Path(folder))
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in chosen}
    for number in range(rounds + 1):
        for name, save in chosen.items():
            collectives.gather(job, 0)
            usual = statistics.median(step() for _ in range(5))
            collectives.gather(job, 0)
            began = time.perf_counter()
            wait = save(number + 1)
            stall = time.perf_counter() - began + step() - usual
            later = [step() for _ in range(STEPS - 1)]
            trained = time.perf_counter()
            wait()
            saved = time.perf_counter() - began if time.perf_counter() - trained > 0.001 else 0.0
            print(f"round {number} {name}: {1e3 * stall:.1f} ms", flush=True)
            if number:
                found[name].append((stall, statistics.median(later), saved))
        if job.rank == 0:
            for old in ("dcp", "plain"):
                shutil.rmtree(Path(folder) / old, ignore_errors=True)
    return found


def table(found: dict[str, list[tuple[float, float, float]]]) -> list[dict[str, Any]]:
    base = [later for _, later, _ in found["no save"]]
    peer = [stall for stall, _, _ in found["dcp.async_save"]]
    rows = []
    for name, rounds in found.items():
        stalls = [stall for stall, _, _ in rounds]
        rows.append(
            {
                "side": name,
                "stall_ms": 1e3 * statistics.median(stalls),
                "stall_ms_range": [1e3 * min(stalls), 1e3 * max(stalls)],
                **ratio_row(stalls, peer, "of_dcp"),
                **ratio_row([later for _, later, _ in rounds], base, "later_steps"),
            }
        )
    return rows


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--nproc", type=int, nargs="+", default=[1, 2])
    args = options.parse_args()
    rows = []
    for nproc in args.nproc:
        with tempfile.TemporaryDirectory() as folder:
            found = run_ranks(
                measure, args.rounds, folder, nproc=nproc, timeout_s=300, deadline_s=1200
            )[0]
        rows += [{"ranks": nproc, **row} for row in table(found)]
    if torch.cuda.is_available():
        publish("checkpoint_gpu", rows, rounds=args.rounds, gpu=torch.cuda.get_device_name())
    else:
        publish("checkpoint", rows, rounds=args.rounds)


if __name__ == "__main__":
    main()
