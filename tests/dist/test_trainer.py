"""`Trainer` is bit-equal to the loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import ConfigError
from paceline.testing import run_failing_ranks, run_ranks


def _data() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(26, 4, generator=generator)
    return TensorDataset(x, x[:, :3].argmax(1))


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def _decay(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def _score(model: nn.Module, batch: Any) -> dict[str, Any]:
    return {"loss": F.cross_entropy(model(batch[0]), batch[1], reduction="sum")}


def _flat(model: nn.Module) -> list[float]:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()


def _by_trainer(job: Any, folder: str) -> tuple[list[float], float, list[str]]:
    torch.manual_seed(11)
    seen: list[str] = []
    trainer = paceline.Trainer(
        _net,
        F.cross_entropy,
        _adam,
        _data(),
        global_batch=8,
        validation=paceline.Validation(dataset=_data(), score=_score, micro_batch=5),
        schedule=_decay,
    )
    names = ("start", "epoch", "validated", "end")
    on = {name: (lambda moment: seen.append(moment.event)) for name in names}
    result = trainer.fit(3, micro_batch=3, clip_norm=1.0, folder=folder, on=on)
    assert result.steps == 12
    assert result.epochs == 3
    return _flat(result.model), result.evaluation.loss, seen


def _by_loop(job: Any) -> tuple[list[float], float]:
    torch.manual_seed(11)
    model = paceline.ddp(job, _net())
    optimizer = _adam(model.parameters())
    batches = paceline.Batches(job, _data(), global_batch=8, micro_batch=3)
    training = paceline.Training(job, model, optimizer, batches, schedule=_decay(optimizer))
    for step in training.steps(epochs=3):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y, reduction="sum"), count=len(y))
        step.update(clip_norm=1.0)
        if step.ends_epoch:
            result = paceline.evaluate(job, model, _data(), _score, micro_batch=5)
    return _flat(paceline.unwrap(model)), result.loss


def _bucket_sizes(job: Any) -> list[int]:
    """How many buckets a model had in each step, of 4 MiB of gradients."""
    seen: list[int] = []

    def note(moment: Any) -> None:
        seen.append(len(moment.training.models[0].reducer._get_zeros_like_grad_buckets()))

    data = TensorDataset(torch.ones(12, 512), torch.ones(12, 512))
    trainer = paceline.Trainer(
        lambda: nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]),
        F.mse_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=1e-5),
        data,
        global_batch=2 * job.world_size,
        bucket_mb=1.0,
    )
    trainer.fit(1, on={"step": note})
    return seen


def test_bucket_mb_reaches_ddp() -> None:
    assert set(run_ranks(_bucket_sizes, nproc=2)[0]) == {4}


@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_the_trainer_is_bit_equal_to_the_loop(nproc: int, tmp_path: Path) -> None:
    by_loop = run_ranks(_by_loop, nproc=nproc)
    by_trainer = run_ranks(_by_trainer, str(tmp_path), nproc=nproc)
    for rank in range(nproc):
        assert by_trainer[rank][:2] == by_loop[rank]
        assert by_trainer[rank][2] == ["start", *["epoch", "validated"] * 3, "end"]
    assert (tmp_path / "model.pth").exists()
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 12


def _tokens(job: Any) -> list[float]:
    def loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
        kept = target != 0
        losses = F.cross_entropy(output, target, reduction="none")
        return (losses * kept).sum(), int(kept.sum())

    trainer = paceline.Trainer(
        lambda: _net().double(),
        paceline.PerToken(loss),
        _adam,
        TensorDataset(_data().tensors[0].double(), _data().tensors[1]),
        global_batch=13,  # divides 26, so that no step is small enough to hold no token
    )
    torch.manual_seed(11)
    return _flat(trainer.fit(2, micro_batch=1).model)


def test_losses_per_token() -> None:
    want = run_ranks(_tokens, nproc=1)[0]
    for got in run_ranks(_tokens, nproc=3):
        assert got == pytest.approx(want, rel=1e-9)


def _batchnorm(job: Any) -> list[float]:
    torch.manual_seed(11)
    trainer = paceline.Trainer(
        lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double(),
        F.cross_entropy,
        lambda p: torch.optim.SGD(p, lr=0.1),
        TensorDataset(_data().tensors[0].double(), _data().tensors[1]),
        global_batch=8,
    )
    model = trainer.fit(2).model
    return _flat(model) + model[1].running_mean.tolist() + model[1].running_var.tolist()


def test_batchnorm_trains_as_on_one_process() -> None:
    # 26 samples in steps of 8: the last step has 2, so with 3 and 4 ranks some have none.
    want = run_ranks(_batchnorm, nproc=1)[0]
    for nproc in (2, 4):
        for got in run_ranks(_batchnorm, nproc=nproc):
            assert got == pytest.approx(want, rel=1e-9)


def _stop(job: Any) -> int:
    trainer = paceline.Trainer(
        _net,
        F.cross_entropy,
        _adam,
        _data(),
        global_batch=8,
        validation=paceline.Validation(dataset=_data()),
    )

    def enough(moment: Any) -> None:
        if moment.step.epoch == 1:
            moment.step.stop()

    return trainer.fit(9, on={"validated": enough}).epochs


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_function_on_an_event_may_stop_the_training(nproc: int) -> None:
    assert run_ranks(_stop, nproc=nproc) == [2] * nproc


def _wrong(job: Any, kind: str) -> None:
    loss: Any = nn.CrossEntropyLoss() if kind == "mean" else F.cross_entropy
    data: Any = TensorDataset(torch.zeros(8, 4)) if kind == "no target" else _data()
    trainer = paceline.Trainer(_net, loss, _adam, data, global_batch=4)
    trainer.fit(1, on={"nonsense": print} if kind == "event" else None)


@pytest.mark.parametrize("kind", ["mean", "no target", "event"])
def test_wrong_arguments_are_refused(kind: str) -> None:
    for outcome in run_failing_ranks(_wrong, kind, nproc=2):
        assert isinstance(outcome.error, ConfigError), outcome.text
