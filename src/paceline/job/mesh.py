"""The layout of a job's ranks. All ranks hold replicas of the model today, so there is one data axis."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class DataAxis:
    """The ranks that get different samples, as seen from this one.

    Everything about data, weights of losses, evaluation and metrics uses this axis. `job.rank` and
    `job.world_size` are for launching and for messages. Ranks with the same data rank get the same samples.

    Attributes:
        rank: this rank's place on the axis, from 0 to `size` - 1.
        size: how many ranks the samples are split over.
        group: the process group of the axis for device tensors; None if `size` is 1.
        control: the Gloo group of the axis for small host values; None if `size` is 1.
    """

    rank: int
    size: int
    group: dist.ProcessGroup | None
    control: dist.ProcessGroup | None
