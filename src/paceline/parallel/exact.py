"""Sums of gradients that do not depend on order: each micro-batch's gradient becomes 64-bit integers.

Floating-point addition depends on order, integer addition does not. The gradient of a micro-batch is
multiplied by a power of two, cut to a whole number and added up; the sum over micro-batches and ranks is
turned back into a float once. The scale of each parameter follows from the largest gradient of the step
before, with room for the number of micro-batches, so no partial sum can overflow; a micro-batch that is
larger than foreseen is detected by itself, on all ranks, and the step is done again with what was learnt.
All of this depends on gradients alone, never on the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from paceline.errors import ConfigError
from paceline.job.job import Job

_BITS = 62  # of a sum; one is the sign, one keeps a distance
_MARGIN = 8  # bits by which a gradient may outgrow the largest of the step before
_CHUNK = 1 << 15  # elements handled at once, so that what lies between stays in the cache
_UNKNOWN = -(2**30)  # no gradient was seen: the exponent of zero
_INFINITE = 2**30

# torch 2.13 renamed both.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ExactSum:
    """Adds up gradients of micro-batches over all ranks, exactly and in any order.

    Args:
        parameters: What has gradients; the same on all ranks.
        most_micro_batches: How many micro-batches a step may have, over all ranks.

    Memory: 8 bytes for each element of the parameters and one gradient, and 8 bytes more while ranks
    exchange.

    Collective: as the methods say.
    """

    def __init__(
        self, job: Job, parameters: Sequence[torch.Tensor], *, most_micro_batches: int
    ) -> None:
        self._job = job
        self._parameters = list(parameters)
        if any(not p.dtype.is_floating_point or p.is_sparse for p in self._parameters):
            raise ConfigError("reproducible training wants real, dense parameters.")
        # Shards of equal size for the exchange.
        elements = sum(p.numel() for p in self._parameters)
        self._shard = -(-elements // job.world_size)
        device, dtype = self._parameters[0].device, _widest(self._parameters)
        whole = self._shard * job.world_size
        self._sums = torch.zeros(whole, dtype=torch.int64, device=device)
        self._gradient = torch.empty(whole, dtype=dtype, device=device)
        self._floats = torch.empty(_CHUNK, dtype=torch.float64, device=device)
        self._integers = torch.empty(_CHUNK, dtype=torch.int64, device=device)
        self._room = math.ceil(math.log2(max(1, most_micro_batches)))
        self._fresh = [True] * len(self._parameters)
        self._seen = [_UNKNOWN] * len(self._parameters)
        self.exponents: list[int] | None = None

    def begin(self) -> None:
        """Forget what was added; a step, or its repetition, begins."""
        self._fresh = [True] * len(self._parameters)
        self._seen = [_UNKNOWN] * len(self._parameters)

    def add(self) -> None:
        """Add the gradients of one micro-batch, and take them away from the parameters."""
        gradients = [(i, p.grad) for i, p in enumerate(self._parameters) if p.grad is not None]
        largest = torch._foreach_norm([gradient for _, gradient in gradients], float("inf"))
        # One transfer for all, since a device would be waited for at each.
        for (i, _), value in zip(gradients, _to_list(largest), strict=True):
            self._seen[i] = max(self._seen[i], exponent_of(value))
        if self.exponents is not None:
            offset = 0
            for i, p in enumerate(self._parameters):
                if p.grad is not None:
                    scale = 2.0 ** self._shift(self.exponents[i])
                    self._add(p.grad.reshape(-1), offset, scale, first=self._fresh[i])
                    self._fresh[i] = False
                offset += p.numel()
        for i, _ in gradients:
            self._parameters[i].grad = None

    def _add(self, gradient: torch.Tensor, offset: int, scale: float, *, first: bool) -> None:
        for at in range(0, len(gradient), _CHUNK):
            part = gradient[at : at + _CHUNK]
            floats = self._floats[: len(part)]
            torch.mul(part, scale, out=floats)
            into = self._sums[offset + at : offset + at + len(part)]
            # A copy cuts towards zero, which is the same everywhere.
            if first:
                into.copy_(floats)
            else:
                into.add_(self._integers[: len(part)].copy_(floats))

    def _shift(self, exponent: int) -> int:
        # Within what a float64 can scale by.
        return max(-900, min(900, _BITS - self._room - exponent))

    def agree(self) -> bool:
        """Whether every micro-batch of all ranks fitted; if not, the step has to be done again.

        Collective: all ranks, once they have added all their micro-batches.
        """
        largest = torch.tensor(self._seen, dtype=torch.int64)
        if self._job.control is not None:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._job.control)
        self._seen = largest.tolist()
        fits = self.exponents is not None and all(
            seen <= allowed or seen == _INFINITE
            for seen, allowed in zip(self._seen, self.exponents, strict=True)
        )
        if not fits:
            self.exponents = foreseen(self._seen)
        return fits

    def finish(self) -> None:
        """Give each parameter the summed gradient, equal to the last bit on all ranks.

        Where one was NaN or infinite, all of it is NaN. Parameters that no micro-batch reached keep
        no gradient.

        Collective: all ranks, after `agree` has said yes.
        """
        assert self.exponents is not None
        job, size = self._job, self._shard
        offset = 0
        for p, fresh in zip(self._parameters, self._fresh, strict=True):
            if fresh:
                self._sums[offset : offset + p.numel()] = 0
            offset += p.numel()
        own = self._sums if job.group is None else self._exchanged()
        mine = self._gradient[job.rank * size : (job.rank + 1) * size]
        self._to_floats(own, mine, first=job.rank * size)
        if job.group is not None:
            _all_gather(self._gradient, mine.clone(), group=job.group)
        self._hand_out()
        self.exponents = foreseen(self._seen, self.exponents)

    def _exchanged(self) -> torch.Tensor:
        """The sums of all ranks over this rank's shard."""
        job, size = self._job, self._shard
        if self._sums.device.type != "cpu":
            own = torch.empty(size, dtype=torch.int64, device=self._sums.device)
            _reduce_scatter(own, self._sums, group=job.group)
            return own
        # Gloo's reduce-scatter sends everything to everyone; this sends each shard once.
        parts = torch.empty_like(self._sums)
        dist.all_to_all_single(parts, self._sums, group=job.group)
        shards = parts.view(job.world_size, size)
        for other in shards[1:]:
            shards[0].add_(other)
        return shards[0]

    def _to_floats(self, own: torch.Tensor, mine: torch.Tensor, *, first: int) -> None:
        """Turn the sums of a shard, which starts at element `first`, into gradients."""
        assert self.exponents is not None
        offset = 0
        for p, exponent in zip(self._parameters, self.exponents, strict=True):
            begin = max(offset, first) - first
            end = min(offset + p.numel(), first + len(mine)) - first
            scale = 2.0 ** -self._shift(exponent)
            for at in range(begin, end, _CHUNK):
                stop = min(at + _CHUNK, end)
                floats = self._floats[: stop - at]
                floats.copy_(own[at:stop])
                mine[at:stop].copy_(floats.mul_(scale))
            offset += p.numel()

    def _hand_out(self) -> None:
        offset = 0
        for p, seen in zip(self._parameters, self._seen, strict=True):
            if seen != _UNKNOWN:
                gradient = self._gradient[offset : offset + p.numel()].view_as(p).to(p.dtype)
                p.grad = gradient if seen != _INFINITE else torch.full_like(p, math.nan)
            offset += p.numel()


def exponent_of(value: float) -> int:
    """The least e with |value| < 2^e; a value for zero, and one for NaN and infinity."""
    if not math.isfinite(value):
        return _INFINITE
    return math.frexp(value)[1] if value else _UNKNOWN


def foreseen(seen: Sequence[int], before: Sequence[int] | None = None) -> list[int]:
    """Exponents for the next step: what was seen and a margin; what was not seen keeps its place."""
    kept = before or [0] * len(seen)
    return [
        old if now in (_UNKNOWN, _INFINITE) else now + _MARGIN
        for now, old in zip(seen, kept, strict=True)
    ]


def _to_list(values: Sequence[torch.Tensor]) -> list[float]:
    return torch.stack([value.double() for value in values]).tolist() if values else []


def _widest(parameters: Sequence[torch.Tensor]) -> torch.dtype:
    dtype = parameters[0].dtype
    for p in parameters:
        dtype = torch.promote_types(dtype, p.dtype)
    return dtype
