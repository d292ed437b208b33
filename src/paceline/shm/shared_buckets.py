"""Gradient buckets in memory that all ranks of a group have mapped, so gradients are not copied to be summed.

`UntypedStorage._share_fd_cpu_`, which `share_memory_()` calls, moves a storage to shared memory in place, so
DDP's bucket and the gradients that are views of it use the new memory. The other ranks open its file
descriptor through /proc. The memory counts as use of /dev/shm. It has no name there and is freed with its
last mapping.
"""

# mypy: disable-error-code="no-untyped-call"
# torch's storages have no annotations.

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from paceline import torch_private
from paceline.log import logger
from paceline.shm.segment import Segment, open_unlinked

MIN_BYTES = 64 << 10  # smaller tensors go through the slots, which needs one synchronization fewer
# Reduced at once: the sum stays in the cache until it is written to all buckets.
_CHUNK_BYTES = 1 << 20
Parts = list[Sequence[torch.Tensor]]


@dataclass(frozen=True)
class _OwnBucket:
    id: int  # never reused
    storage: StorageWeakRef
    address: int
    descriptor: int


class SharedBuckets:
    """The shared buckets of this rank, and the mapped buckets of the other ranks.

    Attributes:
        active: whether `add_parameters` was called; the same on all ranks.
    """

    def __init__(self, segment: Segment) -> None:
        self.active = False
        self._segment = segment
        # `find` runs in the thread that issues a collective, the other methods in the thread that runs it.
        self._lock = threading.Lock()
        self._parameters: list[weakref.ref[torch.Tensor]] = []
        self._own: dict[int, _OwnBucket] = {}  # by the address of the storage object
        self._last_id = 0
        self._mapped: dict[tuple[tuple[int, ...], torch.dtype], Parts | None] = {}

    def add_parameters(self, parameters: Iterable[torch.Tensor]) -> None:
        """Move the storages of these parameters' gradients to shared memory at their next reduction."""
        self.active = True
        self._parameters = [p for p in self._parameters if p() is not None]
        self._parameters += [weakref.ref(p) for p in parameters]

    def find(self, tensor: torch.Tensor) -> int | None:
        """The id of this shared bucket; 0 if `tensor` is not one, None if this group shares no buckets.

        Moves the bucket to shared memory if it is reduced for the first time.
        """
        if not self.active:
            return None
        if tensor.nbytes < MIN_BYTES:
            return 0
        storage = tensor.untyped_storage()
        with self._lock:
            self._forget_freed()
            if storage.data_ptr() != tensor.data_ptr() or storage.nbytes() != tensor.nbytes:
                return 0
            reference = StorageWeakRef(storage)
            own = self._own.get(reference.cdata) or self._share(storage, reference)
            return own.id if own and own.address == storage.data_ptr() else 0

    def _share(self, storage: torch.UntypedStorage, reference: StorageWeakRef) -> _OwnBucket | None:
        gradients = (p.grad for p in (ref() for ref in self._parameters) if p is not None)
        address = storage.data_ptr()
        if not any(g is not None and _address(g) == address for g in gradients):
            return None
        share = torch_private.find("torch.UntypedStorage._share_fd_cpu_")
        if share is None:
            self._parameters.clear()
            return None
        try:
            descriptor, _ = share(storage)
        except RuntimeError as error:
            self._parameters.clear()
            logger.warning(
                "/dev/shm has no room for %d bytes of gradients, so gradients are copied to be summed, "
                "which is slower (in a container, start it with a larger --shm-size): %s",
                storage.nbytes(),
                str(error).partition("\n")[0],
            )
            return None
        self._last_id += 1
        own = _OwnBucket(self._last_id, reference, storage.data_ptr(), descriptor)
        self._own[reference.cdata] = own
        return own

    def _forget_freed(self) -> None:
        """Unmap the buckets whose storage on this rank was freed, as after DDP rebuilt its buckets."""
        rank = self._segment.rank
        for identity, own in list(self._own.items()):
            if own.storage.expired():
                del self._own[identity]
                for key in [key for key in self._mapped if key[0][rank] == own.id]:
                    del self._mapped[key]

    def is_known(self, ids: tuple[int, ...], dtype: torch.dtype) -> bool:
        """Whether these buckets have been mapped, or could not be mapped; the same on all ranks."""
        with self._lock:
            return (ids, dtype) in self._mapped

    def parts(self, ids: tuple[int, ...], dtype: torch.dtype) -> Parts | None:
        """This rank's share of each rank's bucket, in chunks; None if any rank could not map one."""
        with self._lock:
            return self._mapped[ids, dtype]

    def descriptor(self, bucket_id: int) -> int:
        """The file descriptor of a bucket of this rank."""
        with self._lock:
            return next(own.descriptor for own in self._own.values() if own.id == bucket_id)

    def map_buckets(
        self, descriptors: Sequence[int], dtype: torch.dtype, count: int
    ) -> Parts | None:
        """Map the buckets of all ranks, each of `count` elements; None if this rank cannot."""
        segment, width = self._segment, dtype.itemsize
        share = (-(-count // segment.size) + 15) & -16
        first, last = (min(count, r * share) for r in (segment.rank, segment.rank + 1))
        parts: Parts = []
        for rank, descriptor in enumerate(descriptors):
            try:
                found = open_unlinked(segment.pid(rank), descriptor)
                try:
                    memory = mmap.mmap(found, count * width)
                finally:
                    os.close(found)
            except (OSError, ValueError):
                return None
            whole = torch.frombuffer(memory, dtype=dtype, count=count)
            parts.append(whole[first:last].split(_CHUNK_BYTES // width))
        return parts

    def keep(self, ids: tuple[int, ...], dtype: torch.dtype, parts: Parts | None) -> None:
        """Keep the mapped parts; None if a rank could not map a bucket."""
        with self._lock:
            self._mapped[ids, dtype] = parts


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
