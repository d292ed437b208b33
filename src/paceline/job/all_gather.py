"""`job.all_gather`: the rows of all data ranks, with gradient.

`torch.distributed.nn.functional.all_gather` needs equal shapes on all ranks. Here the numbers of rows may
differ, and the row of a padding micro-batch is not sent.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

# torch 2.13 renamed it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class AllGather(torch.autograd.Function):
    """All ranks' rows in rank order, then those rows of this rank that are not sent.

    The backward adds up the gradients that all ranks have for the rows of this rank, in rank order.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, sizes: list[int], rank: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sizes, ctx.rank, ctx.group = sizes, rank, group
        own, most = sizes[rank], max(sizes)
        row = tensor.contiguous()
        if own < most:
            row = tensor.new_zeros((most, *tensor.shape[1:]))
            row[:own] = tensor[:own]
        rows = tensor.new_empty((len(sizes), most, *tensor.shape[1:]))
        _all_gather(rows.flatten(0, 1), row[:most], group=group)
        if min(sizes) == most == len(tensor):
            return rows.flatten(0, 1)
        parts = [part[:size] for part, size in zip(rows, sizes, strict=True)]
        return torch.cat([*parts, tensor[own:]])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        own, total = ctx.sizes[ctx.rank], sum(ctx.sizes)
        parts = gradient.new_empty((len(ctx.sizes), own, *gradient.shape[1:]))
        dist.all_to_all_single(
            parts.flatten(0, 1),
            gradient[:total].contiguous(),
            [own] * len(ctx.sizes),
            ctx.sizes,
            group=ctx.group,
        )
        return torch.cat([parts.sum(0), gradient[total:]]), None, None, None
