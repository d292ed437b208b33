"""Which samples make which step, and which rank gets them: pure arithmetic.

A position in training is three integers, `(seed, epoch, offset)`. An epoch is one permutation of the
sample ids, drawn from `(seed, epoch)`. Step *s* takes places `[s*B, min((s+1)*B, N))` of it, and rank *r* of
*W* takes places `[n*r//W, n*(r+1)//W)` of a step of *n* samples. Nothing is padded, dropped or repeated, and
the samples of a step do not depend on the number of processes, workers or micro-batches.

A *place* is an index into the order of an epoch. A *sample id* is an index into the dataset.

Rank and number of ranks are arguments: nothing here depends on the job or the environment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import ConfigError
from paceline.job import rng

Int64Array = npt.NDArray[np.int64]
# The order of one epoch: a function from places to sample ids.
Order = Callable[[Int64Array], Int64Array]
# A micro-batch as samples `[begin, end)` of a step, and whether it is a padding micro-batch.
Piece = tuple[int, int, bool]

_ROUNDS = 8  # of the Feistel network
# A small set has few permutations, and 8 rounds do not give all of them with equal probability.
_ROUNDS_SMALL = 32
_SMALL = 1024  # samples; sets below this size use _ROUNDS_SMALL


@dataclass(frozen=True)
class Position:
    """A position in training: the next sample is the one at place `offset` of epoch `epoch`.

    Attributes:
        seed: decides the permutation of each epoch.
        epoch: at least 0.
        offset: number of samples of this epoch that were used before, over all ranks.

    Raises:
        ConfigError: a value is not an integer, or epoch or offset is negative.
    """

    seed: int
    epoch: int = 0
    offset: int = 0

    def __post_init__(self) -> None:
        for name, value in (("seed", self.seed), ("epoch", self.epoch), ("offset", self.offset)):
            if type(value) is not int:
                raise ConfigError(f"{name} of a position must be an integer, got {value!r}.")
            if value < 0 and name != "seed":
                raise ConfigError(f"{name} of a position must be at least 0, got {value}.")


class MicroBatch:
    """Samples for one forward of this rank.

    Attributes:
        batch: the result of the collate function, on the job's device.
        count: number of samples in it, at least 1.
        places: places in the epoch of its samples.
        offset: the first of them. It identifies the micro-batch on any number of ranks.
        is_last: whether it is this rank's last micro-batch of the step.
        is_padding: whether it is one real sample that must have weight 0, given to a rank that has fewer
            micro-batches than others, or to all ranks with `micro_batch="auto"`.
    """

    __slots__ = ("batch", "count", "is_last", "is_padding", "offset", "places")

    def __init__(
        self, batch: Any, places: Sequence[int], *, is_last: bool, is_padding: bool = False
    ) -> None:
        self.batch = batch
        self.places = places
        self.count = len(places)
        self.offset = places[0]
        self.is_last = is_last
        self.is_padding = is_padding


class PlannedStep:
    """The data of one optimizer step. Iterate over it once to get this rank's micro-batches in order.

    Attributes:
        epoch, offset: position of the step's first sample.
        stop: position of the next step's first sample, if it is in the same epoch.
        num_samples: samples of the step over all ranks; fewer at the end of an epoch.
        ends_epoch: whether it is the last step of its epoch.
        num_micro_batches: number of micro-batches of this rank, padding micro-batches included; may be 0.
    """

    __slots__ = (
        "_micro_batches",
        "_seed",
        "ends_epoch",
        "epoch",
        "num_micro_batches",
        "num_samples",
        "offset",
        "stop",
    )

    def __init__(
        self,
        seed: int,
        epoch: int,
        offset: int,
        stop: int,
        num_samples: int,
        ends_epoch: bool,
        num_micro_batches: int,
        micro_batches: Iterator[MicroBatch],
    ) -> None:
        self._seed = seed
        self.epoch = epoch
        self.offset = offset
        self.stop = stop
        self.num_samples = num_samples
        self.ends_epoch = ends_epoch
        self.num_micro_batches = num_micro_batches
        self._micro_batches = micro_batches

    @property
    def position(self) -> Position:
        """The position of this step."""
        return Position(self._seed, self.epoch, self.offset)

    @property
    def next_position(self) -> Position:
        """The position after this step."""
        if self.ends_epoch:
            return Position(self._seed, self.epoch + 1, 0)
        return Position(self._seed, self.epoch, self.stop)

    def __iter__(self) -> Iterator[MicroBatch]:
        return self._micro_batches


class Permutation:
    """A permutation of `range(size)` of which any part can be computed without the rest.

    A Feistel network over the numbers below `rows * columns`, with a random table for each round and
    addition instead of exclusive or. Results outside `range(size)` are permuted again until they fall inside:
    Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002. `rows` and `columns` are near the square
    root of `size`, so few results fall outside and the tables stay in the cache.

    Args:
        size: At least 1.
        key: A `rng.key` of what the permutation is used for.
    """

    def __init__(self, size: int, key: int) -> None:
        self.size = size
        self._rows = rows = math.isqrt(size - 1) + 1
        self._columns = columns = -(-size // rows)
        rounds = _ROUNDS_SMALL if size < _SMALL else _ROUNDS
        words = rng.keys(key, np.arange(rounds * rows)).reshape(rounds, rows)
        words[0::2] %= np.uint64(rows)
        words[1::2] %= np.uint64(columns)
        self._tables: Int64Array = words.view(np.int64)

    def __call__(self, places: Int64Array) -> Int64Array:
        """The members at these places, each in `range(size)`."""
        members = self._encipher(places)
        while len(outside := np.flatnonzero(members >= self.size)):
            members[outside] = self._encipher(members[outside])
        return members

    def _encipher(self, numbers: Int64Array) -> Int64Array:
        row = numbers // self._columns
        column = numbers - row * self._columns
        for first, second in zip(self._tables[0::2], self._tables[1::2], strict=True):
            _add(row, first, column, self._rows)
            _add(column, second, row, self._columns)
        row *= self._columns
        row += column
        return row


def _add(half: Int64Array, table: Int64Array, places: Int64Array, modulus: int) -> None:
    """`half = (half + table[places]) % modulus`, in place."""
    half += table.take(places, mode="clip")
    # For a value below the modulus the subtraction wraps to a very large unsigned number, so the minimum is
    # the value itself. This is much faster than `%`.
    unsigned = half.view(np.uint64)
    np.minimum(unsigned, unsigned - np.uint64(modulus), out=unsigned)


def share(num_samples: int, rank: int, size: int) -> tuple[int, int]:
    """The places `[begin, end)` of this rank in a step of `num_samples`."""
    return num_samples * rank // size, num_samples * (rank + 1) // size


def num_micro_batches(count: int, micro_batch: int) -> int:
    """The number of micro-batches of at most `micro_batch` samples in `count`."""
    return -(-count // micro_batch)


@dataclass(frozen=True)
class Plan:
    """One data rank's part of the epochs of a set of known size. `Batches` checks the values.

    Attributes:
        rank, size: data rank, and number of data ranks.
        aligned: give ranks whole micro-batches of `micro_batch` samples, which are then the same on any
            number of ranks.
        sampled: gives the order of `(seed, epoch)` from a sampler, instead of `shuffle`. A sample may occur
            several times in such an order, or not at all.
        drop_last: leave a smaller last step of an epoch out.
        closes_with_padding: with `equal`, end each step with a padding micro-batch on every rank.
    """

    num_samples: int
    global_batch: int
    micro_batch: int
    shuffle: bool
    rank: int
    size: int
    aligned: bool = False
    sampled: Callable[[int, int], Order] | None = None
    drop_last: bool = False
    closes_with_padding: bool = False

    def end(self, offset: int) -> int:
        """The place where an epoch ends whose steps begin at `offset`. Samples from there on are not used."""
        smaller = (self.num_samples - offset) % self.global_batch
        return self.num_samples - smaller * self.drop_last

    @property
    def steps_per_epoch(self) -> int:
        """Steps of a whole epoch, including a smaller last one if it is not dropped."""
        return -(-self.end(0) // self.global_batch)

    def order(self, seed: int, epoch: int) -> Order | None:
        """The order of an epoch; None is the order of the dataset."""
        if self.sampled is not None:
            return self.sampled(seed, epoch)
        if not self.shuffle:
            return None
        return Permutation(self.num_samples, rng.key(seed, rng.SHUFFLE, epoch))

    def steps(self, position: Position, epochs: int) -> Iterator[tuple[int, int, int]]:
        """`(epoch, offset, num_samples)` of each step from `position` to the end of epoch `epochs - 1`."""
        offset = position.offset
        for epoch in range(position.epoch, epochs):
            end = self.end(offset)
            while offset < end:
                num_samples = min(self.global_batch, end - offset)
                yield epoch, offset, num_samples
                offset += num_samples
            offset = 0

    def micro_batch_ranges(self, num_samples: int, equal: bool) -> Iterator[Piece]:
        """This rank's micro-batches of a step of `num_samples`.

        With `equal`, every rank gets as many micro-batches as the rank with the most. The additional ones are
        padding micro-batches: the step's first sample.
        """
        if not self.aligned:
            begin, end = share(num_samples, self.rank, self.size)
        else:
            whole = num_micro_batches(num_samples, self.micro_batch)
            first, last = share(whole, self.rank, self.size)
            begin = min(first * self.micro_batch, num_samples)
            end = min(last * self.micro_batch, num_samples)
        for at in range(begin, end, self.micro_batch):
            yield at, min(at + self.micro_batch, end), False
        own = num_micro_batches(end - begin, self.micro_batch)
        most = max_micro_batches(num_samples, self.micro_batch, self.size) if equal else own
        for _ in range(most - own):
            yield 0, 1, True
        if equal and self.closes_with_padding:
            yield 0, 1, True


def max_micro_batches(num_samples: int, micro_batch: int, size: int) -> int:
    """The number of micro-batches of the rank that has the most, when `size` ranks share `num_samples`."""
    return num_micro_batches(-(-num_samples // size), micro_batch)


def look_up(order: Order | None, places: Int64Array) -> Int64Array:
    """The sample ids at these places of an epoch."""
    return places if order is None else order(places)
