"""`shm`: a process group of torch over shared memory. What it does not do itself it gives to Gloo.

A front to `torch.distributed`'s extension by processes groups in Python, see torch's `PyProcessGroup.hpp`:
C++ callers (DDP, functional collectives) reach only what that file names, the rest goes to Gloo there.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline.cores import usable_cores
from paceline.log import logger
from paceline.shm.folding import foldable
from paceline.shm.line import Line, Operation
from paceline.shm.rounds import Rounds, Steps
from paceline.shm.segment import Segment, Unavailable, open_segment

NAME = "shm"
_GLOO = dist.ProcessGroup.BackendType.GLOO
_Tensors = Sequence[torch.Tensor]


def register() -> None:
    """Make `backend="shm"` known to torch.distributed, in this process.

    Collective: none.
    """
    if not dist.is_backend_available(NAME):
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, _: Any) -> Any:
    """What torch calls for every group: ours, or Gloo's where ranks cannot share memory."""
    store, rank, size = options.store, options.group_rank, options.group_size
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, options.timeout)
    gloo._set_sequence_number_for_group()
    if size == 1:
        return gloo
    try:
        segment = open_segment(dist.PrefixStore("shm", store), rank, size, options.timeout)
    except Unavailable as why:
        if rank == 0:
            logger.warning("no shared memory between ranks (%s): using Gloo.", why)
        return gloo
    ranks = list(options.global_ranks_in_group) or list(range(size))
    return ShmGroup(store, segment, ranks, gloo, options.timeout)


class ShmGroup(dist.ProcessGroup):
    """A group of ranks on one host. Tensors on CPU go through memory, all others through Gloo.

    Collective: every operation, all ranks of the group, in the same order.
    """

    def __init__(
        self,
        store: dist.Store,
        segment: Segment,
        ranks: Sequence[int],
        gloo: dist.ProcessGroupGloo,
        timeout: timedelta,
    ) -> None:
        super().__init__(segment.rank, segment.size)  # the one that Python may extend
        self._inner = dist.ProcessGroup(store, segment.rank, segment.size)
        for group in (self, self._inner):
            group._set_default_backend(_GLOO)
            for device in ("cpu", "cuda"):
                group._register_backend(torch.device(device), _GLOO, gloo)
        self._rank, self._size = segment.rank, segment.size
        self._timeout_s = timeout.total_seconds()
        spin = segment.size <= usable_cores()
        self._rounds = Rounds(segment, spin=spin)
        self._line = Line(self._rounds, ranks, spin=spin)

    def getBackendName(self) -> str:  # noqa: N802 # torch's name
        return NAME

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)
        self._timeout_s = timeout.total_seconds()

    def shutdown(self) -> None:
        self._line.close()
        self._inner.shutdown()

    def abort(self) -> None:
        self._line.close()
        self._inner.abort()

    def _start(self, steps: Steps, outputs: _Tensors, opts: Any) -> Operation:
        timeout_s = opts.timeout.total_seconds()
        if timeout_s <= 0:
            timeout_s = self._timeout_s
        return self._line.start(steps, outputs, timeout_s, blocking=not opts.asyncOp)

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        tensors, opts = _arguments(tensors, opts, dist.AllreduceOptions, timeout)
        op = opts.reduceOp.op
        if not _ours(tensors) or not all(foldable(op, t.dtype) for t in tensors):
            return self._inner.allreduce(tensors, opts)
        if len(tensors) == 1 and _is_flat(tensors[0]):
            steps = self._rounds.all_reduce(tensors[0].data.view(-1), op)
        else:
            steps = self._all_reduce_each(tensors, op)
        return self._start(steps, tensors, opts)

    def _all_reduce_each(self, tensors: _Tensors, op: Any) -> Steps:
        for tensor in tensors:
            flat = _flat(tensor)
            yield from self._rounds.all_reduce(flat, op)
            _put(flat, tensor)

    def allreduce_coalesced(self, tensors: _Tensors, opts: Any = None) -> Any:
        opts = opts or dist.AllreduceCoalescedOptions()
        op = opts.reduceOp.op
        if not _ours(tensors) or not all(foldable(op, t.dtype) for t in tensors):
            return self._inner.allreduce_coalesced(tensors, opts)
        return self._start(self._all_reduce_each(tensors, op), tensors, opts)

    def reduce(self, tensors: Any, opts: Any = None, **more: Any) -> Any:
        if not isinstance(opts, dist.ReduceOptions) or not _ours(tensors):
            return self._inner.reduce(tensors, opts, **more)
        op = opts.reduceOp.op
        if not foldable(op, tensors[0].dtype):
            return self._inner.reduce(tensors, opts)

        def steps() -> Steps:
            flat = _flat(tensors[0])
            yield from self._rounds.reduce(flat, op, opts.rootRank)
            if self._rank == opts.rootRank:
                _put(flat, tensors[0])

        return self._start(steps(), tensors, opts)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None, root: int = 0) -> Any:
        tensors, opts = _arguments(tensors, opts, dist.BroadcastOptions, timeout, root)
        if not _ours(tensors):
            return self._inner.broadcast(tensors, opts)
        root = opts.rootRank

        def steps() -> Steps:
            for tensor in tensors:
                flat, into = _flat(tensor), [None] * self._size
                mine = flat if root == self._rank else None
                if mine is None:
                    into[root] = flat
                yield from self._rounds.share(
                    "broadcast", mine, into, flat.dtype, flat.numel(), root
                )
                if mine is None:
                    _put(flat, tensor)

        return self._start(steps(), tensors, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, **more: Any) -> Any:
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = opts or dist.AllgatherOptions()
        if len(inputs) != 1 or more or not _ours([*inputs, *outputs[0]]):
            return self._inner.allgather(outputs, inputs, opts, **more)
        return self._gather("all_gather", inputs[0], outputs[0], opts, -1)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        opts = opts or dist.AllgatherOptions()
        if not _ours([output, input]):
            return self._inner.all_gather_single(output, input, opts)
        _refuse(output.numel() != input.numel() * self._size, "output must hold size x input")

        def steps() -> Steps:
            flat = _flat(output)
            into = list(flat.view(self._size, -1).unbind()) if len(flat) else [flat] * self._size
            yield from self._gathering("all_gather", input, into, -1)
            _put(flat, output)

        _refuse(output.dtype != input.dtype, "tensors of several dtypes")
        return self._start(steps(), [output], opts)

    _allgather_base = all_gather_single

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, *more: Any) -> Any:
        ours = isinstance(opts, dist.GatherOptions) and len(inputs) == 1
        if not ours or not _ours([*inputs, *(outputs[0] if outputs else [])]):
            return self._inner.gather(outputs, inputs, opts, *more)
        into = outputs[0] if self._rank == opts.rootRank else []
        return self._gather("gather", inputs[0], into, opts, opts.rootRank)

    def _gather(
        self, kind: str, mine: torch.Tensor, outputs: _Tensors, opts: Any, root: int
    ) -> Operation:
        if root in (-1, self._rank):
            _refuse(len(outputs) != self._size, f"{len(outputs)} outputs for {self._size} ranks")
            for tensor in outputs:
                _refuse(tensor.dtype != mine.dtype, "tensors of several dtypes")
                _refuse(tensor.numel() != mine.numel(), "tensors of several sizes")

        def steps() -> Steps:
            flats = [_flat(tensor) for tensor in outputs]
            yield from self._gathering(kind, mine, flats, root)
            for flat, tensor in zip(flats, outputs, strict=True):
                _put(flat, tensor)

        return self._start(steps(), outputs, opts)

    def _gathering(
        self, kind: str, mine: torch.Tensor, into: Sequence[torch.Tensor], root: int
    ) -> Steps:
        flat = _flat(mine)
        yield from self._rounds.share(kind, flat, into, flat.dtype, flat.numel(), root)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, *more: Any) -> Any:
        ours = isinstance(opts, dist.ScatterOptions) and len(outputs) == 1
        if not ours or not _ours([*outputs, *(inputs[0] if inputs else [])]):
            return self._inner.scatter(outputs, inputs, opts, *more)
        root, mine = opts.rootRank, outputs[0]
        given = inputs[0] if self._rank == root else []
        _check_pieces(given, mine, self._size if self._rank == root else 0)

        def steps() -> Steps:
            into: list[torch.Tensor | None] = [None] * self._size
            flat = into[root] = _flat(mine)
            pieces = [_flat(tensor) for tensor in given]
            yield from self._rounds.exchange(
                "scatter", pieces, into, mine.dtype, mine.numel(), root
            )
            _put(flat, mine)

        return self._start(steps(), outputs, opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, *more: Any) -> Any:
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = opts if opts is not None else dist.ReduceScatterOptions()
        ours = isinstance(opts, dist.ReduceScatterOptions) and len(inputs) == 1 and not more
        if not ours or not _ours([*outputs, *inputs[0]]):
            return self._inner.reduce_scatter(outputs, inputs, opts, *more)
        output, pieces, op = outputs[0], inputs[0], opts.reduceOp.op
        even = len({piece.numel() for piece in pieces}) == 1
        if not even or not foldable(op, output.dtype):
            return self._inner.reduce_scatter(outputs, inputs, opts)
        _check_pieces(pieces, output, self._size)

        def steps() -> Steps:
            flat = _flat(output)
            yield from self._rounds.reduce_scatter([_flat(piece) for piece in pieces], flat, op)
            _put(flat, output)

        return self._start(steps(), outputs, opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> Any:
        opts = opts or dist.ReduceScatterOptions()
        op = opts.reduceOp.op
        if not _ours([output, input]) or not foldable(op, output.dtype):
            return self._inner.reduce_scatter_single(output, input, opts)
        _refuse(input.numel() != output.numel() * self._size, "input must hold size x output")
        _refuse(output.dtype != input.dtype, "tensors of several dtypes")

        def steps() -> Steps:
            flat, whole = _flat(output), _flat(input)
            pieces = whole.view(self._size, -1).unbind() if len(whole) else [whole] * self._size
            yield from self._rounds.reduce_scatter(pieces, flat, op)
            _put(flat, output)

        return self._start(steps(), [output], opts)

    _reduce_scatter_base = reduce_scatter_single

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts or dist.AllToAllOptions()
        if not _ours([*outputs, *inputs]):
            return self._inner.alltoall(outputs, inputs, opts)
        for tensors in (outputs, inputs):
            _refuse(len(tensors) != self._size, f"{len(tensors)} tensors for {self._size} ranks")
            _refuse(any(t.dtype != outputs[0].dtype for t in tensors), "tensors of several dtypes")

        def steps() -> Steps:
            flats = [_flat(tensor) for tensor in outputs]
            pieces = [_flat(tensor) for tensor in inputs]
            yield from self._rounds.exchange("all_to_all", pieces, flats, outputs[0].dtype, -1)
            for flat, tensor in zip(flats, outputs, strict=True):
                _put(flat, tensor)

        return self._start(steps(), outputs, opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> Any:
        opts = opts or dist.AllToAllOptions()
        if not _ours([output, input]):
            return self._inner.all_to_all_single(output, input, output_splits, input_splits, opts)
        _refuse(output.dtype != input.dtype, "tensors of several dtypes")
        takes, gives = self._rows(output, output_splits), self._rows(input, input_splits)

        def steps() -> Steps:
            flat = _flat(output)
            into, pieces = flat.split(takes), _flat(input).split(gives)
            yield from self._rounds.exchange("all_to_all", pieces, into, flat.dtype, -1)
            _put(flat, output)

        return self._start(steps(), [output], opts)

    alltoall_base = all_to_all_single

    def _rows(self, tensor: torch.Tensor, splits: Sequence[int]) -> list[int]:
        """Elements for each rank, of a tensor that is split along its first dim."""
        rows = tensor.size(0) if tensor.dim() else 1
        if not splits:
            _refuse(rows % self._size != 0, f"{rows} rows do not divide among {self._size} ranks")
            splits = [rows // self._size] * self._size
        _refuse(len(splits) != self._size, f"{len(splits)} splits for {self._size} ranks")
        _refuse(sum(splits) != rows, f"splits of {sum(splits)} rows for a tensor of {rows}")
        return [n * (tensor.numel() // max(1, rows)) for n in splits]

    def barrier(self, opts: Any = None) -> Any:
        return self._start(self._rounds.barrier(), [], opts or dist.BarrierOptions())


def _arguments(
    tensors: Any, opts: Any, kind: Any, timeout: timedelta | None, root: int = 0
) -> tuple[Any, Any]:
    """The arguments of torch's short forms, such as `group.allreduce(tensor, ReduceOp.MAX)`."""
    if isinstance(tensors, torch.Tensor):
        tensors = [tensors]
    if isinstance(opts, kind):
        return tensors, opts
    made = kind()
    if kind is dist.BroadcastOptions:
        made.rootRank = root if opts is None else opts
    elif opts is not None:
        made.reduceOp = opts if isinstance(opts, dist.ReduceOp) else dist.ReduceOp(opts)
    if timeout is not None:
        made.timeout = timeout
    return tensors, made


def _refuse(wrong: bool, why: str) -> None:
    if wrong:
        raise ValueError(f"{why}.")


def _check_pieces(pieces: _Tensors, mine: torch.Tensor, count: int) -> None:
    _refuse(len(pieces) != count, f"{len(pieces)} tensors for {count} ranks")
    for piece in pieces:
        _refuse(piece.dtype != mine.dtype, "tensors of several dtypes")
        _refuse(piece.numel() != mine.numel(), "tensors of several sizes")


def _ours(tensors: _Tensors) -> bool:
    """Whether memory can carry these; the answer is the same on all ranks, for shapes do not matter."""
    return all(
        t.device.type == "cpu" and t.layout == torch.strided and not t.is_quantized for t in tensors
    )


def _is_flat(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor in a row: its own where they lie so, else a copy."""
    tensor = tensor.data  # without the history and the version counter, as in Gloo
    if not _is_flat(tensor):
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
    return tensor.view(-1)


def _put(flat: torch.Tensor, tensor: torch.Tensor) -> None:
    """Write the elements back where `_flat` had to copy."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.data.copy_(flat.view(tensor.shape))
