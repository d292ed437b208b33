"""A training step on two ranks: Paceline, plain DDP, Accelerate, Lightning Fabric and Lightning's Trainer.

    python benchmarks/frameworks.py [--rounds 7] [--only tiny|comm|comp] [--ranks 2]

The workloads are those of `steps.py`. In each round, each side runs all workloads in one job of its own, with
the backend that it chooses itself: Gloo, or shared memory for Paceline. `paceline run` starts all jobs, with
one thread per rank; the sides take turns. A round reports the median step time on the slower rank. The table
shows medians over rounds, and the ratio of each round to plain DDP with its middle half. All sides see the
same samples in the same order and must end with the same weights. Frameworks that are not installed are
skipped (`pip install 'paceline[bench]'`).
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from steps import WORKLOADS, Workload, paceline_loop, plain_loop
from tables import publish
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import paceline
from paceline.data.plan import Position
from paceline.testing import run_ranks

STEPS = {"tiny": 600, "comm": 40, "comp": 12}
DISTINCT = 16  # number of different batches; more steps repeat them


def samples(work: Workload, ranks: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    size = work.batch * ranks * DISTINCT
    return TensorDataset(
        torch.randn(size, *work.x, generator=draw), torch.randn(size, *work.y, generator=draw)
    )


def order(job: Any, name: str) -> list[torch.Tensor]:
    """The samples that Paceline gives this rank in each step. The other sides use the same ones."""
    batch = WORKLOADS[name].batch * job.world_size
    rows = TensorDataset(torch.arange(batch * DISTINCT))
    plan = paceline.Batches(job, rows, global_batch=batch)
    epochs = -(-STEPS[name] // DISTINCT)
    steps = plan.iterate(Position(job.seed, 0, 0), epochs=epochs)
    return [micro.batch[0] for step in steps for micro in step][: STEPS[name]]


class InMemory:
    """A minimal loader for a trainer, so that the time of torch's DataLoader is not measured."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class Rank:
    """One rank of one side's job."""

    def __init__(self, name: str, orders: str) -> None:
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.name, self.work = name, WORKLOADS[name]
        self.data = samples(self.work, self.ranks)
        self.mine: list[torch.Tensor] = torch.load(orders)[self.rank]
        torch.manual_seed(0)
        self.model = self.work.make()

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        x_all, y_all = self.data.tensors
        for ids in self.mine:
            yield x_all[ids], y_all[ids]

    def plain_ddp(self) -> Iterator[None]:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        model = DistributedDataParallel(self.model, gradient_as_bucket_view=True, static_graph=True)
        yield from plain_loop(self.work, self.data, self.mine, model)

    def paceline(self) -> Iterator[None]:
        with paceline.join() as job:
            model = paceline.ddp(job, self.model)
            yield from paceline_loop(job, self.work, self.data, model, len(self.mine))

    def accelerate(self) -> Iterator[None]:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(self.model, self.work.optimizer(self.model))
        for x, y in self.batches():
            with accelerator.accumulate(model):
                accelerator.backward(F.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
            yield

    def fabric(self) -> Iterator[None]:
        from lightning.fabric import Fabric

        fabric = Fabric(accelerator="cpu", devices=self.ranks, strategy="ddp")
        fabric.launch()
        model, optimizer = fabric.setup(self.model, self.work.optimizer(self.model))
        for x, y in self.batches():
            fabric.backward(F.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            yield

    def trainer(self) -> list[float]:
        import lightning as L

        inner, work, times = self.model, self.work, []

        class Module(L.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.inner = inner

            def training_step(self, batch: Any, _: int) -> torch.Tensor:
                times.append(time.perf_counter())
                x, y = batch
                return F.mse_loss(self.inner(x), y)

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return work.optimizer(self.inner)

        trainer = L.Trainer(
            accelerator="cpu",
            devices=self.ranks,
            strategy="ddp",
            max_epochs=1,
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Module(), InMemory(list(self.batches())))
        return [b - a for a, b in itertools.pairwise(times)]

    def run(self, side: str) -> list[float]:
        """Run all steps. Return the time of each in seconds."""
        found = getattr(self, side)()
        if isinstance(found, list):
            return found
        times, began = [], time.perf_counter()
        for _ in found:
            times.append((now := time.perf_counter()) - began)
            began = now
        return times


SIDES = {
    "plain_ddp": "torch",
    "paceline": "paceline",
    "accelerate": "accelerate",
    "fabric": "lightning",
    "trainer": "lightning",
}


def as_rank(side: str, names: list[str], folder: Path) -> None:
    """Run one round of a side, and write the step times and the weights to `folder`."""
    warnings.filterwarnings("ignore")
    for noisy in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    step_us = {}
    for name in names:
        rank = Rank(name, str(folder / f"{name}-orders.pt"))
        times = rank.run(side)
        step_us[name] = 1e6 * statistics.median(times[len(times) // 4 :])
        if rank.rank == 0:
            torch.save(rank.model.state_dict(), folder / f"{name}-{side}.pt")
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(step_us))
    if dist.is_initialized():
        dist.destroy_process_group()


def one_round(side: str, names: list[str], ranks: int, folder: Path) -> dict[str, float]:
    """Run all workloads in one job. Return the step time of each on the slower rank, in microseconds."""
    words = [
        sys.executable,
        "-m",
        "paceline",
        "run",
        f"--nproc-per-node={ranks}",
        "--hang-after=60",
    ]
    words += [__file__, "--side", side, "--folder", str(folder), "--only", *names]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(words, env=environ, check=True, timeout=600, stdout=subprocess.DEVNULL)
    times = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    return {name: max(of_rank[name] for of_rank in times) for name in names}


def measure(names: list[str], ranks: int, rounds: int) -> list[dict[str, Any]]:
    sides = [side for side, module in SIDES.items() if importlib.util.find_spec(module)]
    found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for name in names:
            torch.save(run_ranks(order, name, nproc=ranks), folder / f"{name}-orders.pt")
        for _ in range(rounds):
            for side in sides:
                found[side].append(one_round(side, names, ranks, folder))
        for name in names:
            refuse_other_weights({side: torch.load(folder / f"{name}-{side}.pt") for side in sides})
    return [row(name, ranks, side, found) for name in names for side in sides]


def refuse_other_weights(weights: dict[str, dict[str, torch.Tensor]]) -> None:
    for side, state in weights.items():
        for key, value in weights["plain_ddp"].items():
            assert torch.allclose(state[key], value, atol=1e-4), (
                f"{side} ended with a different {key}"
            )


def row(
    name: str, ranks: int, side: str, found: dict[str, list[dict[str, float]]]
) -> dict[str, Any]:
    plain = [times[name] for times in found["plain_ddp"]]
    values = [times[name] for times in found[side]]
    ratios = sorted(v / b for v, b in zip(values, plain, strict=True))
    cut = len(ratios) // 4
    return {
        "workload": name,
        "ranks": ranks,
        "side": side,
        "step_us": statistics.median(values),
        "of_plain_ddp": statistics.median(ratios),
        "spread": [ratios[cut], ratios[-1 - cut]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", choices=list(STEPS), nargs="+", default=list(STEPS))
    parser.add_argument("--side", choices=list(SIDES), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        as_rank(options.side, options.only, options.folder)
        return
    rows = measure(options.only, options.ranks, options.rounds)
    publish("frameworks", rows, rounds=options.rounds)


if __name__ == "__main__":
    main()
