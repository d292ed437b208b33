"""One batch of the ordinary run that all ranks share, to find what the loss takes from a rank's own past.

With equal weights, inputs and random states all ranks must compute one loss. A loss that differs depends on a
state that each rank has built from its own samples, such as the centre of a loss, a queue of features or a
running scale. A replay cannot show that, because its ranks have equal samples from the first step on.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from paceline.audit.digests import seed_all
from paceline.audit.run_plan import RunPlan
from paceline.job import rng

# The step with the shared batch, as the number of steps before it: a script that takes fewer is not judged.
_STEPS_BEFORE = 8
# The ranks wait this long for the batch of rank 0, which may get other batches than they do.
_WAIT_S, _POLL_S = 5.0, 0.01
_SEED = 8_000_009


class SharedBatch:
    """The batch of rank 0 for all ranks, in one step of the ordinary run.

    Attributes:
        is_given: Whether the step with this batch is being computed.
    """

    def __init__(self, plan: RunPlan, rank: int) -> None:
        self._plan, self._rank = plan, rank
        self.is_given = False
        self._random_state: torch.Tensor | None = None  # of this rank, before the step

    def in_place_of(self, batch: Any, name: str, steps: int) -> Any:
        """The batch of rank 0 if this is the step for it, else `batch`.

        Args:
            name: Of the batch; equal on all ranks.
            steps: The optimizer steps before.
        """
        if self._plan.mode != "ordinary" or steps != _STEPS_BEFORE:
            return batch
        path = self._plan.folder / f"shared-{name}.pt"
        if self._rank == 0:
            part = path.with_suffix(".part")
            torch.save(batch, part)
            os.replace(part, path)
        until = time.monotonic() + _WAIT_S
        while not path.exists():
            if time.monotonic() > until:
                return batch
            time.sleep(_POLL_S)
        if not self.is_given:
            self._random_state = rng.snapshot(_device())
            seed_all(_SEED)
        self.is_given = True
        # A rank of this run wrote the file; a batch may contain any objects.
        return batch if self._rank == 0 else torch.load(path, weights_only=False)

    def end(self) -> None:
        """End the step: the ranks go on with their own random states."""
        self.is_given = False
        if self._random_state is not None:
            rng.restore(_device(), self._random_state)
            self._random_state = None


def _device() -> torch.device:
    """The device whose generator a script may draw from, besides the generators of the CPU."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
