"""Measures the connection between ranks: the latency and the bandwidth of an all-reduce."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

_MOST_BYTES = 4 * 2**20
_TIMES = 3  # measured so often; the fastest counts, because pauses only add
_LONG_S = 0.05  # a transfer that takes longer is exact enough to be measured once


def measure_link(
    group: dist.ProcessGroup, device: torch.device, most_bytes: int
) -> dict[str, float]:
    """Seconds that an all-reduce takes in addition to its transfer, and bytes per second of the transfer.

    It takes milliseconds, and up to about 0.1 s where the connection is slow.

    Args:
        most_bytes: Of one all-reduce; the gradients of the training.

    Collective: all ranks of `group`.
    """
    small_s = _all_reduce_s(group, device, 4)
    size = min(_MOST_BYTES, max(most_bytes, 4))
    # On a slow connection the largest size would take seconds.
    size_bytes = 2**16
    large_s = _all_reduce_s(group, device, min(size_bytes, size))
    while size_bytes < size and large_s < _LONG_S:
        size_bytes = min(4 * size_bytes, size)
        large_s = _all_reduce_s(group, device, size_bytes)
    size_bytes = min(size_bytes, size)
    transfer_s = max(large_s - small_s, 1e-9)
    return {"latency_s": small_s, "bytes_per_s": size_bytes / transfer_s}


def _all_reduce_s(group: dist.ProcessGroup, device: torch.device, size_bytes: int) -> float:
    """The fastest of some all-reduces; the longest of all ranks, so that they agree on it."""
    tensor = torch.zeros(size_bytes // 4, device=device)
    best_s = float("inf")
    dist.all_reduce(tensor, group=group)  # the ranks arrive at different times
    for _ in range(_TIMES):
        _synchronize(device)
        began = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        _synchronize(device)
        best_s = min(best_s, time.perf_counter() - began)
    agreed = torch.tensor([best_s], device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)
    return float(agreed.item())


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
