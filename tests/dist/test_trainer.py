"""`Trainer` is bit-equal to the loop."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_gpt import GPT, make_tokens
from small_trainings import loss_sum, make_data, make_training, refusals, train, weights_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

import paceline
from paceline import Mesh
from paceline.testing import run_ranks


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def _decay(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def _score(model: nn.Module, batch: Any) -> dict[str, Any]:
    return {"loss": (loss_sum(model, batch), len(batch[1]))}


class _Events(paceline.Callback):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_fit_start(self, training: paceline.Training) -> None:
        self.seen.append("start")

    def on_epoch_end(self, training: paceline.Training, step: paceline.Step) -> None:
        self.seen.append(f"epoch {step.epoch}")

    def on_evaluation_end(self, training: Any, step: Any, evaluation: Any) -> None:
        self.seen.append(f"evaluation of {evaluation.num_samples}")

    def on_fit_end(self, training: Any, evaluation: Any) -> None:
        self.seen.append("end")


def _by_trainer(job: Any, folder: str) -> tuple[list[float], float, list[str]]:
    torch.manual_seed(11)
    events = _Events()
    trainer = paceline.Trainer(
        _net,
        F.cross_entropy,
        _adam,
        make_data(26),
        global_batch=8,
        validation=paceline.Validation(dataset=make_data(26), score=_score, micro_batch=5),
        schedule=_decay,
        micro_batch=3,
        callbacks=[events],
    )
    result = trainer.fit(3, clip_norm=1.0, folder=folder)
    assert result.steps == 12
    assert result.epochs == 3
    return weights_of(result.model), result.evaluation.loss, events.seen


def _by_loop(job: Any) -> tuple[list[float], float]:
    torch.manual_seed(11)
    model = paceline.ddp(job, _net())
    optimizer = _adam(model.parameters())
    batches = paceline.Batches(job, make_data(26), global_batch=8, micro_batch=3)
    training = paceline.Training(job, model, optimizer, batches, schedule=_decay(optimizer))
    for step in training.steps(epochs=3):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
        step.update(clip_norm=1.0)
        if step.ends_epoch:
            result = paceline.evaluate(job, model, make_data(26), _score, micro_batch=5)
    return weights_of(paceline.unwrap(model)), result.loss


def _both(job: Any, folder: str) -> Any:
    return _by_loop(job), _by_trainer(job, folder)


@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_the_trainer_is_bit_equal_to_the_loop(nproc: int, tmp_path: Path) -> None:
    for by_loop, (weights, loss, events) in run_ranks(_both, str(tmp_path), nproc=nproc):
        assert (weights, loss) == by_loop
        epochs = [text for i in range(3) for text in (f"epoch {i}", "evaluation of 26")]
        assert events == ["start", *epochs, "end"]
    assert (tmp_path / "model.pth").exists()
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 12


def _assert_a_loader_and_a_mean_loss_give_the_same(job: Any) -> None:
    x, y = make_data(26).tensors
    data = TensorDataset(x.double(), y)
    loader = DataLoader(data, batch_size=3, shuffle=True)
    ends = []
    for loss, given, scored in ((F.cross_entropy, data, 3), (nn.CrossEntropyLoss(), loader, None)):
        torch.manual_seed(11)
        trainer = paceline.Trainer(
            lambda: _net().double(),
            loss,
            _adam,
            given,
            global_batch=8,
            validation=paceline.Validation(dataset=given, micro_batch=scored),
        )
        result = trainer.fit(2)
        ends.append(
            ([*weights_of(result.model), result.evaluation.loss], result.evaluation.num_samples)
        )
    (by_sum, size), (by_mean, same_size) = ends
    assert size == same_size == 26
    assert by_mean == pytest.approx(by_sum, rel=1e-9)  # a mean is divided before it is multiplied


def _with_batchnorm(job: Any, with_trainer: bool, batch_size: int) -> list[float]:
    """A model with BatchNorm, trained on a loader as it is: its losses, and its state."""
    # The last batch has one sample, for which BatchNorm has no variance.
    x, y = make_data(25).tensors
    loader = DataLoader(TensorDataset(x.double(), y), batch_size, shuffle=True, drop_last=True)
    torch.manual_seed(11)
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()
    if with_trainer:
        trainer = paceline.Trainer(
            net, F.cross_entropy, _adam, loader, global_batch=12, callbacks=[events := Losses()]
        )
        trainer.fit(2)
        losses = events.seen
    else:
        model = paceline.ddp(job, paceline.sync_batchnorm(job, net))
        training = make_training(job, model, loader, optimizer=_adam, global_batch=12)
        losses = train(training, until=4).losses
    return [*losses, *(v.item() for t in net.state_dict().values() for v in t.double().flatten())]


def _with_each_batchnorm(job: Any) -> list[list[float]]:
    return [
        _with_batchnorm(job, with_trainer, batch_size)
        for with_trainer in (False, True)
        for batch_size in (4, 12, 24)
    ]


def test_batchnorm_sees_the_whole_step_whatever_the_batch_of_the_loader() -> None:
    (alone,) = run_ranks(_with_each_batchnorm, nproc=1)
    for nproc in (2, 3):
        for each in run_ranks(_with_each_batchnorm, nproc=nproc):
            for got, want in zip(each, alone, strict=True):
                assert got == pytest.approx(want, rel=1e-9)


class _ForTokens(nn.Module):
    """Computes its own mean loss over the labels that are not -100, as models of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 7).double()

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        return SimpleNamespace(
            loss=F.cross_entropy(self.table(ids).flatten(0, 1), labels.flatten())
        )


def _dicts(job: Any) -> list[float]:
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(0, 7, (26, 5), generator=generator)
    rows = [
        {"ids": row, "labels": row.masked_fill(row == n % 3, -100)} for n, row in enumerate(ids)
    ]

    def loss(out: Any, batch: Any) -> Any:
        return out.loss, (batch["labels"] != -100).sum()

    trainer = paceline.Trainer(
        _ForTokens,
        loss,
        _adam,
        DataLoader(rows, batch_size=2, shuffle=True),  # type: ignore[arg-type]
        global_batch=8,
        validation=paceline.Validation(dataset=rows),
        count="tokens",
    )
    torch.manual_seed(11)
    result = trainer.fit(2)
    return [*weights_of(result.model), result.evaluation.loss]


def _stop(job: Any) -> int:
    class Enough(paceline.Callback):
        def on_evaluation_end(self, training: Any, step: Any, evaluation: Any) -> None:
            if step.epoch == 1:
                step.stop()

    trainer = paceline.Trainer(
        _net,
        F.cross_entropy,
        _adam,
        make_data(26),
        global_batch=8,
        validation=paceline.Validation(dataset=make_data(26)),
        callbacks=[Enough()],
    )
    return trainer.fit(9).epochs


def _never(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    raise AssertionError


WRONG: dict[str, dict[str, Any]] = {
    "loss of a number": {"loss": 5},
    "bound below 0, before the first forward": {"loss": _never, "clip_norm": -1.0},
    "loss per sample": {"loss": nn.CrossEntropyLoss(reduction="none")},
    "sum": {"loss": nn.CrossEntropyLoss(reduction="sum")},
    "no target": {"data": TensorDataset(torch.zeros(8, 4))},
    "callback": {"callbacks": [print]},
    "resume without a folder": {"resume": "must"},
    "schedule without a metric": {"schedule": torch.optim.lr_scheduler.ReduceLROnPlateau},
}


def _fit(job: Any, kind: str) -> None:
    options = {"loss": F.cross_entropy, "data": make_data(26), **WRONG[kind]}
    resume = options.pop("resume", "auto")
    trainer = {name: value for name, value in options.items() if name != "clip_norm"}
    paceline.Trainer(_net, optimizer=_adam, global_batch=4, **trainer).fit(
        1, resume=resume, clip_norm=options.get("clip_norm")
    )


def _each(job: Any) -> tuple[list[float], int]:
    errors = refusals(job, _fit, WRONG)
    assert {kind: name for kind, (name, _) in errors.items()} == dict.fromkeys(WRONG, "ConfigError")
    _assert_a_loader_and_a_mean_loss_give_the_same(job)
    return _dicts(job), _stop(job)


@pytest.mark.ci
def test_batches_of_dicts_stops_and_wrong_arguments_on_any_number_of_ranks() -> None:
    # 26 samples in steps of 8: the last step has 2, so with 4 ranks some have none.
    dicts, stop = run_ranks(_each, nproc=1)[0]
    assert stop == 2
    for nproc in (2, 4):
        for got in run_ranks(_each, nproc=nproc):
            assert got[0] == pytest.approx(dicts, rel=1e-9)
            assert got[1] == 2


def _with_strategies(job: Any, strategies: list[Any]) -> list[tuple[list[float], float]]:
    found = []
    for strategy in strategies:
        trainer = paceline.Trainer(
            lambda: GPT().double(),
            _token_mean,
            _adam,
            make_tokens(10),
            global_batch=4,
            validation=paceline.Validation(dataset=make_tokens(5), micro_batch=2),
            strategy=strategy,
            micro_batch=1,
            count="tokens",
            callbacks=[events := Losses()],
        )
        result = trainer.fit(2, clip_norm=1.0)
        found.append((events.seen, result.evaluation.loss))
    return found


def _token_mean(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), targets.numel()


class Losses(paceline.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step_end(self, training: paceline.Training, step: paceline.Step) -> None:
        self.seen.append(float(step.loss))


@pytest.mark.ci
def test_a_strategy_changes_nothing_else() -> None:
    (want,) = run_ranks(_with_strategies, ["ddp"], nproc=1)[0]
    for mesh in (None, Mesh(tp=2)):
        strategies = [partial(paceline.ddp, bucket_mb=1.0), "fsdp"] if mesh is None else [mesh]
        for results in run_ranks(_with_strategies, strategies, nproc=2, mesh=mesh):
            for losses, evaluation in results:
                assert losses == pytest.approx(want[0], rel=1e-9)
                assert evaluation == pytest.approx(want[1], rel=1e-9)


def _with_transformers(job: Any) -> list[float]:
    """A model of Hugging Face, whose batches are `BatchEncoding`s and whose output is a `ModelOutput`."""
    from transformers import BatchEncoding, GPT2Config, GPT2LMHeadModel

    def collate(rows: list[dict[str, torch.Tensor]]) -> BatchEncoding:
        return BatchEncoding({name: torch.stack([r[name] for r in rows]) for name in rows[0]})

    ids = torch.randint(0, 30, (10, 6), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[::3, 2:] = -100
    labels[4] = -100  # a sample without targets
    rows = [{"input_ids": i, "labels": y} for i, y in zip(ids, labels, strict=True)]
    loader = DataLoader(rows, batch_size=3, collate_fn=collate)  # type: ignore[arg-type]

    def loss(output: Any, batch: BatchEncoding) -> tuple[torch.Tensor, torch.Tensor]:
        return output.loss, (batch["labels"][:, 1:] != -100).sum()

    config = GPT2Config(
        vocab_size=30, n_positions=6, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0.0
    )
    config.embd_pdrop = config.attn_pdrop = 0.0
    trainer = paceline.Trainer(
        lambda: GPT2LMHeadModel(config).double(),
        loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        loader,
        global_batch=6,
        validation=paceline.Validation(dataset=loader),
        count="tokens",
    )
    result = trainer.fit(2)
    assert result.evaluation is not None
    return [result.evaluation.loss, *weights_of(result.model)]


@pytest.mark.ci
def test_models_of_transformers() -> None:
    pytest.importorskip("transformers")
    (one,) = run_ranks(_with_transformers, nproc=1)
    for ranks in run_ranks(_with_transformers, nproc=2):
        assert ranks == pytest.approx(one, rel=1e-9)  # sums in another order


class _TwoTargets(torch.utils.data.Dataset[Any]):
    """Its targets have two parts, so that the length of a target is not the number of samples."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> Any:
        x, y = make_data(7, torch.float64)[index]
        return x, {"class": y, "sum": x.sum()}


def test_a_target_may_have_several_parts() -> None:
    def loss(output: torch.Tensor, target: Any) -> torch.Tensor:
        return F.cross_entropy(output, target["class"]) + F.mse_loss(output.sum(1), target["sum"])

    trainer = paceline.Trainer(
        lambda: _net().double(),
        loss,
        _adam,
        data := _TwoTargets(),
        global_batch=3,
        validation=paceline.Validation(dataset=data, micro_batch=2),
    )
    result = trainer.fit(1)
    x, target = default_collate([data[i] for i in range(7)])
    whole = loss(result.model.eval()(x), target)
    assert result.evaluation is not None
    assert result.evaluation.loss == pytest.approx(whole.item(), rel=1e-9)


def test_strategies_that_do_not_fit_are_refused() -> None:
    with pytest.raises(paceline.ConfigError, match='strategy must be "ddp", "fsdp"'):
        _with_strategies(None, ["sharded"])
    with pytest.raises(paceline.ConfigError, match="the strategy is tp=2, but the job was joined"):
        run_ranks(_with_strategies, [Mesh(tp=2)], nproc=2)
