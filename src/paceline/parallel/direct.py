"""Small gradients of ranks in one memory, summed after a step's last backward, without DDP's reducer.

Where all gradients fit DDP's first bucket, DDP cannot reduce any while the backward goes on; what is left
of it is its bookkeeping, which takes longer than the sum. See docs/decisions/0016-direct-sum.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch import nn

from paceline.errors import ConfigError, GradientError
from paceline.job.job import Job
from paceline.parallel import reducer
from paceline.shm.group import ShmGroup

_MOST_BYTES = 1 << 20  # of gradients: what torch's first bucket holds
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class DirectSum:
    """The gradients of some models, summed over ranks in one operation.

    Collective: as the methods say.
    """

    def __init__(self, job: Job, group: ShmGroup, wrappers: Sequence[reducer.Replica]) -> None:
        self._job, self._group, self._wrappers = job, group, wrappers
        known = [p for wrapper in wrappers for _, p in reducer.known_parameters(wrapper)]
        known.sort(key=lambda p: str(p.dtype))
        self._packs = [_Pack(list(pack)) for _, pack in groupby(known, key=lambda p: p.dtype)]
        self._options = dist.AllreduceCoalescedOptions()
        self._options.asyncOp = False

    def add(self, *others: torch.Tensor) -> None:
        """Give each parameter the sum of all ranks' gradients, and each of `others` its own sum.

        A parameter without a gradient counts as one with zeros, and has one afterwards.

        Raises:
            ConfigError: a communication hook was registered after the steps had begun.
            GradientError: a gradient is sparse.

        Collective: all ranks, once a step, where DDP would have reduced.
        """
        if any(wrapper._comm_hooks for wrapper in self._wrappers):
            raise ConfigError(
                "a communication hook was registered between steps.",
                where=self._job.where(),
                fix="call register_comm_hook before training.steps(...).",
            )
        tensors = [pack.fill() for pack in self._packs]
        try:
            self._group.allreduce_coalesced([*tensors, *others], self._options)
        except RuntimeError as error:
            self._job.reraise(error)
        for pack in self._packs:
            pack.empty()


class _Pack:
    """The gradients of one dtype, in one tensor while they travel."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._flat = torch.empty(sum(p.numel() for p in parameters), dtype=parameters[0].dtype)
        pieces = torch.split(self._flat, [p.numel() for p in parameters])
        self._pieces = [piece.view(p.shape) for piece, p in zip(pieces, parameters, strict=True)]
        self._gradients: list[torch.Tensor] = []

    def fill(self) -> torch.Tensor:
        self._gradients = [_gradient(p) for p in self._parameters]
        torch._foreach_copy_(self._pieces, self._gradients)
        return self._flat

    def empty(self) -> None:
        torch._foreach_copy_(self._gradients, self._pieces)
        self._gradients = []


def direct_sum(job: Job, models: Sequence[nn.Module]) -> DirectSum | None:
    """How to sum the gradients of these models without DDP's reducer; None where DDP has to.

    That is so for several hosts, devices, Gloo and MPI, for models of more than 1 MiB, and for whatever
    only DDP's reducer does: unused parameters, a static graph, buckets of a given size, communication
    hooks, sparse gradients.

    Collective: none; the answer is the same on all ranks.
    """
    group = job.group
    if not isinstance(group, ShmGroup):
        return None
    wrappers = [model for model in models if isinstance(model, reducer.Replica)]
    if len(wrappers) < len(models) or not all(map(_is_plain, wrappers)):
        return None
    if sum(map(reducer.gradient_bytes, wrappers)) > _MOST_BYTES:
        return None
    return DirectSum(job, group, wrappers)


def _is_plain(wrapper: reducer.Replica) -> bool:
    sparse = any(getattr(layer, "sparse", False) for layer in wrapper.modules())
    fits = all(p.is_cpu and p.dtype in _DTYPES for _, p in reducer.known_parameters(wrapper))
    return fits and not sparse and not wrapper._comm_hooks and reducer.is_default(wrapper)


def _gradient(p: torch.Tensor) -> torch.Tensor:
    if p.grad is None:
        p.grad = torch.zeros_like(p)
    elif p.grad.layout != torch.strided:
        raise GradientError(
            f"a parameter of shape {list(p.shape)} has a sparse gradient.",
            fix="ddp(..., bucket_mb=1) has torch's DDP reduce it.",
        )
    return p.grad
