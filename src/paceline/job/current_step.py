"""The training step, micro-batch and pipeline stage, for messages, the launcher and `job.all_gather`."""

from typing import NamedTuple


class Forward(NamedTuple):
    """What `job.all_gather` must know about the micro-batch of a forward.

    Attributes:
        num_micro_batches: Of this rank in the step; 0 outside of a loop over micro-batches.
        is_padding: Whether it is a padding micro-batch.
    """

    num_micro_batches: int
    is_padding: bool


OUTSIDE = Forward(0, False)

step = 0  # the training step that this process is in, or was last in; 0 before the first
forward = OUTSIDE
stage: int | None = None  # the place of this process on the axis `pp` of the mesh; None without one
