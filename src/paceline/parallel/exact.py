"""`reproducible=True`: training that gives the same bits on any number of ranks.

Floating-point addition depends on order, integer addition does not. The gradient of a micro-batch is
multiplied by a power of two, truncated to 64-bit integers and added up; the sum over micro-batches and ranks
is converted back to floating point once. The scale of each parameter follows from its largest gradient in the
step before, with room for the number of micro-batches, so that no partial sum can overflow. If the gradient
of a micro-batch is larger than that, or so small that it would lose digits, all ranks detect it and repeat
the step with a new scale. The scales depend on gradients only, never on the number of ranks.

Four more measures: every number of ranks gets the same micro-batches (`Batches.align`); losses are rounded to
a grid on which their sum is exact; BatchNorm's running statistics are updated in the order of micro-batches;
the number of threads and the kernels are fixed.

Cost: the micro-batches of a step are on the device at once, and each is copied, because a step may be
repeated.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline import torch_private
from paceline.data.batches import Batches
from paceline.data.device import copy_tensors
from paceline.data.plan import MicroBatch, PlannedStep
from paceline.errors import ConfigError
from paceline.job import collectives
from paceline.job.job import Job
from paceline.parallel import syncbn
from paceline.parallel.ddp import check_parameters, set_sync
from paceline.parallel.modules import find_wrapper, has_sparse_layer, owned_parameters, unwrap
from paceline.parallel.strategy import Strategy

_BITS = 62  # bits of a sum: 64 without the sign bit and one bit of margin
_MARGIN_BITS = 8  # a gradient may be 2^8 times as large as the largest of the step before
_LEAST_BITS = 24  # the largest element of a gradient keeps at least these, as many as float32 has
_CHUNK = 1 << 15  # elements converted at once, so that the intermediate values stay in the cache
# Special values in place of an exponent: NaN or infinity, all zeros, no gradient. They are ordered, because
# ranks take the maximum.
_INFINITE, _ZERO, _NONE = 2**30, -(2**30), -(2**30) - 1
_LOSS_GRID = 2.0**-24  # losses are multiples of this; below 2^28 their sums are exact in float64

# torch 2.13 renamed both functions.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ExactStrategy(Strategy):
    """Exact integer sums of the gradients, in place of DDP's reduction; on one process too."""

    loss_unit = _LOSS_GRID

    def prepare(self, batches: Batches) -> None:
        self._wrappers = [w for w in map(find_wrapper, self._models) if w is not None]
        if any(getattr(wrapper, "compress", None) for wrapper in self._wrappers):
            raise ConfigError(
                "reproducible training cannot compress gradients.",
                why="it sums them exactly, so that the result does not depend on the number of ranks.",
                fix="leave compress or reproducible=True out.",
            )
        batches.align()
        self._micro_batch = batches.micro_batch
        self._most_micro_batches = -(-batches.global_batch // batches.micro_batch)
        self._sum = self._sum_of(self._trained_parameters())
        modules = [unwrap(model) for model in self._models]
        if any(map(has_sparse_layer, modules)):
            raise ConfigError(
                "reproducible training needs dense gradients, and a layer has sparse=True.",
                fix="leave sparse=True or reproducible=True out.",
            )
        if self._padding_mode.synchronised:
            raise ConfigError(
                "reproducible training normalises each micro-batch separately, not over ranks.",
                fix="leave sync_batchnorm out: plain BatchNorm gives the same on any number of ranks.",
            )
        self._batchnorms = [
            _OrderedBatchNorm(layer)
            for module in modules
            for layer in syncbn.batchnorms(module)
            if layer.track_running_stats
        ]
        ordered = {id(batchnorm.layer) for batchnorm in self._batchnorms}
        # Name, layer, and attribute: a forward may assign another tensor.
        self._other_buffers = [
            (f"{path}.{attribute}" if path else attribute, layer, attribute)
            for module in modules
            for path, layer in module.named_modules()
            for attribute, _ in layer.named_buffers(recurse=False)
            if id(layer) not in ordered
        ]
        self._buffers_before: list[tuple[Any, int]] = []  # when the step began
        self._step_offset = 0
        _fix_kernels(self._job)

    def check(self) -> None:
        check_parameters(self._job, self._models, self._optimizers)

    def _trained_parameters(self) -> list[torch.Tensor]:
        """The parameters of the optimizers that require a gradient now; later it may be others."""
        owned = owned_parameters(*self._optimizers)
        # Those without elements need no sum, and have no largest gradient.
        trained = {id(p): p for p in owned if p.requires_grad and p.numel()}
        return list(trained.values())  # once, if several optimizers own one

    def _sum_of(self, parameters: Sequence[torch.Tensor]) -> ExactSum:
        return ExactSum(self._job, parameters, most_micro_batches=self._most_micro_batches)

    def micro_batches(self, step: PlannedStep) -> Iterator[MicroBatch]:
        self._step_offset = step.offset
        if not self._sum.has(trained := self._trained_parameters()):
            self._sum = self._sum_of(trained)
        set_sync(self._wrappers, False)  # until the loop is left
        micros = list(step)
        is_done = False
        while not is_done:
            self._sum.begin()
            for batchnorm in self._batchnorms:
                batchnorm.begin(-(-step.num_samples // self._micro_batch))
            self._buffers_before = self._read_other_buffers()
            for each in micros:
                self._earlier_forwards = self._num_forwards()
                # The loop may change its batch in place, and must get it unchanged if the step is repeated.
                batch = copy_tensors(each.batch)
                yield MicroBatch(
                    batch, each.places, is_last=each.is_last, is_padding=each.is_padding
                )
            is_done = self._end_micro_batches()

    def _num_forwards(self) -> torch.Tensor:
        """The forwards of each BatchNorm layer so far, on its device; reading them would wait for it."""
        counts = [batchnorm.layer.num_batches_tracked for batchnorm in self._batchnorms]
        return torch.stack(counts) if counts else torch.zeros(0, dtype=torch.int64)

    def _refuse_second_use(self, batchnorm: _OrderedBatchNorm, uses: int) -> None:
        if uses > 1:
            named = (pair for model in self._models for pair in unwrap(model).named_modules())
            name = next(name for name, module in named if module is batchnorm.layer)
            raise ConfigError(
                f"the BatchNorm layer {name!r} ran {uses} times in one micro-batch.",
                where=self._job.where(),
                why="reproducible training keeps the statistics of one forward of each micro-batch.",
                fix="run it once, on all samples together; or use GroupNorm, or leave "
                "reproducible=True out.",
            )

    def backward(
        self,
        loss: torch.Tensor,
        start: torch.Tensor,
        micro: MicroBatch,
        inputs: Sequence[torch.Tensor] | None,
    ) -> bool:
        uses = self._num_forwards() - self._earlier_forwards
        torch.autograd.backward(loss, start, inputs=inputs)
        # Forwards of activation checkpointing in this backward do not count as uses.
        self._earlier_forwards = self._num_forwards() - uses
        self._sum.add()
        index = (micro.offset - self._step_offset) // self._micro_batch
        for batchnorm, each in zip(self._batchnorms, uses, strict=True):
            batchnorm.record(index, each)
        return False

    def _end_micro_batches(self) -> bool:
        """Sum the gradients of all ranks. False, on all ranks, if the step must be repeated."""
        names = [name for name, _, _ in self._other_buffers]
        for name, before, now in zip(
            names, self._buffers_before, self._read_other_buffers(), strict=True
        ):
            if _has_changed(before, now):
                raise ConfigError(
                    f"the forward changes the buffer {name!r}, in the order of this rank's samples.",
                    why="reproducible training can restore the order for BatchNorm's buffers only.",
                    fix="leave reproducible=True out, or remove the update of the buffer.",
                )
        fitted = self._sum.all_fitted()
        for batchnorm in self._batchnorms:
            batchnorm.restore()
        if fitted:
            self._update_batchnorms()
            self._sum.finish()
        return fitted

    def after_update(self, step: int, planned: PlannedStep) -> None:
        self._sum.end_step()

    def leave_step(self) -> None:
        super().leave_step()
        set_sync(self._wrappers, True)
        for batchnorm in self._batchnorms:
            batchnorm.restore()

    def _read_other_buffers(self) -> list[tuple[Any, int]]:
        """Each buffer that is not BatchNorm's, and the number of times that it was changed in place."""
        version = torch_private.find("torch.Tensor._version")
        buffers = [getattr(layer, attribute) for _, layer, attribute in self._other_buffers]
        return [(b, version.__get__(b) if version else 0) for b in buffers]

    def _update_batchnorms(self) -> None:
        if not self._batchnorms:
            return
        # Each row is nonzero on one rank only, so this sum is exact.
        tables = [batchnorm.table for batchnorm in self._batchnorms]
        packed = collectives.all_reduce(self._job, torch.cat([t.reshape(-1) for t in tables]))
        parts = torch.split(packed, [table.numel() for table in tables])
        for table, part in zip(tables, parts, strict=True):
            table.copy_(part.view_as(table))
        # One transfer for all layers.
        uses = torch.stack([table[:, 2, 0].long() for table in tables]).tolist()
        for batchnorm, each in zip(self._batchnorms, uses, strict=True):
            self._refuse_second_use(batchnorm, max(each))
        for batchnorm, each in zip(self._batchnorms, uses, strict=True):
            batchnorm.update([number > 0 for number in each])

    def _named_parameters(self) -> dict[str, torch.Tensor]:
        return {
            f"{number}.{name}": p
            for number, model in enumerate(self._models)
            for name, p in unwrap(model).named_parameters()
        }

    def state_dict(self) -> Any:
        names = {id(p): name for name, p in self._named_parameters().items()}
        return {
            "exponents": self._sum.exponents,
            "parameters": [names.get(id(p)) for p in self._sum.parameters],
            "threads": torch.get_num_threads(),
        }

    def load_state_dict(self, state: Any) -> None:
        # The parameters that are trained now may be others: the script may have frozen or unfrozen some.
        named = self._named_parameters()
        if summed := [named[name] for name in state["parameters"] if name in named]:
            self._sum = self._sum_of(summed)
        self._sum.load_exponents(state["exponents"])
        torch.set_num_threads(state["threads"])


def _fix_kernels(job: Job) -> None:
    """Fix the number of threads and deterministic kernels until the job is left: both change bits."""
    fixed = os.environ.get("PACELINE_REPRODUCIBLE_THREADS", "1")
    if not (fixed.isdecimal() and int(fixed) > 0):
        raise ConfigError(
            f"PACELINE_REPRODUCIBLE_THREADS must be a number of threads, got {fixed!r}.",
            where=job.where(),
        )
    threads = torch.get_num_threads()
    strict = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark

    def restore() -> None:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(strict, warn_only=warn_only)
        torch.backends.cudnn.benchmark = benchmark

    job.on_leave(restore)
    # One thread by default: the number changes bits, and ranks of another job may have fewer cores.
    torch.set_num_threads(int(fixed))
    job.set_variable("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


class ExactSum:
    """Adds up gradients of micro-batches over all ranks, exactly and in any order.

    Memory: 8 bytes for each element of the parameters and one gradient, and 8 bytes more while ranks
    exchange.

    Args:
        parameters: The same on all ranks.
        most_micro_batches: The largest number of micro-batches of a step, over all ranks.
    """

    def __init__(
        self, job: Job, parameters: Sequence[torch.Tensor], *, most_micro_batches: int
    ) -> None:
        self._job = job
        self.parameters = list(parameters)
        self._ids = {id(p) for p in self.parameters}
        if any(not p.dtype.is_floating_point or p.is_sparse for p in self.parameters):
            raise ConfigError(
                "reproducible training needs real, dense parameters.",
                fix="leave reproducible=True out, or replace complex and sparse parameters.",
            )
        # Shards of equal size for the exchange.
        elements = sum(p.numel() for p in self.parameters)
        self._shard = -(-elements // job.data.size)
        device = self.parameters[0].device
        widest = functools.reduce(torch.promote_types, (p.dtype for p in self.parameters))
        whole = self._shard * job.data.size
        self._sums = torch.zeros(whole, dtype=torch.int64, device=device)
        self._gradient = torch.empty(whole, dtype=widest, device=device)
        self._floats = torch.empty(_CHUNK, dtype=torch.float64, device=device)
        self._integers = torch.empty(_CHUNK, dtype=torch.int64, device=device)
        self._count_bits = math.ceil(math.log2(max(1, most_micro_batches)))
        self.exponents: list[int] | None = None
        self._next_exponents: list[int] | None = None  # of the step after the one in progress
        self.begin()

    def has(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether all these parameters are summed."""
        return {id(p) for p in parameters} <= self._ids

    def load_exponents(self, exponents: list[int] | None) -> None:
        """Take exponents of an earlier sum, if they belong to as many parameters. Else a step finds them."""
        if exponents is not None and len(exponents) == len(self.parameters):
            self.exponents = exponents

    def begin(self) -> None:
        # Whether the sum of a parameter still holds values of an earlier step.
        self._is_outdated = [True] * len(self.parameters)
        self._seen_exponents = [_NONE] * len(self.parameters)

    def add(self) -> None:
        """Add the gradients of one micro-batch, and remove them from the parameters."""
        gradients = [(i, p.grad) for i, p in enumerate(self.parameters) if p.grad is not None]
        largest = torch._foreach_norm([gradient for _, gradient in gradients], float("inf"))
        # One transfer for all values, because each transfer waits for the device.
        values = torch.stack([value.double() for value in largest]).tolist() if largest else []
        for (i, _), value in zip(gradients, values, strict=True):
            self._seen_exponents[i] = max(self._seen_exponents[i], _exponent_of(value))
        if self.exponents is not None:
            offset = 0
            for i, p in enumerate(self.parameters):
                if p.grad is not None:
                    scale = 2.0 ** self._shift(self.exponents[i])
                    self._add(p.grad.reshape(-1), offset, scale, first=self._is_outdated[i])
                    self._is_outdated[i] = False
                offset += p.numel()
        for i, _ in gradients:
            self.parameters[i].grad = None

    def _add(self, gradient: torch.Tensor, offset: int, scale: float, *, first: bool) -> None:
        for at in range(0, len(gradient), _CHUNK):
            part = gradient[at : at + _CHUNK]
            floats = self._floats[: len(part)]
            # Not torch.mul(out=floats): it computes in the type of the gradient, which may overflow.
            floats.copy_(part).mul_(scale)
            into = self._sums[offset + at : offset + at + len(part)]
            # A copy truncates towards zero, on every processor.
            if first:
                into.copy_(floats)
            else:
                into.add_(self._integers[: len(part)].copy_(floats))

    def _shift(self, exponent: int) -> int:
        # Bounded, because 2^shift must be a finite, nonzero float64.
        return max(-900, min(900, _BITS - self._count_bits - exponent))

    def all_fitted(self) -> bool:
        """Whether the gradients of all ranks fitted their scales; if not, the step must be repeated.

        All ranks call it, after they have added all their micro-batches.
        """
        everyone = collectives.gather(self._job, self._seen_exponents, call="step.backward")
        self._seen_exponents = [max(own) for own in zip(*everyone, strict=True)]
        # A gradient that is far smaller than its scale allows would lose digits, or become 0.
        max_gap_bits = max(_MARGIN_BITS, _BITS - self._count_bits - _LEAST_BITS)
        fitted = self.exponents is not None and all(
            allowed - max_gap_bits <= seen <= allowed or seen in (_INFINITE, _ZERO, _NONE)
            for seen, allowed in zip(self._seen_exponents, self.exponents, strict=True)
        )
        if not fitted:
            self.exponents = _next_exponents(self._seen_exponents)
        return fitted

    def finish(self) -> None:
        """Give each parameter the summed gradient, bit for bit equal on all ranks.

        If any gradient of a parameter was NaN or infinite, its sum is NaN. Parameters that no backward
        reached have no gradient. All ranks call it, after `all_fitted` returned True.
        """
        assert self.exponents is not None
        job, size = self._job, self._shard
        offset = 0
        for p, is_outdated in zip(self.parameters, self._is_outdated, strict=True):
            if is_outdated:
                self._sums[offset : offset + p.numel()] = 0
            offset += p.numel()
        own = self._sums if job.data.group is None else self._exchanged()
        mine = self._gradient[job.data.rank * size : (job.data.rank + 1) * size]
        self._to_floats(own, mine, first=job.data.rank * size)
        if job.data.group is not None:
            _all_gather(self._gradient, mine.clone(), group=job.data.group)
        self._set_gradients()
        # Not before the update: a state that is saved until then is that of the step before.
        self._next_exponents = _next_exponents(self._seen_exponents, self.exponents)

    def end_step(self) -> None:
        """The optimizers were updated."""
        self.exponents = self._next_exponents

    def _exchanged(self) -> torch.Tensor:
        job, size = self._job, self._shard
        if self._sums.device.type != "cpu":
            own = torch.empty(size, dtype=torch.int64, device=self._sums.device)
            _reduce_scatter(own, self._sums, group=job.data.group)
            return own
        # Gloo's reduce-scatter sends all shards to all ranks; this sends each shard once.
        parts = torch.empty_like(self._sums)
        dist.all_to_all_single(parts, self._sums, group=job.data.group)
        shards = parts.view(job.data.size, size)
        for other in shards[1:]:
            shards[0].add_(other)
        return shards[0]

    def _to_floats(self, own: torch.Tensor, mine: torch.Tensor, *, first: int) -> None:
        assert self.exponents is not None
        offset = 0
        for p, exponent in zip(self.parameters, self.exponents, strict=True):
            begin = max(offset, first) - first
            end = min(offset + p.numel(), first + len(mine)) - first
            scale = 2.0 ** -self._shift(exponent)
            for at in range(begin, end, _CHUNK):
                stop = min(at + _CHUNK, end)
                floats = self._floats[: stop - at]
                floats.copy_(own[at:stop])
                mine[at:stop].copy_(floats.mul_(scale))
            offset += p.numel()

    def _set_gradients(self) -> None:
        offset = 0
        for p, seen in zip(self.parameters, self._seen_exponents, strict=True):
            if seen != _NONE:
                gradient = self._gradient[offset : offset + p.numel()].view_as(p).to(p.dtype)
                p.grad = gradient if seen != _INFINITE else torch.full_like(p, math.nan)
            offset += p.numel()


def _has_changed(before: tuple[Any, int], now: tuple[Any, int]) -> bool:
    """Whether a buffer was changed in place, or replaced by another with other values."""
    (old, count), (new, new_count) = before, now
    return count != new_count if old is new else not torch.equal(old, new)


def _exponent_of(value: float) -> int:
    """The least e with |value| < 2^e; `_ZERO` for zero, `_INFINITE` for NaN and infinity."""
    if not math.isfinite(value):
        return _INFINITE
    return math.frexp(value)[1] if value else _ZERO


def _next_exponents(seen: Sequence[int], before: Sequence[int] | None = None) -> list[int]:
    """Exponents for the next step: those seen plus a margin; the old one where none was seen."""
    kept = before or [0] * len(seen)
    return [
        old if now in (_INFINITE, _ZERO, _NONE) else now + _MARGIN_BITS
        for now, old in zip(seen, kept, strict=True)
    ]


class _OrderedBatchNorm:
    """Updates the running statistics of one BatchNorm layer in the order of micro-batches, as one process.

    During a step the layer's momentum is 1, so that its buffers hold the statistics of the last
    micro-batch only. They are recorded by micro-batch number, exchanged, and applied in order.
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.table = torch.empty(0)
        self._momentum = layer.momentum
        self._saved: list[torch.Tensor] = []

    def begin(self, num_micro_batches: int) -> None:
        mean, _, _ = buffers = self._buffers()
        self._momentum = self.layer.momentum
        self._saved = [buffer.clone() for buffer in buffers]
        shape = (num_micro_batches, 3, len(mean))
        self.table = torch.zeros(shape, dtype=mean.dtype, device=mean.device)
        self.layer.momentum = 1.0

    def record(self, index: int, uses: torch.Tensor) -> None:
        """Note the statistics of a micro-batch. `uses` are the forwards that changed them: 0 in eval mode."""
        mean, var, _ = self._buffers()
        self.table[index, 0] = mean
        self.table[index, 1] = var
        self.table[index, 2] = uses

    def restore(self) -> None:
        if self._saved:
            for buffer, saved in zip(self._buffers(), self._saved, strict=True):
                buffer.copy_(saved)
            self.layer.momentum, self._saved = self._momentum, []

    def update(self, ran: Sequence[bool]) -> None:
        """Apply the statistics of the micro-batches in which the layer ran."""
        mean, var, count = self._buffers()
        for own_mean, own_var, _ in self.table[list(ran)].unbind(0):
            count += 1
            factor = 1 / int(count) if self._momentum is None else self._momentum
            mean.mul_(1 - factor).add_(own_mean, alpha=factor)
            var.mul_(1 - factor).add_(own_var, alpha=factor)

    def _buffers(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.layer.running_mean, self.layer.running_var, self.layer.num_batches_tracked
