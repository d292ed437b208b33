"""`mpi`: MPI as a process group of torch, and its registration.

torch has a backend `mpi` of its own, which no wheel contains. This one is a process group in Python over
mpi4py, so it needs no build of torch. torch reserves the name, so it is registered as `mpi4py`.

Each method of `MpiGroup` checks its arguments and gives the queue a function `start`. It starts the
operation's MPI requests, and returns a function that writes the results once they are finished (None: there
is nothing to write). See `mpi/work_queue.py` for how requests are completed.

Tensors that are only copied are sent as bytes. Sums of 16-bit floats are computed in float32 and rounded
once. CUDA tensors are copied through host memory.
"""

# mypy: disable-error-code="no-untyped-call,override,assignment"
# `Tensor.split` has no annotations. Methods of torch's stubs also have short forms without options.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from paceline.mpi import world
from paceline.mpi.work_queue import RequestQueue, Start, Work, WriteResults
from paceline.shm.tensors import Tensors, as_flat, check_pieces, check_whole, write_back

NAME = "mpi4py"

_OPS = {"SUM": "SUM", "AVG": "SUM", "PRODUCT": "PROD", "MIN": "MIN", "MAX": "MAX"}
_OPS |= {"BAND": "BAND", "BOR": "BOR", "BXOR": "BXOR"}
_OPS_OF_BOOL = _OPS | {"SUM": "MAX", "PRODUCT": "MIN"}  # of bytes that are 0 or 1
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)
_INTEGERS += (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
# torch's reductions of each dtype that the backend has.
_REDUCTIONS = {
    **dict.fromkeys(_FLOATS, ("SUM", "AVG", "PRODUCT", "MIN", "MAX")),
    **dict.fromkeys((torch.complex64, torch.complex128), ("SUM", "AVG", "PRODUCT")),
    **dict.fromkeys((*_INTEGERS, torch.bool), tuple(name for name in _OPS if name != "AVG")),
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

    def _submit(self, name: str, start: Start, outputs: Tensors, opts: Any) -> Work:
        """Start a collective with torch's options for it."""
        timeout_s = opts.timeout.total_seconds() if opts is not None else 0
        return self.queue.submit(
            name,
            start,
            outputs,
            timeout_s if timeout_s > 0 else self._timeout_s,
            blocking=opts is not None and not opts.asyncOp,
        )

    # Reductions.

    def allreduce(self, tensors: Any, opts: Any) -> Work:
        reduction = _Reduction(self._mpi, opts, tensors, self._size)

        def start(work: Work) -> WriteResults:
            buffers = [_as_numbers(tensor) for tensor in tensors]
            for buffer in buffers:
                work.requests.append(
                    self._communicator.Iallreduce(
                        self._mpi.IN_PLACE, work.numbers(buffer), reduction.op
                    )
                )
            return partial(reduction.write, buffers, tensors)

        return self._submit("all_reduce", start, tensors, opts)

    def reduce(self, tensors: Any, opts: Any) -> Work:
        reduction = _Reduction(self._mpi, opts, tensors, self._size)

        def start(work: Work) -> WriteResults:
            buffers = [_as_numbers(tensor) for tensor in tensors]
            is_root = opts.rootRank == self._rank
            for buffer in buffers:
                own = work.numbers(buffer)
                given, taken = (self._mpi.IN_PLACE, own) if is_root else (own, None)
                work.requests.append(
                    self._communicator.Ireduce(given, taken, reduction.op, opts.rootRank)
                )
            return partial(reduction.write, buffers, tensors) if is_root else None

        return self._submit("reduce", start, tensors, opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        _refuse_unsupported([*outputs, *inputs[0]])
        check_pieces(inputs[0], outputs[0], self._size)
        whole = torch.cat([as_flat(piece) for piece in inputs[0]])
        return self.reduce_scatter_single(outputs[0], whole, opts)

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any) -> Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        reduction = _Reduction(self._mpi, opts, [*outputs, *inputs], self._size)
        for output, whole in zip(outputs, inputs, strict=True):
            check_whole(whole, output, self._size)

        def start(work: Work) -> WriteResults:
            pieces = []
            for whole in map(_as_numbers, inputs):
                piece = whole.new_empty(len(whole) // self._size)
                pieces.append(piece)
                work.requests.append(
                    self._communicator.Ireduce_scatter_block(
                        work.numbers(whole), work.numbers(piece), reduction.op
                    )
                )
            return partial(reduction.write, pieces, outputs)

        return self._submit("reduce_scatter", start, outputs, opts)

    # Copies.

    def broadcast(self, tensors: Any, opts: Any) -> Work:
        _refuse_unsupported(tensors)

        def start(work: Work) -> WriteResults:
            flats = [_on_host(tensor) for tensor in tensors]
            for flat in flats:
                work.requests.append(self._communicator.Ibcast(work.bytes(flat), opts.rootRank))
            return partial(_write, flats, tensors) if opts.rootRank != self._rank else None

        return self._submit("broadcast", start, tensors, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        _refuse_unsupported([*inputs, *outputs[0]])
        check_pieces(outputs[0], inputs[0], self._size)

        def start(work: Work) -> WriteResults:
            own = _on_host(inputs[0])
            whole = own.new_empty(self._size * len(own))
            work.requests.append(self._communicator.Iallgather(work.bytes(own), work.bytes(whole)))
            return partial(_write, whole.split([len(own)] * self._size), outputs[0])

        return self._submit("all_gather", start, outputs[0], opts)

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        _refuse_unsupported([*outputs, *inputs])
        for output, own in zip(outputs, inputs, strict=True):
            check_whole(output, own, self._size)

        def start(work: Work) -> WriteResults:
            flats = [_on_host(output) for output in outputs]
            for flat, own in zip(flats, inputs, strict=True):
                # A rank's input may be its part of the output, which MPI does not allow.
                given = _on_host(own).clone()
                work.requests.append(
                    self._communicator.Iallgather(work.bytes(given), work.bytes(flat))
                )
            return partial(_write, flats, outputs)

        return self._submit("all_gather", start, outputs, opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        is_root = opts.rootRank == self._rank
        targets = outputs[0] if is_root else []
        _refuse_unsupported([*inputs, *targets])
        if is_root:
            check_pieces(targets, inputs[0], self._size)

        def start(work: Work) -> WriteResults:
            own = _on_host(inputs[0])
            whole = own.new_empty(len(targets) * len(own))
            taken = work.bytes(whole) if is_root else None
            work.requests.append(self._communicator.Igather(work.bytes(own), taken, opts.rootRank))
            return partial(_write, whole.split([len(own)] * len(targets)), targets)

        return self._submit("gather", start, targets, opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        is_root = opts.rootRank == self._rank
        sources = inputs[0] if is_root else []
        _refuse_unsupported([*outputs, *sources])
        if is_root:
            check_pieces(sources, outputs[0], self._size)

        def start(work: Work) -> WriteResults:
            own = _on_host(outputs[0])
            given = work.bytes(torch.cat([_on_host(s) for s in sources])) if is_root else None
            work.requests.append(self._communicator.Iscatter(given, work.bytes(own), opts.rootRank))
            return partial(_write, [own], outputs)

        return self._submit("scatter", start, outputs, opts)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        _refuse_unsupported([*outputs, *inputs])
        for tensors in (outputs, inputs):
            if len(tensors) != self._size:
                raise ValueError(f"got {len(tensors)} tensors for {self._size} ranks.")
        takes = [output.numel() for output in outputs]
        gives = [each.numel() for each in inputs]

        def start(work: Work) -> WriteResults:
            given = torch.cat([_on_host(each) for each in inputs])
            taken = given.new_empty(sum(takes))
            self._start_exchange(work, given, gives, taken, takes)
            return partial(_write, taken.split(takes), outputs)

        return self._submit("all_to_all", start, outputs, opts)

    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> Work:
        _refuse_unsupported([output, input])
        takes = self._elements_per_rank(output, output_splits)
        gives = self._elements_per_rank(input, input_splits)

        def start(work: Work) -> WriteResults:
            given, taken = _on_host(input), _on_host(output)
            self._start_exchange(work, given, gives, taken, takes)
            return partial(_write, [taken], [output])

        return self._submit("all_to_all", start, [output], opts)

    def _start_exchange(
        self,
        work: Work,
        given: torch.Tensor,
        gives: Sequence[int],
        taken: torch.Tensor,
        takes: Sequence[int],
    ) -> None:
        """Send `gives[r]` elements of `given` to each rank r, and receive `takes[r]` from it."""
        (sent, byte), (received, _) = work.bytes(given), work.bytes(taken)
        size_bytes = given.element_size()
        work.requests.append(
            self._communicator.Ialltoallv(
                [sent, [size_bytes * count for count in gives], byte],
                [received, [size_bytes * count for count in takes], byte],
            )
        )

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

    def barrier(self, opts: Any = None) -> Work:
        def start(work: Work) -> None:
            work.requests.append(self._communicator.Ibarrier())

        return self._submit("barrier", start, [], opts)

    # Messages between two ranks.

    def send(self, tensors: Any, dst: int, tag: int) -> Work:
        self._check_message(tensors, tag)

        def start(work: Work) -> None:
            flat = _on_host(tensors[0])
            work.requests.append(self._communicator.Isend(work.bytes(flat), dst, tag))

        return self.queue.submit("send", start, [], self._timeout_s, blocking=False, peer=dst)

    def recv(self, tensors: Any, src: int, tag: int) -> Work:
        self._check_message(tensors, tag)
        status = self._mpi.Status()

        def start(work: Work) -> WriteResults:
            flat = _on_host(tensors[0])
            work.requests.append(self._communicator.Irecv(work.bytes(flat), src, tag))
            return partial(self._write_message, status, flat, tensors[0])

        return self.queue.submit(
            "recv", start, tensors, self._timeout_s, blocking=False, peer=src, status=status
        )

    def recv_anysource(self, tensors: Any, tag: int) -> Work:
        return self.recv(tensors, self._mpi.ANY_SOURCE, tag)

    def _write_message(self, status: Any, flat: torch.Tensor, tensor: torch.Tensor) -> None:
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

    # torch's other names for the same operations. C++ callers (functional collectives, DTensor) use the names
    # of their torch version.
    allreduce_coalesced = allreduce
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single


class _Reduction:
    """A reduction of tensors of one dtype.

    Attributes:
        op: MPI's operation.

    Raises:
        ValueError: the tensors have several dtypes, or the dtype has no such reduction.
    """

    def __init__(self, MPI: Any, opts: Any, tensors: Tensors, size: int) -> None:
        _refuse_unsupported(tensors)
        if len(dtypes := {tensor.dtype for tensor in tensors}) > 1:
            names = ", ".join(sorted(map(str, dtypes)))
            raise ValueError(f"the tensors of a reduction have one dtype, got {names}.")
        dtype, name = tensors[0].dtype, opts.reduceOp.op.name
        if name not in _REDUCTIONS.get(dtype, ()):
            raise ValueError(f"backend 'mpi' has no {name} reduction of {dtype}.")
        self.op = getattr(MPI, (_OPS_OF_BOOL if dtype == torch.bool else _OPS)[name])
        self._divisor = size if name == "AVG" else 1

    def write(self, buffers: Tensors, tensors: Tensors) -> None:
        """Write the sums that MPI has computed in `buffers`, or the means, to `tensors`."""
        for buffer in buffers if self._divisor > 1 else ():
            # A complex division is not correctly rounded.
            (torch.view_as_real(buffer) if buffer.is_complex() else buffer).div_(self._divisor)
        _write(buffers, tensors)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor in host memory, as one dimension: the tensor's own memory if possible."""
    return as_flat(tensor).cpu()


def _as_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor in host memory, in a dtype that MPI can reduce."""
    flat = _on_host(tensor)
    if flat.dtype == torch.bool:
        return flat.view(torch.uint8)
    return flat.float() if flat.dtype in (torch.float16, torch.bfloat16) else flat


def _write(flats: Iterable[torch.Tensor], tensors: Tensors) -> None:
    """Copy elements to tensors whose memory MPI has not written itself."""
    for flat, tensor in zip(flats, tensors, strict=True):
        write_back(flat, tensor)


def _refuse_unsupported(tensors: Tensors) -> None:
    for tensor in tensors:
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise ValueError(
                f"backend 'mpi' has no tensors of layout {tensor.layout}; use Tensor.to_dense()."
            )
        if tensor.device.type not in ("cpu", "cuda"):
            raise ValueError(f"backend 'mpi' has no tensors on {tensor.device}.")
