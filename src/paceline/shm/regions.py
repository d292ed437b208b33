"""Gradient buckets in memory that all ranks of a group have mapped: their sum needs no copy in or out.

A front to `UntypedStorage._share_fd_cpu_`, which `share_memory_()` calls: it moves a storage to shared
memory in place, so that DDP's bucket and all gradients that are views into it follow. The other ranks open
its descriptor through /proc. The memory is of /dev/shm, has no name there, and lives as long as a rank has it
mapped.
"""

# mypy: disable-error-code="no-untyped-call"
# It is torch's storages that have no types.

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from paceline.log import logger
from paceline.shm.segment import Segment

LEAST_BYTES = 64 << 10  # smaller tensors fit the slots at once, which needs a meeting less
_CHUNK_BYTES = 1 << 20  # of the sum, which stays in the cache until all ranks' parts have it
Parts = list[Sequence[torch.Tensor]]


@dataclass(frozen=True)
class _Own:
    """A storage of this rank in shared memory."""

    number: int  # never given again
    storage: StorageWeakRef
    descriptor: int


class Regions:
    """What this rank offers to the others, and what it has mapped of theirs.

    Attributes:
        active: whether gradients are to be shared; the same on all ranks.

    Collective: all ranks of the group, as `Rounds.all_reduce` does.
    """

    def __init__(self, segment: Segment) -> None:
        self.active = False
        self._segment = segment
        self._parameters: list[weakref.ref[torch.Tensor]] = []
        self._own: dict[int, _Own] = {}  # by the identity of the storage
        self._made = 0
        self._mapped: dict[tuple[tuple[int, ...], torch.dtype], Parts | None] = {}

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Share the storages that hold gradients of these parameters, when they are reduced."""
        self.active = True
        self._parameters = [p for p in self._parameters if p() is not None]
        self._parameters += [weakref.ref(p) for p in parameters]

    def offer(self, tensor: torch.Tensor) -> int | None:
        """The number of the region that is `tensor`; 0 if it is none, None where nothing is shared."""
        if not self.active:
            return None
        if tensor.nbytes < LEAST_BYTES:
            return 0
        self._forget()
        storage = tensor.untyped_storage()
        if storage.data_ptr() != tensor.data_ptr() or storage.nbytes() != tensor.nbytes:
            return 0
        own = self._own.get(storage._cdata) or self._share(storage)
        return own.number if own else 0

    def _share(self, storage: torch.UntypedStorage) -> _Own | None:
        gradients = (p.grad for p in (ref() for ref in self._parameters) if p is not None)
        identity = storage._cdata
        if not any(g is not None and g.untyped_storage()._cdata == identity for g in gradients):
            return None
        try:
            descriptor, _ = storage._share_fd_cpu_()
        except RuntimeError as error:
            self._parameters.clear()
            logger.warning(
                "gradients are copied to be summed, as /dev/shm has no room for %d bytes of them "
                "(in a container: --shm-size=...): %s",
                storage.nbytes(),
                str(error).partition("\n")[0],
            )
            return None
        self._made += 1
        own = self._own[identity] = _Own(self._made, StorageWeakRef(storage), descriptor)
        return own

    def _forget(self) -> None:
        """Let go of what was mapped for storages of this rank that have gone, as after a rebuild."""
        rank = self._segment.rank
        for identity, own in list(self._own.items()):
            if own.storage.expired():
                del self._own[identity]
                for key in [key for key in self._mapped if key[0][rank] == own.number]:
                    del self._mapped[key]

    def known(self, numbers: tuple[int, ...], dtype: torch.dtype) -> bool:
        """Whether these regions have met before; the same on all ranks."""
        return (numbers, dtype) in self._mapped

    def parts(self, numbers: tuple[int, ...], dtype: torch.dtype) -> Parts | None:
        """For each rank its memory of this rank's share, in chunks; None if a rank could not map it."""
        return self._mapped[numbers, dtype]

    def descriptor(self, number: int) -> int:
        """Under which descriptor the others find a region of this rank."""
        return next(own.descriptor for own in self._own.values() if own.number == number)

    def map(self, descriptors: Sequence[int], dtype: torch.dtype, count: int) -> Parts | None:
        """Map the regions of all ranks, each of `count` elements."""
        segment, width = self._segment, dtype.itemsize
        share = (-(-count // segment.size) + 15) & -16
        first, last = (min(count, r * share) for r in (segment.rank, segment.rank + 1))
        parts: Parts = []
        for rank, descriptor in enumerate(descriptors):
            try:
                found = os.open(f"/proc/{segment.pid(rank)}/fd/{descriptor}", os.O_RDWR)
                try:
                    memory = mmap.mmap(found, count * width)
                finally:
                    os.close(found)
            except (OSError, ValueError):
                return None
            whole = torch.frombuffer(memory, dtype=dtype, count=count)
            parts.append(whole[first:last].split(_CHUNK_BYTES // width))
        return parts

    def keep(self, numbers: tuple[int, ...], dtype: torch.dtype, parts: Parts | None) -> None:
        """Remember what all ranks could map, or that one could not."""
        self._mapped[numbers, dtype] = parts
