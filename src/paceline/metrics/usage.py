"""What this process uses of its device: memory, and the share of time in which it is busy."""

from __future__ import annotations

import time

import torch

from paceline import log


class Usage:
    """Measures this process from one call of `measure` to the next.

    Args:
        device: The device that it trains on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began, self._cpu_s = time.perf_counter(), time.process_time()

    def measure(self) -> tuple[float, float]:
        """Bytes of memory in use, and how busy the device was since the last call.

        With CUDA they are the memory that torch has allocated, and the share of time in which a kernel ran in
        NVML's last sample (-1 if it is unknown). On the CPU they are the resident memory, and the number of
        cores that this process used. With another device they are the resident memory, and -1.
        """
        if self._device.type == "cuda":
            return float(torch.cuda.memory_allocated(self._device)), gpu_busy(self._device)
        import psutil

        memory_bytes = float(psutil.Process().memory_info().rss)
        if self._device.type != "cpu":
            return memory_bytes, -1.0
        now, cpu_s = time.perf_counter(), time.process_time()
        cores = (cpu_s - self._cpu_s) / max(now - self._began, 1e-9)
        self._began, self._cpu_s = now, cpu_s
        return memory_bytes, cores


def gpu_busy(device: torch.device) -> float:
    """The share of time in which a kernel ran; -1 without nvidia-ml-py, and if NVML does not tell it."""
    try:
        return torch.cuda.utilization(device) / 100
    except ModuleNotFoundError:
        return -1.0
    except Exception as error:  # of NVML: a GPU that is divided (MIG) or virtual may not report it
        log.once(f"reports have no GPU utilization: {type(error).__name__}: {error}")
        return -1.0
