"""What this process uses of its device: memory, and the share of time in which it is busy."""

from __future__ import annotations

import functools
import importlib.util
import math
import time

import torch

from paceline import log

GPU_BUSY, GPU_MEMORY = "gpu_busy_percent", "gpu_memory_gb"  # names of values
_GPU_INTERVAL_S = 1.0  # between two questions to NVML, which take up to some milliseconds


class Usage:
    """Measures this process from one call of `measure` to the next.

    Args:
        device: The device that it trains on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began, self._cpu_s = time.perf_counter(), time.process_time()
        self._gpu: dict[str, float] = {}
        self._gpu_asked_at = -math.inf

    def measure(self) -> tuple[float, float]:
        """Bytes of memory in use, and how busy the device was since the last call.

        On a GPU they are the memory that torch has allocated, and the share of time in which a kernel ran in
        NVML's last sample (-1 if NVML does not report it). On the CPU they are the resident memory, and the
        number of cores that this process used.
        """
        now, cpu_s = time.perf_counter(), time.process_time()
        passed_s = max(now - self._began, 1e-9)
        own = (cpu_s - self._cpu_s) / passed_s
        self._began, self._cpu_s = now, cpu_s
        if self._device.type == "cuda":
            percent = self.gpu().get(GPU_BUSY)
            share = -1.0 if percent is None else percent / 100
            return float(torch.cuda.memory_allocated(self._device)), share
        import psutil

        return float(psutil.Process().memory_info().rss), own

    def gpu(self) -> dict[str, float]:
        """The result of `gpu_use`, at most a second old."""
        now = time.monotonic()
        if now - self._gpu_asked_at >= _GPU_INTERVAL_S:
            self._gpu, self._gpu_asked_at = gpu_use(self._device), now
        return self._gpu


@functools.cache
def _has_pynvml() -> bool:
    return importlib.util.find_spec("pynvml") is not None


def gpu_use(device: torch.device) -> dict[str, float]:
    """Percent of time that the GPU was busy, and GB in use; empty without an NVIDIA GPU and nvidia-ml-py."""
    if device.type != "cuda" or not _has_pynvml():
        return {}
    try:
        return {
            GPU_BUSY: float(torch.cuda.utilization(device)),
            GPU_MEMORY: round(torch.cuda.device_memory_used(device) / 1e9, 2),
        }
    except Exception as error:  # of NVML: a GPU that is divided (MIG) or virtual may not report it
        log.once(f"metrics have no GPU utilization: {type(error).__name__}: {error}")
        return {}
