"""The shared-memory backend: its results against Gloo; ranks that die, stop, leave or disagree."""

from __future__ import annotations

import itertools
import os
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from collective_programs import LAYOUTS, differences, every_call, random_calls
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import CollectiveTimeout, LaunchFailed, PeerFailed, RankDisagreement
from paceline.job.job import Job
from paceline.shm import segment
from paceline.shm.group import ShmGroup
from paceline.testing import Fault, inject, run_failing_ranks, run_ranks


@pytest.fixture(autouse=True)
def _use_shm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_BACKEND", "shm")


def _bits(job: Job) -> dict[str, Any]:
    """Sums of the same numbers in one tensor and in pieces; means; 16-bit sums."""
    generator = torch.Generator().manual_seed(job.rank)
    whole = torch.randn(700_001, generator=generator)
    pieces = [piece.clone() for piece in whole.split([1, 1000, 200_000, 500_000 - 1000])]
    halves = [whole[:70_000].to(dtype) for dtype in (torch.bfloat16, torch.float16)]
    everyone = [torch.empty_like(whole) for _ in range(job.world_size)]
    dist.all_gather(everyone, whole)
    in_order = everyone[0].clone()
    for other in everyone[1:]:
        in_order += other
    mean = whole.clone()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    summed = whole.clone()
    dist.all_reduce(summed)
    for piece in pieces:
        dist.all_reduce(piece)
    exact = []
    for half in halves:
        rows = [torch.empty_like(half) for _ in range(job.world_size)]
        dist.all_gather(rows, half)
        dist.all_reduce(half)
        total = rows[0].float()
        for row in rows[1:]:
            total += row.float()
        exact.append(torch.equal(half, total.to(half.dtype)))
    return {
        "in rank order": torch.equal(summed, in_order),
        "in pieces": torch.equal(summed, torch.cat(pieces)),
        "mean": torch.equal(mean, in_order / job.world_size),
        "halves": exact,
    }


def _functional(job: Job) -> list[Any]:
    mine = torch.full((2, 3), float(job.rank))
    before = job.group.queue.num_issued  # type: ignore[union-attr]
    whole = functional.all_gather_tensor(mine, 0, job.group)
    part = functional.reduce_scatter_tensor(torch.cat([mine] * job.world_size), "sum", 0, job.group)
    values = [whole[:, 0].tolist(), part.tolist()]  # reading them waits
    return [*values, job.group.queue.num_issued - before]  # type: ignore[union-attr]


def _results(job: Job, num_programs: int) -> dict[str, Any]:
    every = [differences(job, every_call(layout), "shm", later=False) for layout in LAYOUTS]
    drawn = [
        differences(job, random_calls(seed), "shm", later=bool(seed % 2))
        for seed in range(num_programs)
    ]
    return {
        "every operation": list(itertools.chain(*every)),
        "random programs": list(itertools.chain(*drawn)),
        "bits": _bits(job),
        "functional": _functional(job),
    }


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("nproc", "num_programs"),
    [
        (2, 4),
        pytest.param(4, 4, marks=pytest.mark.ci),
        *(pytest.param(n, 40, marks=pytest.mark.slow) for n in (2, 3, 4)),
    ],
)
def test_results_are_those_of_gloo_and_sums_are_in_rank_order(
    nproc: int, num_programs: int
) -> None:
    # The functional collectives must run in memory: torch would otherwise run Gloo's while it holds the
    # interpreter lock, which has deadlocked FSDP's checkpoints.
    total = float(sum(range(nproc)))
    gathered = [float(rank) for rank in range(nproc) for _ in range(2)]
    for result in run_ranks(_results, num_programs, nproc=nproc, timeout_s=100, deadline_s=500):
        assert result == {
            "every operation": [],
            "random programs": [],
            "bits": {"in rank order": True, "in pieces": True, "mean": True, "halves": [True] * 2},
            "functional": [gathered, [[total] * 3] * 2, 2],
        }


def _kinds(job: Job) -> list[Any]:
    fast = job.group
    values: list[Any] = [dist.get_backend(fast), type(fast).__name__]
    sparse = torch.eye(3).to_sparse()
    dist.all_reduce(sparse)
    values.append(sparse.to_dense().sum().item())
    peer = torch.zeros(2)
    if job.rank == 0:
        dist.send(torch.ones(2), 1, tag=7)
    else:
        dist.recv(peer, 0, tag=7)
    values.append(peer.sum().item())
    listed = [None, None]
    dist.all_gather_object(listed, {"rank": job.rank})
    values.append(listed)
    with torch.inference_mode():
        made = torch.ones(3)
    dist.all_reduce(made)
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * weight).sum()
    dist.broadcast(weight.detach(), 0)
    loss.backward()  # the broadcast has not told autograd of a change, as with Gloo
    empty = torch.ones(2, 0, 3)
    dist.all_reduce(empty)
    complex_ = torch.ones(2, dtype=torch.complex64) * 1j
    dist.all_reduce(complex_)
    return [*values, made.tolist(), complex_.tolist()]


def test_what_memory_does_not_support_uses_gloo() -> None:
    first, second = run_ranks(_kinds, nproc=2)
    assert first[:3] == ["shm", "ShmGroup", 6.0]
    assert (first[3], second[3]) == (0.0, 2.0)
    assert first[4] == [{"rank": 0}, {"rank": 1}]
    assert first[5:7] == [[2.0] * 3, [2j, 2j]]


def _without_memory(job: Job) -> list[str]:
    """Groups of ranks on several hosts, and of a first rank that cannot create memory."""

    def refuse() -> None:
        raise segment.SharedMemoryUnavailable("no memory for files")

    found = []
    for name, replacement, ranks in (
        ("_host_id", lambda: f"host {job.rank}", (0, 1, 2)),
        ("_refuse_unsupported", refuse, (0,)),
    ):
        original = getattr(segment, name)
        if job.rank in ranks:
            setattr(segment, name, replacement)
        group = dist.new_group(backend="shm")
        setattr(segment, name, original)
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        found.append(f"{type(group).__name__} {total.item()}")
    return found


def test_ranks_that_cannot_share_memory_use_gloo() -> None:
    assert run_ranks(_without_memory, nproc=3) == [["ProcessGroup 3.0"] * 2] * 3


def _disagree(job: Job) -> tuple[dict[str, str], list[int]]:
    """The error of each case. A group that failed stays failed, so each case has a group of its own."""
    rank, three = job.rank, torch.ones(3)
    longer = torch.ones(3 + rank)
    typed = torch.ones(3, dtype=[torch.float32, torch.int32][rank])
    op = [dist.ReduceOp.SUM, dist.ReduceOp.MAX][rank]
    # Each rank makes its own call of a pair; a single call differs in its arguments.
    calls: dict[str, list[Callable[[Any], Any]]] = {
        "shape": [lambda group: dist.all_reduce(longer, group=group)],
        "dtype": [lambda group: dist.all_reduce(typed, group=group)],
        "operation": [lambda group: dist.all_reduce(three, op, group=group)],
        "root": [lambda group: dist.broadcast(three, rank, group=group)],
        "kind": [dist.barrier, lambda group: dist.all_reduce(three, group=group)],
    }
    texts = dict.fromkeys(calls, "no error")
    for case, of_ranks in calls.items():
        group = dist.new_group(backend="shm")
        try:
            of_ranks[rank % len(of_ranks)](group)
        except RankDisagreement as error:
            texts[case] = str(error)
    frames = []
    for _ in range(20):  # each later call raises the same error
        try:
            dist.all_reduce(three, group=group)
        except RankDisagreement as error:
            frames.append(len(traceback.extract_tb(error.__traceback__)))
    dist.barrier(group=job.control)
    return texts, frames


def test_all_ranks_get_the_error_if_they_disagree() -> None:
    for texts, frames in run_ranks(_disagree, nproc=2):
        assert len(frames) == 20
        assert frames[0] == frames[-1]
        assert len(texts) == 5
        for case, text in texts.items():
            assert text.startswith("ranks called different collectives: rank 0"), (case, text)


def _dies(job: Job, faults: list[Fault], big: bool) -> None:
    for step in range(1, 5):
        inject(job, faults, step)
        dist.all_reduce(torch.ones(3_000_000 if big else 3))


@pytest.mark.parametrize("big", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_killed_rank_is_named_at_once(big: bool) -> None:
    before = set(os.listdir("/dev/shm"))
    faults = [Fault(rank=1, step=3, kind="kill")]
    outcomes = run_failing_ranks(_dies, faults, big, nproc=3, faults=faults)
    assert isinstance(outcomes[1].error, LaunchFailed)
    for rank in (0, 2):
        error = outcomes[rank].error
        assert isinstance(error, PeerFailed), outcomes[rank].text  # and not a CollectiveTimeout
        assert "rank 1 died" in str(error) or "because of rank 1" in str(error)
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "paceline" in name}


def _stops(job: Job) -> RuntimeError:
    dist.barrier()
    job.store.set(f"pid/{job.rank}", str(os.getpid()))  # type: ignore[union-attr]
    pids = [int(job.store.get(f"pid/{rank}")) for rank in range(3)]  # type: ignore[union-attr]
    if job.rank == 1:
        time.sleep(3600)
    if job.rank == 0:
        os.kill(pids[1], signal.SIGSTOP)
    try:
        dist.all_reduce(torch.ones(3))
    except RuntimeError as error:
        found = error
    job.store.set(f"told/{job.rank}", "")  # type: ignore[union-attr]
    job.store.wait(["told/0", "told/2"])  # type: ignore[union-attr]
    if job.rank == 0:
        os.kill(pids[1], signal.SIGKILL)
    return found


def test_a_stopped_rank_is_named_after_the_timeout() -> None:
    outcomes = run_failing_ranks(_stops, nproc=3, timeout_s=2)
    errors = [outcomes[rank].value for rank in (0, 2)]
    timeouts = [error for error in errors if isinstance(error, CollectiveTimeout)]
    assert timeouts
    for error in timeouts:
        assert error.missing == [1]
        assert error.waited_s > 2
        assert "rank 1 (stopped, process" in str(error)
    # The other rank may notice first that its peer gave up.
    assert all("because of rank 1" in str(error) for error in errors if error not in timeouts)


def _leaves(job: Job) -> None:
    if job.rank == 1:
        raise ValueError("a reason of its own")
    dist.all_reduce(torch.ones(3))


def test_the_error_of_a_rank_that_left_is_in_the_errors_of_the_others() -> None:
    outcomes = run_failing_ranks(_leaves, nproc=2)
    assert isinstance(outcomes[1].error, ValueError)
    assert isinstance(outcomes[0].error, PeerFailed)
    assert "a reason of its own" in str(outcomes[0].error)


def _trains_and_dies(job: Job, faults: list[Fault]) -> None:
    """DDP waits for a future in C++, which only exceptions raised in a callback reach."""
    model = DistributedDataParallel(nn.Linear(64, 64), process_group=job.group)
    for step in range(1, 6):
        out = model(torch.ones(2, 64))
        inject(job, faults, step)
        out.sum().backward()


@pytest.mark.parametrize("kind", ["kill", pytest.param("raise", marks=pytest.mark.slow)])
def test_a_rank_that_dies_in_a_backward_of_ddp(kind: Any) -> None:
    faults = [Fault(rank=1, step=3, kind=kind)]
    outcomes = run_failing_ranks(_trains_and_dies, faults, nproc=2, faults=faults)
    error = outcomes[0].error
    assert isinstance(error, RuntimeError), outcomes[0].text
    assert "rank 1" in str(error)


def _many(job: Job, rounds: int) -> list[float]:
    """Asynchronous works as DDP uses them: only their futures are waited for."""
    tensors = [torch.full((50_000,), float(job.rank + n)) for n in range(rounds)]
    if job.rank == 0:
        job.store.wait(["all issued"])  # type: ignore[union-attr] # rank 1 leaves its works to its thread
    opts = dist.AllreduceOptions()
    works = [job.group.allreduce([t], opts) for t in tensors]  # type: ignore[union-attr]
    if job.rank == 1:
        job.store.set("all issued", "")  # type: ignore[union-attr]
    futures = [work.get_future() for work in works]
    chained = [future.then(lambda f: f.value()[0][0].item()) for future in futures]
    return [future.wait() for future in chained]


def _forgotten(job: Job) -> bool:
    """Rank 1's sum needs many rounds of rank 0, whose main thread is blocked in a call of the store."""
    value = torch.ones(3_000_000)
    if job.rank == 0:
        dist.all_reduce(value, async_op=True)
        job.store.set("one issued", "")  # type: ignore[union-attr]
        job.store.wait(["summed"])  # type: ignore[union-attr]
    else:
        job.store.wait(["one issued"])  # type: ignore[union-attr]
        dist.all_reduce(value)
        job.store.set("summed", "")  # type: ignore[union-attr]
    while not bool((value == 2).all()):  # bounded by the deadline of the ranks
        time.sleep(0.01)
    return True


def _unattended(job: Job) -> tuple[list[float], bool]:
    return _many(job, 20), _forgotten(job)


def test_asynchronous_works_finish_without_a_wait() -> None:
    expected = [1.0 + 2 * n for n in range(20)]
    assert run_ranks(_unattended, nproc=2) == [(expected, True)] * 2


def _crowd(job: Job) -> bool:
    total = torch.arange(200_000.0) + job.rank
    dist.all_reduce(total)
    rows = [torch.zeros(1) for _ in range(job.world_size)]
    dist.all_gather(rows, torch.tensor([float(job.rank)]))
    size = job.world_size
    expected = torch.arange(200_000.0) * size + size * (size - 1) / 2
    gathered = [row.item() for row in rows] == list(range(size))
    return isinstance(job.group, ShmGroup) and torch.equal(total, expected) and gathered


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_64_ranks() -> None:
    results = run_ranks(_crowd, nproc=64, timeout_s=200, deadline_s=400)
    assert results == [True] * 64
