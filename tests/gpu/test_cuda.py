"""The same promises on CUDA: one GPU suffices; ranks beyond the number of GPUs are skipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.doctor.examine import facts_of
from paceline.errors import ConfigError
from paceline.job.environment import RankInfo
from paceline.testing import run_failing_ranks, run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this host"),
]
GPUS = torch.cuda.device_count()


def _data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(53, 8, generator=generator)
    return TensorDataset(x, x[:, :4].argmax(1))


def _net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 4))


def _train(job: Any, precision: str, count: str, workers: int) -> tuple[list[float], str, float]:
    model = paceline.sync_batchnorm(job, _net()).to(job.device)
    model = paceline.ddp(job, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = paceline.Batches(job, _data(), global_batch=12, micro_batch=12, workers=workers)
    training = paceline.Training(job, model, optimizer, batches, precision=precision, count=count)
    losses = []
    for step in training.steps(epochs=4):
        for x, y in step:
            assert x.device == job.device
            loss = F.cross_entropy(model(x), y, reduction="sum")
            n: Any = len(y) if count == "samples" else (y >= 0).sum()
            step.backward(loss, count=n, reduction="sum")
        step.update(clip_norm=1.0)
        losses.append(float(step.loss))
    result = paceline.evaluate(
        job,
        model,
        _data(),
        lambda m, b: {"right": ((m(b[0]).argmax(1) == b[1]).sum(), len(b[1]))},
        micro_batch=10,
    )
    return losses, str(job.device), result.right


@pytest.mark.parametrize("nproc", [n for n in (1, 2, 4) if n <= max(GPUS, 1)])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_training_on_cuda_is_that_on_cpu(nproc: int, precision: str) -> None:
    want = run_ranks(_on_cpu, precision, nproc=1)[0]
    for rank, (losses, device, _) in enumerate(
        run_ranks(_train, precision, "samples", 2, nproc=nproc)
    ):
        assert device == f"cuda:{rank}"
        # Kernels differ; the formats' rounding is the larger part.
        assert losses == pytest.approx(want, rel=1e-3 if precision == "fp32" else 0.1)


def _on_cpu(job: Any, precision: str) -> list[float]:
    job.device = torch.device("cpu")
    return _train(job, precision, "samples", 0)[0]


def test_counts_may_stay_on_the_device() -> None:
    by_samples = run_ranks(_train, "fp32", "samples", 0, nproc=1)[0]
    by_tokens = run_ranks(_train, "fp32", "tokens", 0, nproc=1)[0]
    assert by_tokens[0] == pytest.approx(by_samples[0], rel=1e-4)


def _facts(job: Any) -> tuple[str, int, bool]:
    return str(job.device), torch.cuda.current_device(), torch.distributed.is_initialized()


def test_the_device_is_set_before_anything_else() -> None:
    assert run_ranks(_facts, nproc=1) == [("cuda:0", 0, False)]


def test_the_doctor_sees_the_gpu() -> None:
    place = RankInfo(launcher="none", rank=0, world_size=1, local_rank=0, local_world_size=1)
    facts = facts_of(place)
    assert facts["device"]["name"] == torch.cuda.get_device_name(0)
    assert facts["gpus"] == GPUS
    assert facts["versions"]["nccl"] != "none"


def test_more_ranks_than_devices_is_refused() -> None:
    for outcome in run_failing_ranks(_facts, nproc=GPUS + 1):
        assert isinstance(outcome.error, ConfigError)
