"""Collectives on small host values, with errors that name ranks.

A front to `torch.distributed` on the job's control group. Values are sent as JSON or numbers, never as
pickles. In a job of one process every function returns at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from paceline.credentials import redact
from paceline.errors import PeerFailed, refuse_different_values
from paceline.job.exchange import ON_EVERY_RANK
from paceline.job.job import Job

T = TypeVar("T")


def gather(
    job: Job,
    value: Any,
    *,
    call: str = "gather",
    fix: str = ON_EVERY_RANK,
    has_timeout: bool = True,
) -> list[Any]:
    """The values of all ranks, in rank order. A value may be anything that JSON can represent.

    Args:
        call: Which call of the user it belongs to, for the error.
        fix: What to do if only some ranks make the call.
        has_timeout: Whether the other ranks must come within the timeout of the job.

    Raises:
        StepError: on all ranks, if some made another call instead, or went on without one.
        CollectiveTimeout: a rank did not come in time.

    Collective: all ranks, same order as the job's other collectives.
    """
    job.refuse_if_left()
    if job.exchange is None:
        return [json.loads(json.dumps(value))]
    return job.exchange.gather(call, value, fix=fix, has_timeout=has_timeout)


def gather_tensors(
    job: Job, own: Sequence[torch.Tensor], *, call: str = "gather"
) -> list[list[torch.Tensor]]:
    """The tensors of each rank, on the CPU, in rank order; numbers, dtypes and shapes may differ.

    Collective: all ranks, same order as the job's other collectives. See `gather`.
    """
    job.refuse_if_left()
    # The clone of a tensor of one element has a stride of 1, as `view` needs it.
    tensors = [t.detach().cpu().clone(memory_format=torch.contiguous_format) for t in own]
    if job.exchange is None:
        return [tensors]
    layout = [[str(each.dtype).removeprefix("torch."), list(each.shape)] for each in tensors]
    layouts = job.exchange.gather(call, layout)
    body = b"".join(each.view(-1).view(torch.uint8).numpy().tobytes() for each in tensors)
    bodies = job.exchange.gather_bytes(call, body)
    return [_tensors_in(*each) for each in zip(bodies, layouts, strict=True)]


def _tensors_in(body: bytes, layout: list[tuple[str, list[int]]]) -> list[torch.Tensor]:
    found, at = [], 0
    for name, shape in layout:
        tensor = torch.empty(shape, dtype=getattr(torch, name))
        if size := tensor.nbytes:
            part = bytearray(body[at : at + size])
            tensor = torch.frombuffer(part, dtype=tensor.dtype).reshape(shape)
        found.append(tensor)
        at += size
    return found


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
    rows = gather(job, [float(value) for value in values], call="sum_over_ranks")
    reported = [rows[rank] for rank in job.data.reporters]
    return tuple(exact_sum(column) for column in zip(*reported, strict=True))


def agree(job: Job, what: str, value: T, *, where: str = "", fix: str = "") -> T:
    """Check that all ranks hold an equal value, and return it.

    Args:
        what: name of the value, for the error.
        value: anything that JSON can represent.

    Raises:
        RankDisagreement: on all ranks; it names the values and their ranks.

    Collective: all ranks, same order as the job's other collectives.
    """
    values = gather(job, value, call=f"agree({what!r})")
    refuse_different_values(what, values, where=where, fix=fix)
    return value


def on_rank0(job: Job, action: Callable[[], T]) -> T:
    """Run `action` on rank 0 while the others wait; all get its result, or its error.

    The others wait as long as rank 0 lives, for it may download or tokenize. The result must be something
    that JSON can represent.

    Raises:
        PeerFailed: on the other ranks, if `action` raised an error on rank 0.

    Collective: all ranks, same order as the job's other collectives.
    """
    job.refuse_if_left()
    if job.exchange is None:
        return action()
    reply: dict[str, Any] = {}
    if job.rank == 0:
        try:
            reply = {"value": action()}
            json.dumps(reply)
        except BaseException as error:
            # Rank 0 does not wait for the others, who may come much later. The row must hold all of it.
            text = redact(f"{type(error).__name__}: {error}").encode("ascii", "replace")[:200]
            job.exchange.send("on_rank0", json.dumps({"error": text.decode()}).encode())
            raise
    reply = job.exchange.gather("on_rank0", reply, has_timeout=False)[0]
    if "error" in reply:
        raise PeerFailed(f"rank 0 failed first: {reply['error']}", where=job.where(), rank=0)
    return reply["value"]  # type: ignore[no-any-return]


def _run(job: Job, collective: Callable[[], Any]) -> None:
    try:
        collective()
    except RuntimeError as error:
        job.reraise(error)
