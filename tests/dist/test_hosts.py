"""Groups over several hosts: what Gloo gives, the same bits however tensors are cut, failures named everywhere.

The hosts are pretended: `layout` has a letter for each rank's host.
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from test_shm import CALL, FUZZ, _every_call, _program, pretend_hosts
from torch import nn

import paceline
from paceline.errors import CollectiveTimeout, LaunchFailed, PeerFailed, RankDisagreement
from paceline.job.job import Job
from paceline.watch import flight_recorder
from paceline.shm.hosts import HostRounds
from paceline.testing import digest, run_failing_ranks, run_ranks


LONG = pytest.mark.slow


def _split(job: Job, layout: str, timeout_s: float = 10) -> Any:
    """A group of all ranks over hosts."""
    pretend_hosts(job, layout)
    group: Any = dist.new_group(backend="shm", timeout=timedelta(seconds=timeout_s))
    assert isinstance(group._rounds, HostRounds)
    return group


@LONG
@pytest.mark.timeout(600)
@settings(FUZZ, max_examples=4)
@given(
    st.lists(CALL, min_size=1, max_size=25),
    st.sampled_from(["abb", "aabb", "abab", "abca"]),
    st.booleans(),
)
def test_random_programs_give_what_gloo_gives(
    calls: list[tuple[Any, ...]], layout: str, later: bool
) -> None:
    nproc = len(layout)
    assert run_ranks(_program, calls, later, layout, nproc=nproc) == [[]] * nproc


@pytest.mark.parametrize(
    ("layout", "every"), [("abb", 3), pytest.param("abca", 1, marks=LONG)]
)
def test_every_operation_gives_what_gloo_gives(layout: str, every: int) -> None:
    nproc, calls = len(layout), _every_call("transposed")[::every]
    found = run_ranks(_program, calls, False, layout, nproc=nproc)
    assert found == [[]] * nproc


def _bits(job: Job, layout: str) -> dict[str, bool]:
    """Sums of the same numbers in one tensor and in pieces; means; 16-bit means."""
    group = _split(job, layout)
    whole = torch.randn(1_200_001, generator=torch.Generator().manual_seed(job.rank))
    rows = [torch.empty_like(whole) for _ in layout]
    dist.all_gather(rows, whole, group=group)
    sums = []
    for host in dict.fromkeys(layout):
        own = [row for row, name in zip(rows, layout, strict=True) if name == host]
        sums.append(own[0].clone())
        for row in own[1:]:
            sums[-1] += row
    in_order = sums[0]
    for other in sums[1:]:
        in_order = in_order + other
    summed, mean, half = whole.clone(), whole.clone(), torch.full((5000,), 40_000.0).half()
    dist.all_reduce(summed, group=group)
    dist.all_reduce(mean, dist.ReduceOp.AVG, group=group)
    dist.all_reduce(half, dist.ReduceOp.AVG, group=group)
    pieces = [piece.clone() for piece in whole.split([1, 1000, 200_000, 999_000])]
    for piece in pieces:
        dist.all_reduce(piece, group=group)
    return {
        "in order": torch.equal(summed, in_order),
        "in pieces": torch.equal(summed, torch.cat(pieces)),
        "mean": torch.equal(mean, in_order / len(layout)),
        "no overflow": bool(half.eq(40_000).all()),
    }


@pytest.mark.parametrize("layout", ["abab", pytest.param("abca", marks=LONG)])
def test_sums_are_in_the_order_of_hosts_however_they_are_cut(layout: str) -> None:
    for found in run_ranks(_bits, layout, nproc=len(layout)):
        assert all(found.values()), found


def _differ(job: Job, layout: str, case: str) -> None:
    group = _split(job, layout)
    other = job.rank == len(layout) - 1  # alone, or with all of its host
    if case == "host":
        other = layout[job.rank] == layout[-1]
    size = 20_000 if case == "host" else 3
    dist.all_reduce(torch.ones(size + other), group=group)


@pytest.mark.parametrize("case", ["host", pytest.param("rank", marks=LONG)])
def test_hosts_that_disagree_are_all_told(case: str) -> None:
    outcomes = run_failing_ranks(_differ, "abb", case, nproc=3)
    for outcome in outcomes:
        assert isinstance(outcome.error, RankDisagreement | PeerFailed), outcome.text
        assert "ranks called different collectives: rank" in str(outcome.error)
        assert f"rank 2 all_reduce of {20_001 if case == 'host' else 4} x float32, sum" in str(
            outcome.error
        )
    # Who is second may hear of it from the first.
    assert any(isinstance(outcome.error, RankDisagreement) for outcome in outcomes)


def _struck(job: Job, layout: str, victim: int, how: int, timeouts_s: str) -> tuple[Any, ...]:
    """The victim strikes itself; the others keep their groups until all of them have been told."""
    group = _split(job, layout, timeout_s=float(timeouts_s.split()[job.rank]))
    dist.barrier(group=group)
    store: Any = job.store
    others = [f"told/{rank}" for rank in range(len(layout)) if rank != victim]
    if job.rank == victim:
        store.set("pid", str(os.getpid()))
        os.kill(os.getpid(), how)
    began = time.monotonic()
    try:
        dist.all_reduce(torch.ones(3), group=group)
    except (PeerFailed, CollectiveTimeout) as error:
        found = error
    waited_s = time.monotonic() - began
    store.set(f"told/{job.rank}", "")
    store.wait(others, timedelta(seconds=20))
    if job.rank == 0 and how == signal.SIGSTOP:
        os.kill(int(store.get("pid")), signal.SIGKILL)
    named = [found.facts[key] for key in ("rank", "missing") if key in found.facts][0]
    return waited_s, type(found).__name__, named, found.what


@pytest.mark.parametrize(
    ("layout", "victim", "how", "timeouts_s"),
    [
        ("aabb", 3, signal.SIGKILL, "9 9 9 9"),
        pytest.param("aabb", 2, signal.SIGKILL, "9 9 9 9", marks=LONG),
        pytest.param("aabc", 3, signal.SIGKILL, "9 9 9 9", marks=LONG),
        pytest.param("aabb", 2, signal.SIGSTOP, "2 2 2 2", marks=LONG),
        # Where this host is late before that of the stopped rank is.
        pytest.param("aabb", 3, signal.SIGSTOP, "2 9 9 9", marks=LONG),
    ],
)
def test_a_killed_or_stopped_rank_is_named_on_all_hosts(
    layout: str, victim: int, how: int, timeouts_s: str
) -> None:
    outcomes = run_failing_ranks(_struck, layout, victim, how, timeouts_s, nproc=4)
    assert isinstance(outcomes[victim].error, LaunchFailed)
    for rank in {0, 1, 2, 3} - {victim}:
        assert outcomes[rank].value, outcomes[rank].text
        waited_s, kind, named, text = outcomes[rank].value
        assert waited_s < 8
        assert f"rank {victim}" in text
        if rank == 0:
            late = how == signal.SIGSTOP
            expected = ("CollectiveTimeout", [victim]) if late else ("PeerFailed", victim)
            assert (kind, named) == expected


def _raises(job: Job) -> None:
    group = _split(job, "abb")
    if job.rank == 2:
        raise ValueError("a reason of its own")
    dist.all_reduce(torch.ones(3), group=group)


@LONG
def test_the_reason_of_a_rank_of_another_host_is_told() -> None:
    for outcome in run_failing_ranks(_raises, nproc=3)[:2]:
        assert isinstance(outcome.error, PeerFailed)
        assert "a reason of its own" in str(outcome.error)


def _trains(job: Job, layout: str, bucket_mb: float) -> str:
    job.group = _split(job, layout)
    torch.manual_seed(0)
    model = paceline.ddp(job, nn.Sequential(*(nn.Linear(300, 300) for _ in range(4))), bucket_mb=bucket_mb)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(job.rank)
    for _ in range(4):
        model(torch.randn(8, 300)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = digest(model.state_dict())
    del model, optimizer
    job.group = dist.group.WORLD
    return weights


@LONG
def test_weights_do_not_depend_on_buckets_with_three_hosts() -> None:
    small, large = (run_ranks(_trains, "abca", mb, nproc=4) for mb in (0.5, 25))
    assert small == large == [small[0]] * 4


def _one_without(job: Job) -> str:
    from paceline.shm import segment

    def refuse() -> None:
        raise segment.Unavailable("no memory for files")

    if job.rank == 2:
        segment._refuse_unfit = refuse
    pretend_hosts(job, "aabb")
    group = dist.new_group(backend="shm")
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    return f"{type(group).__name__} {total.item()}"


@LONG
def test_one_host_without_memory_sends_all_to_gloo() -> None:
    assert run_ranks(_one_without, nproc=4) == ["ProcessGroup 4.0"] * 4


def _recorded_calls(job: Job) -> tuple[list[str], list[str]]:
    group = _split(job, "aab")
    dist.barrier(group=job.control)
    work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    work.wait()
    kinds = [entry["profiling_name"] for entry in flight_recorder.table()["entries"]]
    return kinds, [name for name, *_ in flight_recorder.arrivals(0) if "shm" not in name]


@LONG
def test_what_passes_between_hosts_is_no_call_of_the_script(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")
    for kinds, groups in run_ranks(_recorded_calls, nproc=3):
        assert "gloo:barrier" in kinds
        assert "gloo:all_gather" not in kinds
        assert "" not in groups
