"""Gradients in shared memory: the bits of the path through copies, whatever DDP does to its buckets."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import paceline
from paceline.errors import LaunchFailed
from paceline.job.job import Job
from paceline.shm.group import ShmGroup
from paceline.shm.regions import Regions
from paceline.testing import Fault, inject, run_failing_ranks, run_ranks

WIDTH = 200  # 160 KB of gradients a layer


@pytest.fixture(autouse=True)
def _on_shm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_BACKEND", "shm")


class Net(nn.Module):
    def __init__(self, heads: int = 1) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(heads))

    def forward(self, x: torch.Tensor, head: int = 0) -> torch.Tensor:
        out: torch.Tensor = self.heads[head](self.trunk(x))
        return out


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "static_graph": {"static_graph": True},
    "find_unused": {"find_unused": True},
    "accumulation": {},
    "hook": {},
    "zeroed": {},
}


def _regions(job: Job) -> Regions:
    assert isinstance(job.group, ShmGroup)
    return job.group._rounds.regions


def _both(job: Job, case: str) -> tuple[str, str, int, int]:
    """The weights after some steps through copies and through regions, and how many were mapped."""
    share = ShmGroup.share_gradients
    ShmGroup.share_gradients = lambda self, parameters: None  # type: ignore[method-assign]
    copied, none = _train(job, case)
    ShmGroup.share_gradients = share  # type: ignore[method-assign]
    shared, some = _train(job, case)
    return copied, shared, none, some


def _train(job: Job, case: str) -> tuple[str, int]:
    torch.manual_seed(0)
    model: Any = paceline.ddp(
        job, Net(heads=2 if case == "find_unused" else 1), bucket_mb=0.2, **CASES[case]
    )
    if case == "hook":
        model.register_comm_hook(job.group, allreduce_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(job.rank + 1)
    for step in range(6):
        if case == "accumulation":
            with model.no_sync():
                F.mse_loss(model(torch.randn(8, WIDTH)), torch.randn(8, WIDTH)).backward()
        head = step % 2 if case == "find_unused" else 0
        F.mse_loss(model(torch.randn(8, WIDTH), head), torch.randn(8, WIDTH)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=case != "zeroed")
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    mapped = [parts for parts in _regions(job)._mapped.values() if parts is not None]
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest(), len(mapped)


@pytest.mark.parametrize("nproc", [2, 3, 4])
@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_copies(case: str, nproc: int) -> None:
    results = run_ranks(_both, case, nproc=nproc)
    assert {weights for result in results for weights in result[:2]} == {results[0][0]}
    for _, _, none, some in results:
        assert none == 0 and some >= 2


def _refused(job: Job, how: str) -> tuple[str, int, list[str]]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("paceline").addHandler(handler)
    if job.rank == 1 and how == "no room":

        def full(storage: Any) -> None:
            raise RuntimeError("No space left on device (28)")

        torch.UntypedStorage._share_fd_cpu_ = full  # type: ignore[assignment,method-assign]
    if job.rank == 1 and how == "no access":
        Regions.map = lambda *_: None  # type: ignore[method-assign,assignment]
    weights, mapped = _train(job, "plain")
    return weights, mapped, said


@pytest.mark.parametrize("how", ["no room", "no access"])
def test_a_rank_that_cannot_share_sends_all_through_copies(how: str) -> None:
    results = run_ranks(_refused, how, nproc=3)
    copied, *_ = run_ranks(_both, "plain", nproc=3)[0]
    assert {weights for weights, _, _ in results} == {copied}
    assert [mapped for _, mapped, _ in results] == [0, 0, 0]
    told = [[text for text in said if "--shm-size" in text] for _, _, said in results]
    assert [len(texts) for texts in told] == ([0, 1, 0] if how == "no room" else [0, 0, 0])


def _other_tensors(job: Job) -> list[bool]:
    paceline.ddp(job, Net())
    right = []
    for size in (10, 20_000, 90_000):
        whole = torch.arange(2 * size, dtype=torch.float32)
        # One rank's lies in a row, the others' do not.
        tensor = whole[:size].clone() if job.rank == 0 else whole[:size].repeat_interleave(2)[::2]
        dist.all_reduce(tensor)
        right.append(torch.equal(tensor, 3 * whole[:size]))
    return right


def test_other_tensors_of_the_group_are_summed_as_ever() -> None:
    assert run_ranks(_other_tensors, nproc=3) == [[True] * 3] * 3


def _one_after_another(job: Job) -> list[int]:
    counts = []
    for _ in range(4):
        model = paceline.ddp(job, Net(), bucket_mb=0.2)
        model(torch.randn(2, WIDTH)).sum().backward()
        del model
        counts.append(len(_regions(job)._mapped) + _open_memory())
    return counts


def _open_memory() -> int:
    """Descriptors of shared memory; threads open and close other files at any time."""
    links = Path("/proc/self/fd").iterdir()
    # One that has been closed since it was listed cannot be read.
    return sum("/dev/shm/" in os.path.realpath(link) for link in links)


def test_memory_of_models_that_have_gone_is_let_go() -> None:
    for counts in run_ranks(_one_after_another, nproc=2):
        assert counts[1:] == counts[:1] * 3


def _dies(job: Job, faults: list[Fault]) -> None:
    model = paceline.ddp(job, Net())
    for step in range(3):
        inject(job, faults, step)
        model(torch.randn(2, WIDTH)).sum().backward()


def test_a_killed_rank_is_named() -> None:
    faults = [Fault(rank=1, step=2, kind="kill")]
    outcomes = run_failing_ranks(_dies, faults, nproc=3, faults=faults)
    assert isinstance(outcomes[1].error, LaunchFailed)
    for rank in (0, 2):
        assert "rank 1" in str(outcomes[rank].error)
