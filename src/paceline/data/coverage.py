"""The data audit of the first epoch: did every sample reach the loop exactly once?

The plan guarantees it by construction; the audit checks what the loaders gave. It keeps a count and a hash
that does not depend on order, the sum modulo 2^64 of a mixed 64-bit hash of each id, so memory and exchange
are the same for any size of dataset. Two different sets of ids have equal hashes with probability 2^-64.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from paceline.data.plan import Int64Array, Permutation, Plan, Position, look_up, share
from paceline.errors import AuditError
from paceline.job import collectives, rng
from paceline.job.job import Job

# Ids are kept and hashed in batches: one numpy call per step would cost more than the hash. 1 MiB.
_PENDING = 1 << 17
_PORTION = 1 << 16  # ids hashed at once where a whole range is; stays in the cache
# Only ids below this are searched for a lost or doubled sample, after a failure: about a second.
_SEARCHED = 1 << 22
_MASK = (1 << 64) - 1


class Tally(NamedTuple):
    """Number of ids, and the sum of their hashes modulo 2^64."""

    size: int
    hashed: int

    def plus(self, other: Tally) -> Tally:
        """The tally of both multisets together."""
        return Tally(self.size + other.size, (self.hashed + other.hashed) & _MASK)

    def minus(self, other: Tally) -> Tally:
        """This tally without `other`; (0, 0) if they are equal."""
        return Tally(self.size - other.size, (self.hashed - other.hashed) & _MASK)


_NOTHING = Tally(0, 0)


class Coverage:
    """Tallies the sample ids of one epoch on this rank; of a stream, the places.

    Args:
        plan: None for a stream.
        start: position of the first step; what comes before it in the epoch is not expected.
    """

    def __init__(self, job: Job, plan: Plan | None, start: Position) -> None:
        self._job = job
        self._plan = plan
        self._start = start
        self._seen = _NOTHING
        self._pending: list[torch.Tensor] = []
        self._num_pending = 0

    def saw(self, ids: torch.Tensor) -> None:
        """Note that the loop got these samples (int64, one dimension)."""
        self._pending.append(ids)
        self._num_pending += len(ids)
        if self._num_pending >= _PENDING:
            self._flush()

    def _flush(self) -> None:
        if self._pending:
            self._seen = self._seen.plus(_tally(torch.cat(self._pending).cpu().numpy()))
            self._pending.clear()
            self._num_pending = 0

    def check(self, epoch: int, size: int) -> None:
        """Check that the ranks together saw each id below `size` once, but for those before `start`.

        Raises:
            AuditError: on all ranks.

        Collective: all ranks, once, after the last step of the epoch.
        """
        self._flush()
        excess = self._summed(self._seen.minus(self._own_part(size)))
        if excess == _NOTHING:
            return
        lost, doubled = _searched(excess, size)
        expected = size - self._start.offset
        seen = expected + excess.size
        named = [f"sample {i} was lost" for i in lost]
        named += [f"sample {i} was used twice or is not in the dataset" for i in doubled]
        found = "; ".join(named) or "some samples were lost or used more than once"
        raise AuditError(
            f"epoch {epoch} did not use each of {size} samples once: it used {seen} samples where "
            f"{expected} were expected; {found}.",
            why="the loop left out micro-batches, or a shard of the stream gives other items than it should.",
            fix="read every micro-batch of every step; for a stream, see `shard` in docs/data.md.",
            expected=expected,
            seen=seen,
            lost=lost,
            doubled=doubled,
        )

    def _own_part(self, size: int) -> Tally:
        """This rank's part of the ids that the epoch should use."""
        axis, start = self._job.data, self._start
        ids = _tally_of_places(None, *share(size, axis.rank, axis.size))
        order = None if self._plan is None else self._plan.order(start.seed, start.epoch)
        return ids.minus(_tally_of_places(order, *share(start.offset, axis.rank, axis.size)))

    def _summed(self, own: Tally) -> Tally:
        # In halves, so that a sum over ranks stays below 2^63.
        parts = torch.tensor([own.size, own.hashed & 0xFFFFFFFF, own.hashed >> 32])
        count, low, high = collectives.sum_tensor(self._job, parts).tolist()
        return Tally(count, (low + (high << 32)) & _MASK)


def _hashes(ids: Int64Array) -> rng.UInt64Array:
    return rng.keys(0, ids)


def _tally(ids: Int64Array) -> Tally:
    return Tally(len(ids), int(_hashes(ids).sum(dtype=np.uint64)))


def _tally_of_places(order: Permutation | None, begin: int, end: int) -> Tally:
    """The tally of the ids at places `[begin, end)` of an epoch."""
    total = _NOTHING
    for at in range(begin, end, _PORTION):
        places = np.arange(at, min(at + _PORTION, end), dtype=np.int64)
        total = total.plus(_tally(look_up(order, places)))
    return total


def _searched(excess: Tally, size: int) -> tuple[list[int], list[int]]:
    """The lost and the doubled sample, where at most one of each explains the excess; else nothing."""
    ids = np.arange(min(size + 1, _SEARCHED), dtype=np.int64)
    hashes = _hashes(ids)
    difference = np.uint64(excess.hashed)
    if excess.size == -1:
        return ids[hashes == np.uint64(-excess.hashed & _MASK)].tolist(), []
    if excess.size == 1:
        return [], ids[hashes == difference].tolist()
    if excess.size == 0:
        wanted = hashes + difference  # hash of the doubled one, if the lost one is at this index
        lost = ids[np.isin(wanted, hashes)]
        return lost.tolist(), ids[np.isin(hashes, wanted[lost])].tolist()
    return [], []
