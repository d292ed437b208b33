"""Collectives on small host values, with errors that name ranks.

A front to `torch.distributed` on the job's control group. Values are sent as JSON or numbers, never as
pickles. In a job of one process every function returns at once.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from paceline.credentials import redact
from paceline.errors import (
    CollectiveTimeout,
    PacelineError,
    PeerFailed,
    StepError,
    name_ranks,
    refuse_different_values,
)
from paceline.job import current_step
from paceline.job.job import Job

T = TypeVar("T")
_ON_RANK0_POLL_S = 0.02


def gather(job: Job, value: Any) -> list[Any]:
    """The values of all ranks, in rank order. A value may be anything that JSON can represent.

    Collective: all ranks, same order as the job's other collectives.
    """
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = gather_rows(job, torch.tensor(len(data)), job.control).tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(data)] = data
    rows = gather_rows(job, padded, job.control)
    return [json.loads(bytes(row[:size].numpy())) for row, size in zip(rows, sizes, strict=True)]


def gather_reports(job: Job, value: Any) -> list[Any]:
    """The values of one rank for each data rank, in their order; on all ranks. See `gather`.

    Collective: all ranks, same order as the job's other collectives.
    """
    everyone = gather(job, value)
    return [everyone[rank] for rank in job.data.reporters]


def gather_in_step(
    job: Job,
    call: str,
    value: Any,
    *,
    action: str,
    error: type[PacelineError] = StepError,
    why: str,
    fix: str,
) -> list[Any]:
    """The values that all ranks give in the same step, or after it, in rank order; missing ranks are named.

    Through the store, so that ranks which make the call alone get an error instead of waiting for the others.

    Args:
        call: Which call it is, for the store.
        action: What all ranks must do, for the error: "call `evaluate` in this step".

    Raises:
        error: Some ranks ended the step, or outside of a step left the job, without the call.

    Collective: all ranks, in the same step or after the same one.
    """
    if job.peers is None:
        return [value]
    values, missing = job.peers.exchange_in_step(call, value, timeout_s=job.timeout_s)
    if missing:
        what = f"{name_ranks(missing)} did not {action}."
        raise error(what, where=job.where(), why=why, fix=fix, step=current_step.step)
    return values


def gather_tensor(job: Job, tensor: torch.Tensor) -> list[torch.Tensor]:
    """The CPU tensors of all ranks, in rank order; equal shapes and dtypes.

    Collective: all ranks, same order as the job's other collectives.
    """
    return list(gather_rows(job, tensor, job.control))


def gather_rows(job: Job, row: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The tensors of all ranks of a group, stacked in rank order; equal shapes and dtypes.

    Args:
        group: On whose device the tensors are; None is this rank alone.

    Collective: all ranks of the group.
    """
    if group is None:
        return row[None]
    rows = row.new_empty((dist.get_world_size(group), *row.shape))
    _run(job, lambda: dist.all_gather(list(rows.unbind()), row.contiguous(), group=group))
    return rows


def all_reduce(job: Job, tensor: torch.Tensor) -> torch.Tensor:
    """Add up the tensors of all data ranks, in place, on the job's device, and return the tensor.

    Collective: all ranks, same order as the job's other collectives.
    """
    if job.data.group is not None:
        _run(job, lambda: dist.all_reduce(tensor, group=job.data.group))
    return tensor


def exact_sum(values: Sequence[float]) -> float:
    """The sum of host numbers, rounded once, so that their order does not matter.

    As `math.fsum`, but NaN or infinity where that raises: infinities of both signs, or a sum out of range.
    """
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):
        return sum(values)


def sum_over_ranks(job: Job, *values: float | torch.Tensor) -> tuple[float, ...]:
    """The sum of each value over the ranks, rounded once; a model that is split over ranks counts once.

    Args:
        values: Numbers, or tensors with one element. Reading a tensor waits for its device.

    Returns:
        A tuple with the sum of each value, equal on all ranks; also for a single value.

    Raises:
        ValueError, RuntimeError: a tensor has several elements.

    Collective: all ranks, the same number of values, in the same order as the job's other collectives.
    """
    rows = gather_reports(job, [float(value) for value in values])
    return tuple(exact_sum(column) for column in zip(*rows, strict=True))


def agree(job: Job, what: str, value: T, *, where: str = "", fix: str = "") -> T:
    """Check that all ranks hold an equal value, and return it.

    Args:
        what: name of the value, for the error.
        value: anything that JSON can represent.

    Raises:
        RankDisagreement: on all ranks; it names the values and their ranks.

    Collective: all ranks, same order as the job's other collectives.
    """
    refuse_different_values(what, gather(job, value), where=where, fix=fix)
    return value


def on_rank0(job: Job, action: Callable[[], T], *, timeout_s: float | None = None) -> T:
    """Run `action` on rank 0 while the others wait; all get its result, or its error.

    The others wait without a collective, so no collective times out while rank 0 downloads or tokenizes. The
    result must be something that JSON can represent.

    Args:
        timeout_s: how long the others wait, in seconds; None waits as long as rank 0 lives.

    Raises:
        PeerFailed: on the other ranks, if `action` raised an error on rank 0.
        CollectiveTimeout: rank 0 needed more than `timeout_s`.

    Collective: all ranks, same order as other calls of this function.
    """
    if job.store is None:
        return action()
    count = job.store.add(f"on_rank0/{job.rank}", 1)
    answer = f"on_rank0/answer/{count}"
    if job.rank == 0:
        try:
            result = action()
            text = json.dumps({"value": result})
        except BaseException as error:
            job.store.set(answer, json.dumps({"error": redact(f"{type(error).__name__}: {error}")}))
            raise
        job.store.set(answer, text)
        return result
    return _await_answer(job, answer, timeout_s)  # type: ignore[no-any-return]


def _await_answer(job: Job, answer: str, timeout_s: float | None) -> Any:
    assert job.store is not None
    assert job.peers is not None
    began = time.monotonic()
    while not job.store.check([answer]):
        # Rank 0 answers before it reports its failure: the answer may have come since.
        if (failure := job.peers.failure()) and not job.store.check([answer]):
            raise failure
        if timeout_s is not None and time.monotonic() - began > timeout_s:
            raise CollectiveTimeout(
                f"rank 0 did not finish within {timeout_s:g} s.",
                where=job.where(),
                missing=[0],
                waited_s=timeout_s,
            )
        time.sleep(_ON_RANK0_POLL_S)
    reply = json.loads(job.store.get(answer))
    if "error" in reply:
        raise PeerFailed(
            f"rank 0 failed first: {reply['error']}",
            where=job.where(),
            rank=0,
        )
    return reply["value"]


def _run(job: Job, collective: Callable[[], Any]) -> None:
    try:
        collective()
    except RuntimeError as error:
        job.reraise(error)
