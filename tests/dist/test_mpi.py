"""The MPI backend: its results against Gloo; all types and reductions; ranks that fail or do not come."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import cloudpickle
import collective_programs
import mpi_ranks
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from collective_programs import LAYOUTS, differences, every_call, random_calls
from mpi_ranks import MPI, mpi_command, run_mpi_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import CollectiveTimeout, PeerFailed
from paceline.job.job import Job

# Ranks that MPI starts cannot import the tests.
for module in (sys.modules[__name__], collective_programs, mpi_ranks):
    cloudpickle.register_pickle_by_value(module)

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]
COMPLEX = [torch.complex64, torch.complex128]
REDUCTIONS = {
    "SUM": lambda rows: rows.sum(0),
    "AVG": lambda rows: _mean(rows),
    "PRODUCT": lambda rows: rows.prod(0),
    "MIN": lambda rows: rows.amin(0),
    "MAX": lambda rows: rows.amax(0),
    "BAND": lambda rows: _fold(torch.bitwise_and, rows),
    "BOR": lambda rows: _fold(torch.bitwise_or, rows),
    "BXOR": lambda rows: _fold(torch.bitwise_xor, rows),
}


def _fold(function: Any, rows: torch.Tensor) -> torch.Tensor:
    total = rows[0]
    for row in rows[1:]:
        total = function(total, row)
    return total


def _mean(rows: torch.Tensor) -> torch.Tensor:
    total = rows.sum(0)
    if total.is_complex():
        return torch.view_as_complex(torch.view_as_real(total) / len(rows))
    return total / len(rows)


def _values(rank: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    values = torch.randint(0, 2 if dtype == torch.bool else 4, (37,), generator=generator)
    return values.to(dtype)


def _reductions(job: Job) -> list[str]:
    """Reductions and dtypes whose result is not that of torch's own operation on the rows of all ranks."""
    wrong = []
    for dtype, name in itertools.product([*FLOATS, *INTEGERS, *COMPLEX, torch.bool], REDUCTIONS):
        rows = torch.stack([_values(rank, dtype) for rank in range(job.world_size)])
        mine = rows[job.rank].clone()
        numeric = rows.to(torch.int64) if dtype == torch.bool and name != "AVG" else rows
        bitwise = name in ("BAND", "BOR", "BXOR")
        refused = (
            (name == "AVG" and dtype in (*INTEGERS, torch.bool))
            or (bitwise and dtype in (*FLOATS, *COMPLEX))
            or (dtype in COMPLEX and name not in ("SUM", "AVG"))
        )
        try:
            dist.all_reduce(mine, getattr(dist.ReduceOp, name))
        except ValueError:
            wrong += [] if refused else [f"{name} of {dtype} refused"]
            continue
        if refused:
            wrong.append(f"{name} of {dtype} not refused")
            continue
        wide = numeric.float() if dtype in (torch.float16, torch.bfloat16) else numeric
        if not torch.equal(mine, REDUCTIONS[name](wide).to(dtype)):
            wrong.append(f"{name} of {dtype}")
    return wrong


def _messages(job: Job) -> list[Any]:
    """Sends and receives in a ring, from any rank, as a batch; functional collectives; objects."""
    size, rank = job.world_size, job.rank
    after, before = (rank + 1) % size, (rank - 1) % size
    mine, got = torch.full((3,), rank, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16)
    operations = [dist.P2POp(dist.isend, mine, after), dist.P2POp(dist.irecv, got, before)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    values: list[Any] = [got[0].item()]
    if rank == 0:
        taken = torch.zeros(1)
        values.append(sorted([dist.recv(taken, tag=7) for _ in range(1, size)]))
    else:
        dist.send(torch.ones(1), 0, tag=7)
        values.append(list(range(1, size)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # renamed in torch 2.13
        gathered = functional.all_gather_tensor(torch.tensor([rank]), 0, job.group)
        summed = functional.all_reduce(torch.ones(2), "sum", job.group)
    listed: list[Any] = [None] * size
    dist.all_gather_object(listed, {"rank": rank})
    values += [gathered.tolist(), summed.tolist(), [each["rank"] for each in listed]]
    errors = []
    for wrong in (
        lambda: dist.all_reduce(torch.eye(2).to_sparse()),
        lambda: dist.send(torch.ones(1), after, tag=-1),
        lambda: dist.all_to_all_single(torch.zeros(3), torch.zeros(3), [9], [9]),
    ):
        try:
            wrong()
        except ValueError as error:
            errors.append(type(error).__name__)
    return [*values, errors]


def _ddp(job: Job) -> list[float]:
    """DDP waits for futures, which the background thread completes; the same sums as one process."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))
    model = DistributedDataParallel(net, process_group=job.group, bucket_cap_mb=0.01)
    for step in range(3):
        rows = torch.arange(12.0 * 64).view(12, 64).sin()[job.rank :: job.world_size] * (step + 1)
        model(rows).sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in net.parameters()]) / 12 * job.world_size
    return gradient[:5].tolist()  # type: ignore[no-any-return]


def _results(job: Job, num_programs: int) -> dict[str, Any]:
    every = [differences(job, every_call(layout), "mpi4py", later=False) for layout in LAYOUTS]
    drawn = [
        differences(job, random_calls(seed), "mpi4py", later=bool(seed % 2))
        for seed in range(num_programs)
    ]
    return {
        "every operation": list(itertools.chain(*every)),
        "random programs": list(itertools.chain(*drawn)),
        "reductions": _reductions(job),
        "messages": _messages(job),
        "ddp": _ddp(job),
    }


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "nproc", "num_programs"),
    [
        ("mpich", 2, 4),
        pytest.param("mpich", 3, 4, marks=pytest.mark.slow),
        pytest.param("openmpi", 4, 4, marks=pytest.mark.slow),
        *(
            pytest.param(kind, nproc, 40, marks=pytest.mark.slow)
            for kind in MPI
            for nproc in (2, 3, 4)
        ),
    ],
)
@pytest.mark.ci
def test_results_are_those_of_gloo(
    tmp_path: Path, kind: str, nproc: int, num_programs: int
) -> None:
    results = run_mpi_ranks(
        kind, _results, num_programs, nproc=nproc, folder=tmp_path, timeout_s=100, deadline_s=500
    )
    everyone = list(range(nproc))
    for rank, result in enumerate(results):
        assert isinstance(result, dict), result
        assert result["every operation"] == []
        assert result["random programs"] == []
        assert result["reductions"] == []
        before = float((rank - 1) % nproc)
        senders = everyone[1:]
        errors = ["ValueError"] * 3
        assert result["messages"] == [before, senders, everyone, [nproc] * 2, everyone, errors]
        assert result["ddp"] == results[0]["ddp"]


def _leaves(job: Job) -> None:
    if job.rank == 1:
        raise ValueError("a reason of its own")
    dist.all_reduce(torch.ones(3))


def _does_not_come(job: Job) -> None:
    if job.rank == 1:
        told = ["told/0", "told/2"]
        job.store.wait(told, timedelta(seconds=60))  # type: ignore[union-attr]
        return
    try:
        dist.all_reduce(torch.ones(3))
    finally:
        job.store.set(f"told/{job.rank}", "")  # type: ignore[union-attr]


@pytest.mark.ci
def test_a_rank_that_failed_is_named(tmp_path: Path) -> None:
    outcomes = run_mpi_ranks("mpich", _leaves, nproc=3, folder=tmp_path)
    assert isinstance(outcomes[1], ValueError)
    for rank in (0, 2):
        assert isinstance(outcomes[rank], PeerFailed), outcomes
        assert outcomes[rank].rank == 1
        assert "a reason of its own" in str(outcomes[rank])


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    outcomes = run_mpi_ranks("mpich", _does_not_come, nproc=3, folder=tmp_path, timeout_s=3)
    errors = [outcomes[rank] for rank in (0, 2)]
    timeouts = [error for error in errors if isinstance(error, CollectiveTimeout)]
    assert timeouts, outcomes
    for error in timeouts:
        assert error.missing == [1]
        assert error.waited_s > 3
    # The other rank may notice first that its peer gave up.
    assert all(isinstance(error, PeerFailed) for error in errors if error not in timeouts)


JOIN = "import paceline\npaceline.join(device='cpu', backend='mpi', timeout_s=20)"


def _run(words: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        [*words, "-c", JOIN], env=environ, capture_output=True, text=True, timeout=60
    )


@pytest.mark.ci
def test_ranks_that_mpi_has_not_started_are_refused() -> None:
    mpi_command("mpich", 2)
    done = _run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node=2",
            "--no-python",
            sys.executable,
        ]
    )
    assert done.returncode != 0
    assert "the job has 2 ranks, but MPI has 1 process." in done.stderr
    assert "mpirun -n 2 python" in done.stderr


def test_one_thread_is_refused(tmp_path: Path) -> None:
    words, variables = mpi_command("mpich", 2)
    code = "import mpi4py; mpi4py.rc.thread_level = 'single'; from mpi4py import MPI\n" + JOIN
    done = subprocess.run(
        [*words, sys.executable, "-c", code],
        env={**os.environ, **variables, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert "MPI_THREAD_MULTIPLE" in done.stderr
    assert "remove mpi4py.rc.thread_level" in done.stderr
