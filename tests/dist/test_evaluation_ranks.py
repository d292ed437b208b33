"""Validation gives what one process gives: any length, any number of ranks, metrics and predictions too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_trainings import refusals
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import PeerFailed, SampleError
from paceline.testing import run_failing_ranks, run_ranks


def _data(n: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, 4, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long())


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))


def _score(model: nn.Module, batch: Any) -> dict[str, Any]:
    x, y = batch
    logits = model(x)
    return {
        "loss": F.cross_entropy(logits, y, reduction="sum"),
        "accuracy": (logits.argmax(1) == y).sum(),
        "per_token": (logits.sum(), 3 * len(y)),
    }


def _evaluate(job: Any, lengths: list[int], workers: int) -> list[dict[str, Any]]:
    model = paceline.ddp(job, _model())
    results = []
    for n in lengths:
        was = [m.training for m in model.modules()]
        result = paceline.evaluate(job, model, _data(n), _score, micro_batch=3, workers=workers)
        assert [m.training for m in model.modules()] == was
        assert result.num_samples == n
        results.append(result.values)
    return results


LENGTHS = [1, 2, 3, 7, 16, 29]


def test_results_are_equal_to_the_last_bit_on_one_to_five_ranks() -> None:
    want = run_ranks(_evaluate, LENGTHS, 0, nproc=1)[0]
    for nproc in (2, 3, 4, 5):
        for got in run_ranks(_evaluate, LENGTHS, 0, nproc=nproc):
            assert got == want
    with_workers = run_ranks(_evaluate, [7, 16], 2, nproc=2)
    assert with_workers == [[want[LENGTHS.index(n)] for n in (7, 16)]] * 2


def _with_metrics(job: Any, n: int) -> dict[str, Any]:
    # Imported here, since the import takes seconds in each rank of the other tests.
    from torchmetrics import MeanMetric, MetricCollection
    from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy
    from torchmetrics.regression import PearsonCorrCoef

    metrics = {
        "auroc": BinaryAUROC(),  # a list state of uneven length
        "correlation": PearsonCorrCoef(),  # states that are stacked and merged by compute
        "mean": MeanMetric(),
        "both": MetricCollection(
            {"micro": MulticlassAccuracy(2, average="micro"), "macro": MulticlassAccuracy(2)}
        ),
        "rows": "rows",
        "flags": "rows",
    }

    def score(model: nn.Module, batch: Any) -> dict[str, Any]:
        x, y = batch
        logits = model(x)
        p = logits.softmax(1)[:, 1]
        return {
            "auroc": (p, y),
            "correlation": (p, y.float()),
            "mean": (p,),
            "both": (logits, y),
            "rows": logits,
            "flags": logits.argmax(1) == y,
        }

    model = paceline.ddp(job, _model())
    values = paceline.evaluate(job, model, _data(n), score, micro_batch=4, metrics=metrics).values
    assert metrics["mean"].update_called is False  # the user's own objects are left alone
    flat = {k: v for k, v in values.items() if k != "both"} | values["both"]
    return {name: value.tolist() for name, value in flat.items()}


def _with_metrics_of_each_length(job: Any) -> list[dict[str, Any]]:
    return [_with_metrics(job, n) for n in (6, 25)]  # of 6 samples some ranks get none


@pytest.mark.parametrize("nproc", [3, *[pytest.param(n, marks=pytest.mark.slow) for n in (2, 4)]])
def test_any_metric_and_predictions_in_order(nproc: int) -> None:
    want = run_ranks(_with_metrics_of_each_length, nproc=1)[0]
    for rank in run_ranks(_with_metrics_of_each_length, nproc=nproc):
        for got, one in zip(rank, want, strict=True):
            assert got["rows"] == one["rows"]
            assert got["flags"] == one["flags"]
            for name in ("auroc", "correlation", "mean", "micro", "macro"):
                # float32 states, summed or merged in another order
                assert got[name] == pytest.approx(one[name], rel=1e-5), name


def _bad(job: Any, kind: str) -> None:
    def score(model: nn.Module, batch: Any) -> dict[str, Any]:
        x, _ = batch
        if kind == "vector":
            return {"loss": model(x)}
        if kind == "rows":
            return {"r": model(x).sum()}
        return {"r": model(x)}

    data: Any = _data(9)
    if kind == "empty":
        data = _data(3)
        data.tensors = tuple(t[:0] for t in data.tensors)
    elif kind == "stream":
        data = iter([1, 2])
    elif kind == "lengths":
        data = _data(9 + job.rank)
    metrics: dict[str, Any] | None = {"r": "rows"} if kind == "rows" else None
    if kind == "tuple":
        from torchmetrics import MeanMetric

        metrics = {"r": MeanMetric()}
    paceline.evaluate(job, _model(), data, score, micro_batch=2, metrics=metrics)


WRONG = {
    "vector": "EvaluationError",
    "rows": "EvaluationError",
    "tuple": "EvaluationError",
    "empty": "ConfigError",
    "stream": "ConfigError",
    "lengths": "EvaluationError",
}


def test_what_cannot_be_evaluated_is_refused_on_all_ranks() -> None:
    for found in run_ranks(refusals, _bad, list(WRONG), nproc=3):
        assert {kind: name for kind, (name, _) in found.items()} == WRONG


class Broken(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise OSError("no such image")
        return torch.zeros(4), torch.tensor(0)


def _broken(job: Any) -> None:
    paceline.evaluate(job, _model(), Broken(), _score, micro_batch=2)


def test_a_sample_that_raises_is_named() -> None:
    outcomes = run_failing_ranks(_broken, nproc=2)
    assert isinstance(outcomes[1].error, SampleError)
    assert outcomes[1].error.sample == 5
    assert isinstance(outcomes[0].error, PeerFailed)
    assert "sample 5" in str(outcomes[0].error)
