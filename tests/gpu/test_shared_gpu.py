"""Several ranks that share one GPU, over Gloo: what CUDA changes in a step, on any number of GPUs.

`join` refuses ranks that share a GPU, because NCCL does. So these ranks join on the CPU, with a backend that
also takes CUDA tensors, and take the GPU afterwards.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.launch.spawning import spawn
from paceline.parallel.modules import local
from paceline.testing import digest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this host"),
]


@pytest.fixture(autouse=True)
def _gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_BACKEND", "cpu:gloo,cuda:gloo")


def _on_ranks(function: Any, *args: Any, nproc: int) -> list[Any]:
    return spawn(function, *args, nproc=nproc, device="cpu", timeout_s=60.0, deadline_s=120.0)


def _data() -> TensorDataset:
    x = torch.randn(53, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x[:, :4].argmax(1))


def _net(*, exact: bool) -> nn.Module:
    """Dropout and BatchNorm are those of one process in reproducible training only."""
    torch.manual_seed(1)
    more = [nn.BatchNorm1d(32), nn.Dropout(0.2)] if exact else []
    return nn.Sequential(nn.Linear(8, 32), *more, nn.Tanh(), nn.Linear(32, 4))


def _train(
    job: Any,
    strategy: str,
    folder: str | None,
    until: int,
    device: str = "cuda",
    precision: str = "fp32",
) -> tuple[list[float], str]:
    """The losses of the steps, and the digest of the weights."""
    if device == "cuda":
        job.device = torch.device("cuda", 0)
        torch.cuda.set_device(job.device)
    exact = strategy == "reproducible"
    net = _net(exact=exact)
    if strategy == "fsdp":
        model = paceline.fsdp(job, net.to(job.device))
    else:
        model = paceline.ddp(job, net.to(job.device))
    training = paceline.Training(
        job,
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        paceline.Batches(job, _data(), global_batch=12, micro_batch=3),
        precision=precision,
        reproducible=exact,
        checkpoints=paceline.Checkpoints(folder, every_steps=3) if folder else None,
    )
    losses = []
    for step in training.steps(until=until):
        for x, y in step:
            assert x.device == job.device
            step.backward(
                F.cross_entropy(model(x), y, reduction="sum"), count=len(y), reduction="sum"
            )
        step.update(clip_norm=1.0)
        losses.append(float(step.loss))
    weights = [local(p) for p in model.parameters()]
    return losses, digest(weights) if strategy != "fsdp" else ""


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_train_as_one(strategy: str, precision: str) -> None:
    want = _on_ranks(_train, strategy, None, 10, "cuda", precision, nproc=1)[0][0]
    for nproc in (2, 3, 4):
        for losses, _ in _on_ranks(_train, strategy, None, 10, "cuda", precision, nproc=nproc):
            assert losses == pytest.approx(want, rel=1e-4 if precision == "fp32" else 0.02)


def test_reproducible_training_has_the_same_bits_on_a_gpu() -> None:
    results = {n: _on_ranks(_train, "reproducible", None, 10, nproc=n) for n in (1, 2, 3, 4)}
    assert len({result for ranks in results.values() for result in map(str, ranks)}) == 1


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "reproducible"])
def test_a_checkpoint_of_a_gpu_continues_on_other_ranks(tmp_path: Path, strategy: str) -> None:
    want = _on_ranks(_train, strategy, None, 11, nproc=2)[0]
    folder = str(tmp_path / "checkpoints")
    first = _on_ranks(_train, strategy, folder, 6, nproc=2)[0][0]
    rest, weights = _on_ranks(_train, strategy, folder, 11, nproc=3)[0]
    assert first + rest == pytest.approx(want[0], rel=1e-4)
    if strategy == "reproducible":
        assert (first + rest, weights) == want
    on_cpu = _on_ranks(_train, strategy, folder, 13, "cpu", nproc=1)[0][0]
    assert len(on_cpu) == 2  # the checkpoint of a GPU continues on a CPU
