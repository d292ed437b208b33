"""`mpi`: MPI as a process group of torch, and its registration.

torch has a backend `mpi` of its own, which no wheel contains. This one is a process group in Python over
mpi4py, so it needs no build of torch. torch reserves the name, so it is registered as `mpi4py`.

The collectives of DDP, FSDP and evaluations go through MPI; Gloo does everything else, see `GroupOverGloo`.
Each method of `MpiGroup` checks its arguments and gives the queue a function. It starts the operation's MPI
requests, and returns a function that writes the results once they are finished (None: there is nothing to
write). See `mpi/work_queue.py` for how requests are completed.

Tensors that are only copied are sent as bytes. Sums of 16-bit floats are computed in float32 and rounded
once. CUDA tensors are copied through host memory.
"""

# mypy: disable-error-code="no-untyped-call,override,assignment"
# `Tensor.split` has no annotations. Methods of torch's stubs also have short forms without options.

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from paceline.mpi import world
from paceline.mpi.work_queue import RequestQueue, Work, WriteResults
from paceline.shm.group_over_gloo import GroupOverGloo, Plan, can_hold_gloo, make_gloo, native
from paceline.shm.tensors import Tensors, as_flat, check_pieces, check_whole, write_back

NAME = "mpi4py"

_OPS = {"SUM": "SUM", "AVG": "SUM", "PRODUCT": "PROD", "MIN": "MIN", "MAX": "MAX"}
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


def register() -> None:
    """Register `backend="mpi4py"` with torch.distributed in this process."""
    if not dist.is_backend_available(NAME):
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, _: Any) -> Any:
    """Called by torch in each member of a group. Makes a `MpiGroup`, or a Gloo group of one rank."""
    gloo = make_gloo(options)
    if options.group_size == 1 or not can_hold_gloo():
        return gloo
    store = dist.PrefixStore("mpi", options.store)
    communicator = world.open_communicator(store, options.group_rank, options.group_size)
    return MpiGroup(options, communicator, store, gloo)


class MpiGroup(GroupOverGloo):
    """A process group over a communicator of MPI.

    Attributes:
        queue: the unfinished operations of MPI.
    """

    queue: RequestQueue

    def __init__(
        self, options: Any, communicator: Any, store: dist.Store, gloo: dist.ProcessGroupGloo
    ) -> None:
        super().__init__(options, gloo)
        self._mpi, self._communicator = world.library(), communicator
        ranks = list(options.global_ranks_in_group) or list(range(self._size))
        self.queue = RequestQueue(store, self._rank, ranks)

    def getBackendName(self) -> str:
        return NAME

    def shutdown(self) -> None:
        if self.queue.close() and not self._mpi.Is_finalized():
            self._communicator.Free()
        self._gloo.shutdown()

    def abort(self) -> None:
        self.queue.close("its job failed, or the program aborted the group.")
        self._gloo.abort()

    @native
    def allreduce(self, tensors: Any, opts: Any = None) -> Plan:
        if not _can_reduce(tensors, opts):
            return None
        op, write = self._reduction(opts)

        def all_reduce(work: Work) -> WriteResults:
            buffers = [_as_numbers(tensor) for tensor in tensors]
            for buffer in buffers:
                work.requests.append(
                    self._communicator.Iallreduce(self._mpi.IN_PLACE, work.numbers(buffer), op)
                )
            return partial(write, buffers, tensors)

        return all_reduce, tensors

    @native
    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Plan:
        plan: Plan = MpiGroup.allreduce.plan(self, tensors, opts)
        return plan

    @native
    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Plan:
        plan: Plan = MpiGroup.reduce_scatter_single_coalesced.plan(self, [output], [input], opts)
        return plan

    @native
    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Plan:
        if not _can_reduce([*outputs, *inputs], opts):
            return None
        for output, whole in zip(outputs, inputs, strict=True):
            check_whole(whole, output, self._size)
        op, write = self._reduction(opts)

        def reduce_scatter(work: Work) -> WriteResults:
            pieces = []
            for whole in map(_as_numbers, inputs):
                piece = whole.new_empty(len(whole) // self._size)
                pieces.append(piece)
                work.requests.append(
                    self._communicator.Ireduce_scatter_block(
                        work.numbers(whole), work.numbers(piece), op
                    )
                )
            return partial(write, pieces, outputs)

        return reduce_scatter, outputs

    @native
    def broadcast(self, tensors: Any, opts: Any = None) -> Plan:
        if not _can_copy(tensors):
            return None

        def broadcast(work: Work) -> WriteResults:
            flats = [_on_host(tensor) for tensor in tensors]
            for flat in flats:
                work.requests.append(self._communicator.Ibcast(work.bytes(flat), opts.rootRank))
            return partial(_write, flats, tensors) if opts.rootRank != self._rank else None

        return broadcast, tensors

    @native
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Plan:
        if not _can_copy([*inputs, *outputs[0]]):
            return None
        check_pieces(outputs[0], inputs[0], self._size)

        def all_gather(work: Work) -> WriteResults:
            own = _on_host(inputs[0])
            whole = own.new_empty(self._size * len(own))
            work.requests.append(self._communicator.Iallgather(work.bytes(own), work.bytes(whole)))
            return partial(_write, whole.split([len(own)] * self._size), outputs[0])

        return all_gather, outputs[0]

    @native
    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Plan:
        plan: Plan = MpiGroup.all_gather_single_coalesced.plan(self, [output], [input], opts)
        return plan

    @native
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Plan:
        if not _can_copy([*outputs, *inputs]):
            return None
        for output, own in zip(outputs, inputs, strict=True):
            check_whole(output, own, self._size)

        def all_gather(work: Work) -> WriteResults:
            flats = [_on_host(output) for output in outputs]
            for flat, own in zip(flats, inputs, strict=True):
                # A rank's input may be its part of the output, which MPI does not allow.
                given = _on_host(own).clone()
                work.requests.append(
                    self._communicator.Iallgather(work.bytes(given), work.bytes(flat))
                )
            return partial(_write, flats, outputs)

        return all_gather, outputs

    @native
    def barrier(self, opts: Any = None) -> Plan:
        def barrier(work: Work) -> None:
            work.requests.append(self._communicator.Ibarrier())

        return barrier, []

    # Names in torch before 2.13, see `GroupOverGloo`.
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    def _reduction(self, opts: Any) -> tuple[Any, Any]:
        """MPI's operation, and the function that writes its results, or the means, to the tensors."""
        name = opts.reduceOp.op.name

        def write(buffers: Tensors, tensors: Tensors) -> None:
            for buffer in buffers if name == "AVG" else ():
                buffer.div_(self._size)
            _write(buffers, tensors)

        return getattr(self._mpi, _OPS[name]), write


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor in host memory, as one dimension: the tensor's own memory if possible."""
    return as_flat(tensor).cpu()


def _as_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor in host memory, in a dtype that MPI can reduce."""
    flat = _on_host(tensor)
    return flat.float() if flat.dtype in (torch.float16, torch.bfloat16) else flat


def _write(flats: Iterable[torch.Tensor], tensors: Tensors) -> None:
    """Copy elements to tensors whose memory MPI has not written itself."""
    for flat, tensor in zip(flats, tensors, strict=True):
        write_back(flat, tensor)


def _can_copy(tensors: Tensors) -> bool:
    return all(t.layout == torch.strided and not t.is_quantized for t in tensors)


def _can_reduce(tensors: Tensors, opts: Any) -> bool:
    name = opts.reduceOp.op.name
    dtypes = _FLOATS if name == "AVG" else (*_FLOATS, *_INTEGERS)
    return name in _OPS and _can_copy(tensors) and all(t.dtype in dtypes for t in tensors)
