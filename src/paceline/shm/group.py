"""`shm`: the process group of the backend, and its registration with torch.

A process group in Python (see torch's `PyProcessGroup.hpp`). The collectives that training needs run in
shared memory. Each group also has a Gloo group for everything else: reduce, gather, scatter, all-to-all,
send, receive; sparse and CUDA tensors; sums of bool. The choice depends only on the operation, the device,
the layout and the dtype, so all ranks make the same choice.
"""

# mypy: disable-error-code="no-untyped-call"
# `Tensor.split` has no annotations.

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline import torch_private
from paceline.log import logger
from paceline.machine import usable_cores
from paceline.shm.collectives import Collective, Collectives, can_reduce
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
_GLOO = dist.ProcessGroup.BackendType.GLOO
_CLASS = "torch.distributed.ProcessGroup"
_SET_DEFAULT, _REGISTER = f"{_CLASS}._set_default_backend", f"{_CLASS}._register_backend"
_SET_SEQUENCE_NUMBER = "torch.distributed.ProcessGroupGloo._set_sequence_number_for_group"
# Names in torch before 2.13. The private ones are also in `torch_private.NAMES`.
_OLD_NAMES = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}
_Plan = tuple[Collective, Tensors] | None  # a collective and its outputs; None for Gloo


def register() -> None:
    """Register `backend="shm"` with torch.distributed in this process."""
    if not dist.is_backend_available(NAME):
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, _: Any) -> Any:
    """Called by torch. Makes a `ShmGroup`, or a Gloo group if the ranks cannot share memory."""
    store, rank, size = options.store, options.group_rank, options.group_size
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, options.timeout)
    if set_sequence_number := torch_private.find(_SET_SEQUENCE_NUMBER):
        set_sequence_number(gloo)
    if size == 1 or None in map(torch_private.find, (_SET_DEFAULT, _REGISTER)):
        return gloo
    try:
        segment = open_segment(dist.PrefixStore("shm", store), rank, size, options.timeout)
    except SharedMemoryUnavailable as error:
        if rank == 0:
            logger.warning("the ranks of a group cannot share memory, using Gloo: %s.", error)
        return gloo
    return ShmGroup(options, segment, gloo)


def _in_memory(plan: Callable[..., _Plan]) -> Any:
    """Make an operation of the group from a method that plans it.

    The method returns the collective to run and its outputs, or None if Gloo must do the call. Gloo also does
    calls in torch's short forms without options, such as `group.allreduce(tensor)`.
    """
    name = plan.__name__

    @functools.wraps(plan)
    def operation(self: ShmGroup, *args: Any, **options: Any) -> Any:
        opts: Any = options.get("opts") or (args[-1] if args else None)
        planned = plan(self, *args, **options) if hasattr(opts, "asyncOp") else None
        if planned is None:
            return self._gloo_operation(name)(*args, **options)
        collective, outputs = planned
        timeout_s = opts.timeout.total_seconds()
        return self.queue.submit(
            collective,
            outputs,
            timeout_s if timeout_s > 0 else self._timeout_s,
            blocking=not opts.asyncOp,
        )

    operation.plan = plan  # type: ignore[attr-defined]
    return operation


class ShmGroup(dist.ProcessGroup):
    """A process group of ranks that share memory. All its ranks call all operations in the same order.

    Attributes:
        queue: the unfinished collectives in shared memory.
    """

    def __init__(self, options: Any, segment: Segment, gloo: dist.ProcessGroupGloo) -> None:
        self._rank, self._size = options.group_rank, options.group_size
        super().__init__(self._rank, self._size)  # type: ignore[call-arg] # the constructor for subclasses
        # Gloo's operations are called through another object: those of `self` would call the methods below.
        self._gloo = dist.ProcessGroup(options.store, self._rank, self._size)
        set_default: Any = torch_private.find(_SET_DEFAULT)  # `_create` has found both
        register_backend: Any = torch_private.find(_REGISTER)
        for group in (self, self._gloo):
            set_default(group, _GLOO)
            for device in ("cpu", "cuda"):
                register_backend(group, torch.device(device), _GLOO, gloo)
        self._timeout_s = options.timeout.total_seconds()
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

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)
        self._timeout_s = timeout.total_seconds()

    def shutdown(self) -> None:
        self.queue.close()
        self._gloo.shutdown()

    def abort(self) -> None:
        self.queue.close()
        self._gloo.abort()

    def _gloo_operation(self, name: str) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(self._gloo, name, None) or getattr(
            self._gloo, _OLD_NAMES[name]
        )
        return found

    @_in_memory
    def allreduce(self, tensors: Any, opts: Any = None) -> _Plan:
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

    @_in_memory
    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> _Plan:
        plan: _Plan = ShmGroup.allreduce.plan(self, tensors, opts)
        return plan

    @_in_memory
    def broadcast(self, tensors: Any, opts: Any = None) -> _Plan:
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

    @_in_memory
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> _Plan:
        if not in_cpu_memory([*inputs, *outputs[0]]):
            return None
        check_pieces(outputs[0], inputs[0], self._size)

        def all_gather() -> Collective:
            flats = [as_flat(tensor) for tensor in outputs[0]]
            yield from self._collectives.all_gather(as_flat(inputs[0]), flats)
            for flat, tensor in zip(flats, outputs[0], strict=True):
                write_back(flat, tensor)

        return all_gather(), outputs[0]

    @_in_memory
    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> _Plan:
        plan: _Plan = ShmGroup.all_gather_single_coalesced.plan(self, [output], [input], opts)
        return plan

    @_in_memory
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> _Plan:
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

    @_in_memory
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> _Plan:
        op = int(opts.reduceOp.op)
        if not _reducible([*outputs, *inputs[0]], op):
            return None
        if len({piece.numel() for piece in inputs[0]}) > 1:
            return None
        check_pieces(inputs[0], outputs[0], self._size)

        def reduce_scatter() -> Collective:
            flat, pieces = as_flat(outputs[0]), [as_flat(piece) for piece in inputs[0]]
            yield from self._collectives.reduce_scatter(pieces, flat, op)
            write_back(flat, outputs[0])

        return reduce_scatter(), outputs

    @_in_memory
    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> _Plan:
        plan: _Plan = ShmGroup.reduce_scatter_single_coalesced.plan(self, [output], [input], opts)
        return plan

    @_in_memory
    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> _Plan:
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

    @_in_memory
    def barrier(self, opts: Any = None) -> _Plan:
        return self._collectives.barrier(), []

    # Gloo runs the following. It would not notice that the ranks call different collectives.

    @_in_memory
    def reduce(self, tensors: Any, opts: Any = None) -> _Plan:
        self._compare("reduce", tensors[0], opts, int(opts.reduceOp.op), opts.rootRank)
        return None

    @_in_memory
    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> _Plan:
        self._compare("gather", inputs[0], opts, root=opts.rootRank)
        return None

    @_in_memory
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> _Plan:
        self._compare("scatter", outputs[0], opts, root=opts.rootRank)
        return None

    @_in_memory
    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> _Plan:
        self._compare("all_to_all", outputs[0], opts)
        return None

    @_in_memory
    def all_to_all_single(self, output: Any, *args: Any) -> _Plan:
        self._compare("all_to_all", output, args[-1])
        return None

    def _compare(
        self, kind: str, own: torch.Tensor, opts: Any, op: int = 0, root: int = -1
    ) -> None:
        """Raise RankDisagreement on all ranks if they call different collectives."""
        count = 0 if kind == "all_to_all" else own.numel()
        collective = self._collectives.compare(kind, own.dtype, count, op=op, root=root)
        self.queue.submit(collective, [], self._timeout_s, blocking=not opts.asyncOp)

    # C++ callers (functional collectives, DTensor) look up these operations by the old or the new name. If
    # they find neither, torch runs Gloo's operation while it holds the interpreter lock, which can deadlock
    # with a thread of Gloo.
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single


def _reducible(tensors: Tensors, op: int) -> bool:
    return in_cpu_memory(tensors) and all(can_reduce(op, t.dtype) for t in tensors)
