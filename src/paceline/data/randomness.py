"""The randomness of one sample: the same for any rank, worker, micro-batch or restart.

A dataset that asks for a `generator` gets one of torch; for all others the global generators of torch
(CPU), numpy and `random` are seeded before each sample. A dataset that draws on an accelerator, or from
generators of its own making, is not reached.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.job import rng


def sample_keys(meaning: tuple[int, ...], samples: npt.NDArray[Any]) -> list[int]:
    """One 64-bit key for each of these samples, in what `meaning` names."""
    keys: list[int] = rng.keys(rng.key(*meaning), samples).tolist()
    return keys


def seed_globals(key: int) -> None:
    """Seed the global generators of torch (CPU), numpy and `random`; about 7 us."""
    # Not torch.manual_seed, which takes 100 us and reseeds the accelerators too. Torch and numpy run
    # the same algorithm and would draw equal numbers from equal seeds, so each gets its own half.
    torch.default_generator.manual_seed(key & 0xFFFFFFFF)
    np.random.seed(key >> 32)
    random.seed(key)


@contextlib.contextmanager
def globals_kept() -> Iterator[None]:
    """Leave the global generators of torch (CPU), numpy and `random` as they were; about 80 us."""
    states = torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
