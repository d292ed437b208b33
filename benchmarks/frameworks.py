"""A training step on two ranks: Paceline, plain DDP, Accelerate, Lightning Fabric and Lightning's Trainer.

    python benchmarks/frameworks.py [--rounds 7] [--only tiny|comm|comp] [--ranks 2]

The workloads are those of `workloads.py`. In each round, each side runs all workloads in one job of its own,
with the backend that it chooses itself: Gloo, or shared memory for Paceline. `paceline run` starts all jobs,
with one thread per rank; the sides take turns. A round reports the median step time on the slower rank. The
table shows medians over rounds, and the ratio of each round to plain DDP with its middle half. All sides see
the same samples in the same order and must end with the same weights. Frameworks that are not installed are
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
from tables import publish, ratio_row
from workloads import WORKLOADS, Steps, order, paceline_loop, plain_ddp, plain_loop, timed

import paceline
from paceline.testing import run_ranks

STEPS = {"tiny": 600, "comm": 40, "comp": 12}
DISTINCT = 16  # number of different batches; more steps repeat them


def rank_order(job: Any, name: str) -> list[torch.Tensor]:
    """The samples that Paceline gives this rank in each step. The other sides use the same ones."""
    batch = WORKLOADS[name].batch * job.world_size
    return order(job, batch * DISTINCT, batch, STEPS[name])


class InMemory:
    """A minimal loader for a trainer, so that the time of torch's DataLoader is not measured."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class Rank:
    """One rank of one side's job; a single process if `ranks` is 1."""

    def __init__(self, name: str, mine: list[torch.Tensor], ranks: int) -> None:
        self.ranks, self.mine = ranks, mine
        self.work = WORKLOADS[name]
        # "ddp" on one rank would wrap the model, and would set the number of threads.
        self.strategy = "ddp" if ranks > 1 else "auto"
        self.data = self.work.data(ranks, DISTINCT)
        torch.manual_seed(0)
        self.model = self.work.make()

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        x_all, y_all = self.data.tensors
        for ids in self.mine:
            yield x_all[ids], y_all[ids]

    def plain_loop(self) -> Steps:
        return plain_loop(self.data, self.mine, self.model, self.work.optimizer(self.model))

    def plain_ddp(self) -> Steps:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        model = plain_ddp(self.model)
        return plain_loop(self.data, self.mine, model, self.work.optimizer(model))

    def paceline(self) -> Steps:
        with paceline.join() as job:
            yield from self.paceline_in(job)

    def paceline_in(self, job: Any) -> Steps:
        model = paceline.ddp(job, self.model)
        optimizer, batch = self.work.optimizer(model), self.work.batch * self.ranks
        return paceline_loop(job, self.data, batch, model, optimizer, len(self.mine))

    def accelerate(self) -> Steps:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(self.model, self.work.optimizer(self.model))
        for x, y in self.batches():
            with accelerator.accumulate(model):
                accelerator.backward(F.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
            yield

    def fabric(self) -> Steps:
        from lightning.fabric import Fabric

        fabric = Fabric(accelerator="cpu", devices=self.ranks, strategy=self.strategy)
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
            strategy=self.strategy,
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
        return found if isinstance(found, list) else timed(found)


SIDES = {
    "plain_ddp": "torch",
    "paceline": "paceline",
    "accelerate": "accelerate",
    "fabric": "lightning",
    "trainer": "lightning",
}


def installed() -> list[str]:
    return [side for side, module in SIDES.items() if importlib.util.find_spec(module)]


def quiet() -> None:
    warnings.filterwarnings("ignore")
    for noisy in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(noisy).setLevel(logging.ERROR)


def as_rank(side: str, names: list[str], folder: Path) -> None:
    """Run one round of a side, and write the step times and the weights to `folder`."""
    quiet()
    torch.set_num_threads(1)
    number, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    step_us = {}
    for name in names:
        mine = torch.load(folder / f"{name}-orders.pt")[number]
        rank = Rank(name, mine, ranks)
        times = rank.run(side)
        step_us[name] = 1e6 * statistics.median(times[len(times) // 4 :])
        if number == 0:
            torch.save(rank.model.state_dict(), folder / f"{name}-{side}.pt")
    (folder / f"{number}.json").write_text(json.dumps(step_us))
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
    sides = installed()
    found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for name in names:
            torch.save(run_ranks(rank_order, name, nproc=ranks), folder / f"{name}-orders.pt")
        for _ in range(rounds):
            for side in sides:
                found[side].append(one_round(side, names, ranks, folder))
        for name in names:
            refuse_other_weights({side: torch.load(folder / f"{name}-{side}.pt") for side in sides})
    return [row(name, ranks, side, found) for name in names for side in sides]


def refuse_other_weights(weights: dict[str, dict[str, torch.Tensor]]) -> None:
    """Raise AssertionError if a side differs from the first one."""
    expected = next(iter(weights.values()))
    for side, state in weights.items():
        for key, value in expected.items():
            assert torch.allclose(state[key], value, atol=1e-4), (
                f"{side} ended with a different {key}"
            )


def row(
    name: str, ranks: int, side: str, found: dict[str, list[dict[str, float]]]
) -> dict[str, Any]:
    values = [times[name] for times in found[side]]
    plain = [times[name] for times in found["plain_ddp"]]
    facts = {"workload": name, "ranks": ranks, "side": side}
    return facts | {"step_us": statistics.median(values), **ratio_row(values, plain)}


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
