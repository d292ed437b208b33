"""The MPI backend: its results against Gloo; all types and reductions; ranks that fail or do not come."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import time
import warnings
import weakref
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

from paceline.clock import step_clock
from paceline.errors import CollectiveTimeout, PeerFailed
from paceline.job.job import Job

# Ranks that MPI starts cannot import the tests.
for module in (sys.modules[__name__], collective_programs, mpi_ranks):
    cloudpickle.register_pickle_by_value(module)

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def _values(rank: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 4, (37,), generator=generator).to(dtype)


def _reductions(job: Job) -> list[str]:
    """Means, which Gloo does not have, and what the group leaves to Gloo."""
    wrong = []
    for dtype in FLOATS:
        rows = torch.stack([_values(rank, dtype) for rank in range(job.world_size)])
        mine = rows[job.rank].clone()
        dist.all_reduce(mine, dist.ReduceOp.AVG)
        if not torch.equal(mine, (rows.double().sum(0) / len(rows)).to(dtype)):
            wrong.append(f"mean of {dtype}")
    sparse, flag = torch.eye(2).to_sparse(), torch.tensor(job.rank == 0)  # both through Gloo
    dist.all_reduce(sparse)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    if not torch.equal(sparse.to_dense(), job.world_size * torch.eye(2)) or not flag:
        wrong.append("what Gloo does")
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
    return values


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


def _waiting_s(job: Job) -> float:
    """Seconds that count as communication while rank 1 is late, twice by 0.3 s."""
    clock = step_clock.clock  # the module is not pickled by value
    dist.barrier()
    clock.start()
    for later in (False, True):
        time.sleep(0.3 * (job.rank == 1))
        work = dist.barrier(async_op=later)
        if work is not None:
            work.wait()
    spent_s = clock.take().spent_s[step_clock.COMMUNICATION]
    clock.stop()
    return spent_s


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
        "clock": _waiting_s(job),
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
        assert result["messages"] == [before, senders, everyone, [nproc] * 2, everyone]
        assert result["clock"] > 0.4 or rank == 1
        assert result["ddp"] == results[0]["ddp"]


def _leaves(job: Job) -> None:
    if job.rank == 1:
        raise ValueError("a reason of its own")
    dist.all_reduce(torch.ones(3))


class _SecondFails:
    """A communicator whose second all-reduce fails."""

    def __init__(self, communicator: Any, MPI: Any) -> None:
        self.communicator, self.MPI, self.count = communicator, MPI, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.communicator, name)

    def Iallreduce(self, *args: Any) -> Any:
        self.count += 1
        if self.count == 2:
            raise self.MPI.Exception(self.MPI.ERR_INTERN)
        return self.communicator.Iallreduce(*args)


def _error_of(call: Any) -> tuple[Any, int]:
    """The error that a call raises, if any, and how many frames are in its traceback."""
    try:
        call()
    except Exception as error:
        trace, frames = error.__traceback__, 0
        while trace is not None:
            trace, frames = trace.tb_next, frames + 1
        return error, frames
    return None, 0


def _failed_queues(job: Job) -> dict[str, Any]:
    """What becomes of groups whose queue fails. Each has a group of its own."""
    groups: list[Any] = [dist.new_group(timeout=timedelta(seconds=6)) for _ in range(2)]
    found: dict[str, Any] = {}

    # A younger operation has the earlier deadline. The other ranks do not come.
    if job.rank == 0:
        dist.all_reduce(torch.zeros(1), group=groups[0], async_op=True)
        younger: Any = dist.all_reduce(torch.zeros(1), group=groups[0], async_op=True)
        error, _ = _error_of(lambda: younger.wait(timedelta(seconds=1)))
        found["deadline"] = isinstance(error, CollectiveTimeout) and error.waited_s < 5

    # MPI refuses the second of two requests; the first one goes on.
    group = groups[1]
    MPI = group._mpi
    group._communicator = _SecondFails(group._communicator, MPI)
    tensors = [torch.ones(5), torch.ones(5)]
    kept = weakref.ref(tensors[0])
    options = dist.AllreduceOptions()
    error, _ = _error_of(lambda: group.allreduce(list(tensors), options))
    found["second request"] = isinstance(error, MPI.Exception)
    again = [_error_of(lambda: dist.all_reduce(torch.ones(1), group=group)) for _ in range(3)]
    found["raised again"] = all(each is error for each, _ in again)
    found["frames"] = len({frames for _, frames in again}) == 1
    tensors.clear()
    del error, again
    gc.collect()
    found["memory is kept"] = kept() is not None
    return found


def _does_not_come(job: Job) -> tuple[Any, dict[str, Any]]:
    error = None
    if job.rank == 1:
        told = ["told/0", "told/2"]
        job.store.wait(told, timedelta(seconds=60))  # type: ignore[union-attr]
    else:
        try:
            work: Any = dist.all_reduce(torch.ones(3), async_op=True)
            work.wait(timedelta(seconds=3 if job.rank == 0 else 30))
        except Exception as raised:
            error = raised
        finally:
            job.store.set(f"told/{job.rank}", "")  # type: ignore[union-attr]
    return error, _failed_queues(job)


@pytest.mark.ci
def test_a_rank_that_failed_is_named(tmp_path: Path) -> None:
    outcomes = run_mpi_ranks("mpich", _leaves, nproc=3, folder=tmp_path)
    assert isinstance(outcomes[1], ValueError)
    for rank in (0, 2):
        assert isinstance(outcomes[rank], PeerFailed), outcomes
        assert outcomes[rank].rank == 1
        assert "a reason of its own" in str(outcomes[rank])


@pytest.mark.ci
def test_a_rank_that_does_not_come_is_a_timeout(tmp_path: Path) -> None:
    outcomes = run_mpi_ranks("mpich", _does_not_come, nproc=3, folder=tmp_path)
    assert all(isinstance(outcome, tuple) for outcome in outcomes), outcomes
    errors, queues = zip(*outcomes, strict=True)
    assert isinstance(errors[0], CollectiveTimeout), outcomes
    assert "`all_reduce` timed out after 3 s" in str(errors[0])
    assert isinstance(errors[2], PeerFailed), outcomes
    assert "rank 0 left this group after an error while this rank waited" in str(errors[2])
    for found in queues:
        assert [what for what, right in found.items() if not right] == []


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


# A child that does not call exec, then one of three ends of the process.
ENDS = """
import atexit, os, signal, sys, torch, torch.distributed as dist
from paceline.mpi.group import register
from paceline.mpi.world import library
pid = os.getpid()
def tell():
    who = "rank" if os.getpid() == pid else "child"
    os.write(1, f"{who} {library().Is_finalized()}\\n".encode())
atexit.register(tell)
register()
store, rank = dist.FileStore(sys.argv[1], 2), library().COMM_WORLD.Get_rank()
dist.init_process_group("mpi4py", store=store, rank=rank, world_size=2)
if (child := os.fork()) == 0:
    signal.alarm(10)
    atexit._run_exitfuncs()
    os._exit(0)
os.waitpid(child, 0)
dist.barrier()
groups = [dist.new_group(), dist.new_group()]
if sys.argv[2] == "unfinished":
    work = dist.all_reduce(torch.ones(1), group=groups[rank], async_op=True)
elif sys.argv[2] == "failed":
    dist.group.WORLD.abort()  # all operations are finished
"""


@pytest.mark.ci
@pytest.mark.parametrize("end", ["unfinished", "failed", "clean"])
def test_the_end_of_a_process(tmp_path: Path, end: str) -> None:
    words, variables = mpi_command("mpich", 2)
    done = subprocess.run(
        [*words, sys.executable, "-W", "ignore", "-c", ENDS, str(tmp_path / "store"), end],
        env={**os.environ, **variables, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "after finaliz" not in done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
    lines = sorted(done.stdout.splitlines())
    assert lines == ["child False", "child False", *[f"rank {end == 'clean'}"] * 2]


@pytest.mark.ci
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
