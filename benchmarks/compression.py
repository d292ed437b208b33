"""Gradient compression of `ddp(compress=...)`: step time over loopback and over a shaped link of 1 Gbit/s.

    python benchmarks/compression.py [--rounds 7] [--steps 6] [--rate 1gbit]

Two ranks train a network with 33 MiB of gradients through Gloo: torch's DDP with torch's hooks in a plain
loop, `paceline.ddp(compress=...)`, and `paceline.diloco(every=50)`. The sides take turns in one job, a round
of steps each, and 50 of diloco, whose time of a step is the mean. For the shaped link each rank is on a host
of its own, see `links.py`. The table shows medians over rounds, ratios to `ddp` without compression with
their middle half, and what a rank sends in a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from links import finish, hosts, start
from tables import publish, ratio_row
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import paceline

EVERY = 50
Wrap = Callable[[Any, nn.Module], nn.Module]


def ddp(**options: Any) -> Wrap:
    return partial(paceline.ddp, **options)


def diloco(**options: Any) -> Wrap:
    return partial(paceline.diloco, every=EVERY, **options)


SIDES: dict[str, Wrap | None] = {
    "none": ddp(),
    "fp16": ddp(compress="fp16"),
    "bf16": ddp(compress="bf16"),
    "PowerSGD, rank 2": ddp(compress=paceline.PowerSGD(rank=2, start_step=2)),
    "torch, fp16 hook": None,
    "torch, PowerSGD hook": None,
    f"diloco, every {EVERY}": diloco(),
    f"diloco, every {EVERY}, int8": diloco(outer_dtype="int8"),
}
_WIDTH = 2048


class Side:
    def __init__(self, job: Any, name: str) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(64, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, _WIDTH), nn.ReLU(),
            nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 10),
        )  # fmt: skip
        self.name = name
        wrap = SIDES[name]
        self.model = _torch_ddp(net, name) if wrap is None else wrap(job, net)
        generator = torch.Generator().manual_seed(1)
        data = TensorDataset(
            torch.randn(512, 64, generator=generator),
            torch.randint(10, (512,), generator=generator),
        )
        batches = paceline.Batches(job, data, global_batch=16)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        if wrap is None:
            self.steps = self._plain_loop(job, data, optimizer)
        else:
            training = paceline.Training(job, self.model, optimizer, batches, desync_every=0)
            self.steps = self._loop(training)

    def round(self, count: int) -> tuple[float, float]:
        """Run `count` steps; returns the time of a step in seconds, and the bytes that this rank has sent."""
        took, before = [], _sent_bytes()
        count = EVERY if "diloco" in self.name else count
        for _ in range(count):
            began = time.perf_counter()
            next(self.steps)
            took.append(time.perf_counter() - began)
        middle = statistics.fmean if "diloco" in self.name else statistics.median
        return middle(took), (_sent_bytes() - before) / count

    def _loop(self, training: paceline.Training) -> Generator[None]:
        for step in training.steps():
            step.run(self._loss, reduction="sum")
            step.update()
            yield

    def _plain_loop(
        self, job: Any, data: TensorDataset, optimizer: torch.optim.Optimizer
    ) -> Generator[None]:
        x, y = data.tensors
        while True:
            for ids in torch.randperm(len(data)).split(16):  # type: ignore[no-untyped-call]
                own = ids[job.rank :: job.world_size]
                (self._loss((x[own], y[own])) / len(own)).backward()
                optimizer.step()
                optimizer.zero_grad()
                yield

    def _loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1], reduction="sum")


def _torch_ddp(net: nn.Module, name: str) -> nn.Module:
    # With several buckets torch's PowerSGD hook hangs over Gloo: it starts collectives in callbacks, and
    # their order differs between ranks.
    cap_mb = 64 if "PowerSGD" in name else None
    wrapper = DistributedDataParallel(net, gradient_as_bucket_view=True, bucket_cap_mb=cap_mb)
    if "fp16" in name:
        wrapper.register_comm_hook(None, default_hooks.fp16_compress_hook)
    else:
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=2, start_powerSGD_iter=2, orthogonalization_epsilon=1e-8
        )
        wrapper.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return wrapper


def _sent_bytes() -> int:
    """What this host has sent to others; 0 without a link of its own."""
    path = Path("/sys/class/net/eth0/statistics/tx_bytes")
    return int(path.read_text()) if path.exists() else 0


def work(rounds: int, steps: int, out: Path) -> None:
    """One rank of the job."""
    mesh = paceline.Mesh(dp_replicate=2)  # so that diloco takes two ranks on one host for two hosts
    with paceline.join(mesh=mesh) as job:
        sides = {name: Side(job, name) for name in SIDES}
        for side in sides.values():
            side.round(3)
        times: dict[str, list[float]] = {name: [] for name in sides}
        sent: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(rounds):
            for name, side in sides.items():
                took_s, sent_bytes = side.round(steps)
                times[name].append(took_s)
                sent[name].append(sent_bytes)
        if job.rank == 0:
            out.write_text(json.dumps([times, sent]))


def measure(
    network: str, arguments: argparse.Namespace, out: Path
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    script = [__file__, f"--worker={out}"]
    script += [f"--rounds={arguments.rounds}", f"--steps={arguments.steps}"]
    more = {"PACELINE_BACKEND": "gloo", "OMP_NUM_THREADS": "1"}
    if network == "loopback":
        ends = [finish(start(["run", "--nproc-per-node=2", *script], out.parent, **more), 700)]
    else:
        with hosts(2, arguments.rate) as made:
            nodes = ["run", "--nnodes=2", "--nproc-per-node=1", f"--host={made.address(0)}"]
            running = [made.start(n, [*nodes, *script], out.parent, **more) for n in range(2)]
            ends = [finish(process, 700) for process in running]
    if any(end.code for end in ends):
        sys.exit("".join(end.err for end in ends))
    times, sent = json.loads(out.read_text())
    return times, sent


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
            found, sent = measure(network, arguments, Path(folder) / "out.json")
        for name, times in found.items():
            rows.append(
                {
                    "network": network if network == "loopback" else f"link of {arguments.rate}",
                    "compress": name,
                    "sent_mib": statistics.median(sent[name]) / 2**20,
                    "step_ms": 1e3 * statistics.median(times),
                    **ratio_row(times, found["none"]),
                }
            )
    publish("compression", rows, as_json=arguments.json, rounds=arguments.rounds, ranks=2)


if __name__ == "__main__":
    main()
