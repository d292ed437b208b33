"""Random streams with keys: the purpose of a draw decides its seed, not the rank or worker that draws.

A stream is identified by integers, such as (seed, SAMPLE, epoch, sample). The finalizer of SplitMix64
(Steele, Lea, Flood 2014) mixes them to 64 bits. It must not change: every training would change. The
functions for NumPy arrays and for Python integers give the same numbers.
"""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

SHUFFLE = 1
SAMPLE = 2
MICRO_BATCH = 3
EVALUATION = 4
INIT = 5
SAMPLER = 6

_GOLDEN = 0x9E3779B97F4A7C15
_MUL_1 = 0xBF58476D1CE4E5B9
_MUL_2 = 0x94D049BB133111EB
_MASK = 0xFFFFFFFFFFFFFFFF

UInt64Array = npt.NDArray[np.uint64]


def _finish(z: int) -> int:
    z = ((z ^ (z >> 30)) * _MUL_1) & _MASK
    z = ((z ^ (z >> 27)) * _MUL_2) & _MASK
    return z ^ (z >> 31)


def key(*parts: int) -> int:
    """Mix integers into one 64-bit key; order matters."""
    state = 0
    for part in parts:
        state = _finish((state + _GOLDEN + (part & _MASK)) & _MASK)
    return state


def pair_seed(stem: int, first: int, second: int) -> int:
    """A seed for torch's generators from two numbers; cheaper than `key`, for use in each micro-batch."""
    return _finish((stem + first * _GOLDEN + second * _MUL_2) & _MASK) >> 1


def finish_array(z: UInt64Array) -> UInt64Array:
    """The mixing step of `key` on a whole array, modulo 2^64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MUL_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MUL_2)
    return z ^ (z >> np.uint64(31))


def keys(stem: int, last: npt.NDArray[Any]) -> UInt64Array:
    """`key(*parts, x)` for every x of `last`, where `stem` is `key(*parts)`."""
    offset = np.uint64((stem + _GOLDEN) & _MASK)
    return finish_array(last.astype(np.int64).view(np.uint64) + offset)


def default_generator(device: torch.device) -> torch.Generator:
    """The generator of torch that dropout draws from on this device."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    module.init()
    generator: torch.Generator = module.default_generators[device.index]
    return generator


def states(device: torch.device) -> dict[str, Any]:
    """The states of the generators of torch (CPU and `device`), NumPy and Python."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=True),
        "torch": torch.get_rng_state(),
        "device": [] if device.type == "cpu" else default_generator(device).get_state(),
    }


def set_states(device: torch.device, saved: dict[str, Any]) -> None:
    """Set the generators to `states`; `device`'s too if it was saved."""
    version, words, gauss = saved["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(saved["numpy"]))
    torch.set_rng_state(torch.as_tensor(saved["torch"], dtype=torch.uint8))
    if device.type != "cpu" and len(saved["device"]):
        default_generator(device).set_state(torch.as_tensor(saved["device"], dtype=torch.uint8))


def snapshot(device: torch.device) -> torch.Tensor:
    """`states` as JSON; uint8, shape (n,)."""
    text = json.dumps(states(device), default=lambda array: array.tolist())
    # One size, so that the plan of a checkpoint can be used again; JSON allows blanks at the end.
    encoded = text.encode().ljust(1 << 16)
    return torch.frombuffer(bytearray(encoded), dtype=torch.uint8)


def restore(device: torch.device, saved: torch.Tensor) -> None:
    """Set the generators to the states of `snapshot`."""
    set_states(device, json.loads(bytes(saved.numpy())))
