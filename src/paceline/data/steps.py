"""What a training loop gets: steps, and in each step this rank's micro-batches.

Plain slotted classes, made once a step, since their cost is part of every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from paceline.data.plan import Position
from paceline.errors import StepError


class MicroBatch:
    """Samples for one forward of this rank.

    Attributes:
        batch: what the collate function gave, on the job's device.
        count: samples in it, at least 1.
        offset: place in the epoch of its first sample; names the micro-batch in any world.
        is_last: whether it is this rank's last of the step.
        is_ghost: whether it only keeps this rank in company: one real sample of weight 0.
    """

    __slots__ = ("batch", "count", "is_ghost", "is_last", "offset")

    def __init__(self, batch: Any, count: int, offset: int, is_last: bool, is_ghost: bool) -> None:
        self.batch = batch
        self.count = count
        self.offset = offset
        self.is_last = is_last
        self.is_ghost = is_ghost


class PlannedStep:
    """One optimizer step's data. Iterate over it once for this rank's micro-batches, in order.

    Attributes:
        epoch, offset: where the step starts.
        num_samples: samples of the step over all ranks; fewer at the end of an epoch.
        ends_epoch: whether it is the last of its epoch.
        num_micro_batches: how many this rank gets; may be 0.
    """

    __slots__ = (
        "_micros",
        "_seed",
        "ends_epoch",
        "epoch",
        "num_micro_batches",
        "num_samples",
        "offset",
    )

    def __init__(
        self,
        seed: int,
        epoch: int,
        offset: int,
        num_samples: int,
        ends_epoch: bool,
        num_micro_batches: int,
        micros: Iterator[MicroBatch],
    ) -> None:
        self._seed = seed
        self.epoch = epoch
        self.offset = offset
        self.num_samples = num_samples
        self.ends_epoch = ends_epoch
        self.num_micro_batches = num_micro_batches
        self._micros: Iterator[MicroBatch] | None = micros

    @property
    def next_position(self) -> Position:
        """Where training stands after this step."""
        if self.ends_epoch:
            return Position(self._seed, self.epoch + 1, 0)
        return Position(self._seed, self.epoch, self.offset + self.num_samples)

    def wrap(self, around: Callable[[Iterator[MicroBatch]], Iterator[MicroBatch]]) -> None:
        """Have its micro-batches pass through `around`."""
        if self._micros is not None:
            self._micros = around(self._micros)

    def __iter__(self) -> Iterator[MicroBatch]:
        micros = self._micros
        if micros is None:
            raise StepError(
                "the micro-batches of a step can be read once.",
                why="they are loaded ahead and not kept.",
                fix="put what you need of them into a list.",
            )
        self._micros = None
        return micros
