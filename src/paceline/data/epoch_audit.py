"""The data audit of the first epoch: did every sample reach the loop exactly once?

The plan guarantees this; the audit checks what the loaders delivered. It keeps a count and an
order-independent hash: the sum modulo 2^64 of a 64-bit hash of each id. So memory and communication are the
same for a dataset of any size. Two different multisets of ids have equal hashes with probability 2^-64.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from paceline.data.plan import Int64Array, Order, Plan, Position, look_up, share
from paceline.errors import AuditError
from paceline.job import collectives, rng
from paceline.job.job import Job

# Ids are collected before they are hashed, because one numpy call per step would cost more than the hash.
# This many ids take 1 MiB.
_MAX_PENDING = 1 << 17
_CHUNK = 1 << 16  # places hashed in one call; the arrays stay in the cache
# After a failure, a lost or doubled sample is searched among the ids below this, which takes about a second.
_MAX_SEARCHED = 1 << 22
_MASK = (1 << 64) - 1


class Tally(NamedTuple):
    """The number of ids in a multiset, and the sum of their hashes modulo 2^64."""

    size: int
    hashed: int

    def plus(self, other: Tally) -> Tally:
        """The tally of both multisets together."""
        return Tally(self.size + other.size, (self.hashed + other.hashed) & _MASK)

    def minus(self, other: Tally) -> Tally:
        """This tally without `other`; (0, 0) if they are equal."""
        return Tally(self.size - other.size, (self.hashed - other.hashed) & _MASK)


_EMPTY = Tally(0, 0)


class EpochAudit:
    """The tally of the sample ids that the loop got in one epoch on this rank. For a stream, of the places.

    Args:
        plan: None for a stream.
        start: position of the first step; samples before it in the epoch are not expected.
    """

    def __init__(self, job: Job, plan: Plan | None, start: Position) -> None:
        self._job = job
        self._plan = plan
        self._start = start
        self._seen = _EMPTY
        self._pending: list[torch.Tensor] = []
        self._num_pending = 0

    def add(self, ids: torch.Tensor) -> None:
        """Add samples that the loop got (int64, one dimension)."""
        self._pending.append(ids)
        self._num_pending += len(ids)
        if self._num_pending >= _MAX_PENDING:
            self._flush()

    def _flush(self) -> None:
        if self._pending:
            self._seen = self._seen.plus(_tally(torch.cat(self._pending).cpu().numpy()))
            self._pending.clear()
            self._num_pending = 0

    def check(self, epoch: int, num_samples: int, num_own: int | None = None) -> None:
        """Check that all ranks together got `num_samples` ids once, except those before `start`.

        All ranks must call it, once, after the last step of the epoch.

        Args:
            num_own: Of a stream that divides itself, the samples that this rank read. Its places have gaps,
                so only their number is compared.

        Raises:
            AuditError: on all ranks.
        """
        self._flush()
        if num_own is None:
            own = self._hashed_range(num_samples)
        else:
            own = Tally(num_own, self._seen.hashed)
        excess, expected = self._sum_over_ranks(self._seen.minus(own), own.size)
        if excess == _EMPTY:
            return
        size = num_samples if self._plan is None else self._plan.num_samples
        lost, doubled = _find_one(excess, size)
        seen = expected + excess.size
        used = f"{seen} samples instead of {expected}"
        if seen == expected:
            used = f"{seen} samples, but some of them twice and others not"
        named = [f"sample {i} was lost" for i in lost]
        named += [f"sample {i} was used twice or is not in the dataset" for i in doubled]
        found = "; ".join(named) or "some samples were lost or used more than once"
        raise AuditError(
            f"epoch {epoch} did not use each sample once: it used {used}; {found}.",
            why="the loop skipped micro-batches, or the lengths of a stream's shards do not fit one stream.",
            fix="read every micro-batch of every step; for a stream, see `shard` in docs/howto/data.md.",
            expected=expected,
            seen=seen,
            lost=lost,
            doubled=doubled,
        )

    def _hashed_range(self, num_samples: int) -> Tally:
        """This rank's share of the tally that is expected over all ranks.

        Each rank hashes one contiguous range of the epoch, only to divide the work. It is not what the rank
        reads; only the sum over ranks is compared.
        """
        axis, start, plan = self._job.data, self._start, self._plan
        order = None if plan is None else plan.order(start.seed, start.epoch)
        if plan is not None and plan.sampled is None and num_samples == plan.num_samples:
            whole = None  # a permutation has each id once, so that it need not be computed here
        else:
            whole = order
        ids = _tally_of_places(whole, *share(num_samples, axis.rank, axis.size))
        return ids.minus(_tally_of_places(order, *share(start.offset, axis.rank, axis.size)))

    def _sum_over_ranks(self, excess: Tally, size: int) -> tuple[Tally, int]:
        # The hash is summed in two halves of 32 bits, so that sums over ranks stay below 2^63.
        parts = torch.tensor([excess.size, excess.hashed & 0xFFFFFFFF, excess.hashed >> 32, size])
        count, low, high, size = collectives.sum_tensor(self._job, parts).tolist()
        return Tally(count, (low + (high << 32)) & _MASK), size


def _hashes(ids: Int64Array) -> rng.UInt64Array:
    return rng.keys(0, ids)


def _tally(ids: Int64Array) -> Tally:
    return Tally(len(ids), int(_hashes(ids).sum(dtype=np.uint64)))


def _tally_of_places(order: Order | None, begin: int, end: int) -> Tally:
    """The tally of the ids at places `[begin, end)` of an epoch."""
    total = _EMPTY
    for at in range(begin, end, _CHUNK):
        places = np.arange(at, min(at + _CHUNK, end), dtype=np.int64)
        total = total.plus(_tally(look_up(order, places)))
    return total


def _find_one(excess: Tally, num_samples: int) -> tuple[list[int], list[int]]:
    """The lost and the doubled sample, if at most one of each explains the excess; otherwise no sample."""
    ids = np.arange(min(num_samples + 1, _MAX_SEARCHED), dtype=np.int64)
    hashes = _hashes(ids)
    difference = np.uint64(excess.hashed)
    if excess.size == -1:
        return ids[hashes == np.uint64(-excess.hashed & _MASK)].tolist(), []
    if excess.size == 1:
        return [], ids[hashes == difference].tolist()
    if excess.size == 0:
        # For each id: the hash of the doubled id, if this id was lost.
        wanted = hashes + difference
        lost = ids[np.isin(wanted, hashes)]
        return lost.tolist(), ids[np.isin(hashes, wanted[lost])].tolist()
    return [], []
