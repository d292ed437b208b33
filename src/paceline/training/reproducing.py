"""What `Training(reproducible=True)` adds to a step: the same bits on any number of ranks.

Micro-batches are cut alike whatever the world (`Batches.align`), their gradients are summed exactly
(`step.exact`), losses are rounded to a grid on which their sum is exact, BatchNorm's running statistics
are folded in the order of micro-batches, and thread count and kernels are pinned.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.data.batches import Batches
from paceline.errors import ConfigError
from paceline.job.job import Job
from paceline.parallel import ddp as parallel
from paceline.parallel import syncbn
from paceline.parallel.exact import ExactSum
from paceline.training.optimizers import Track

# Losses are whole multiples of this; below 2^28 their sums are exact in a float64.
_LOSS_GRID = 2.0**-24


class Reproducing:
    """The part of one training that makes it reproducible.

    Collective: as the methods say.
    """

    def __init__(
        self, job: Job, models: list[nn.Module], tracks: list[Track], batches: Batches
    ) -> None:
        self._job = job
        batches.align()
        self._micro_batch = batches.micro_batch
        self._most = -(-batches.global_batch // batches.micro_batch)
        self.sums = {
            id(track): ExactSum(job, _trainable(track), most_micro_batches=self._most)
            for track in tracks
        }
        modules = [parallel.unwrap(model) for model in models]
        if any(syncbn.layers(module) for module in modules):
            raise ConfigError(
                "reproducible training normalises each micro-batch by itself, not over ranks.",
                fix="leave sync_batchnorm out: plain BatchNorm gives the same on any number of ranks.",
            )
        self._norms = [BatchNormFold(layer) for module in modules for layer in _norms(module)]
        folded = {id(b) for fold in self._norms for b in fold.layer.buffers()}
        self._others = [
            (name, buffer)
            for module in modules
            for name, buffer in module.named_buffers()
            if id(buffer) not in folded
        ]
        self._versions: list[int] = []
        self._pin()

    def _pin(self) -> None:
        """Fix what changes bits besides order: threads and kernels, until the job is left."""
        job = self._job
        threads = torch.get_num_threads()
        strict = torch.are_deterministic_algorithms_enabled()
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        benchmark = torch.backends.cudnn.benchmark

        def restore() -> None:
            torch.set_num_threads(threads)
            torch.use_deterministic_algorithms(strict, warn_only=warn_only)
            torch.backends.cudnn.benchmark = benchmark

        job.on_leave(restore)
        # One thread by default: the count changes bits, and ranks of other jobs may have fewer cores.
        torch.set_num_threads(int(os.environ.get("PACELINE_REPRODUCIBLE_THREADS", "1")))
        job.set_variable("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False

    def begin(self, num_samples: int) -> None:
        """A step of so many samples begins, or begins again."""
        for exact in self.sums.values():
            exact.begin()
        for fold in self._norms:
            fold.begin(-(-num_samples // self._micro_batch))
        self._versions = [buffer._version for _, buffer in self._others]

    def added(self, track: Track, index: int) -> None:
        """A backward for micro-batch `index` of the step is done."""
        self.sums[id(track)].add()
        for fold in self._norms:
            fold.note(index)

    def agree(self) -> bool:
        """Whether the step stands; if not, its micro-batches have to be run again.

        Raises:
            ConfigError: a buffer was changed by a forward, in an order that depends on ranks.

        Collective: all ranks, after their last micro-batch.
        """
        for (name, buffer), version in zip(self._others, self._versions, strict=True):
            if buffer._version != version:
                raise ConfigError(
                    f"the forward changes the buffer {name!r}, in the order of this rank's samples.",
                    fix="reproducible training knows how to fold BatchNorm's buffers only.",
                )
        # Every one is asked: each has its own exchange.
        answers = [exact.agree() for exact in self.sums.values()]
        stands = all(answers)
        for fold in self._norms:
            fold.restore()
        if stands and self._norms:
            self._fold()
        return stands

    def _fold(self) -> None:
        packed = torch.cat([fold.table.reshape(-1) for fold in self._norms])
        if self._job.group is not None:
            # Each row is one rank's and zero elsewhere, so this sum is exact.
            dist.all_reduce(packed, group=self._job.group)
        parts = torch.split(packed, [fold.table.numel() for fold in self._norms])
        for fold, part in zip(self._norms, parts, strict=True):
            fold.table.copy_(part.view_as(fold.table))
            fold.fold()

    def rounded(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss in float64 on a grid, so that sums of losses are exact."""
        return (loss.double() / _LOSS_GRID).round() * _LOSS_GRID

    def state_dict(self) -> list[list[int] | None]:
        """The scales of the next step, for each optimizer."""
        return [exact.exponents for exact in self.sums.values()]

    def load_state_dict(self, state: list[list[int] | None]) -> None:
        """Take up the scales of an earlier run."""
        for exact, exponents in zip(self.sums.values(), state, strict=True):
            exact.exponents = exponents


class BatchNormFold:
    """Running statistics of one layer, updated as one process would, micro-batch after micro-batch.

    During a step the layer's momentum is 1, so that its buffers hold the statistics of the last
    micro-batch alone; these are noted by number, exchanged, and folded in order.
    """

    def __init__(self, layer: _BatchNorm) -> None:
        self.layer = layer
        self.table = torch.empty(0)
        self._momentum = layer.momentum
        self._saved: list[torch.Tensor] = []

    def begin(self, num_micro_batches: int) -> None:
        """A step begins."""
        mean, _, _ = buffers = self._buffers()
        if not self._saved:
            self._momentum = self.layer.momentum
            self._saved = [buffer.clone() for buffer in buffers]
        # A layer that is frozen (in eval mode) has nothing to fold.
        rows = num_micro_batches if self.layer.training else 0
        self.table = torch.zeros((rows, 2, len(mean)), dtype=mean.dtype, device=mean.device)
        self.layer.momentum = 1.0

    def note(self, index: int) -> None:
        """Keep the statistics of micro-batch `index`."""
        if len(self.table):
            mean, var, _ = self._buffers()
            self.table[index, 0] = mean
            self.table[index, 1] = var

    def restore(self) -> None:
        """Put the layer back as it was before the step."""
        for buffer, saved in zip(self._buffers(), self._saved, strict=True):
            buffer.copy_(saved)
        self.layer.momentum = self._momentum

    def fold(self) -> None:
        """Update the statistics by those of all ranks' micro-batches, in order."""
        mean, var, count = self._buffers()
        for own_mean, own_var in self.table.unbind(0):
            count += 1
            factor = 1 / int(count) if self._momentum is None else self._momentum
            mean.mul_(1 - factor).add_(own_mean, alpha=factor)
            var.mul_(1 - factor).add_(own_var, alpha=factor)
        self._saved = []

    def _buffers(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean, var = self.layer.running_mean, self.layer.running_var
        count = self.layer.num_batches_tracked
        assert mean is not None
        assert var is not None
        assert count is not None
        return mean, var, count


def _norms(module: nn.Module) -> list[_BatchNorm]:
    return [
        layer
        for layer in module.modules()
        if isinstance(layer, _BatchNorm) and layer.track_running_stats
    ]


def _trainable(track: Track) -> list[torch.Tensor]:
    return [p for p in track.parameters if p.requires_grad]
