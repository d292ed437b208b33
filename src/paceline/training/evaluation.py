"""Validation that gives the number one process gives: no padding, each sample once, on any ranks.

The dataset is cut into micro-batches that do not depend on the number of ranks, which are dealt to the
ranks in contiguous runs; what each micro-batch gave is exchanged once at the end and added up exactly, so
the result is equal to the last bit for any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

import torch

from paceline.data.evaluation import EvaluationBatch, evaluation_batches
from paceline.data.samples import Collate
from paceline.errors import ConfigError, EvaluationError, rank_location
from paceline.job import collectives
from paceline.job.job import Job
from paceline.job.preemption import Preempted, notice
from paceline.parallel.modules import equalize_buffers, unwrap
from paceline.parallel.strategy import chosen_for
from paceline.training.merge import concatenate_ranks, merge_metric

Score = Callable[[torch.nn.Module, Any], Mapping[str, Any]]


class Evaluation:
    """The results of an evaluation, by name: `result.accuracy` or `result["accuracy"]`.

    Attributes:
        num_samples: how many samples were seen, each once.
        values: all results: floats, metrics' values, gathered tensors (on the CPU).

    Collective: none; all ranks hold the same.
    """

    def __init__(self, num_samples: int, values: dict[str, Any]) -> None:
        self.num_samples = num_samples
        self.values = values

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("values", {})
        if name in values:
            return values[name]
        raise AttributeError(
            f"the score gave no {name!r}; it gave {', '.join(values) or 'nothing'}"
        )

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def __repr__(self) -> str:
        shown = ", ".join(
            f"{name}={value:.6g}" if isinstance(value, float) else name
            for name, value in self.values.items()
        )
        return f"Evaluation({shown}, num_samples={self.num_samples})"


def evaluate(
    job: Job,
    model: torch.nn.Module,
    dataset: Any,
    score: Score,
    *,
    micro_batch: int = 64,
    workers: int = 0,
    metrics: Mapping[str, Any] | None = None,
    collate: Collate | None = None,
) -> Evaluation:
    """Score a model on every sample of a dataset exactly once.

    Args:
        model: Wrapped or not; run unwrapped, in eval mode, without gradients, and left as it was.
        dataset: Map-style.
        score: `score(model, batch)` gives results by name. A number or tensor of shape () is a sum over the
            batch's samples, to be divided by the number of samples; a pair (sum, count) is divided
            by the sum of its counts.
        micro_batch: Samples in a forward; part of the result's last bits, so not derived from ranks.
        metrics: By name, a torchmetrics metric, where score's value of that name is the tuple of arguments
            for `update`; or "rows", where it is a tensor with a row per sample, to be given whole, in
            sample order.
        collate: Makes a batch of a list of samples; None is torch's `default_collate`.

    Returns:
        The results, equal on all ranks.

    Raises:
        EvaluationError: not every sample was seen once, or the results cannot be added.
        SampleError: the dataset's `__getitem__` raised.
        Preempted: on all ranks, inside a training loop: a signal came to any before all was scored.

    Collective: all ranks, same arguments.
    """
    job.refuse_if_left()
    strategy = chosen_for([model])
    if strategy is not None and not strategy.has_whole_gradients:
        raise ConfigError(
            "evaluate does not support models sharded by paceline.fsdp yet.",
            why="each forward gathers parameters, but ranks may have different numbers of batches.",
            fix="training.export(path), and evaluate the weights in that file.",
        )
    job.settle()
    equalize_buffers(job, model)
    asked = metrics or {}
    own = {name: _fresh(m, job.device) for name, m in asked.items() if m != "rows"}
    kept: dict[str, list[torch.Tensor]] = {name: [] for name in asked if name not in own}
    share = evaluation_batches(
        job, dataset, micro_batch=micro_batch, workers=workers, collate=collate
    )
    mine = _run(unwrap(model), share, score, own, kept)
    everyone = collectives.gather(job, mine)
    if any(entry["cut"] for entry in everyone):
        # `Training`, when the job is left, saves the step in progress and corrects the number.
        raise Preempted(notice.take(), 0)
    values: dict[str, Any] = _add_up(job, everyone, len(dataset), micro_batch)
    num_updates = [len(entry["batches"]) for entry in everyone]
    for name, metric in own.items():
        values[name] = merge_metric(job, metric, num_updates)
    for name, rows in kept.items():
        values[name] = concatenate_ranks(job, torch.cat(rows) if rows else None)
    return Evaluation(len(dataset), values)


def _run(
    model: torch.nn.Module,
    share: Generator[EvaluationBatch],
    score: Score,
    metrics: Mapping[str, Any],
    kept: dict[str, list[torch.Tensor]],
) -> dict[str, Any]:
    """Score this rank's batches: which they were, and the sums of each; fills metrics and rows.

    A notice cuts it short; a share that was scored already is whole.
    """
    batches: list[tuple[int, int]] = []
    sums: list[dict[str, Any]] = []
    cut = False
    with _evaluating(model), closing(share):
        for each in share:
            if notice.received:
                cut = True
                break
            results = dict(score(model, each.batch))
            for name, metric in metrics.items():
                metric.update(*_arguments(name, results.pop(name, None)))
            for name, rows in kept.items():
                rows.append(_rows(name, results.pop(name, None), each.count))
            batches.append((each.index, each.count))
            sums.append(results)
    return {"batches": batches, "sums": _to_host(sums), "cut": cut}


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Eval mode and no gradients; each module's own flag is restored."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def _fresh(metric: Any, device: torch.device) -> Any:
    """A copy without state, so that the user's metric is left alone and nothing synchronises by itself."""
    copy = metric.clone()
    copy.reset()
    copy.to(device)
    for part in copy.values() if hasattr(copy, "values") else [copy]:
        part.distributed_available_fn = _never
    return copy


def _never() -> bool:
    """What a metric is told when it asks whether to synchronise by itself: we merge its states."""
    return False


def _arguments(name: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, tuple):
        raise EvaluationError(
            f"the score must give the arguments of metric {name!r} as a tuple, got "
            f"{type(value).__name__}.",
            fix=f'return {{"{name}": (predictions, targets), ...}}',
        )
    return value


def _rows(name: str, value: Any, count: int) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.dim() == 0 or len(value) != count:
        got = (
            f"shape {tuple(value.shape)}"
            if isinstance(value, torch.Tensor)
            else type(value).__name__
        )
        raise EvaluationError(
            f"{name!r} must have one row for each of the {count} samples, got {got}."
        )
    return value.detach().cpu()


def _to_host(sums: list[dict[str, Any]]) -> list[dict[str, list[float]]]:
    """Read all sums and counts; a count of None stands for the number of samples."""
    out = []
    for results in sums:
        numbers = {}
        for name, value in results.items():
            total, count = value if isinstance(value, tuple) else (value, None)
            if isinstance(total, torch.Tensor) and total.numel() != 1:
                raise EvaluationError(
                    f"{name!r} must be a sum, got shape {tuple(total.shape)}.",
                    fix=f'sum it, or pass metrics={{"{name}": "rows"}}.',
                )
            numbers[name] = [float(total)] + ([] if count is None else [float(count)])
        out.append(numbers)
    return out


def _add_up(
    job: Job, everyone: list[dict[str, Any]], num_samples: int, micro_batch: int
) -> dict[str, Any]:
    """Add what all micro-batches gave; `math.fsum` is exact, so the order does not matter."""
    seen_batches = sorted(tuple(pair) for entry in everyone for pair in entry["batches"])
    seen = sum(count for _, count in seen_batches)
    num_batches = -(-num_samples // micro_batch)
    if [index for index, _ in seen_batches] != list(range(num_batches)) or seen != num_samples:
        raise EvaluationError(
            f"{seen} samples were evaluated, the dataset holds {num_samples}.",
            where=rank_location(job.rank, job.world_size),
            why="the ranks may hold datasets of different lengths.",
            seen=seen,
        )
    sums = [numbers for entry in everyone for numbers in entry["sums"]]
    names = list(sums[0])
    if any(set(numbers) != set(names) for numbers in sums):
        raise EvaluationError("the score gave different names for different batches.")
    values: dict[str, Any] = {}
    for name in names:
        total = math.fsum(numbers[name][0] for numbers in sums)
        own_counts = [numbers[name][1] for numbers in sums if len(numbers[name]) == 2]
        count = math.fsum(own_counts) if own_counts else float(num_samples)
        if count == 0:
            raise EvaluationError(f"the counts of {name!r} sum to 0.")
        values[name] = total / count
    return values
