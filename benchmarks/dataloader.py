"""`Batches` of a `DataLoader` beside `Batches` of its dataset: data wait and step time.

    python benchmarks/dataloader.py [--rounds 9] [--steps 150]

The sides take turns in one process, a round of steps each. Samples are images of 3 x 32 x 32 with a random
flip, so that reading takes a part of the step. The order of "weighted sampler" is drawn by torch's
`WeightedRandomSampler` once per epoch. The table shows medians over rounds, and ratios to the dataset itself
with their middle half.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tables import publish, ratio_row
from torch import nn
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

import paceline

SIZE, GLOBAL_BATCH, MICRO_BATCH = 4096, 64, 32


class Images(Dataset):  # type: ignore[type-arg]
    def __init__(self) -> None:
        self.pixels = torch.rand(SIZE, 3, 32, 32)
        self.labels = torch.arange(SIZE) % 10

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        image = self.pixels[index]
        return (image.flip(-1) if torch.rand(()) < 0.5 else image), self.labels[index]


class Side:
    """One training whose steps are timed in rounds."""

    def __init__(self, job: Any, make: Callable[[], paceline.Batches], until: int) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))
        net(torch.zeros(1, 3, 32, 32))
        self.model = paceline.ddp(job, net)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.batches = make()
        self.training = paceline.Training(job, self.model, optimizer, self.batches)
        self.steps: Iterator[Any] = self.training.steps(until=until)

    def round(self, count: int) -> tuple[float, float]:
        """Run `count` steps; returns the median time of a step, and of waiting for data in it, in seconds."""
        took, waited = [], []
        for _ in range(count):
            began = time.perf_counter()
            step = next(self.steps)
            wait, at = time.perf_counter() - began, time.perf_counter()
            for x, y in step:
                wait += time.perf_counter() - at
                loss = nn.functional.cross_entropy(self.model(x), y, reduction="sum")
                step.backward(loss, count=len(y), reduction="sum")
                at = time.perf_counter()
            wait += time.perf_counter() - at
            step.update()
            took.append(time.perf_counter() - began)
            waited.append(wait)
        return statistics.median(took), statistics.median(waited)


def measure(job: Any, workers: int, rounds: int, steps: int) -> list[dict[str, Any]]:
    data = Images()
    common: dict[str, Any] = {"global_batch": GLOBAL_BATCH}

    def loader(**options: Any) -> paceline.Batches:
        given = DataLoader(data, batch_size=MICRO_BATCH, num_workers=workers, **options)
        return paceline.Batches(job, given, **common)

    makers = {
        "dataset": lambda: paceline.Batches(
            job, data, micro_batch=MICRO_BATCH, workers=workers, **common
        ),
        "DataLoader": lambda: loader(shuffle=True),
        "weighted sampler": lambda: loader(sampler=WeightedRandomSampler(torch.ones(SIZE), SIZE)),
    }
    sides = {name: Side(job, make, (rounds + 1) * steps) for name, make in makers.items()}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, side in sides.items():
            result = side.round(steps)
            if number:  # the first round warms up
                found[name].append(result)
    for side in sides.values():
        next(side.steps, None)  # ends the loop normally
        side.batches.close()
    rows = []
    for name, results in found.items():
        row: dict[str, Any] = {"workers": workers, "side": name}
        for index, what in enumerate(("step", "wait")):
            times = [result[index] for result in results]
            base = [result[index] for result in found["dataset"]]
            row[f"{what}_us"] = 1e6 * statistics.median(times)
            row |= ratio_row(times, base, f"{what}_ratio")
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    with paceline.join() as job:
        rows = [
            row
            for workers in (0, 1)
            for row in measure(job, workers, options.rounds, options.steps)
        ]
    publish("dataloader", rows, rounds=options.rounds, steps=options.steps)


if __name__ == "__main__":
    main()
