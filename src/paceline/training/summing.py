"""Who sums a training's gradients over ranks, and what that asks of the weight of a loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.parallel.direct import DirectSum, direct_sum

if TYPE_CHECKING:
    from paceline.training.training import Training


@dataclass(frozen=True, kw_only=True)
class Summing:
    """How the gradients of one training are summed.

    Attributes:
        direct: Sums them after the last backward, in DDP's place.
        by_ddp: Whether DDP averages them in the last backward. If neither, nobody does, or `Reproducing`.
        in_memory: Whether ranks exchange what else belongs to a step right after its gradients.
        before: What a loss is multiplied by, as DDP takes a mean where a sum is wanted.
        after: What a summed gradient is multiplied by, likewise.
    """

    direct: DirectSum | None
    by_ddp: bool
    in_memory: bool
    before: int
    after: int


def choose_summing(training: Training) -> Summing:
    """Decide it by what is known when steps begin, such as communication hooks.

    Collective: none; the answer is the same on all ranks.
    """
    job, exact = training.job, training.reproducing is not None
    # With several optimizers the user decides when each is updated, between the others' backwards.
    in_memory = training.control.in_memory and len(training.tracks) == 1 and not exact
    direct = direct_sum(job, training.models) if in_memory else None
    by_ddp = job.world_size > 1 and direct is None and not exact
    undo = job.world_size if by_ddp else 1
    # In fp16 the mean is undone afterwards: a gradient that is `world_size` times larger would overflow
    # on many ranks and not on one.
    late = training.precision.scaler is not None
    return Summing(
        direct=direct,
        by_ddp=by_ddp,
        in_memory=in_memory,
        before=1 if late else undo,
        after=undo if late else 1,
    )
