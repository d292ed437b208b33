"""Overhead of a training step compared with a plain PyTorch loop: one process, and two ranks with DDP.

    python benchmarks/overhead.py [--steps 400] [--rounds 9] [--only one|two]

    tiny  MLP 32-32-8, batch 16, AdamW
    comm  MLP 4 x 1024, batch 128 (16.8 MB of gradients), SGD; two ranks only

The data is in memory, per-sample randomness is off, and each process uses one thread. All sides run in one
process and take turns in each round. A round reports the median step time. The table shows medians over
rounds, and the difference and ratio to the plain loop with their spread. Accelerate, Lightning Fabric and
Lightning's Trainer take part if they are installed (`pip install 'paceline[bench]'`), with logging and
checkpoints switched off. All sides must end with the same weights.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from tables import publish
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import paceline
from paceline.data.plan import Position
from paceline.testing import run_ranks

Side = Callable[[int], tuple[list[float], nn.Module]]  # number of steps -> step times, model

WIDTH, CLASSES, BATCH = 32, 8, 16
COMM_WIDTH, COMM_BATCH = 1024, 128


def make_model(*, comm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    if comm:
        layers = [nn.Linear(COMM_WIDTH, COMM_WIDTH) for _ in range(4)]
        return nn.Sequential(*[part for layer in layers for part in (layer, nn.GELU())])
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))


def make_data(steps: int, *, comm: bool = False) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    size, width = (COMM_BATCH, COMM_WIDTH) if comm else (BATCH, WIDTH)
    size *= steps
    return TensorDataset(
        torch.randn(size, width, generator=generator),
        torch.randint(0, CLASSES, (size,), generator=generator),
    )


def optimizer_of(model: nn.Module, *, comm: bool = False) -> torch.optim.Optimizer:
    if comm:
        return torch.optim.SGD(model.parameters(), lr=0.01)
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def order_of(job: Any, data: TensorDataset) -> torch.Tensor:
    """The sample order of `paceline.Batches`. All sides use it, so that they do the same work."""
    rows = TensorDataset(torch.arange(len(data)))
    batches = paceline.Batches(job, rows, global_batch=BATCH)
    steps = batches.iterate(Position(job.seed, 0, 0), epochs=1)
    return torch.cat([m.batch[0] for step in steps for m in step])


def plain_loop(
    data: TensorDataset, order: torch.Tensor, wrap: Callable[[nn.Module], nn.Module]
) -> Side:
    x_all, y_all = data.tensors

    def run(steps: int) -> tuple[list[float], nn.Module]:
        model = wrap(make_model())
        optimizer = optimizer_of(model)
        times = []
        for i in range(steps):
            began = time.perf_counter()
            ids = order[i * BATCH : (i + 1) * BATCH]
            x, y = x_all[ids], y_all[ids]
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - began)
        return times, model

    return run


def with_paceline(job: Any, data: TensorDataset, *, comm: bool = False) -> Side:
    def run(steps: int) -> tuple[list[float], nn.Module]:
        model = paceline.ddp(job, make_model(comm=comm))
        batches = paceline.Batches(
            job, data, global_batch=COMM_BATCH if comm else BATCH, sample_randomness=False
        )
        training = paceline.Training(job, model, optimizer_of(model, comm=comm), batches)
        times = []
        began = time.perf_counter()
        for step in training.steps(until=steps):
            for x, y in step:
                loss = F.cross_entropy(model(x), y, reduction="sum")
                step.backward(loss, count=len(y), reduction="sum")
            step.update()
            now = time.perf_counter()
            times.append(now - began)
            began = now
        return times, paceline.unwrap(model)

    return run


def with_accelerate(data: TensorDataset, order: torch.Tensor) -> Side:
    from accelerate import Accelerator

    def run(steps: int) -> tuple[list[float], nn.Module]:
        accelerator = Accelerator(cpu=True)
        bare = make_model()
        model, optimizer = accelerator.prepare(bare, optimizer_of(bare))
        x_all, y_all = data.tensors
        times = []
        for i in range(steps):
            began = time.perf_counter()
            ids = order[i * BATCH : (i + 1) * BATCH]
            x, y = x_all[ids], y_all[ids]
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            times.append(time.perf_counter() - began)
        return times, bare

    return run


def with_fabric(data: TensorDataset, order: torch.Tensor) -> Side:
    from lightning.fabric import Fabric

    def run(steps: int) -> tuple[list[float], nn.Module]:
        fabric = Fabric(accelerator="cpu", devices=1)
        bare = make_model()
        model, optimizer = fabric.setup(bare, optimizer_of(bare))
        x_all, y_all = data.tensors
        times = []
        for i in range(steps):
            began = time.perf_counter()
            ids = order[i * BATCH : (i + 1) * BATCH]
            x, y = x_all[ids], y_all[ids]
            loss = F.cross_entropy(model(x), y)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - began)
        return times, bare

    return run


def with_trainer(data: TensorDataset, order: torch.Tensor) -> Side:
    import lightning as L

    x_all, y_all = data.tensors

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()
            self.times: list[float] = []
            self.began = 0.0

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            now = time.perf_counter()
            if self.began:
                self.times.append(now - self.began)
            self.began = now
            x, y = batch
            return F.cross_entropy(self.model(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.model)

    class InMemory:
        """Batches by slicing, so that the time of torch's DataLoader is not measured."""

        def __init__(self, steps: int) -> None:
            self.steps = steps

        def __len__(self) -> int:
            return self.steps

        def __iter__(self) -> Any:
            for i in range(self.steps):
                ids = order[i * BATCH : (i + 1) * BATCH]
                yield x_all[ids], y_all[ids]

    def run(steps: int) -> tuple[list[float], nn.Module]:
        module = Module()
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            barebones=False,
        )
        trainer.fit(module, InMemory(steps))
        return module.times, module.model

    return run


def measure(sides: dict[str, Side], steps: int, rounds: int) -> dict[str, list[float]]:
    """The median step time in us for each side and round. The sides take turns."""
    medians: dict[str, list[float]] = {name: [] for name in sides}
    weights: dict[str, torch.Tensor] = {}
    for number in range(rounds + 1):
        for name, run in sides.items():
            times, model = run(steps)
            weights[name] = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
            if number:  # the first round warms up
                medians[name].append(1e6 * statistics.median(times[steps // 10 :]))
    first = next(iter(weights.values()))
    for name, each in weights.items():
        assert torch.allclose(each, first, atol=2e-6), f"{name} ended with different weights"
    return medians


def rows_of(medians: dict[str, list[float]]) -> list[dict[str, Any]]:
    base = medians["plain loop"]
    rows = []
    for name, values in medians.items():
        differences = sorted(v - b for v, b in zip(values, base, strict=True))
        ratios = sorted(v / b for v, b in zip(values, base, strict=True))
        rows.append(
            {
                "side": name,
                "step_us": statistics.median(values),
                "over_us": statistics.median(differences),
                "over_us_spread": [
                    differences[len(differences) // 4],
                    differences[-len(differences) // 4],
                ],
                "ratio": statistics.median(ratios),
                "ratio_spread": [ratios[len(ratios) // 4], ratios[-len(ratios) // 4]],
            }
        )
    return rows


def one_process(steps: int, rounds: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    with paceline.join(seed=7) as job:
        data = make_data(steps)
        order = order_of(job, data)
        sides: dict[str, Side] = {
            "plain loop": plain_loop(data, order, lambda model: model),
            "paceline": with_paceline(job, data),
        }
        if importlib.util.find_spec("lightning"):
            sides["fabric"] = with_fabric(data, order)
        if importlib.util.find_spec("accelerate"):
            sides["accelerate"] = with_accelerate(data, order)
        if importlib.util.find_spec("lightning"):
            sides["lightning trainer"] = with_trainer(data, order)
        return rows_of(measure(sides, steps, rounds))


def two_ranks(job: Any, steps: int, rounds: int, comm: bool) -> list[dict[str, Any]]:
    """Compare with plain DDP at the same settings. Each rank takes its half of every batch."""
    torch.set_num_threads(1)
    data = make_data(steps, comm=comm)
    rows = paceline.Batches(
        job, TensorDataset(torch.arange(len(data))), global_batch=COMM_BATCH if comm else BATCH
    )
    mine = [m.batch[0] for s in rows.iterate(Position(job.seed, 0, 0), epochs=1) for m in s]
    x_all, y_all = data.tensors

    def plain(steps: int) -> tuple[list[float], nn.Module]:
        model = DistributedDataParallel(make_model(comm=comm), gradient_as_bucket_view=True)
        optimizer = optimizer_of(model, comm=comm)
        times = []
        for i in range(steps):
            began = time.perf_counter()
            x, y = x_all[mine[i]], y_all[mine[i]]
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - began)
        return times, model.module

    sides = {"plain loop": plain, "paceline": with_paceline(job, data, comm=comm)}
    return rows_of(measure(sides, steps, rounds))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--steps", type=int, default=400)
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--only", choices=["one", "two"])
    args = options.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    rows: list[dict[str, Any]] = []
    if args.only != "two":
        rows += [{"of": "one process"} | row for row in one_process(args.steps, args.rounds)]
    if args.only != "one":
        for name, steps in (("tiny", args.steps), ("comm", max(10, args.steps // 20))):
            found = run_ranks(
                two_ranks,
                steps,
                args.rounds,
                name == "comm",
                nproc=2,
                timeout_s=300,
                deadline_s=1200,
            )[0]
            rows += [
                {"of": f"two ranks, {name} MLP, compared with plain DDP"} | row for row in found
            ]
    publish("overhead", rows, rounds=args.rounds)


if __name__ == "__main__":
    main()
