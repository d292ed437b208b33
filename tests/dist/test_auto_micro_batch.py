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
from paceline.parallel.modules import whole
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
    job: Any,
    model: nn.Module,
    micro_batch: Any,
    *,
    batch: int = GLOBAL_BATCH,
    samples: int = 24,
    workers: int = 0,
) -> paceline.Training:
    data = make_data(samples, torch.float64)
    batches = paceline.Batches(
        job, data, global_batch=batch, micro_batch=micro_batch, workers=workers
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return paceline.Training(job, model, optimizer, batches)


def _train(job: Any, model: Limited, micro_batch: Any, **options: Any) -> tuple[list[Any], int]:
    training = _training(job, paceline.ddp(job, model), micro_batch, **options)
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
        training = _training(job, paceline.ddp(job, net), micro_batch)
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


class _RunsOut(torch.autograd.Function):
    """Calls `block.enter` in its forward and in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, block: Block) -> torch.Tensor:
        ctx.block = block
        block.enter("forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.block.enter("backward")
        return gradient, None


class Block(nn.Module):
    """Runs out of memory at one of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.fails_in, self.calls_left = "", 0

    def enter(self, where: str) -> None:
        if where == self.fails_in:
            self.calls_left -= 1
            if self.calls_left == 0:
                self.fails_in = ""
                raise torch.OutOfMemoryError("out of memory")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = _RunsOut.apply(self.first(x), self)  # type: ignore[no-untyped-call]
        return x + torch.tanh(self.second(x))


# (step, rank, block): in which pass of which micro-batch it runs out of memory. The micro-batches have
# 12, 6, 3, 2 samples.
FAILURES = {
    (1, 0, 0): ("forward", 1),
    (2, 1, 2): ("forward", 2),  # the last one, in which the gradients are summed
    (3, 0, 1): ("backward", 2),
    (3, 1, 0): ("forward", 3),
    (4, 1, 0): ("backward", 6),
}


def _train_blocks(job: Any, micro_batch: Any, **options: Any) -> list[float]:
    torch.manual_seed(1)
    blocks = [Block() for _ in range(3)]
    net = nn.Sequential(nn.BatchNorm1d(4).eval(), nn.Linear(4, 8), *blocks, nn.Linear(8, 3))
    model = paceline.fsdp(job, net.double(), blocks=Block, **options)
    size = job.world_size
    training = _training(job, model, micro_batch, batch=12 * size, samples=54 * size, workers=1)
    losses = []
    for step in training.steps(until=8):
        for number, block in enumerate(blocks):
            key = (step.number, job.rank % 2, number)
            if micro_batch == "auto" and key in FAILURES:
                block.fails_in, block.calls_left = FAILURES[key]
        step.run(lambda batch: F.cross_entropy(model(batch[0]), batch[1]))
        step.update(clip_norm=1.0)
        losses.append(float(step.loss))
    assert all(not block.fails_in for block in blocks)
    assert training.batches.micro_batch == (1 if micro_batch == "auto" else micro_batch)
    weights = [whole(value).double().reshape(-1) for value in model.state_dict().values()]
    return [*losses, *torch.cat(weights).tolist()]


def _joins_again(job: Any, options: dict[str, Any]) -> None:
    found, wanted = (_train_blocks(job, each, **options) for each in ("auto", 12))
    assert found == pytest.approx(wanted, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize(
    ("nproc", "mesh", "options"),
    [
        pytest.param(2, None, {}, marks=pytest.mark.ci),
        pytest.param(3, None, {"reshard_after_forward": False}, marks=pytest.mark.ci),
        pytest.param(4, paceline.Mesh(dp_replicate=2, dp_shard=2), {}, marks=pytest.mark.ci),
    ],
)
def test_a_rank_of_fsdp_without_memory_joins_the_collectives_again(
    nproc: int, mesh: paceline.Mesh | None, options: dict[str, Any]
) -> None:
    run_ranks(_joins_again, options, nproc=nproc, mesh=mesh)


def _one_sample(job: Any) -> None:
    model: Any = paceline.fsdp(job, Limited(job, 0))
    for step in _training(job, model, "auto").steps():
        step.run(lambda batch: F.cross_entropy(model(batch[0]), batch[1]))


@pytest.mark.ci
def test_one_sample_does_not_fit_with_fsdp() -> None:
    with pytest.raises(paceline.StepError, match=r"one sample .* of rank 1"):
        run_ranks(_one_sample, nproc=2)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


def _wrong(job: Any, kind: str) -> None:
    model: Any = Limited(job, 0)
    if kind == "loop":
        for step in _training(job, paceline.ddp(job, model), "auto").steps():
            for _ in step:
                pass
    if kind == "one sample":
        _train(job, model, "auto")
    if kind == "stream":
        paceline.Batches(job, Stream(), global_batch=4, micro_batch="auto")
    batches = paceline.Batches(job, make_data(), global_batch=4, micro_batch="auto")
    if kind == "sync_batchnorm":
        model = paceline.sync_batchnorm(job, Limited(job, 0, batchnorm=True))
    model = paceline.ddp(job, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    paceline.Training(job, model, optimizer, batches, reproducible=kind == "reproducible")


WRONG = ["loop", "one sample", "stream", "sync_batchnorm", "reproducible"]


def test_refusals() -> None:
    check_messages("auto_micro_batch", run_ranks(refusals, _wrong, WRONG, nproc=2))
