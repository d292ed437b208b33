"""`evaluate`: the same result on any number of ranks. Each sample is evaluated once, without padding.

The dataset is cut into micro-batches that do not depend on the number of ranks, and each rank gets a share
of them. Their results are exchanged once at the end and added exactly, so the result is bit
for bit equal for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from paceline import log, torch_private
from paceline.clock.step_clock import EVALUATION, clock
from paceline.data.evaluation import (
    EvaluationBatches,
    EvaluationStream,
    batches_to_evaluate,
)
from paceline.data.samples import Collate
from paceline.errors import ConfigError, StepError
from paceline.job import collectives
from paceline.job.job import Job
from paceline.job.preemption import Preempted, notice
from paceline.parallel.ddp import Replica
from paceline.parallel.diloco import outer_weights
from paceline.parallel.modules import (
    PIPELINE,
    NoOutputOnThisStage,
    equalize_buffers,
    find_wrapper,
    free_gathered,
    is_split,
    unwrap,
    wrapped_by,
)
from paceline.training.precision import autocast_of

Score = Callable[[torch.nn.Module, Any], Mapping[str, Any]]


class Evaluation:
    """The results of an evaluation, by name: `result.accuracy` or `result["accuracy"]`.

    Attributes:
        num_samples: Number of samples, each evaluated once.
        values: All results: floats, metrics' values, gathered tensors (on the CPU).

    A result that is named as one of these attributes is read by `result["values"]`.

    Collective: none; all ranks hold the same results.
    """

    def __init__(self, num_samples: int, values: dict[str, Any]) -> None:
        self.num_samples = num_samples
        self.values = values

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("values", {})
        if name in values:
            return values[name]
        raise AttributeError(
            f"the score returned no {name!r}; it returned {', '.join(values) or 'nothing'}"
        )

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def __repr__(self) -> str:
        shown = ", ".join(
            f"{name}={value:.6g}" if isinstance(value, float) else name
            for name, value in self.values.items()
        )
        return f"Evaluation({shown}, num_samples={self.num_samples})"


@dataclass(frozen=True)
class _RankResults:
    """What one rank has scored, in a form that JSON can represent.

    Attributes:
        batches: Index and number of samples of each batch.
        sums: For each of these batches, sum and count by name.
        is_preempted: Whether it stopped because of a preemption signal.
    """

    batches: list[tuple[int, int]]
    sums: list[dict[str, tuple[float, float]]]
    is_preempted: bool


@clock.during(EVALUATION)
def evaluate(
    job: Job,
    model: torch.nn.Module,
    dataset: Any,
    score: Score,
    *,
    micro_batch: int | None = None,
    workers: int | None = None,
    metrics: Mapping[str, Any] | None = None,
    collate: Collate | None = None,
    precision: str = "fp32",
) -> Evaluation:
    """Score a model on every sample of a dataset exactly once. All ranks call it.

    Args:
        model: Wrapped or not; run in eval mode, without gradients and without DDP, and left as it was. A
            compiled model runs compiled.
        dataset: Map-style, a stream (`IterableDataset`), a `DataLoader`, or another iterable of batches. A
            loader of a map-style dataset gives its dataset, the selection of its sampler, batch size, collate
            function and workers. Of streams and other iterables every rank reads all batches, the same on
            all ranks, and scores its share.
        score: `score(model, batch)` returns results by name, each a pair (sum, count) of numbers or
            tensors of shape (): the sum over the batch, and the number of samples (or tokens) in it. The
            result is the sum of all batches divided by their counts.
        micro_batch: Number of samples in a forward, for any number of ranks. It changes the result's last
            bits. None means the loader's batch size, or 64.
        workers: Loader processes of each rank. None means the loader's number, or 0.
        metrics: By name, a torchmetrics metric, for which score returns the tuple of arguments of `update`
            under that name; or "rows": score returns a tensor with a row per sample, and the result is the
            tensor of all samples in their order.
        collate: Makes a batch from a list of samples; None is torch's `default_collate`.
        precision: "fp32", or "bf16" or "fp16" autocast, such as `training.precision`.

    Returns:
        The results, equal on all ranks.

    Raises:
        StepError: not every sample was evaluated once, a result is no pair, the results cannot be added, or
            a rank ends the step without calling `evaluate`.
        DataError: the dataset's `__getitem__` raised.
        Preempted: on all ranks, inside a training loop, if any rank received a signal before the end.

    Collective: all ranks, same arguments.
    """
    _check_all_call(job, "evaluate")
    sharded = is_split(model)  # then each forward is a collective
    equalize_buffers(job, model)
    requested = metrics or {}
    copies = {name: _reset_copy(m, job.device) for name, m in requested.items() if m != "rows"}
    rows: dict[str, list[torch.Tensor]] = {name: [] for name in requested if name not in copies}
    autocast = autocast_of(precision, job.device) or nullcontext()
    share = batches_to_evaluate(
        job, dataset, micro_batch=micro_batch, workers=workers, collate=collate, equal=sharded
    )
    with outer_weights(model):
        own_results = _run(_without_ddp(model), share, score, copies, rows, autocast)
    if sharded:
        free_gathered(model)
    # A rank may have a batch more than others, or read it slowly.
    everyone = collectives.gather(job, vars(own_results), call="evaluate", has_timeout=False)
    results = [_RankResults(**each) for each in everyone]
    if any(each.is_preempted for each in results):
        # When the job is left, `Training` saves the step in progress and replaces the step number 0.
        raise Preempted(notice.take(), 0)
    results = [results[rank] for rank in job.data.reporters]
    if isinstance(share, EvaluationStream):
        share.check()
    values: dict[str, Any] = _add_up(job, results, share.num_samples, share.num_batches)
    for name, metric in copies.items():
        values[name] = _merge_metric(job, metric, results)
    for name, own in rows.items():
        values[name] = _merge_rows(job, own, results)
    return Evaluation(share.num_samples, values)


def parts(
    job: Job,
    model: torch.nn.Module,
    dataset: Any,
    *,
    micro_batch: int | None = None,
    workers: int | None = None,
    collate: Collate | None = None,
) -> Iterator[Any]:
    """This rank's batches of a validation dataset, for a validation loop of your own.

    Together the ranks get each sample once; a rank may get none. Add up what the loop computed with
    `sum_over_ranks`; to average over batches is wrong, because their sizes differ. `evaluate` does all this
    without a loop.

        model.eval()
        correct = count = 0
        with torch.no_grad():
            for images, labels in paceline.parts(job, model, val_loader):
                correct += (model(images).argmax(1) == labels).sum()
                count += len(labels)
        correct, count = paceline.sum_over_ranks(job, correct, count)

    Args:
        model: That of the loop; its buffers, such as BatchNorm's statistics, become those of rank 0. It is
            not put into eval mode.
        dataset: As for `evaluate`, and so are the options.

    Returns:
        An iterator over batches, on the job's device.

    Raises:
        ConfigError: the model is split over ranks (`fsdp`, `tensor_parallel`, `pipeline`), so that each
            forward needs all ranks.
        StepError: another rank ends the step without calling `parts`, or ranks read different
            streams.
        DataError: the dataset's `__getitem__` raised.

    Collective: all ranks, same arguments; they read all batches, or all break off.
    """
    if is_split(model):
        raise ConfigError(
            f"paceline.parts does not support a model that is wrapped by {wrapped_by(model)}.",
            where=job.where(),
            why="each of its forwards needs all ranks, which may have different numbers of batches.",
            fix="use paceline.evaluate(job, model, dataset, score).",
        )
    _check_all_call(job, "parts")
    equalize_buffers(job, model)
    share = batches_to_evaluate(
        job, dataset, micro_batch=micro_batch, workers=workers, collate=collate, equal=False
    )
    return _batches_of(model, share)


def _batches_of(
    model: torch.nn.Module, share: EvaluationBatches | EvaluationStream
) -> Iterator[Any]:
    with outer_weights(model):
        for each in share:
            yield each.batch
    if isinstance(share, EvaluationStream):
        share.check()


def _check_all_call(job: Job, call: str) -> None:
    """Check that all ranks are in this call, in the same step."""
    job.refuse_if_left()
    job.check_loop_exit()
    collectives.gather(job, None, call=call)


def _run(
    model: torch.nn.Module,
    share: EvaluationBatches | EvaluationStream,
    score: Score,
    metrics: Mapping[str, Any],
    rows: dict[str, list[torch.Tensor]],
    autocast: AbstractContextManager[Any],
) -> _RankResults:
    """Score this rank's batches; fills `metrics` and `rows` too.

    After a preemption notice no further batch is scored, unless other ranks wait for the forwards.
    """
    may_stop = not is_split(model)
    runner = unwrap(model).__dict__.get(PIPELINE)
    batches: list[tuple[int, int]] = []
    sums: list[dict[str, Any]] = []
    is_preempted = False
    with _evaluating(model), closing(iter(share)) as batches_of_rank:
        for each in batches_of_rank:
            if notice.received and may_stop:
                is_preempted = True
                break
            if runner is not None:
                runner.calls_left = 1
            try:
                with autocast:
                    results = _by_name(score(model, each.batch))
            except NoOutputOnThisStage:
                continue  # the last stage of the pipeline reports the results
            finally:
                if runner is not None:
                    runner.calls_left = None
            if each.is_padding:
                continue
            for name, metric in metrics.items():
                metric.update(*_arguments(name, results.pop(name, None)))
            for name, own in rows.items():
                own.append(_rows(name, results.pop(name, None), each.count))
            for name, value in results.items():
                _refuse_no_pair(name, value)
            batches.append((each.index, each.count))
            sums.append(results)
    numbers = [  # reading them waits for the device
        {name: (float(total), float(count)) for name, (total, count) in results.items()}
        for results in sums
    ]
    return _RankResults(batches, numbers, is_preempted)


def _by_name(results: Any) -> dict[str, Any]:
    if not isinstance(results, Mapping):
        raise StepError(
            f"the score must return its results by name, got {type(results).__name__}.",
            fix='return {"accuracy": ((logits.argmax(1) == y).sum(), len(y))}, pairs (sum, count).',
        )
    return dict(results)


def _refuse_no_pair(name: str, value: Any) -> None:
    if not isinstance(value, tuple) or len(value) != 2:
        raise StepError(
            f"the score must return {name!r} as a pair (sum, count), got {type(value).__name__}.",
            why="a number alone may be a sum or a mean, and batches have different sizes.",
            fix=f'return {{"{name}": (total, len(batch[0]))}}. From a mean of the batch, the total is mean * '
            "len(batch[0]).",
        )
    for part in value:
        if isinstance(part, torch.Tensor) and part.numel() != 1:
            raise StepError(
                f"sum and count of {name!r} must be numbers, got shape {tuple(part.shape)}.",
                fix=f'sum them, or pass metrics={{"{name}": "rows"}}.',
            )


def _without_ddp(model: torch.nn.Module) -> torch.nn.Module:
    """The model to run. DDP is left out, because ranks may have different numbers of batches."""
    while isinstance(model, DistributedDataParallel):
        model = model.module
    wrapper = find_wrapper(model)
    if wrapper is None or isinstance(wrapper, Replica):
        return model  # without gradients, the forward of a Replica runs no collective
    log.once(
        "evaluate runs this model without torch.compile, because it was compiled around torch's DDP. "
        "Compile the module inside: paceline.ddp(job, torch.compile(model))."
    )
    return unwrap(model)


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def _reset_copy(metric: Any, device: torch.device) -> Any:
    """A reset copy that does not synchronise itself. The user's metric does not change."""
    copy = metric.clone()
    copy.reset()
    copy.to(device)
    # A collection and a wrapper hold other metrics.
    for part in copy.modules():
        if hasattr(part, "distributed_available_fn"):
            part.distributed_available_fn = bool  # False: `_merge_metric` synchronises the copy
    return copy


def _arguments(name: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, tuple):
        raise StepError(
            f"the score must return the arguments of metric {name!r} as a tuple, got "
            f"{type(value).__name__}.",
            fix=f'return {{"{name}": (predictions, targets), ...}}',
        )
    return value


def _rows(name: str, value: Any, count: int) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.dim() == 0 or len(value) != count:
        is_tensor = isinstance(value, torch.Tensor)
        got = f"shape {tuple(value.shape)}" if is_tensor else type(value).__name__
        raise StepError(
            f"{name!r} must have one row for each of the {count} samples, got {got}.",
            fix="return a tensor whose first dimension is the samples of the batch.",
        )
    return value.detach().cpu()


def _add_up(
    job: Job, results: list[_RankResults], num_samples: int, num_batches: int
) -> dict[str, Any]:
    """Add the results of all micro-batches; the sums are exact, so the order does not matter."""
    seen_batches = sorted(tuple(pair) for each in results for pair in each.batches)
    seen = sum(count for _, count in seen_batches)
    if [index for index, _ in seen_batches] != list(range(num_batches)) or seen != num_samples:
        raise StepError(
            f"{seen} samples were evaluated, the dataset holds {num_samples}.",
            where=job.where(),
            why="the ranks may hold datasets of different lengths.",
            fix="build the same dataset on all ranks.",
            seen=seen,
        )
    sums = [numbers for each in results for numbers in each.sums]
    names = list(sums[0])
    if any(set(numbers) != set(names) for numbers in sums):
        raise StepError(
            "the score returned different names for different batches.",
            fix="return the same names for every batch.",
        )
    values: dict[str, Any] = {}
    for name in names:
        totals, counts = zip(*(numbers[name] for numbers in sums), strict=True)
        total = collectives.exact_sum(totals)
        count = collectives.exact_sum(counts)
        if count == 0:
            raise StepError(
                f"the counts of {name!r} sum to 0.",
                fix="check the counts that the score returns, or the masks of the dataset.",
            )
        values[name] = total / count
    return values


def _merge_rows(job: Job, own: list[torch.Tensor], results: list[_RankResults]) -> torch.Tensor:
    """The rows of all samples, in their order, on the CPU; `own` has those of each batch of this rank.

    Raises:
        StepError: on all ranks, if dtypes or shapes of rows differ.
    """
    everyone = collectives.gather_tensors(job, own, call="evaluate")
    by_batch = {
        index: piece
        for rank, each in zip(job.data.reporters, results, strict=True)
        for (index, _), piece in zip(each.batches, everyone[rank], strict=True)
    }
    pieces = [by_batch[index] for index in sorted(by_batch)]
    kinds = {(str(piece.dtype), tuple(piece.shape[1:])) for piece in pieces}
    if len(kinds) > 1:
        raise StepError(
            f"the score returned rows of different dtypes or shapes: {sorted(map(str, kinds))}.",
            fix="return rows of one dtype and shape for every batch.",
        )
    return torch.cat(pieces)


def _merge_metric(job: Job, metric: Any, results: list[_RankResults]) -> Any:
    """The value of a torchmetrics metric over the updates of all ranks, equal on all ranks.

    Reduces tensor states as the metric declares, as torchmetrics does. But ranks without updates are left
    out, because their default states would change stacked states. A list state gets the entries of all
    ranks, in the order of the ranks, whatever its reduction.
    """
    if hasattr(metric, "items"):  # a collection
        return {name: _merge_metric(job, part, results) for name, part in metric.items()}
    for part in metric.modules():  # the metric, and those that it wraps
        if part is metric or hasattr(part, "distributed_available_fn"):
            _merge_states(job, part, results)
    return metric.compute()


def _merge_states(job: Job, metric: Any, results: list[_RankResults]) -> None:
    reductions = torch_private.attribute("torchmetrics.Metric._reductions", metric)
    if reductions is None:
        raise StepError(
            f"the states of {type(metric).__name__} are unknown, so ranks cannot add them up.",
            fix='gather the predictions (metrics={"name": "rows"}) and compute the metric from them.',
        )
    states = {name: getattr(metric, name) for name in reductions}
    entries = {name: s if isinstance(s, list) else [s] for name, s in states.items()}
    # For each state of each rank: how many entries it has, and the types of those that are no tensors.
    kinds = {
        name: ["Tensor" if isinstance(e, torch.Tensor) else type(e).__name__ for e in own]
        for name, own in entries.items()
    }
    told = collectives.gather(job, kinds, call="evaluate")
    for name in reductions:
        others = {kind for each in told for kind in each[name] if kind != "Tensor"}
        if others:
            raise StepError(
                f"the state {name!r} of {type(metric).__name__} has entries of type {min(others)}, but ranks "
                "exchange only tensors.",
                fix='gather the predictions (metrics={"name": "rows"}) and compute the metric from them.',
            )
    own_tensors = [entry for name in reductions for entry in entries[name]]
    gathered = collectives.gather_tensors(job, own_tensors, call="evaluate")
    busy = [r for r, each in zip(job.data.reporters, results, strict=True) if each.batches]
    rests = {rank: iter(gathered[rank]) for rank in busy}
    for name, reduction in reductions.items():
        parts = [
            [entry.to(metric.device) for entry in islice(rests[rank], len(told[rank][name]))]
            for rank in busy
        ]
        merged: Any = list(chain(*parts))
        if not isinstance(states[name], list):
            if getattr(reduction, "__name__", "") == "dim_zero_mean":
                raise StepError(
                    f"{type(metric).__name__} takes the mean of its state {name!r} over ranks, which is "
                    "wrong for ranks with different numbers of samples.",
                    fix="use a metric that keeps sums, or gather the predictions.",
                )
            stacked = torch.stack(merged)
            if reduction is None:
                merged = stacked if len(busy) > 1 else stacked[0]
            else:
                merged = reduction(stacked)
        setattr(metric, name, merged)
