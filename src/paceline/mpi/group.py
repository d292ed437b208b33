"""`mpi`: MPI as a process group of torch, and its registration.

torch has a backend `mpi` of its own, which no wheel contains. This one is a process group in Python over
mpi4py, so it needs no build of torch. torch reserves the name, so it is registered as `mpi4py`.

Tensors that are only copied are sent as bytes. Sums of 16-bit floats are computed in float32 and rounded
once. CUDA tensors are copied through host memory.
"""

# mypy: disable-error-code="no-untyped-call"
# `Tensor.split` has no annotations.

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline.mpi import world
from paceline.mpi.work_queue import Operation, RequestQueue, Work
from paceline.shm.tensors import Tensors, as_flat, check_pieces, check_whole, write_back

NAME = "mpi4py"
_Plan = tuple[Operation, Tensors]

_OPS = {
    "SUM": "SUM",
    "AVG": "SUM",
    "PRODUCT": "PROD",
    "MIN": "MIN",
    "MAX": "MAX",
    "BAND": "BAND",
    "BOR": "BOR",
    "BXOR": "BXOR",
}
_OP_NAMES = {int(getattr(dist.ReduceOp, name)): name for name in _OPS}
_BITWISE = ("BAND", "BOR", "BXOR")
_WIDENED = (torch.float16, torch.bfloat16)  # MPI has no such types
# The values are 0 and 1, for which these are the sum, the product and so on; MPI.SUM would give 2.
_BOOL_OPS = {
    "SUM": "MAX",
    "MAX": "MAX",
    "BOR": "MAX",
    "PRODUCT": "MIN",
    "MIN": "MIN",
    "BAND": "MIN",
}
_BOOL_OPS["BXOR"] = "BXOR"
_TYPES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.uint8: "UINT8_T",
    torch.uint16: "UINT16_T",
    torch.uint32: "UINT32_T",
    torch.uint64: "UINT64_T",
    torch.bool: "UINT8_T",
}


def register() -> None:
    """Register `backend="mpi4py"` with torch.distributed in this process."""
    if not dist.is_backend_available(NAME):
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, _: Any) -> MpiGroup:
    """Called by torch in each member of a group."""
    store = dist.PrefixStore("mpi", options.store)
    communicator = world.open_communicator(
        store, options.group_rank, options.group_size, options.timeout
    )
    return MpiGroup(options, communicator, store)


def _operation(plan: Callable[..., _Plan]) -> Any:
    """Make an operation of the group from a method that returns its generator and its outputs."""

    @functools.wraps(plan)
    def operation(self: MpiGroup, *args: Any, **options: Any) -> Any:
        opts: Any = options.get("opts") or (args[-1] if args else None)
        planned, outputs = plan(self, *args, **options)
        timeout_s = opts.timeout.total_seconds() if hasattr(opts, "timeout") else 0
        return self.queue.submit(
            planned,
            outputs,
            timeout_s if timeout_s > 0 else self._timeout_s,
            blocking=not getattr(opts, "asyncOp", True),
        )

    operation.plan = plan  # type: ignore[attr-defined]
    return operation


class MpiGroup(dist.ProcessGroup):
    """A process group over a communicator of MPI. All its ranks call all collectives in the same order.

    Attributes:
        queue: the unfinished operations.
    """

    def __init__(self, options: Any, communicator: Any, store: dist.Store) -> None:
        self._rank, self._size = options.group_rank, options.group_size
        super().__init__(self._rank, self._size)  # type: ignore[call-arg] # the constructor for subclasses
        self._name, self._description = str(options.group_id), ""
        self._timeout_s = options.timeout.total_seconds()
        self._mpi, self._communicator = world.library(), communicator
        self._max_tag = communicator.Get_attr(self._mpi.TAG_UB)
        ranks = list(options.global_ranks_in_group) or list(range(self._size))
        self.queue = RequestQueue(store, self._rank, ranks)

    def getBackendName(self) -> str:
        return NAME

    # torch keeps the name and the description of a group in its C++ backends, of which this group has none.

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)
        self._timeout_s = timeout.total_seconds()

    def shutdown(self) -> None:
        if self.queue.close() and not self._mpi.Is_finalized():
            self._communicator.Free()

    def abort(self) -> None:
        self.queue.close("its job failed, or the program aborted the group.")

    @_operation
    def allreduce(self, tensors: Any, opts: Any = None) -> _Plan:
        reduction = self._reduction(tensors, opts)

        def all_reduce() -> Operation:
            buffers = [reduction.buffer(tensor) for tensor in tensors]
            requests = [
                self._communicator.Iallreduce(
                    self._mpi.IN_PLACE, reduction.of(buffer), reduction.op
                )
                for buffer in buffers
            ]
            yield from _finished(requests)
            for buffer, tensor in zip(buffers, tensors, strict=True):
                reduction.finish(buffer, tensor)

        return all_reduce(), tensors

    @_operation
    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> _Plan:
        plan: _Plan = MpiGroup.allreduce.plan(self, tensors, opts)
        return plan

    @_operation
    def reduce(self, tensors: Any, opts: Any = None) -> _Plan:
        reduction, root = self._reduction(tensors, opts), opts.rootRank

        def reduce() -> Operation:
            buffers = [reduction.buffer(tensor) for tensor in tensors]
            requests = [
                self._communicator.Ireduce(
                    self._mpi.IN_PLACE if root == self._rank else reduction.of(buffer),
                    reduction.of(buffer) if root == self._rank else None,
                    reduction.op,
                    root,
                )
                for buffer in buffers
            ]
            yield from _finished(requests)
            if root == self._rank:
                for buffer, tensor in zip(buffers, tensors, strict=True):
                    reduction.finish(buffer, tensor)

        return reduce(), tensors

    @_operation
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> _Plan:
        reduction = self._reduction([*outputs, *inputs[0]], opts)
        if len(inputs[0]) != self._size:
            check_pieces(inputs[0], outputs[0], self._size)
        counts = [piece.numel() for piece in inputs[0]]

        def reduce_scatter() -> Operation:
            whole = torch.cat([reduction.buffer(piece) for piece in inputs[0]])
            output = whole.new_empty(outputs[0].numel())
            request = self._communicator.Ireduce_scatter(
                reduction.of(whole), reduction.of(output), counts, reduction.op
            )
            yield from _finished([request])
            reduction.finish(output, outputs[0])

        return reduce_scatter(), outputs

    @_operation
    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> _Plan:
        plan: _Plan = MpiGroup.reduce_scatter_single_coalesced.plan(self, [output], [input], opts)
        return plan

    @_operation
    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> _Plan:
        reduction = self._reduction([*outputs, *inputs], opts)
        for output, whole in zip(outputs, inputs, strict=True):
            check_whole(whole, output, self._size)

        def reduce_scatter() -> Operation:
            wholes = [reduction.buffer(whole) for whole in inputs]
            pieces = [whole.new_empty(len(whole) // self._size) for whole in wholes]
            requests = [
                self._communicator.Ireduce_scatter_block(
                    reduction.of(whole), reduction.of(piece), reduction.op
                )
                for whole, piece in zip(wholes, pieces, strict=True)
            ]
            yield from _finished(requests)
            for piece, output in zip(pieces, outputs, strict=True):
                reduction.finish(piece, output)

        return reduce_scatter(), outputs

    @_operation
    def broadcast(self, tensors: Any, opts: Any = None) -> _Plan:
        _refuse_unsupported(tensors)
        root = opts.rootRank if opts is not None else 0

        def broadcast() -> Operation:
            flats = [_on_host(tensor) for tensor in tensors]
            yield from _finished([self._communicator.Ibcast(self._bytes(f), root) for f in flats])
            if root != self._rank:
                for flat, tensor in zip(flats, tensors, strict=True):
                    write_back(flat, tensor)

        return broadcast(), tensors

    @_operation
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> _Plan:
        _refuse_unsupported([*inputs, *outputs[0]])
        check_pieces(outputs[0], inputs[0], self._size)

        def all_gather() -> Operation:
            own = _on_host(inputs[0])
            whole = own.new_empty(self._size * len(own))
            yield from _finished([self._communicator.Iallgather(*map(self._bytes, (own, whole)))])
            for piece, output in zip(
                whole.chunk(self._size) if len(own) else (), outputs[0], strict=False
            ):
                write_back(piece, output)

        return all_gather(), outputs[0]

    @_operation
    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> _Plan:
        plan: _Plan = MpiGroup.all_gather_single_coalesced.plan(self, [output], [input], opts)
        return plan

    @_operation
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> _Plan:
        _refuse_unsupported([*outputs, *inputs])
        for output, own in zip(outputs, inputs, strict=True):
            check_whole(output, own, self._size)

        def all_gather() -> Operation:
            flats = [_on_host(output) for output in outputs]
            # A rank's input may be its part of the output, which MPI does not allow.
            owns = [_on_host(own).clone() for own in inputs]
            requests = [
                self._communicator.Iallgather(self._bytes(own), self._bytes(flat))
                for own, flat in zip(owns, flats, strict=True)
            ]
            yield from _finished(requests)
            for flat, output in zip(flats, outputs, strict=True):
                write_back(flat, output)

        return all_gather(), outputs

    @_operation
    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> _Plan:
        root = opts.rootRank
        targets = outputs[0] if root == self._rank else []
        _refuse_unsupported([*inputs, *targets])
        if root == self._rank:
            check_pieces(targets, inputs[0], self._size)

        def gather() -> Operation:
            own = _on_host(inputs[0])
            whole = own.new_empty(len(targets) * len(own))
            request = self._communicator.Igather(
                self._bytes(own), self._bytes(whole) if root == self._rank else None, root
            )
            yield from _finished([request])
            for number, output in enumerate(targets):
                write_back(whole[number * len(own) : (number + 1) * len(own)], output)

        return gather(), targets

    @_operation
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> _Plan:
        root = opts.rootRank
        sources = inputs[0] if root == self._rank else []
        _refuse_unsupported([*outputs, *sources])
        if root == self._rank:
            check_pieces(sources, outputs[0], self._size)

        def scatter() -> Operation:
            own = _on_host(outputs[0])
            whole = torch.cat([_on_host(source) for source in sources]) if sources else None
            request = self._communicator.Iscatter(
                None if whole is None else self._bytes(whole), self._bytes(own), root
            )
            yield from _finished([request])
            write_back(own, outputs[0])

        return scatter(), outputs

    @_operation
    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> _Plan:
        _refuse_unsupported([*outputs, *inputs])
        for tensors in (outputs, inputs):
            if len(tensors) != self._size:
                raise ValueError(f"got {len(tensors)} tensors for {self._size} ranks.")

        def all_to_all() -> Operation:
            given = [_on_host(tensor) for tensor in inputs]
            whole = torch.cat(given)
            taken = whole.new_empty(sum(output.numel() for output in outputs))
            counts = [output.numel() for output in outputs]
            yield from self._exchange(whole, [len(g) for g in given], taken, counts)
            for piece, output in zip(taken.split(counts), outputs, strict=True):
                write_back(piece, output)

        return all_to_all(), outputs

    @_operation
    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> _Plan:
        _refuse_unsupported([output, input])
        takes = self._elements_per_rank(output, output_splits)
        gives = self._elements_per_rank(input, input_splits)

        def all_to_all() -> Operation:
            flat, own = _on_host(output), _on_host(input)
            yield from self._exchange(own, gives, flat, takes)
            write_back(flat, output)

        return all_to_all(), [output]

    @_operation
    def barrier(self, opts: Any = None) -> _Plan:
        def barrier() -> Operation:
            yield from _finished([self._communicator.Ibarrier()])

        return barrier(), []

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        self._check_message(tensors, tag)

        def send() -> Operation:
            flat = _on_host(tensors[0])
            yield from _finished([self._communicator.Isend(self._bytes(flat), dst, tag)])

        return self.queue.submit(send(), [], self._timeout_s, blocking=False, peer=dst)

    def recv(self, tensors: Any, src: int, tag: int) -> Any:
        return self._submit_receive(tensors, src, tag, self._mpi.Status())

    def recv_anysource(self, tensors: Any, tag: int) -> Any:
        status = self._mpi.Status()
        work = self._submit_receive(tensors, self._mpi.ANY_SOURCE, tag, status)
        work.source = status.Get_source
        return work

    def _submit_receive(self, tensors: Any, src: int, tag: int, status: Any) -> Work:
        self._check_message(tensors, tag)
        receive = self._receive(tensors[0], src, tag, status)
        return self.queue.submit(receive, tensors, self._timeout_s, blocking=False, peer=src)

    def _receive(self, tensor: torch.Tensor, src: int, tag: int, status: Any) -> Operation:
        flat = _on_host(tensor)
        request = self._communicator.Irecv(self._bytes(flat), src, tag)
        while not request.Test(status):
            yield
        if (count := status.Get_count(self._mpi.BYTE)) != flat.nbytes:
            raise ValueError(
                f"rank {status.Get_source()} of the group sent {count} bytes, the tensor has {flat.nbytes}."
            )
        write_back(flat, tensor)

    def _check_message(self, tensors: Any, tag: int) -> None:
        _refuse_unsupported(tensors)
        if len(tensors) != 1:
            raise ValueError(f"a message is one tensor, got {len(tensors)}.")
        if not 0 <= tag <= self._max_tag:
            raise ValueError(f"MPI has tags from 0 to {self._max_tag}, got {tag}.")

    def _exchange(
        self, given: torch.Tensor, gives: Sequence[int], taken: torch.Tensor, takes: Sequence[int]
    ) -> Operation:
        size_bytes = given.element_size()
        request = self._communicator.Ialltoallv(
            [self._buffer(given), [size_bytes * n for n in gives], self._mpi.BYTE],
            [self._buffer(taken), [size_bytes * n for n in takes], self._mpi.BYTE],
        )
        yield from _finished([request])

    def _elements_per_rank(self, tensor: torch.Tensor, splits: Sequence[int]) -> list[int]:
        if not splits:
            if tensor.dim() and len(tensor) % self._size:
                raise ValueError(
                    f"a tensor of {len(tensor)} rows cannot be split evenly over {self._size} ranks."
                )
            return [tensor.numel() // self._size] * self._size
        if len(splits) != self._size or sum(splits) != len(tensor):
            raise ValueError(
                f"{list(splits)} do not split {len(tensor)} rows over {self._size} ranks."
            )
        row = tensor.numel() // len(tensor) if len(tensor) else 0
        return [row * split for split in splits]

    def _buffer(self, flat: torch.Tensor) -> Any:
        return self._mpi.buffer.fromaddress(flat.data_ptr(), flat.nbytes)

    def _bytes(self, flat: torch.Tensor) -> list[Any]:
        return [self._buffer(flat), self._mpi.BYTE]

    def _reduction(self, tensors: Tensors, opts: Any) -> _Reduction:
        _refuse_unsupported(tensors)
        if len(dtypes := {tensor.dtype for tensor in tensors}) > 1:
            names = ", ".join(sorted(map(str, dtypes)))
            raise ValueError(f"the tensors of a reduction have one dtype, got {names}.")
        return _Reduction(self._mpi, int(opts.reduceOp.op), tensors[0].dtype, self._size)

    # C++ callers (functional collectives, DTensor) look up these operations by the old or the new name.
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single


class _Reduction:
    """A reduction of tensors of one dtype: its MPI operation and type, and how results are written."""

    def __init__(self, MPI: Any, op: int, dtype: torch.dtype, size: int) -> None:
        self._size = size
        name = _OP_NAMES.get(op)
        self._widen, self._mean, self._mpi = dtype in _WIDENED, name == "AVG", MPI
        type_name = "FLOAT" if self._widen else _TYPES.get(dtype)
        floating = dtype.is_floating_point or dtype.is_complex
        wrong = (
            name is None
            or type_name is None
            or (floating and name in _BITWISE)
            or (not floating and name == "AVG")
            or (dtype.is_complex and name in ("MIN", "MAX"))
        )
        if wrong:
            raise ValueError(f"backend 'mpi' has no {name or 'such'} reduction of {dtype}.")
        self._type = getattr(MPI, type_name)  # type: ignore[arg-type]
        names = _BOOL_OPS if dtype == torch.bool else _OPS
        self.op = getattr(MPI, names[name])  # type: ignore[index]

    def buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elements of a tensor in host memory, in the type that MPI reduces."""
        flat = _on_host(tensor)
        return flat.float() if self._widen else flat

    def of(self, flat: torch.Tensor) -> list[Any]:
        """Elements from `buffer` as an argument of mpi4py."""
        return [self._mpi.buffer.fromaddress(flat.data_ptr(), flat.nbytes), self._type]

    def finish(self, buffer: torch.Tensor, tensor: torch.Tensor) -> None:
        """Write the result to `tensor`."""
        if self._mean:
            # A complex division is not correctly rounded.
            (torch.view_as_real(buffer) if buffer.is_complex() else buffer).div_(self._size)
        write_back(buffer, tensor)


def _finished(requests: Sequence[Any]) -> Operation:
    for request in requests:
        while not request.Test():
            yield


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    flat = as_flat(tensor)
    return flat if flat.is_cpu else flat.cpu()


def _refuse_unsupported(tensors: Tensors) -> None:
    for tensor in tensors:
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise ValueError(
                f"backend 'mpi' has no tensors of layout {tensor.layout}; use Tensor.to_dense()."
            )
        if tensor.device.type not in ("cpu", "cuda"):
            raise ValueError(f"backend 'mpi' has no tensors on {tensor.device}.")
