"""`micro_batch="auto"`: the step that runs out of memory on a rank is repeated in smaller micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_trainings import check_messages, make_data, record_log, refusals
from torch import nn
from torch.utils.data import IterableDataset

import paceline
from paceline.testing import run_ranks

GLOBAL_BATCH = 12


class Limited(nn.Module):
    """Has no memory for more than `limit` samples, in its forward or in its backward."""

    def __init__(self, job: Any, limit: int, *, batchnorm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8) if batchnorm else nn.Tanh(), nn.Linear(8, 3)
        ).double()
        self.limit = limit if job.rank == job.world_size - 1 else 10**6
        self.in_backward = False
        self.failures = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.net(x)
        if len(x) > self.limit:
            self.failures += 1
            if not self.in_backward:
                raise torch.OutOfMemoryError("out of memory")
            y.register_hook(_run_out)
        return y


def _run_out(_: torch.Tensor) -> None:
    raise torch.OutOfMemoryError("out of memory")


def _training(
    job: Any, model: nn.Module, micro_batch: Any, *, samples: int = 24, workers: int = 0
) -> paceline.Training:
    data = make_data(samples, torch.float64)
    batches = paceline.Batches(
        job, data, global_batch=GLOBAL_BATCH, micro_batch=micro_batch, workers=workers
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return paceline.Training(job, paceline.ddp(job, model), optimizer, batches)


def _train(job: Any, model: Limited, micro_batch: Any, **options: Any) -> tuple[list[Any], int]:
    training = _training(job, model, micro_batch, **options)
    wrapped = training.models[0]
    losses = []
    for step in training.steps(epochs=3):
        if step.number == 4:  # memory gets less: the hook of a backward runs out of it
            model.limit, model.in_backward = (model.limit + 1) // 2, True
        step.run(lambda batch: F.cross_entropy(wrapped(batch[0]), batch[1]))
        step.update(clip_norm=1.0)
        losses.append(float(step.loss))
    weights = torch.cat([value.double().reshape(-1) for value in model.state_dict().values()])
    return [*losses, *weights.tolist()], training.batches.micro_batch


def _buffers(job: Any) -> None:
    """The statistics of BatchNorm: failed tries and padding micro-batches leave no trace in them."""
    texts = record_log()
    limit = 6 // job.world_size
    nets = []
    for micro_batch in ("auto", limit):
        net = Limited(job, limit if micro_batch == "auto" else 10**6, batchnorm=True)
        training = _training(job, net, micro_batch)
        wrapped = training.models[0]
        for step in training.steps(until=3):
            step.run(lambda batch, model=wrapped: F.cross_entropy(model(batch[0]), batch[1]))
            step.update(clip_norm=1.0)
        assert training.batches.micro_batch == limit
        nets.append(net)
    auto, fixed = nets
    for (name, value), want in zip(
        auto.state_dict().items(), fixed.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(value, want, msg=name)
    if job.rank == 0:
        assert any("BatchNorm" in text for text in texts)
        assert any("ran out of memory" in text for text in texts)


def _agrees(job: Any) -> tuple[int, int]:
    _buffers(job)
    limit = 4 if job.world_size < 3 else 2  # half of it from step 4 on
    auto = Limited(job, limit)
    found, micro_batch = _train(job, auto, "auto", samples=34, workers=job.world_size - 1)
    wanted, _ = _train(job, Limited(job, 10**6), None, samples=34)
    assert found == pytest.approx(wanted, rel=1e-10, abs=1e-12)
    assert micro_batch <= limit // 2 < 2 * micro_batch
    return micro_batch, auto.failures


@pytest.mark.parametrize(
    "nproc", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_the_result_is_that_of_a_fixed_micro_batch(nproc: int) -> None:
    ranks = run_ranks(_agrees, nproc=nproc)
    assert len({micro_batch for micro_batch, _ in ranks}) == 1
    assert ranks[-1][1] >= 2


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


def _wrong(job: Any, kind: str) -> None:
    model: Any = Limited(job, 0)
    if kind == "loop":
        for step in _training(job, model, "auto").steps():
            for _ in step:
                pass
    if kind == "one sample":
        _train(job, model, "auto")
    if kind == "stream":
        paceline.Batches(job, Stream(), global_batch=4, micro_batch="auto")
    batches = paceline.Batches(job, make_data(), global_batch=4, micro_batch="auto")
    if kind == "fsdp":
        model = paceline.fsdp(job, model)
    elif kind == "sync_batchnorm":
        model = paceline.sync_batchnorm(job, Limited(job, 0, batchnorm=True))
    if kind != "fsdp":
        model = paceline.ddp(job, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    paceline.Training(job, model, optimizer, batches, reproducible=kind == "reproducible")


WRONG = ["loop", "one sample", "stream", "fsdp", "sync_batchnorm", "reproducible"]


def test_refusals() -> None:
    check_messages("auto_micro_batch", run_ranks(refusals, _wrong, WRONG, nproc=2))
