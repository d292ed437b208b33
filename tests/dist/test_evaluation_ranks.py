"""Validation gives what one process gives: any length, any number of ranks, metrics and predictions too."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_trainings import refusals
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import paceline
from paceline.errors import DataError, PeerFailed
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
        "loss": (F.cross_entropy(logits, y, reduction="sum"), len(y)),
        "accuracy": ((logits.argmax(1) == y).sum(), len(y)),
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
    for nproc in (2, 3, 5):
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
        "doubled": MeanMetric() * 2.0,  # a metric that holds another one
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
            "doubled": (p,),
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


@pytest.mark.ci
@pytest.mark.parametrize("nproc", [3, *[pytest.param(n, marks=pytest.mark.slow) for n in (2, 4)]])
def test_any_metric_and_predictions_in_order(nproc: int) -> None:
    want = run_ranks(_with_metrics_of_each_length, nproc=1)[0]
    for rank in run_ranks(_with_metrics_of_each_length, nproc=nproc):
        for got, one in zip(rank, want, strict=True):
            assert got["rows"] == one["rows"]
            assert got["flags"] == one["flags"]
            for name in ("auroc", "correlation", "mean", "doubled", "micro", "macro"):
                # float32 states, summed or merged in another order
                assert got[name] == pytest.approx(one[name], rel=1e-5), name


class _Stream:
    """An iterable of batches, of which each rank scores every n-th."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


def _with_list_states(job: Any, name: str) -> list[Any]:
    """A result per image, from a list state with an entry for each image, of differing shapes."""
    from torchmetrics import CatMetric, Metric
    from torchmetrics.text import ROUGEScore

    class MeanOfMaxima(Metric):
        def __init__(self) -> None:
            super().__init__()
            self.add_state("boxes", default=[], dist_reduce_fx=None)

        def update(self, boxes: list[torch.Tensor]) -> None:
            self.boxes += boxes

        def compute(self) -> torch.Tensor:
            return torch.stack([each.max() for each in self.boxes]).mean()

    images = [torch.arange(i % 3 + 1.0) + i for i in range(9)]
    if name == "stream":
        data: Any = _Stream([images[i : i + 2] for i in range(0, 9, 2)])
    else:
        data = images
    metrics = {
        "maxima": MeanOfMaxima(),
        "all": CatMetric(),
        "rouge": ROUGEScore(rouge_keys="rouge1"),
    }

    def score(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, Any]:
        texts = [f"a text of {int(each.sum()) % 4} words" for each in batch]
        return {
            "maxima": (batch,),
            "all": (torch.cat(batch),),
            "rouge": (texts, ["a text of 1 words"] * len(batch)),
        }

    collate = None if name == "stream" else list
    options: dict[str, Any] = {} if name == "stream" else {"micro_batch": 2, "collate": collate}
    result = paceline.evaluate(job, _model(), data, score, metrics=metrics, **options)
    rouge = {key: float(value) for key, value in result.rouge.items()}
    return [float(result.maxima), result.all.tolist(), rouge]


def _with_all_list_states(job: Any) -> list[Any]:
    return [_with_list_states(job, name) for name in ("samples", "stream")]


@pytest.mark.ci
def test_list_states_of_metrics_keep_their_entries_and_order() -> None:
    (want,) = run_ranks(_with_all_list_states, nproc=1)
    images = [torch.arange(i % 3 + 1.0) + i for i in range(9)]
    assert want[0][0] == sum(float(each.max()) for each in images) / 9
    assert want[0][1] == torch.cat(images).tolist()
    assert want[1] == want[0]
    for samples, stream in run_ranks(_with_all_list_states, nproc=3):
        assert samples == want[0]
        assert sorted(stream[1]) == sorted(want[1][1])  # in the order of the ranks
        assert stream[2] == pytest.approx(want[1][2])


def _bad(job: Any, kind: str) -> None:
    def score(model: nn.Module, batch: Any) -> dict[str, Any]:
        x, y = batch
        if kind == "vector":
            return {"loss": (model(x), len(y))}
        if kind == "number":
            return {"loss": F.cross_entropy(model(x), y)}
        if kind == "no name":
            return model(x).sum(), len(y)  # type: ignore[return-value]
        if kind == "rows":
            return {"r": model(x).sum()}
        if kind == "texts":
            return {"r": ("text",)}
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
    elif kind == "texts":
        from torchmetrics import Metric

        class Texts(Metric):
            def __init__(self) -> None:
                super().__init__()
                self.add_state("texts", default=[], dist_reduce_fx=None)

            def update(self, text: str) -> None:
                self.texts.append(text)

            def compute(self) -> int:
                return len(self.texts)

        metrics = {"r": Texts()}
    paceline.evaluate(job, _model(), data, score, micro_batch=2, metrics=metrics)


WRONG = {
    "vector": "StepError",
    "number": "StepError",
    "no name": "StepError",
    "rows": "StepError",
    "tuple": "StepError",
    "empty": "ConfigError",
    "stream": "ConfigError",
    "lengths": "StepError",
    "texts": "StepError",
}


@pytest.mark.ci
def test_what_cannot_be_evaluated_is_refused_on_all_ranks() -> None:
    for found in run_ranks(refusals, _bad, list(WRONG), nproc=3):
        assert {kind: name for kind, (name, _) in found.items()} == WRONG
        assert "'texts' of Texts has entries of type str" in found["texts"][1]
        assert 'return {"loss": (total, len(batch[0]))}' in found["number"][1]


def _evaluate_on(job: Any, ranks: list[int], fails: bool) -> None:
    model = paceline.ddp(job, _model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = paceline.Batches(job, _data(32), global_batch=8)
    for step in paceline.Training(job, model, optimizer, batches).steps(epochs=2):
        for x, y in step:
            step.backward(
                F.cross_entropy(model(x), y, reduction="sum"), count=len(y), reduction="sum"
            )
        step.update()
        paceline.evaluate(job, model, _data(9), _score)
        if step.number == 3:
            if job.rank in ranks:
                paceline.evaluate(job, model, _data(9), _score)
            elif fails:
                raise RuntimeError("of this rank")


def test_a_rank_that_fails_before_an_evaluation_is_named() -> None:
    outcomes = run_failing_ranks(_evaluate_on, [0], True, nproc=2)
    assert isinstance(outcomes[0].error, PeerFailed)
    assert "of this rank" in str(outcomes[0].error)


def test_a_model_that_has_diverged_can_be_evaluated() -> None:
    values = {"both": [math.inf, -math.inf], "large": [1e308, 1e308], "small": [0.1, 0.2]}

    def score(model: Any, batch: Any) -> dict[str, Any]:
        return {name: (each[int(batch[0])], 1) for name, each in values.items()}

    with paceline.join() as job:
        found = paceline.evaluate(job, _model(), torch.arange(2), score, micro_batch=1)
    assert math.isnan(found.both)
    assert (found.large, found.small) == (math.inf, math.fsum([0.1, 0.2]) / 2)


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
    assert isinstance(outcomes[1].error, DataError)
    assert outcomes[1].error.sample == 5
    assert isinstance(outcomes[0].error, PeerFailed)
    assert "sample 5" in str(outcomes[0].error)


class Stream(IterableDataset[Any]):
    """The samples of `_data(29)`; with `part`, only those of this rank."""

    def __init__(self, part: tuple[int, int] = (0, 1)) -> None:
        self.part = part

    def __iter__(self) -> Any:
        return islice(iter(_data(29)), self.part[0], None, self.part[1])


class Lengths(torch.utils.data.Sampler[list[int]]):
    """Batches of 1, 2, 3, ... samples."""

    def __iter__(self) -> Any:
        first = 0
        for size in range(1, 8):
            yield list(range(first, min(first + size, 29)))
            first += size

    def __len__(self) -> int:
        return 7


def _evaluate_streams(job: Any) -> dict[str, Any]:
    model = paceline.ddp(job, _model())
    sources: dict[str, Any] = {
        "stream": Stream(),
        "loader of a stream": DataLoader(Stream(), 3),
        "loader of batches": DataLoader(TensorBatches(), batch_size=None),
        "generator": iter(list(DataLoader(_data(29), 3))),
        "batch sampler": DataLoader(_data(29), batch_sampler=Lengths()),
    }
    results = {}
    for name, source in sources.items():
        options = {"micro_batch": 3} if name == "stream" else {}
        result = paceline.evaluate(job, model, source, _score, **options)
        results[name] = (result.num_samples, result.values)
    return results


class TensorBatches(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return _data(29)[3 * index : 3 * index + 3]


def _bad_stream(job: Any, kind: str) -> None:
    loader = DataLoader(_data(9), 3)
    data: Any = {
        "split": Stream((job.rank, job.world_size)),
        "shuffled": _shuffled(loader, job.rank),
        "shuffled later": _shuffled(loader, job.rank, first=1),
        "exhausted": iter([]),
        "no tensors": iter([["a", "b"]]),
        "workers": Stream(),
    }[kind]
    paceline.evaluate(job, _model(), data, _score, workers=2 if kind == "workers" else None)


def _shuffled(loader: Any, rank: int, first: int = 0) -> Any:
    batches = list(loader)
    at = first + rank % (3 - first)
    return iter(batches[:first] + batches[at:] + batches[first:at])


class Counted(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(torch.arange(11.0))


def _rows_of_streams(job: Any) -> list[list[float]]:
    found = []
    for data in (Counted(), iter(torch.arange(11.0).split(2))):
        rows = {"x": "rows"}
        own = paceline.evaluate(
            job,
            _model(),
            data,
            lambda model, x: {"x": x},
            metrics=rows,
            micro_batch=2 if isinstance(data, Counted) else None,
        )
        found.append(own.x.tolist())
    return found


class Reordered(IterableDataset[Any]):
    """The numbers 0 to 8, from the second on in an order from torch's global generator."""

    def __iter__(self) -> Any:
        yield 0
        yield from (torch.randperm(8) + 1).tolist()


def _reordered(job: Any) -> Any:
    model = _model()
    torch.manual_seed(job.rank)
    state = torch.get_rng_state()
    rows = paceline.evaluate(
        job, model, Reordered(), lambda model, x: {"x": x}, metrics={"x": "rows"}, micro_batch=2
    ).x
    return rows.tolist(), torch.equal(state, torch.get_rng_state())


def _bad_streams(job: Any) -> dict[str, Any]:
    kinds = ["split", "shuffled", "shuffled later", "exhausted", "no tensors", "workers"]
    return refusals(job, _bad_stream, kinds)


def test_streams_that_differ_between_ranks_are_refused() -> None:
    for found in run_ranks(_bad_streams, nproc=2):
        assert "15 samples by rank 0, 14 samples by rank 1" in found["split"][1]
        assert "the ranks read different batches" in found["shuffled"][1]
        assert "the ranks read different batches" in found["shuffled later"][1]
        assert "gave no batch" in found["exhausted"][1]
        assert "the number of samples of a batch is not known" in found["no tensors"][1]
        assert found["workers"][0] == "ConfigError"


def _own_loop(job: Any, lengths: list[int]) -> list[list[float]]:
    """Loss and accuracy of a hand-written validation loop, of datasets and of a stream."""
    torch.manual_seed(job.rank)
    model = paceline.ddp(job, nn.Sequential(nn.BatchNorm1d(4), _model()))
    model(torch.randn(5, 4) + job.rank)  # now each rank has other running statistics
    model.eval()
    results = []
    for n in lengths:
        for data in (
            DataLoader(_data(n), batch_size=3, num_workers=n % 2),
            _Stream(list(DataLoader(_data(n), 4))),
        ):
            loss = correct = torch.zeros(())
            count = 0
            with torch.no_grad():
                for x, y in paceline.parts(job, model, data):
                    logits = model(x)
                    loss = loss + F.cross_entropy(logits, y, reduction="sum")
                    correct = correct + (logits.argmax(1) == y).sum()
                    count += len(y)
            loss, correct, count = paceline.sum_over_ranks(job, loss, correct, count)
            assert count == n
            results.append([loss / count, correct / count])
            whole = paceline.evaluate(job, model, data, _score, micro_batch=None)
            assert results[-1] == pytest.approx([whole.loss, whole.accuracy], rel=1e-6)
    return results


def _in_each_way(job: Any) -> dict[str, Any]:
    return {
        "dataset": _evaluate(job, [29], 0)[0],
        "streams": _evaluate_streams(job),
        "rows": _rows_of_streams(job),
        "shuffled": _reordered(job),
        "own loop": _own_loop(job, [1, 7, 16]),
    }


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_streams_loaders_rows_and_own_loops_give_what_the_dataset_gives(nproc: int) -> None:
    ranks = run_ranks(_in_each_way, nproc=nproc)
    assert [each["own loop"] for each in ranks] == [ranks[0]["own loop"]] * nproc
    for found in ranks:
        for name, (num_samples, values) in found["streams"].items():
            assert num_samples == (28 if name == "batch sampler" else 29)
            if name != "batch sampler":
                assert values == found["dataset"]
        assert found["rows"] == [[float(i) for i in range(11)]] * 2
        shuffled, unchanged = found["shuffled"]
        assert sorted(shuffled) == list(range(9)) != shuffled
        assert unchanged


def _wrong_parts(job: Any, kind: str) -> None:
    if kind == "split":
        list(paceline.parts(job, paceline.fsdp(job, _model()), _data(5)))
    elif job.rank == 0:
        list(paceline.parts(job, _model(), _data(5)))


def test_parts_of_a_split_model_or_of_one_rank_are_refused() -> None:
    for outcome in run_failing_ranks(_wrong_parts, "split", nproc=2):
        assert "paceline.evaluate" in str(outcome.error)
    for outcome in run_failing_ranks(_wrong_parts, "alone", nproc=2):
        assert "rank 1 did not call `parts` at this point" in str(outcome.error)


class Counting:
    """A backend of torch.compile that counts the runs of compiled graphs."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            self.runs += 1
            return graph(*args)

        return run


class Wrapped(nn.Module):
    """Dynamo compiles no frame of torch's own modules, so DDP around a Sequential would run eagerly."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out


def _evaluate_compiled(job: Any) -> dict[str, Any]:
    results = {}
    for kind in ("inside", "around"):
        backend = Counting()
        model: nn.Module = Wrapped()
        if kind == "inside":
            model = paceline.ddp(job, torch.compile(model, backend=backend))
        else:
            model = torch.compile(paceline.ddp(job, model), backend=backend)
        values = paceline.evaluate(job, model, _data(7), _score, micro_batch=3).values
        results[kind] = (backend.runs, values)
    return results


def _evaluate_bf16(job: Any) -> tuple[list[str], dict[str, float]]:
    seen = []

    def score(model: nn.Module, batch: Any) -> dict[str, Any]:
        seen.append(str(model(batch[0]).dtype))
        return _score(model, batch)

    model = paceline.ddp(job, _model())
    values = paceline.evaluate(job, model, _data(7), score, micro_batch=3, precision="bf16").values
    return seen, values


def _evaluate_in_other_ways(job: Any) -> Any:
    return _evaluate_compiled(job), _evaluate_bf16(job)


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.ci
def test_compiled_models_run_compiled_and_the_precision_is_used(nproc: int) -> None:
    want = run_ranks(_evaluate, [7], 0, nproc=1)[0][0]
    low = None
    for compiled, (dtypes, values) in run_ranks(_evaluate_in_other_ways, nproc=nproc):
        for runs, got in compiled.values():
            assert runs > 0
            assert got == pytest.approx(want, rel=1e-5)
        assert set(dtypes) == {"torch.bfloat16"}
        assert values != want
        assert low in (None, values)
        low = values
        assert values["loss"] == pytest.approx(want["loss"], rel=0.02)


def test_an_unknown_precision_of_an_evaluation_is_refused() -> None:
    with paceline.join() as job, pytest.raises(paceline.ConfigError, match="precision must be"):
        paceline.evaluate(job, _model(), _data(7), _score, precision="int8")
