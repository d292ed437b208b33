"""Utilization and memory of a GPU: a front to `pynvml` (package nvidia-ml-py, extra `cuda`).

Reads nothing if the package is not installed or the device is not an NVIDIA GPU.
"""

from __future__ import annotations

from typing import Any

import torch

from paceline.errors import ConfigError


class DeviceMonitor:
    """Reads utilization and memory of one device."""

    def __init__(self, device: torch.device) -> None:
        self._library: Any = None
        self._handle: Any = None
        if device.type != "cuda":
            return
        try:
            import pynvml
        except ImportError:
            return
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except pynvml.NVMLError as error:
            raise ConfigError(
                f"the utilization of this rank's GPU cannot be read: {error}.",
                fix="pip uninstall nvidia-ml-py, or install a version that fits the driver.",
            ) from error
        self._library = pynvml

    def read(self) -> dict[str, float]:
        """Percent of time busy since the last reading, and GB in use; empty if unknown."""
        if self._handle is None:
            return {}
        busy = self._library.nvmlDeviceGetUtilizationRates(self._handle).gpu
        used = self._library.nvmlDeviceGetMemoryInfo(self._handle).used
        return {"gpu_busy_percent": float(busy), "gpu_memory_gb": round(used / 1e9, 2)}
