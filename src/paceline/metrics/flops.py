"""Model FLOP/s utilisation (MFU): what a model needs, by what the devices could compute in the same time.

As defined in "PaLM: Scaling Language Modeling with Pathways" (Chowdhery et al., 2022, appendix B): only the
operations that the model itself needs count, not those that are computed again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

# Dense bf16 operations per second, from the vendor's data sheets; by a part of the device's name.
_PEAKS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "H800": 989e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A40": 150e12,
    "A30": 165e12,
}


def peak_of(device_name: str) -> float | None:
    """Dense bf16 operations per second of a GPU; None if it is not known."""
    # Whole words: an L40 is no L4.
    matching = [part for part in _PEAKS if re.search(rf"\b{part}\b", device_name)]
    return _PEAKS[max(matching, key=len)] if matching else None


def facts(flops: float | None, device: torch.device) -> dict[str, Any]:
    """What a run's line in clock.jsonl says of operations; empty if they are not known.

    Args:
        flops: Operations of one sample or token, forward and backward.
    """
    if flops is None:
        return {}
    peak = peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return {"flops": flops, "peak_flops": peak}


def utilisation(run: Mapping[str, Any], rate: float) -> str:
    """The MFU, or the operations per second of devices whose peak is not known; empty if neither is known.

    Args:
        run: What describes the run; see `facts`.
        rate: Samples or tokens per second, over all ranks.
    """
    flops, world_size = run.get("flops"), run.get("world_size")
    if not flops or not world_size:
        return ""
    of_rank = rate * float(flops) / int(world_size)
    if peak := run.get("peak_flops"):
        return f"{of_rank / float(peak):.1%} MFU".replace("%", " %")
    return f"{of_rank / 1e12:.3g} TFLOP/s a rank"
