"""Gradient compression of `ddp(compress=...)`: step time over loopback and over a shaped link of 1 Gbit/s.

    python benchmarks/compression.py [--rounds 7] [--steps 6] [--rate 1gbit]

Two ranks train a network with 33 MiB of gradients through Gloo. The sides take turns in one job, a round of
steps each. For the shaped link each rank is on a host of its own, see `links.py`. The table shows medians
over rounds, and ratios to no compression with their middle half.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from links import finish, hosts, start
from tables import publish, ratio_row
from torch import nn
from torch.utils.data import TensorDataset

import paceline

SIDES: dict[str, Any] = {
    "none": None,
    "fp16": "fp16",
    "bf16": "bf16",
    "PowerSGD, rank 2": paceline.PowerSGD(rank=2, start_step=2),
}
_WIDTH = 2048


class Side:
    def __init__(self, job: Any, compress: Any) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(64, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, _WIDTH), nn.ReLU(),
            nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 10),
        )  # fmt: skip
        self.model = paceline.ddp(job, net, compress=compress)
        generator = torch.Generator().manual_seed(1)
        data = TensorDataset(
            torch.randn(512, 64, generator=generator),
            torch.randint(10, (512,), generator=generator),
        )
        batches = paceline.Batches(job, data, global_batch=16)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        training = paceline.Training(job, self.model, optimizer, batches, desync_every=0)
        self.steps: Iterator[Any] = iter(training.steps())

    def round(self, count: int) -> float:
        """Run `count` steps; returns the median time of a step in seconds."""
        took = []
        for _ in range(count):
            began = time.perf_counter()
            step = next(self.steps)
            step.run(self._loss, reduction="sum")
            step.update()
            took.append(time.perf_counter() - began)
        return statistics.median(took)

    def _loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1], reduction="sum")


def work(rounds: int, steps: int, out: Path) -> None:
    """One rank of the job."""
    with paceline.join() as job:
        sides = {name: Side(job, compress) for name, compress in SIDES.items()}
        for side in sides.values():
            side.round(3)
        times: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(rounds):
            for name, side in sides.items():
                times[name].append(side.round(steps))
        if job.rank == 0:
            out.write_text(json.dumps(times))


def measure(network: str, arguments: argparse.Namespace, out: Path) -> dict[str, list[float]]:
    script = [__file__, f"--worker={out}"]
    script += [f"--rounds={arguments.rounds}", f"--steps={arguments.steps}"]
    more = {"PACELINE_BACKEND": "gloo", "OMP_NUM_THREADS": "1"}
    if network == "loopback":
        ends = [finish(start(["run", "--nproc-per-node=2", *script], out.parent, **more), 600)]
    else:
        with hosts(2, arguments.rate) as made:
            nodes = ["run", "--nnodes=2", "--nproc-per-node=1", f"--host={made.address(0)}"]
            running = [made.start(n, [*nodes, *script], out.parent, **more) for n in range(2)]
            ends = [finish(process, 600) for process in running]
    if any(end.code for end in ends):
        sys.exit("".join(end.err for end in ends))
    result: dict[str, list[float]] = json.loads(out.read_text())
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rate", default="1gbit", help="of the shaped link, as `tc` takes it")
    parser.add_argument("--only", choices=["loopback", "link"], help="measure one network")
    parser.add_argument("--json", action="store_true", help="print JSON, write no file")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.rounds, arguments.steps, arguments.worker)
        return
    rows = []
    for network in ("loopback", "link"):
        if arguments.only not in (None, network):
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = measure(network, arguments, Path(folder) / "out.json")
        for name, times in found.items():
            rows.append(
                {
                    "network": network if network == "loopback" else f"link of {arguments.rate}",
                    "compress": name,
                    "step_ms": 1e3 * statistics.median(times),
                    **ratio_row(times, found["none"]),
                }
            )
    publish("compression", rows, as_json=arguments.json, rounds=arguments.rounds, ranks=2)


if __name__ == "__main__":
    main()
