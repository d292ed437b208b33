"""Buffers that replicas hold alike, such as BatchNorm's running statistics."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from paceline.job.job import Job


def equalize_buffers(job: Job, model: nn.Module) -> None:
    """Give all ranks the buffers of rank 0, such as BatchNorm's running statistics, bit for bit.

    One collective for each device, whatever the number of buffers. Nothing to do without buffers.

    Collective: all ranks, same order as the job's other collectives.
    """
    if job.group is None:
        return
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for buffer in model.buffers():
        if buffer.numel():
            by_device.setdefault(buffer.device, []).append(buffer.detach())
    for buffers in by_device.values():
        # They travel as bytes, so that one message carries all types. The widest first: then each
        # starts at a multiple of its own size, as `view` demands.
        buffers.sort(key=lambda b: -b.element_size())
        packed = torch.cat([b.contiguous().view(-1).view(torch.uint8) for b in buffers])
        try:
            dist.broadcast(packed, src=0, group=job.group)
        except RuntimeError as error:
            job.reraise(error)
        pieces = torch.split(packed, [b.numel() * b.element_size() for b in buffers])
        for buffer, piece in zip(buffers, pieces, strict=True):
            buffer.copy_(piece.view(buffer.dtype).view(buffer.shape))
