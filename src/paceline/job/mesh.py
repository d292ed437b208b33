"""The layout of a job's ranks: `Mesh`, the degrees of parallelism, and `DataAxis`, which data code uses."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

import torch.distributed as dist

from paceline.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """How many ranks each form of parallelism uses. Their product is the number of ranks.

    One degree may be -1: the ranks that are left. Neighbouring ranks differ in `tp` first, then in
    `dp_shard`, `dp_replicate` and `pp`, so that the axis with the most communication stays on one host.

    Attributes:
        dp_replicate: Replicas of the model; the samples of a step are split over them.
        dp_shard: Ranks that a replica's parameters are sharded over (FSDP); the samples are split over them
            too.
        tp: Ranks that compute each layer together (tensor parallel); they get the same samples.
        pp: Stages of layers (pipeline parallel); they get the same samples.

    Collective: none; give all ranks the same mesh.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1

    def resolve(self, world_size: int, local_world_size: int) -> Mesh:
        """The mesh with -1 replaced.

        Args:
            local_world_size: Number of ranks on each host.

        Raises:
            ConfigError: the degrees do not multiply to `world_size`, or an axis `tp` would span two hosts.
        """
        degrees = asdict(self)
        for name, degree in degrees.items():
            if type(degree) is not int or degree == 0 or degree < -1:
                raise ConfigError(
                    f"Mesh: {name} must be a whole number of at least 1, or -1, got {degree!r}."
                )
        free = [name for name, degree in degrees.items() if degree == -1]
        given = math.prod(degree for degree in degrees.values() if degree != -1)
        if len(free) > 1:
            raise ConfigError(f"Mesh: only one degree may be -1, got {' and '.join(free)}.")
        if free and world_size % given == 0:
            degrees[free[0]] = world_size // given
        elif not free and given == 1 < world_size:
            raise ConfigError(
                f"Mesh: all degrees are 1, but the job has {world_size} ranks.",
                fix="Mesh(dp_replicate=-1) for paceline.ddp, Mesh(dp_shard=-1) for paceline.fsdp; or leave "
                "the mesh out: both then use all ranks.",
            )
        elif free or given != world_size:
            needed = f"a multiple of {given} ranks" if free else f"{given} ranks"
            raise ConfigError(
                f"Mesh: {self} needs {needed}, the job has {world_size}.",
                fix=f"start {needed}." if free else f"start {needed}, or set one degree to -1.",
            )
        if degrees["tp"] > 1 and local_world_size % degrees["tp"]:
            raise ConfigError(
                f"Mesh: tp={degrees['tp']} does not divide the {local_world_size} ranks of a host.",
                why="tensor parallel ranks exchange activations in each layer, so they must share a host.",
                fix=f"choose a tp that divides {local_world_size}.",
            )
        return replace(self, **degrees)

    @property
    def data_size(self) -> int:
        """The number of ranks that samples are split over."""
        return self.dp_replicate * self.dp_shard

    @property
    def axes(self) -> dict[str, int]:
        """The degrees by name, from the axis whose neighbours are farthest apart."""
        return {
            "pp": self.pp,
            "dp_replicate": self.dp_replicate,
            "dp_shard": self.dp_shard,
            "tp": self.tp,
        }

    def data_ranks(self, rank: int) -> list[int]:
        """The ranks of the data axis that `rank` is on, in order of their data rank."""
        stage_size = self.data_size * self.tp
        first = rank // stage_size * stage_size + rank % self.tp
        return list(range(first, first + stage_size, self.tp))

    def axis_ranks(self, rank: int, axis: str) -> list[int]:
        """The ranks that differ from `rank` in one axis only."""
        names = list(self.axes)
        stride = math.prod(list(self.axes.values())[names.index(axis) + 1 :])
        size = self.axes[axis]
        first = rank - rank // stride % size * stride
        return list(range(first, first + size * stride, stride))

    def __str__(self) -> str:
        shown = [f"{name}={size}" for name, size in self.axes.items() if size > 1]
        return " x ".join(shown) or "one rank"


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
        reporters: for each data rank, the one rank of the job whose losses and results count. With a
            pipeline it is in the last stage, which computes the losses.
        reports: whether this rank is a reporter.
    """

    rank: int
    size: int
    group: dist.ProcessGroup | None
    control: dist.ProcessGroup | None
    reporters: tuple[int, ...]
    reports: bool
