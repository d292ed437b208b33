"""Compression of the gradients that DDP exchanges, by torch's communication hooks.

`PowerSGD` approximates each matrix by a product of two thin matrices (Vogels et al., 2019,
https://arxiv.org/abs/1905.13727). What the approximation leaves out is added to the next step's gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import ConfigError, listed
from paceline.job.arguments import require_integers
from paceline.job.job import Job
from paceline.parallel.modules import has_sparse_layer
from paceline.shm.group import ShmGroup

_CASTS: dict[str, Any] = {
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
}


@dataclass(frozen=True, kw_only=True)
class PowerSGD:
    """Options of `ddp(compress=PowerSGD())`.

    Args:
        rank: Columns of the thin matrices, at least 1. More columns send more and lose less.
        start_step: Steps before the first compressed one, at least 2; early gradients compress badly. They
            are counted from the start of the process, also when a training is resumed.

    Raises:
        ConfigError: an option is out of range.

    Collective: none.
    """

    rank: int = 2
    start_step: int = 100

    def __post_init__(self) -> None:
        require_integers(1, rank=self.rank)
        # torch rebuilds its buckets after the first step, and PowerSGD needs buckets that stay.
        require_integers(2, start_step=self.start_step)


def refuse_compression(compress: Any, module: nn.Module) -> None:
    """Refuse a value of `compress` that is unknown or cannot be combined with the gradients of a module."""
    if compress is None:
        return
    if compress not in ("fp16", "bf16") and not isinstance(compress, PowerSGD):
        raise ConfigError(
            f"compress must be 'fp16', 'bf16', paceline.PowerSGD(...) or None, got {compress!r}."
        )
    if has_sparse_layer(module):
        raise ConfigError(
            "compression cannot be combined with sparse gradients.",
            why="torch neither casts nor compresses them.",
            fix="leave compress out, or build the layers with sparse=False.",
        )
    if names := [n for n, p in module.named_parameters() if p.is_complex() and p.requires_grad]:
        raise ConfigError(
            f"compression cannot be combined with complex parameters: {listed(names)}.",
            why="torch's casts leave out the imaginary part of their gradients.",
            fix="leave compress out, or keep the parameters as torch.view_as_real(...) of them.",
        )


def compress_gradients(
    job: Job, wrapper: DistributedDataParallel, compress: str | PowerSGD
) -> None:
    """Register the communication hook of a wrapped model."""
    group: Any = job.data.group
    # The hooks below have no annotations, which torch would compare with its own types.
    if isinstance(compress, str):
        cast = _CASTS[compress]
        # A function with another name: torch refuses its bf16 hook by name on CPU.
        wrapper.register_comm_hook(None, lambda state, bucket: cast(group, bucket))
        return
    if isinstance(group, ShmGroup):
        # The hook starts a collective in the callback of the one before, and waits for it there. In the shm
        # group the thread that completes collectives runs it, and would wait for itself.
        group = job.data.control
    state = powerSGD_hook.PowerSGDState(
        group,
        matrix_approximation_rank=compress.rank,
        start_powerSGD_iter=compress.start_step,
        orthogonalization_epsilon=1e-8,  # a gradient may be 0
    )

    def approximate(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = powerSGD_hook.powerSGD_hook(state, bucket)
        if not bucket.buffer().is_cuda:
            # The hook starts collectives in callbacks. On CPU those run in threads, so with several buckets
            # in flight the ranks could start them in different orders.
            future.wait()
        return future

    wrapper.register_comm_hook(None, lambda state, bucket: approximate(state, bucket))
