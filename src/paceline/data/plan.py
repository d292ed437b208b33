"""Which samples make which step, and who gets them: pure arithmetic.

A position in training is three integers, `(seed, epoch, offset)`. An epoch is one permutation of the
sample ids, drawn from `(seed, epoch)`; step *s* is its places `[s*B, min((s+1)*B, N))`, and rank *r* of
*W* gets the places `[n*r//W, n*(r+1)//W)` of a step of *n* samples. Nothing is padded, dropped or
repeated, and no number here depends on how many processes, workers or micro-batches there are.

This file never reads the environment and knows no job: rank and world size are arguments.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from paceline.errors import ConfigError
from paceline.job import rng

Int64Array = npt.NDArray[np.int64]

# How many ids are drawn at once: enough to spread numpy's cost a call, few enough for the first batch
# to come within a millisecond or two.
_BLOCK = 1 << 16
# Epochs of a small set are drawn together, as far as the tables of so many stay small.
_EPOCHS = 32
_ROUNDS = 8
# A small set has few orders, and a few rounds do not reach all of them equally often.
_ROUNDS_SMALL = 32
_SMALL = 1024


@dataclass(frozen=True)
class Position:
    """Where training stands: `offset` samples of epoch `epoch` were used, in the order of `seed`.

    Raises:
        ConfigError: something that is no whole number, or a negative epoch or offset.
    """

    seed: int
    epoch: int = 0
    offset: int = 0

    def __post_init__(self) -> None:
        for name, value in (("seed", self.seed), ("epoch", self.epoch), ("offset", self.offset)):
            if type(value) is not int:
                raise ConfigError(f"{name} of a position must be a whole number, got {value!r}.")
            if value < 0 and name != "seed":
                raise ConfigError(f"{name} of a position must be at least 0, got {value}.")


class Permutation:
    """A permutation of `range(size)` that gives any part of itself without building the whole.

    A Feistel network over the numbers below `rows * columns`, with a random table for each round and
    addition instead of exclusive or, walking on where it leaves `range(size)`: Black and Rogaway,
    "Ciphers with Arbitrary Finite Domains", 2002. `rows` and `columns` are near the square root of
    `size`, so that the domain is hardly larger than the set and the tables stay in the cache.

    Args:
        size: At least 1.
        stems: A `rng.key` for what the permutation is for; several are several permutations, which
            cost little more than one where they are small.
    """

    def __init__(self, size: int, *stems: int) -> None:
        self.size = size
        self._rows = rows = math.isqrt(size - 1) + 1
        self._columns = columns = -(-size // rows)
        rounds = _ROUNDS_SMALL if size < _SMALL else _ROUNDS
        words = np.stack([rng.keys(stem, np.arange(rounds * rows)) for stem in stems])
        # A round's tables of all permutations lie one after the other.
        words = words.reshape(-1, rounds, rows).swapaxes(0, 1).reshape(rounds, -1)
        words[0::2] %= np.uint64(rows)
        words[1::2] %= np.uint64(columns)
        self._tables: Int64Array = words.view(np.int64)
        self._count = len(stems)

    def __call__(self, places: Int64Array) -> Int64Array:
        """The members at these places, each in `range(size)`; of several permutations one after the other."""
        if self._count == 1:
            return self._walk(places, None)
        begins = np.arange(self._count) * self._rows
        return self._walk(np.tile(places, self._count), np.repeat(begins, len(places)))

    def _walk(self, numbers: Int64Array, begins: Int64Array | None) -> Int64Array:
        """`begins`: where the table of each number's permutation begins; None for a single one."""
        members = self._encipher(numbers, begins)
        while len(outside := np.flatnonzero(members >= self.size)):
            own = None if begins is None else begins[outside]
            members[outside] = self._encipher(members[outside], own)
        return members

    def _encipher(self, numbers: Int64Array, begins: Int64Array | None) -> Int64Array:
        row = numbers // self._columns
        column = numbers - row * self._columns
        for first, second in zip(self._tables[0::2], self._tables[1::2], strict=True):
            _add(row, first, column if begins is None else column + begins, self._rows)
            _add(column, second, row if begins is None else row + begins, self._columns)
        row *= self._columns
        row += column
        return row


def _add(half: Int64Array, table: Int64Array, places: Int64Array, modulus: int) -> None:
    """`half = (half + table[places]) % modulus`, in place."""
    half += table.take(places, mode="clip")
    # Unsigned, what is below the modulus wraps to a huge number and loses the minimum; far cheaper
    # than a division.
    unsigned = half.view(np.uint64)
    np.minimum(unsigned, unsigned - np.uint64(modulus), out=unsigned)


def share(num_samples: int, rank: int, world_size: int) -> tuple[int, int]:
    """The places `[begin, end)` of a step of `num_samples` that are this rank's; maybe none."""
    return num_samples * rank // world_size, num_samples * (rank + 1) // world_size


def micro_batches(count: int, micro_batch: int) -> int:
    """How many micro-batches of at most `micro_batch` samples make `count`."""
    return -(-count // micro_batch)


class Block(NamedTuple):
    """This rank's sample ids (int64) of some coming steps of one epoch, and how many each step has."""

    seed: int
    epoch: int
    offset: int
    ids: torch.Tensor
    counts: list[int]


@dataclass(frozen=True)
class Plan:
    """One rank's part of the epochs of a set of known size. Checked by `Batches`, not here."""

    num_samples: int
    global_batch: int
    micro_batch: int
    shuffle: bool
    rank: int
    world_size: int
    aligned: bool = False

    def share(self, num_samples: int) -> tuple[int, int]:
        """The places `[begin, end)` of a step that are this rank's: samples split evenly, or, where
        the plan is aligned, whole micro-batches, which are then the same in any world."""
        if not self.aligned:
            return share(num_samples, self.rank, self.world_size)
        size = self.micro_batch
        begin, end = share(micro_batches(num_samples, size), self.rank, self.world_size)
        return min(begin * size, num_samples), min(end * size, num_samples)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of a whole epoch, the smaller last one included."""
        return -(-self.num_samples // self.global_batch)

    def order(self, seed: int, *epochs: int) -> Permutation | None:
        """The permutation of an epoch, or of some; None where samples come in their own order."""
        if not self.shuffle:
            return None
        return Permutation(
            self.num_samples, *(rng.key(seed, rng.SHUFFLE, epoch) for epoch in epochs)
        )

    def steps(self, position: Position, epochs: int) -> Iterator[tuple[int, int, int]]:
        """`(epoch, offset, num_samples)` of each step from `position` to the end of epoch `epochs`."""
        offset = position.offset
        for epoch in range(position.epoch, epochs):
            while offset < self.num_samples:
                size = min(self.global_batch, self.num_samples - offset)
                yield epoch, offset, size
                offset += size
            offset = 0

    def pieces(self, offset: int, num_samples: int, equal: bool) -> Iterator[tuple[int, int, bool]]:
        """`(begin, end, is_ghost)` of this rank's micro-batches of one step, as places of the epoch.

        With `equal`, every rank gets as many as the one with most; what it lacks is filled with the
        step's first sample.
        """
        begin, end = self.share(num_samples)
        for at in range(begin, end, self.micro_batch):
            yield offset + at, offset + min(at + self.micro_batch, end), False
        for _ in range(self.pieces_count(num_samples, equal) - self.pieces_count(num_samples)):
            yield offset, offset + 1, True

    def pieces_count(self, num_samples: int, equal: bool = False) -> int:
        """How many `pieces` a step of `num_samples` has for this rank."""
        if equal:
            return micro_batches(-(-num_samples // self.world_size), self.micro_batch)
        begin, end = self.share(num_samples)
        return micro_batches(end - begin, self.micro_batch)

    def blocks(
        self, position: Position, epochs: int, device: torch.device | None = None
    ) -> Iterator[Block]:
        """This rank's samples from `position` to the end of epoch `epochs - 1`, ids on `device`.

        How many steps come at once is left to this function: at least one, and none of another epoch.
        """
        epoch, offset = position.epoch, position.offset
        while epoch < epochs:
            # What costs are calls, after an evaluation has emptied the caches.
            together = 1
            if self.shuffle and offset == 0:
                together = min(max(1, _BLOCK // self.num_samples), _EPOCHS, epochs - epoch)
            order = self.order(position.seed, *range(epoch, epoch + together))
            while offset < self.num_samples:
                places, counts, end = self._coming(offset)
                ids = torch.from_numpy(look_up(order, places)).view(together, len(places))
                ids = ids if device is None else ids.to(device)
                for number, own in enumerate(ids):
                    yield Block(position.seed, epoch + number, offset, own, counts)
                offset = end
            epoch += together
            offset = 0

    def _coming(self, offset: int) -> tuple[Int64Array, list[int], int]:
        """This rank's places of the coming steps of an epoch, how many each has, and the steps' end."""
        left = self.num_samples - offset
        begin, end = self.share(min(self.global_batch, left))
        steps = max(1, min(left // self.global_batch, _BLOCK // max(1, end - begin)))
        starts = offset + np.arange(steps, dtype=np.int64) * self.global_batch
        places = (starts[:, None] + np.arange(begin, end, dtype=np.int64)).reshape(-1)
        counts = [end - begin] * steps
        rest = max(0, left - steps * self.global_batch)
        if 0 < rest < self.global_batch:  # the smaller last step, which comes with the others
            begin, end = self.share(rest)
            last = self.num_samples - rest
            places = np.append(places, np.arange(last + begin, last + end, dtype=np.int64))
            counts.append(end - begin)
            rest = 0
        return places, counts, self.num_samples - rest


def look_up(order: Permutation | None, places: Int64Array) -> Int64Array:
    """The sample ids at these places of an epoch."""
    return places if order is None else order(places)
