"""All-reduce on one host: the shared-memory backend against Gloo, and against MPI where mpi4py is installed.

    python benchmarks/allreduce.py [--ranks 2 4] [--rounds 15]

All sides run in the same processes (mpiexec's, where there is one), in turn, round after round, one thread a
rank; a barrier of Gloo comes before each. Each side gives its median time of a call per round, of the slowest
rank; the table shows medians over rounds and the ratio of each round to the shared memory of the same round,
with its spread. The sums are checked after every round.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tables import publish

import paceline
from paceline.testing import run_ranks

SIZES = {4 << 10: 300, 1 << 20: 60, 25 << 20: 6}  # bytes: calls in a round


Side = Callable[[torch.Tensor], Callable[[], Any]]  # from a tensor to what sums it over ranks


def median_call(side: Side, job: Any, size: int, calls: int) -> float:
    """The median of `calls` calls in us, of the slowest rank."""
    tensor = torch.ones(size // 4)
    reduce = side(tensor)
    dist.barrier(group=job.control)
    times = []
    for _ in range(calls):
        tensor.fill_(1)  # as a backward does, which leaves it in the cache of its core
        began = time.perf_counter()
        reduce()
        times.append(time.perf_counter() - began)
    assert tensor.eq(job.world_size).all()
    slowest = torch.tensor(statistics.median(times))
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=job.control)
    return 1e6 * slowest.item()


def sides_of(job: Any) -> dict[str, Side]:
    """What is measured, by name."""
    shm, gradients = (dist.new_group(backend="shm") for _ in range(2))
    gloo = dist.new_group(backend="gloo")

    def as_gradient(tensor: torch.Tensor) -> Callable[[], Any]:
        # As `paceline.ddp` does with its buckets: the tensor itself lies in memory of all ranks.
        parameter = torch.nn.Parameter(torch.empty_like(tensor))
        parameter.grad = tensor
        gradients.share_gradients([parameter])
        return lambda: dist.all_reduce(parameter.grad, group=gradients)

    sides: dict[str, Side] = {
        "shm": lambda tensor: lambda: dist.all_reduce(tensor, group=shm),
        "shm, of a gradient": as_gradient,
        "gloo": lambda tensor: lambda: dist.all_reduce(tensor, group=gloo),
    }
    if "PACELINE_MPI" in os.environ:
        from mpi4py import MPI

        def mpi(tensor: torch.Tensor) -> Callable[[], Any]:
            array = tensor.numpy()
            return lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, array)

        sides["mpi"] = mpi
    return sides


def measure(job: Any, rounds: int) -> dict[int, dict[str, list[float]]]:
    """For each size and side, one median per round."""
    torch.set_num_threads(1)
    sides = sides_of(job)
    found: dict[int, dict[str, list[float]]] = {}
    for size, calls in SIZES.items():
        found[size] = {name: [] for name in sides}
        for number in range(rounds + 1):
            for name, side in sides.items():
                took = median_call(side, job, size, calls)
                if number:  # the first round warms up
                    found[size][name].append(took)
    return found


def run(ranks: int, rounds: int) -> dict[int, dict[str, list[float]]]:
    """The times on so many ranks, as rank 0 has them."""
    mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if mpiexec is None or not importlib.util.find_spec("mpi4py"):
        times: dict[int, dict[str, list[float]]] = run_ranks(
            measure, rounds, nproc=ranks, deadline_s=900
        )[0]
        return times
    words = [mpiexec, "-n", str(ranks), sys.executable, __file__, "--rounds", str(rounds)]
    environ = {**os.environ, "PACELINE_MPI": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environ, stdout=subprocess.PIPE, check=True, timeout=900)
    return {int(size): sides for size, sides in json.loads(done.stdout).items()}


def as_mpi_rank(rounds: int) -> None:
    """One rank of mpiexec; the first prints the times."""
    with paceline.join(device="cpu") as job:
        found = measure(job, rounds)
        if job.rank == 0:
            print(json.dumps(found), flush=True)


def rows_of(ranks: int, found: dict[int, dict[str, list[float]]]) -> list[dict[str, Any]]:
    rows = []
    for size, sides in found.items():
        for name, values in sides.items():
            ratios = sorted(v / s for v, s in zip(values, sides["shm"], strict=True))
            us = statistics.median(values)
            rows.append(
                {
                    "ranks": ranks,
                    "bytes": size,
                    "side": name,
                    "call_us": us,
                    "gb_per_s": size / us / 1e3,
                    "ratio_to_shm": statistics.median(ratios),
                    "ratio_spread": [ratios[len(ratios) // 4], ratios[-len(ratios) // 4]],
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    if "PACELINE_MPI" in os.environ:
        as_mpi_rank(options.rounds)
        return
    rows = []
    for ranks in options.ranks:
        rows += rows_of(ranks, run(ranks, options.rounds))
    publish("allreduce", rows, rounds=options.rounds)


if __name__ == "__main__":
    main()
