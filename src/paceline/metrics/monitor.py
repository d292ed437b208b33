"""How busy a GPU is, and how full its memory, through NVIDIA's management library.

A front to `pynvml` (package nvidia-ml-py, extra `cuda`). Where it is not installed, or the device is no
NVIDIA GPU, there is nothing to tell.
"""

from __future__ import annotations

from typing import Any

import torch

from paceline.errors import ConfigError


class DeviceMonitor:
    """Reads utilisation and memory of one device."""

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
                f"the GPU of this rank cannot be watched: {error}.",
                fix="pip uninstall nvidia-ml-py, or use one that fits the driver.",
            ) from error
        self._library = pynvml

    def read(self) -> dict[str, float]:
        """Per cent of time busy and GB in use since the last reading; empty where nothing is known."""
        if self._handle is None:
            return {}
        busy = self._library.nvmlDeviceGetUtilizationRates(self._handle).gpu
        used = self._library.nvmlDeviceGetMemoryInfo(self._handle).used
        return {"gpu_busy_percent": float(busy), "gpu_memory_gb": round(used / 1e9, 2)}
