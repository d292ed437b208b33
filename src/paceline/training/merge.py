"""Putting together what ranks hold of one whole: rows of uneven number, and torchmetrics' states."""

from __future__ import annotations

from typing import Any

import torch

from paceline.errors import EvaluationError
from paceline.job import collectives
from paceline.job.job import Job


def concatenate_ranks(job: Job, rows: torch.Tensor | None) -> torch.Tensor:
    """The rows of all ranks, in rank order, on the CPU; a rank without rows gives None.

    Raises:
        EvaluationError: on all ranks, where dtypes or the shapes of a row differ.

    Collective: all ranks, same order as the job's other collectives.
    """
    own = None if rows is None else {"dtype": str(rows.dtype), "shape": list(rows.shape)}
    described = collectives.gather(job, own)
    present = [d for d in described if d is not None]
    if not present:
        return torch.empty(0)
    kinds = {(d["dtype"], tuple(d["shape"][1:])) for d in present}
    if len(kinds) > 1:
        raise EvaluationError(f"ranks gave rows of different kinds: {sorted(map(str, kinds))}.")
    dtype: torch.dtype = getattr(torch, present[0]["dtype"].removeprefix("torch."))
    row_shape = present[0]["shape"][1:]
    counts = [0 if d is None else d["shape"][0] for d in described]
    padded = torch.zeros([max(counts), *row_shape], dtype=dtype)
    if rows is not None:
        padded[: len(rows)] = rows.detach().cpu()
    # Gloo has no bool; bytes carry every dtype.
    parts = collectives.gather_tensor(job, padded.reshape(-1).view(torch.uint8))
    whole = [
        part.view(dtype).reshape(padded.shape)[:count]
        for part, count in zip(parts, counts, strict=True)
    ]
    return torch.cat(whole)


def merge_metric(job: Job, metric: Any, num_updates: list[int]) -> Any:
    """The value of a torchmetrics metric over the updates of all ranks, equal on all ranks.

    Reduces each state as the metric declares, as torchmetrics does itself; but ranks that saw nothing are
    left out, whose default states would spoil what is stacked, and lists may be uneven.

    Collective: all ranks, same metric.
    """
    if hasattr(metric, "items") and not hasattr(metric, "_reductions"):
        return {name: merge_metric(job, part, num_updates) for name, part in metric.items()}
    busy = [rank for rank, count in enumerate(num_updates) if count]
    for name, reduction in metric._reductions.items():
        state = getattr(metric, name)
        if isinstance(state, list):
            whole = concatenate_ranks(
                job, torch.cat([_as_rows(s) for s in state]) if state else None
            )
            setattr(metric, name, [whole.to(metric.device)])
            continue
        parts = collectives.gather_tensor(job, state.detach().cpu())
        stacked = torch.stack([parts[rank] for rank in busy]).to(metric.device)
        if reduction is None:
            merged = stacked if len(busy) > 1 else stacked[0]
        elif getattr(reduction, "__name__", "") == "dim_zero_mean":
            raise EvaluationError(
                f"{type(metric).__name__} takes the mean of its state {name!r} over ranks, which is wrong "
                "for ranks with different numbers of samples.",
                fix="use a metric that keeps sums, or gather the predictions.",
            )
        else:
            merged = reduction(stacked)
        setattr(metric, name, merged)
    metric._update_count = sum(num_updates)
    metric._computed = None
    return metric.compute()


def _as_rows(state: torch.Tensor) -> torch.Tensor:
    return state.reshape(1) if state.dim() == 0 else state
