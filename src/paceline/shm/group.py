"""`shm`: the process group of the backend, and its registration with torch.

The collectives that training needs run in shared memory. Gloo does everything else, and sparse and CUDA
tensors and sums of bool: see `GroupOverGloo`.
"""

# mypy: disable-error-code="no-untyped-call"
# `Tensor.split` has no annotations.

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from paceline.log import logger
from paceline.machine import usable_cores
from paceline.shm.collectives import Collective, Collectives, can_reduce
from paceline.shm.group_over_gloo import GroupOverGloo, Plan, can_hold_gloo, make_gloo, native
from paceline.shm.segment import Segment, SharedMemoryUnavailable, open_segment
from paceline.shm.tensors import (
    Tensors,
    as_flat,
    check_pieces,
    check_whole,
    in_cpu_memory,
    is_flat,
    write_back,
)
from paceline.shm.work_queue import WorkQueue

NAME = "shm"


def register() -> None:
    """Register `backend="shm"` with torch.distributed in this process."""
    if not dist.is_backend_available(NAME):
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, _: Any) -> Any:
    """Called by torch. Makes a `ShmGroup`, or a Gloo group if the ranks cannot share memory."""
    store, rank, size = options.store, options.group_rank, options.group_size
    gloo = make_gloo(options)
    if size == 1 or not can_hold_gloo():
        return gloo
    try:
        segment = open_segment(dist.PrefixStore("shm", store), rank, size)
    except SharedMemoryUnavailable as error:
        if rank == 0:
            logger.warning("the ranks of a group cannot share memory, using Gloo: %s.", error)
        return gloo
    return ShmGroup(options, segment, gloo)


class ShmGroup(GroupOverGloo):
    """A process group of ranks that share memory.

    Attributes:
        queue: the unfinished collectives in shared memory.
    """

    queue: WorkQueue

    def __init__(self, options: Any, segment: Segment, gloo: dist.ProcessGroupGloo) -> None:
        super().__init__(options, gloo)
        spin = self._size <= usable_cores()
        self._collectives = Collectives(segment, spin=spin)
        ranks = list(options.global_ranks_in_group) or list(range(self._size))
        self.queue = WorkQueue(self._collectives, ranks, spin=spin)

    def getBackendName(self) -> str:
        return NAME

    def share_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Keep DDP's buckets of these parameters' gradients in shared memory from now on.

        All ranks of the group must call it, between the same operations. The next reduction makes numpy views
        of gradients invalid.
        """
        self._collectives.buckets.add_parameters(parameters)

    def shutdown(self) -> None:
        self.queue.close()
        self._gloo.shutdown()

    def abort(self) -> None:
        self.queue.close()
        self._gloo.abort()

    @native
    def allreduce(self, tensors: Any, opts: Any = None) -> Plan:
        op = int(opts.reduceOp.op)
        if not _reducible(tensors, op):
            return None
        buckets = self._collectives.buckets
        if len(tensors) == 1 and is_flat(tensors[0]):
            bucket_id = buckets.find(tensors[0])  # before `as_flat`, because it may move the tensor
            return self._collectives.all_reduce(as_flat(tensors[0]), op, bucket_id), tensors
        bucket_id = 0 if buckets.active else None

        def all_reduce() -> Collective:
            for tensor in tensors:
                flat = as_flat(tensor)
                yield from self._collectives.all_reduce(flat, op, bucket_id)
                write_back(flat, tensor)

        return all_reduce(), tensors

    @native
    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Plan:
        plan: Plan = ShmGroup.allreduce.plan(self, tensors, opts)
        return plan

    @native
    def broadcast(self, tensors: Any, opts: Any = None) -> Plan:
        if not in_cpu_memory(tensors):
            return None
        root = opts.rootRank

        def broadcast() -> Collective:
            for tensor in tensors:
                flat = as_flat(tensor)
                yield from self._collectives.broadcast(flat, root)
                if root != self._rank:
                    write_back(flat, tensor)

        return broadcast(), tensors

    @native
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Plan:
        if not in_cpu_memory([*inputs, *outputs[0]]):
            return None
        check_pieces(outputs[0], inputs[0], self._size)

        def all_gather() -> Collective:
            flats = [as_flat(tensor) for tensor in outputs[0]]
            yield from self._collectives.all_gather(as_flat(inputs[0]), flats)
            for flat, tensor in zip(flats, outputs[0], strict=True):
                write_back(flat, tensor)

        return all_gather(), outputs[0]

    @native
    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Plan:
        plan: Plan = ShmGroup.all_gather_single_coalesced.plan(self, [output], [input], opts)
        return plan

    @native
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Plan:
        if not in_cpu_memory([*outputs, *inputs]):
            return None
        for output, own in zip(outputs, inputs, strict=True):
            check_whole(output, own, self._size)

        def all_gather() -> Collective:
            for output, own in zip(outputs, inputs, strict=True):
                flat, own_flat = as_flat(output), as_flat(own)
                pieces = flat.split([len(own_flat)] * self._size)
                yield from self._collectives.all_gather(own_flat, pieces)
                write_back(flat, output)

        return all_gather(), outputs

    @native
    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Plan:
        plan: Plan = ShmGroup.reduce_scatter_single_coalesced.plan(self, [output], [input], opts)
        return plan

    @native
    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Plan:
        op = int(opts.reduceOp.op)
        if not _reducible([*outputs, *inputs], op):
            return None
        for output, whole in zip(outputs, inputs, strict=True):
            check_whole(whole, output, self._size)

        def reduce_scatter() -> Collective:
            for output, whole in zip(outputs, inputs, strict=True):
                flat = as_flat(output)
                pieces = as_flat(whole).split([len(flat)] * self._size)
                yield from self._collectives.reduce_scatter(pieces, flat, op)
                write_back(flat, output)

        return reduce_scatter(), outputs

    @native
    def barrier(self, opts: Any = None) -> Plan:
        return self._collectives.barrier(), []

    # Names in torch before 2.13, see `GroupOverGloo`.
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single


def _reducible(tensors: Tensors, op: int) -> bool:
    return in_cpu_memory(tensors) and all(can_reduce(op, t.dtype) for t in tensors)
