"""Measures the connection between ranks: the latency and the bandwidth of an all-reduce."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

_LEAST_BYTES, _MOST_BYTES = 2**16, 4 * 2**20
_GROWTH = 4  # from one size to the next
_TIMES = 3  # measurements of one size; the fastest counts, because pauses only add time
_ONCE_S = 0.1  # an all-reduce that takes longer is measured once, which is exact enough
_LONG_S = 0.05  # if an all-reduce takes longer, larger ones are not measured


def measure_link(
    group: dist.ProcessGroup, device: torch.device, most_bytes: int
) -> dict[str, float]:
    """Seconds that an all-reduce takes in addition to its transfer, and bytes per second of the transfer.

    It takes milliseconds, and some tenths of a second where the connection is slow.

    Args:
        most_bytes: Of the largest all-reduce that is measured: the bytes of all gradients.

    Collective: all ranks of `group`.
    """
    small_s = _all_reduce_s(group, device, 4, _TIMES)
    # From small to large: on a slow connection the largest size would take seconds.
    most_bytes = min(_MOST_BYTES, max(most_bytes, 8))
    size_bytes, large_s = min(_LEAST_BYTES, most_bytes), 0.0
    while True:
        times = _TIMES if _GROWTH * large_s < _ONCE_S else 1
        large_s = _all_reduce_s(group, device, size_bytes, times)
        if size_bytes == most_bytes or large_s > _LONG_S:
            break
        size_bytes = min(_GROWTH * size_bytes, most_bytes)
    transfer_s = max(large_s - small_s, 1e-9)
    return {"latency_s": small_s, "bytes_per_s": size_bytes / transfer_s}


def _all_reduce_s(
    group: dist.ProcessGroup, device: torch.device, size_bytes: int, times: int
) -> float:
    """The fastest of some all-reduces; the longest of all ranks, so that they agree on it."""
    tensor = torch.zeros(size_bytes // 4, device=device)
    best_s = float("inf")
    dist.all_reduce(tensor, group=group)  # the first one of a size is slower
    for _ in range(times):
        _synchronize(device)
        began = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        _synchronize(device)
        best_s = min(best_s, time.perf_counter() - began)
    agreed = torch.tensor([best_s], device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)
    return float(agreed.item())


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
