"""`ddp(bucket_mb="auto")`: sizes are tried in the training's own steps; what is summed stays the same."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import TensorDataset

import paceline
from paceline import Job
from paceline.testing import digest, run_ranks

WIDTH, LAYERS = 700, 7  # of 1.9 MiB each: three in a bucket of 5 MiB


def _sizes(model: Any) -> list[int]:
    """Of the buckets, in order of reduction, without what was measured for it."""
    return [bucket.buffer().numel() for bucket in model.reducer._get_zeros_like_grad_buckets()]


def _train(
    job: Job, folder: str | None, bucket_mb: Any, until: int, fast: int, options: dict[str, bool]
) -> dict[str, Any]:
    torch.manual_seed(3)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    model = paceline.ddp(job, torch.nn.Sequential(*layers), bucket_mb=bucket_mb, **options)
    calls: list[str] = []
    model.register_forward_hook(lambda *_: calls.append("hook"))
    model.eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9)
    data = TensorDataset(torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(1)))
    training = paceline.Training(
        job,
        model,
        optimizer,
        paceline.Batches(job, data, global_batch=6),
        checkpoints=paceline.Checkpoints(folder) if folder else None,
    )
    met: list[int] = []
    for step in training.steps(until=until):
        for (x,) in step:
            if job.rank == 0 and job.world_size > 1 and len(_sizes(model)) != fast:
                time.sleep(0.06)
            step.backward(model(x).square().sum(), count=len(x))
        step.update()
        met.append(len(_sizes(model)) if job.world_size > 1 else 0)
    assert not model.training and len(calls) >= len(met)
    assert {p.grad for p in model.parameters()} == {None}
    return {"met": met, "digest": digest([model.state_dict(), optimizer.state_dict()])}


def _ways(met: list[int]) -> list[int]:
    return sorted(set(met))


def test_the_fastest_is_found_and_kept_and_the_sums_are_the_same(tmp_path: Path) -> None:
    nproc = 3
    plain = run_ranks(_train, None, 25.0, 50, 0, {}, nproc=nproc)
    assert all(_ways(rank["met"]) == [2] for rank in plain)
    tuned = run_ranks(_train, str(tmp_path), "auto", 50, 3, {}, nproc=nproc)
    for rank in tuned:
        assert rank["met"] == tuned[0]["met"]
        assert rank["digest"] == plain[0]["digest"]
        assert rank["met"][:12] == [2] * 4 + [3] * 4 + [1] * 4
        assert set(rank["met"][48:]) == {3}
    # A resumed run does not try again, though another is the fastest now.
    for rank in run_ranks(_train, str(tmp_path), "auto", 54, 2, {}, nproc=nproc):
        assert set(rank["met"]) == {3}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"find_unused": True}, {"static_graph": True}])
def test_it_goes_with_the_other_options(options: dict[str, bool]) -> None:
    nproc = 2 if "find_unused" in options else 4
    plain, tuned = (
        run_ranks(_train, None, size, 14, 1, options, nproc=nproc) for size in (25.0, "auto")
    )
    assert {rank["digest"] for rank in plain + tuned} == {plain[0]["digest"]}
    assert plain[0]["met"][2:] == [2] * 12  # with a static graph torch learns in the first step
    assert 1 in tuned[0]["met"] and len(_ways(tuned[0]["met"])) > 1


def test_one_process_has_no_buckets() -> None:
    assert run_ranks(_train, None, "auto", 4, 0, {}, nproc=1)[0]["met"] == [0] * 4



def _hooked(job: Job) -> list[int]:
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    model: Any = paceline.ddp(job, torch.nn.Sequential(*layers), bucket_mb="auto")
    model.register_comm_hook(job.group, allreduce_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    batches = paceline.Batches(job, TensorDataset(torch.ones(12, WIDTH)), global_batch=6)
    training = paceline.Training(job, model, optimizer, batches)
    met = []
    for step in training.steps(until=10):
        for (x,) in step:
            step.backward(model(x).square().sum(), count=len(x))
        step.update()
        met.append(len(_sizes(model)))
    return [*met, len(model._comm_hooks)]


def test_a_model_with_a_communication_hook_is_left_alone() -> None:
    assert run_ranks(_hooked, nproc=2) == [[2] * 10 + [1]] * 2
