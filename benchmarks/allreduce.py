"""All-reduce on one host: `shm` beside Gloo, and if mpi4py is installed, MPI and the backend `mpi`.

    python benchmarks/allreduce.py [--ranks 2 4] [--rounds 15]

All sides run in the same processes and take turns in each round. With MPI, mpiexec starts the processes. The
side "mpi" is mpi4py's own blocking Allreduce on numpy arrays; torch's own backend `mpi` is in no wheel. Each
rank uses one thread. A Gloo barrier precedes each measurement. In each round a side reports the median time
of a call on its slowest rank. The table shows the median over rounds, and the ratio to `shm` in the same
round with its spread. The sums are checked in every round.
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
from tables import publish, ratio_row

import paceline
from paceline.mpi.group import register
from paceline.testing import run_ranks

SIZES = {4 << 10: 300, 1 << 20: 60, 25 << 20: 6}  # tensor size in bytes: calls per round

# Takes a tensor, returns a function that sums it over ranks.
Side = Callable[[torch.Tensor], Callable[[], Any]]


def median_call(side: Side, job: Any, size: int, calls: int) -> float:
    """The median time of `calls` calls in us, on the slowest rank."""
    tensor = torch.ones(size // 4)
    reduce = side(tensor)
    dist.barrier(group=job.control)
    times = []
    for _ in range(calls):
        tensor.fill_(1)  # like a backward pass, this leaves the tensor in the cache
        began = time.perf_counter()
        reduce()
        times.append(time.perf_counter() - began)
    assert tensor.eq(job.world_size).all()
    slowest = torch.tensor(statistics.median(times))
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=job.control)
    return 1e6 * slowest.item()


def sides_of(job: Any) -> dict[str, Side]:
    """The measured implementations by name."""
    shm, gradients = (dist.new_group(backend="shm") for _ in range(2))
    gloo = dist.new_group(backend="gloo")

    def as_gradient(tensor: torch.Tensor) -> Callable[[], Any]:
        # `paceline.ddp` does the same with its buckets: the tensor itself is in shared memory.
        parameter = torch.nn.Parameter(torch.empty_like(tensor))
        parameter.grad = tensor
        gradients.share_gradients([parameter])
        return lambda: dist.all_reduce(parameter.grad, group=gradients)

    sides: dict[str, Side] = {
        "shm": lambda tensor: lambda: dist.all_reduce(tensor, group=shm),
        "shm, gradient": as_gradient,
        "gloo": lambda tensor: lambda: dist.all_reduce(tensor, group=gloo),
    }
    if "PACELINE_MPI" in os.environ:
        from mpi4py import MPI

        def mpi(tensor: torch.Tensor) -> Callable[[], Any]:
            array = tensor.numpy()
            return lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, array)

        sides["mpi"] = mpi
        register()
        over_mpi = dist.new_group(backend="mpi4py")
        sides["mpi backend"] = lambda tensor: lambda: dist.all_reduce(tensor, group=over_mpi)
    return sides


def measure(job: Any, rounds: int) -> dict[int, dict[str, list[float]]]:
    """One median per round for each size and side."""
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
    """The times measured by rank 0 of `ranks` ranks."""
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
    """Run as one rank of mpiexec. Rank 0 prints the times."""
    with paceline.join(device="cpu") as job:
        found = measure(job, rounds)
        if job.rank == 0:
            print(json.dumps(found), flush=True)


def rows_of(ranks: int, found: dict[int, dict[str, list[float]]]) -> list[dict[str, Any]]:
    rows = []
    for size, sides in found.items():
        for name, values in sides.items():
            us = statistics.median(values)
            rows.append(
                {
                    "ranks": ranks,
                    "bytes": size,
                    "side": name,
                    "call_us": us,
                    "gb_per_s": size / us / 1e3,
                    **ratio_row(values, sides["shm"], "of_shm"),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
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
