"""Sum of small gradients through shared memory, in one operation after a step's last backward.

If all gradients fit DDP's first bucket, DDP cannot reduce any of them during the backward, and its own
bookkeeping takes longer than the sum. Measured in docs/inside/decisions/0016-direct-sum.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.data.batches import Batches
from paceline.data.plan import MicroBatch
from paceline.errors import ConfigError, GradientError
from paceline.job import collectives
from paceline.job.job import Job
from paceline.parallel.modules import has_sparse_layer, unreached_error
from paceline.parallel.replica import Replica, ReplicaStrategy, known_parameters
from paceline.shm.group import ShmGroup

_MAX_BYTES = 1 << 20  # bytes of all gradients; the size of DDP's first bucket
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class PackedStrategy(ReplicaStrategy):
    """Gradients are copied into one tensor for each dtype and summed after the last backward.

    Used instead of DDP's reducer if all of these hold: the ranks run on the CPU of one host and share memory,
    there is at most 1 MiB of dense gradients, there is one optimizer, and `ddp` was called without options
    and communication hooks.
    """

    def _prepare(self, batches: Batches) -> None:
        super()._prepare(batches)
        self.needs_equal_micro_batches = True
        known = [p for wrapper in self._wrappers for _, p in known_parameters(wrapper)]
        known.sort(key=lambda p: str(p.dtype))
        self._packs = [_Pack(list(pack)) for _, pack in groupby(known, key=lambda p: p.dtype)]

    @classmethod
    def fits(cls, job: Job, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> bool:
        group = job.data.group
        if not (isinstance(group, ShmGroup) and len(optimizers) == 1):
            return False
        wrappers = [model for model in models if isinstance(model, Replica)]
        if len(wrappers) < len(models) or not all(map(_is_plain, wrappers)):
            return False
        sizes = (p.nbytes for wrapper in wrappers for _, p in known_parameters(wrapper))
        return sum(sizes) <= _MAX_BYTES

    def before_forward(self, micro: MicroBatch) -> None:
        super().before_forward(micro)
        self._bypass(True)  # until the loop is left

    def leave_step(self) -> None:
        super().leave_step()
        self._bypass(False)

    def _bypass(self, on: bool) -> None:
        for wrapper in self._wrappers:
            wrapper.__dict__["bypassed"] = on

    def finish(self, optimizer: Optimizer) -> None:
        """Sum the gradients over ranks. A parameter that only some micro-batches used is summed too."""
        super().finish(optimizer)
        for wrapper in self._wrappers:
            known = known_parameters(wrapper)
            if names := [name for name, p in known if p.grad is None]:
                raise unreached_error(
                    self._job,
                    names,
                    why="the ranks sum the gradients of all trainable parameters together.",
                    fix="freeze unused parameters with requires_grad_(False) before ddp(...), or "
                    "ddp(..., find_unused=True).",
                )
            if wrapper.__dict__["has_hook"]:
                raise ConfigError(
                    "a communication hook was registered between steps.",
                    where=self._job.where(),
                    fix="call register_comm_hook before training.steps(...).",
                )
        for pack in self._packs:
            collectives.all_reduce(self._job, pack.copy_in())
            pack.copy_out()


def _is_plain(wrapper: Any) -> bool:
    fits = all(p.is_cpu and p.dtype in _DTYPES for _, p in known_parameters(wrapper))
    return (
        fits and wrapper.default_options and not wrapper.has_hook and not has_sparse_layer(wrapper)
    )


class _Pack:
    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._flat = torch.empty(sum(p.numel() for p in parameters), dtype=parameters[0].dtype)
        pieces = torch.split(self._flat, [p.numel() for p in parameters])
        self._pieces = [piece.view(p.shape) for piece, p in zip(pieces, parameters, strict=True)]
        self._gradients: list[torch.Tensor] = []

    def copy_in(self) -> torch.Tensor:
        self._gradients = [_dense_gradient(p) for p in self._parameters]
        torch._foreach_copy_(self._pieces, self._gradients)
        return self._flat

    def copy_out(self) -> None:
        torch._foreach_copy_(self._gradients, self._pieces)
        self._gradients = []


def _dense_gradient(p: torch.Tensor) -> torch.Tensor:
    assert p.grad is not None
    if p.grad.layout != torch.strided:
        raise GradientError(
            f"a parameter of shape {list(p.shape)} has a sparse gradient.",
            fix="ddp(..., bucket_mb=1): then torch's DDP reduces the gradients.",
        )
    return p.grad
