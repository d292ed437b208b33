"""The audit of the first epoch: was every sample handed to the loop exactly once?

The plan says so by construction; this counts what really came out of the loaders.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.data.plan import Plan, look_up
from paceline.errors import AuditError
from paceline.job import collectives
from paceline.job.job import Job

# Ids are kept and counted in batches, since a call a step would cost more than the counting.
_PENDING = 1 << 17
_PORTION = 1 << 16
_NAMED = 8

Counts = npt.NDArray[np.uint8]


class Audit:
    """Counts the sample ids of one epoch on this rank.

    Args:
        num_samples: Of the epoch; None for a stream, which tells at its end.

    Collective: none; see `close`.
    """

    def __init__(self, job: Job, num_samples: int | None) -> None:
        self._job = job
        self._num_samples = num_samples
        self._counts: Counts = np.zeros(0, dtype=np.uint8)
        self._pending: list[torch.Tensor] = []
        self._num_pending = 0

    def saw(self, ids: torch.Tensor) -> None:
        """These samples (int64, one dimension) were handed to the loop."""
        self._pending.append(ids)
        self._num_pending += len(ids)
        if self._num_pending >= _PENDING:
            self._count()

    def close(self, *, epoch: int, size: int, used_before: npt.NDArray[Any]) -> None:
        """Check that each id below `size`, but for those used before, was seen exactly once.

        Args:
            used_before: the ids that an earlier run used of this epoch.

        Raises:
            AuditError: on all ranks; names what was lost and what came more than once.

        Collective: all ranks, once, after the last step of the epoch.
        """
        self._count()
        if self._num_samples is None:
            # A stream may be longer on one rank than another believes.
            length = max(size, *collectives.gather(self._job, len(self._counts)))
        else:
            length = self._num_samples + 1
        self._grow(length)
        seen: Counts = collectives.sum_tensor(self._job, torch.from_numpy(self._counts)).numpy()
        expected = np.ones(length, dtype=np.uint8)
        expected[size:] = 0
        expected[used_before] = 0
        if np.array_equal(seen, expected):
            return
        lost = np.flatnonzero(seen < expected)
        doubled = np.flatnonzero(seen > expected)
        parts = [
            f"{len(ids)} {what} ({_named(ids)})"
            for what, ids in (("lost", lost), ("used more than once or out of turn", doubled))
            if len(ids)
        ]
        raise AuditError(
            f"epoch {epoch} did not use each of {size} samples once: {', '.join(parts)}.",
            why="the dataset, or the loop that reads it, does not keep to its own numbering.",
            fix="read every micro-batch of every step; for a stream, see `shard` in docs/data.md.",
            lost=lost.tolist(),
            doubled=doubled.tolist(),
        )

    def _count(self) -> None:
        if not self._pending:
            return
        ids = torch.cat(self._pending).cpu().numpy()
        self._pending.clear()
        self._num_pending = 0
        if self._num_samples is not None:
            # So that all ranks have equally many counts; the last is of ids that there should not be.
            ids = np.minimum(ids, self._num_samples)
        if len(ids):
            self._grow(int(ids.max()) + 1)
            np.add.at(self._counts, ids, np.uint8(1))

    def _grow(self, length: int) -> None:
        if length > len(self._counts):
            grown = np.zeros(length, dtype=np.uint8)
            grown[: len(self._counts)] = self._counts
            self._counts = grown


def used_before(plan: Plan, seed: int, epoch: int, offset: int) -> npt.NDArray[np.int64]:
    """The ids at the places below `offset` of an epoch."""
    order = plan.order(seed, epoch)
    # In portions that stay in the cache; as a whole it takes several times as long.
    portions = [
        look_up(order, np.arange(begin, min(begin + _PORTION, offset), dtype=np.int64))
        for begin in range(0, offset, _PORTION)
    ]
    return np.concatenate(portions) if portions else np.zeros(0, dtype=np.int64)


def _named(ids: npt.NDArray[np.int64]) -> str:
    text = ", ".join(str(i) for i in ids[:_NAMED].tolist())
    return text if len(ids) <= _NAMED else f"{text}, ..."
