"""Small samples of tensors in memory, gathered for several steps by one call.

A gather of a few rows costs its call and cold caches, not its bytes. What torch has written over since
is not handed out; writes through `.numpy()` or `.data` leave no trace.
"""

from __future__ import annotations

from itertools import accumulate

import torch

from paceline.data.samples import Samples

# Gathered at once: it waits in a cache, and is all that a kept batch can hold on to.
_BYTES = 1 << 18
_ALIGNED = 64  # bytes; kernels may round otherwise where memory lies otherwise


class Ahead:
    """The micro-batches of coming steps, gathered group by group.

    Args:
        ids: Sample ids (int64), step after step.
        counts: How many each step has; equal but for the last.
        group: Steps to gather at once.
    """

    def __init__(
        self, samples: Samples, ids: torch.Tensor, counts: list[int], micro_batch: int, group: int
    ) -> None:
        self._samples = samples
        self._tensors = samples.tensors or ()
        self._ids = ids
        self._counts = counts
        self._micro_batch = micro_batch
        self._group = group
        self._stop = 0  # the place after the last that was gathered
        # By the place of their first sample.
        self._batches: dict[int, tuple[torch.Tensor, ...]] = {}
        self._versions: list[int] = []

    def batch(self, begin: int) -> list[torch.Tensor] | None:
        """The micro-batch from place `begin` of the ids; None if the dataset was written to since."""
        if begin >= self._stop:
            self._gather(begin)
        if [tensor._version for tensor in self._tensors] != self._versions:
            return None
        return list(self._batches[begin])

    def _gather(self, begin: int) -> None:
        step, most = begin // self._counts[0], self._micro_batch
        counts = self._counts[step : step + self._group]
        self._stop = begin + sum(counts)
        sizes = [min(most, count - at) for count in counts for at in range(0, count, most)]
        whole = self._samples.read(0, 0, self._ids[begin : self._stop])
        # Plain views share a version: to write into one would spoil graphs that hold another.
        pieces = [torch.unsafe_split_with_sizes(tensor, sizes) for tensor in whole]
        begins = accumulate(sizes[:-1], initial=begin)
        self._batches = dict(zip(begins, zip(*pieces, strict=True), strict=True))
        self._versions = [tensor._version for tensor in self._tensors]


def ahead(samples: Samples, ids: torch.Tensor, counts: list[int], micro_batch: int) -> Ahead | None:
    """The coming steps' micro-batches, where to gather them together is right and gains something."""
    tensors, count = samples.tensors, counts[0]
    if tensors is None or count == 0 or len(counts) == 1:
        return None
    group = _BYTES // max(1, count * sum(map(_row_bytes, tensors)))
    size = min(count, micro_batch)
    if group < 2 or not all(_can_wait(tensor, count, size) for tensor in tensors):
        return None
    return Ahead(samples, ids, counts, micro_batch, group)


def _can_wait(tensor: torch.Tensor, count: int, micro_batch: int) -> bool:
    """Whether torch's writes to it are seen, and each micro-batch would lie as if gathered alone."""
    row, storage = _row_bytes(tensor), tensor.untyped_storage()
    return (
        # Memory of numpy's or of other processes is written to without a trace.
        storage.resizable()
        and not storage.is_shared()
        and not tensor.requires_grad
        and not tensor.is_inference()
        and count * row % _ALIGNED == 0
        and micro_batch * row % _ALIGNED == 0
    )


def _row_bytes(tensor: torch.Tensor) -> int:
    return tensor.nbytes // len(tensor)
