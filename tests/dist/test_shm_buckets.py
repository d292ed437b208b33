"""Gradient buckets in shared memory: the same bits as with copies, whatever DDP does to its buckets."""

from __future__ import annotations

import gc
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from small_trainings import record_log
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import paceline
from paceline import torch_private
from paceline.job.job import Job
from paceline.shm.group import ShmGroup
from paceline.shm.shared_buckets import SharedBuckets
from paceline.testing import run_ranks

WIDTH = 200  # 160 KB of gradients a layer


@pytest.fixture(autouse=True)
def _use_shm(monkeypatch: pytest.MonkeyPatch) -> None:
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
    "find_unused": {"find_unused": True},
    "accumulation": {},
    "hook": {},
    "zeroed": {},
}


def _buckets(job: Job) -> SharedBuckets:
    assert isinstance(job.group, ShmGroup)
    return job.group._collectives.buckets


def _copied(job: Job, case: str) -> tuple[str, int]:
    """The weights after some steps without shared buckets, and how many buckets were mapped."""
    share = ShmGroup.share_gradients
    ShmGroup.share_gradients = lambda self, parameters: None  # type: ignore[method-assign]
    try:
        return _train(job, case)
    finally:
        ShmGroup.share_gradients = share  # type: ignore[method-assign]


def _train(job: Job, case: str) -> tuple[str, int]:
    known = set(_buckets(job)._mapped)
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
    mapped = [key for key, parts in _buckets(job)._mapped.items() if parts is not None]
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest(), len({*mapped} - known)


def _other_tensors(job: Job) -> list[bool]:
    """Sums of tensors that are no gradients, contiguous on one rank only."""
    size, right = job.world_size, []
    for numel in (10, 20_000, 90_000):
        whole = torch.arange(2 * numel, dtype=torch.float32)
        tensor = whole[:numel].clone() if job.rank == 0 else whole[:numel].repeat_interleave(2)[::2]
        dist.all_reduce(tensor)
        right.append(torch.equal(tensor, size * whole[:numel]))
    return right


def _every_case(job: Job) -> tuple[dict[str, Any], list[bool]]:
    copied = {case: _copied(job, case) for case in CASES}
    shared = {case: _train(job, case) for case in CASES}
    return {case: (*copied[case], *shared[case]) for case in CASES}, _other_tensors(job)


@pytest.mark.parametrize("nproc", [2, 3, 4])
def test_bits_are_the_same_as_with_copies(nproc: int) -> None:
    results = run_ranks(_every_case, nproc=nproc)
    for case in CASES:
        for cases, _ in results:
            copied, num_copied, shared, num_shared = cases[case]
            assert copied == shared == results[0][0][case][0], case
            assert num_copied == 0, case
            assert num_shared >= 2, case
    assert [others for _, others in results] == [[True] * 3] * nproc


def _refused(job: Job) -> tuple[str, dict[str, tuple[str, int]], list[str]]:
    messages = record_log()

    def full(storage: Any) -> None:
        raise RuntimeError("No space left on device (28)")

    copied, _ = _copied(job, "plain")
    results = {}
    for how, owner, name, replacement in (
        ("no access", SharedBuckets, "map_buckets", lambda *_: None),
        ("no room", torch.UntypedStorage, "_share_fd_cpu_", full),
    ):
        original = getattr(owner, name)
        if job.rank == 1:
            setattr(owner, name, replacement)
        torch_private.find.cache_clear()
        results[how] = _train(job, "plain")
        setattr(owner, name, original)
    return copied, results, messages


def test_all_ranks_copy_if_one_cannot_share() -> None:
    results = run_ranks(_refused, nproc=3)
    copied = results[0][0]
    for _, trained, _ in results:
        assert trained == {"no access": (copied, 0), "no room": (copied, 0)}
    hints = [[text for text in texts if "--shm-size" in text] for _, _, texts in results]
    assert [len(texts) for texts in hints] == [0, 1, 0]


def _one_after_another(job: Job) -> list[int]:
    counts = []
    for _ in range(4):
        model = paceline.ddp(job, Net(), bucket_mb=0.2)
        model(torch.randn(2, WIDTH)).sum().backward()
        del model
        # The thread that ran the last sum may keep its tensors for a moment.
        while any(not own.storage.expired() for own in _buckets(job)._own.values()):
            gc.collect()
        counts.append(len(_buckets(job)._mapped) + _open_memory())
    return counts


def _open_memory() -> int:
    """Open file descriptors of shared memory. Threads open and close other files at any time."""
    links = Path("/proc/self/fd").iterdir()
    # `realpath` does not fail for one that was closed since it was listed.
    return sum("/dev/shm/" in os.path.realpath(link) for link in links)


def test_memory_of_freed_models_is_released() -> None:
    for counts in run_ranks(_one_after_another, nproc=2):
        assert counts[1:] == counts[:1] * 3
