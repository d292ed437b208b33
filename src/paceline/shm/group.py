"""`shm`: a process group of torch over shared memory. What it does not do itself it gives to Gloo.

A front to `torch.distributed`'s extension by process groups in Python, see torch's `PyProcessGroup.hpp`:
C++ callers (DDP, functional collectives) reach only what that file names, the rest goes to Gloo there.
"""

# mypy: disable-error-code="no-untyped-call"
# It is `Tensor.split` that has no types.

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline.log import logger
from paceline.machine import usable_cores
from paceline.shm.folding import foldable
from paceline.shm.hosts import open_rounds
from paceline.shm.line import Line
from paceline.shm.rounds import Rounds, Steps
from paceline.shm.segment import Unavailable

NAME = "shm"
_GLOO = dist.ProcessGroup.BackendType.GLOO
_Tensors = Sequence[torch.Tensor]
# What earlier versions of torch call them.
_FORMER = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}


def register() -> None:
    """Make `backend="shm"` known to torch.distributed, in this process."""
    if not dist.is_backend_available(NAME):
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, _: Any) -> Any:
    """What torch calls for every group: ours, or Gloo's where no two ranks can share memory."""
    store, rank, size = options.store, options.group_rank, options.group_size
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, options.timeout)
    gloo._set_sequence_number_for_group()
    if size == 1:
        return gloo
    try:
        rounds, ranks = open_rounds(options)
    except Unavailable as why:
        if rank == 0 and str(why):
            logger.warning("no shared memory between ranks (%s): using Gloo.", why)
        return gloo
    return ShmGroup(options, rounds, ranks, gloo)


_Plan = tuple[Steps, _Tensors] | None


def _or_gloo(plan: Callable[..., _Plan]) -> Any:
    """An operation from its plan: what to carry on and its outputs, or None for what is left to Gloo.

    Gloo also takes torch's short forms, such as `group.allreduce(tensor)`.
    """
    name = plan.__name__

    @functools.wraps(plan)
    def operation(self: ShmGroup, *args: Any, **options: Any) -> Any:
        opts: Any = options.get("opts") or (args[-1] if args else None)
        ours = hasattr(opts, "asyncOp") and name not in self._rounds.leaves
        planned = plan(self, *args, **options) if ours else None
        if planned is None:
            inner = getattr(self._inner, name, None) or getattr(self._inner, _FORMER[name])
            return inner(*args, **options)
        steps, outputs = planned
        timeout_s = opts.timeout.total_seconds()
        return self._line.start(
            steps,
            outputs,
            timeout_s if timeout_s > 0 else self._timeout_s,
            blocking=not opts.asyncOp,
        )

    operation.plan = plan  # type: ignore[attr-defined]
    return operation


class ShmGroup(dist.ProcessGroup):
    """A group of which ranks share a host. Tensors on CPU go through memory there, all else through Gloo.

    Collective: every operation, all ranks of the group, in the same order.
    """

    def __init__(
        self, options: Any, rounds: Rounds, ranks: Sequence[int], gloo: dist.ProcessGroupGloo
    ) -> None:
        self._rank, self._size = options.group_rank, options.group_size
        super().__init__(self._rank, self._size)  # type: ignore[call-arg] # the extendable one
        self._inner = dist.ProcessGroup(options.store, self._rank, self._size)
        for group in (self, self._inner):
            group._set_default_backend(_GLOO)
            for device in ("cpu", "cuda"):
                group._register_backend(torch.device(device), _GLOO, gloo)
        self._timeout_s = options.timeout.total_seconds()
        self._rounds = rounds
        spin = rounds.segment.size <= usable_cores()
        self._line = Line(rounds, ranks, spin=spin)

    def getBackendName(self) -> str:
        return NAME

    @property
    def is_on_one_host(self) -> bool:
        """Whether all ranks of the group share this memory."""
        return bool(self._rounds.segment.size == self._size)

    def share_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Keep the buckets that hold the gradients of these in memory of all ranks, from now on.

        On several hosts they stay where they are, and are copied to be summed.

        A view into a gradient that is not torch's, as of numpy, must not outlive the next reduction.

        Collective: all ranks of the group, between the same operations.
        """
        if self.is_on_one_host:
            self._rounds.regions.watch(parameters)

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)
        self._timeout_s = timeout.total_seconds()

    def shutdown(self) -> None:
        self._line.close()
        self._inner.shutdown()

    def abort(self) -> None:
        self._line.close()
        self._inner.abort()

    @_or_gloo
    def allreduce(self, tensors: Any, opts: Any = None) -> _Plan:
        op = int(opts.reduceOp.op)
        if not _reducible(tensors, op):
            return None
        if len(tensors) == 1 and _is_flat(tensors[0]):
            region = self._rounds.regions.offer(tensors[0])  # first, as it may move the tensor
            return self._rounds.all_reduce(_flat(tensors[0]), op, region), tensors
        region = 0 if self._rounds.regions.active else None

        def all_reduce() -> Steps:
            for tensor in tensors:
                flat = _flat(tensor)
                yield from self._rounds.all_reduce(flat, op, region)
                _put(flat, tensor)

        return all_reduce(), tensors

    @_or_gloo
    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> _Plan:
        plan: _Plan = ShmGroup.allreduce.plan(self, tensors, opts)
        return plan

    @_or_gloo
    def reduce(self, tensors: Any, opts: Any = None) -> _Plan:
        op = int(opts.reduceOp.op)
        if not _reducible(tensors, op):
            return None

        def steps() -> Steps:
            flat = _flat(tensors[0])
            yield from self._rounds.reduce(flat, op, opts.rootRank)
            if self._rank == opts.rootRank:
                _put(flat, tensors[0])

        return steps(), tensors

    @_or_gloo
    def broadcast(self, tensors: Any, opts: Any = None) -> _Plan:
        if not _ours(tensors):
            return None
        root = opts.rootRank
        mine = root == self._rank

        def steps() -> Steps:
            for tensor in tensors:
                flat = _flat(tensor)
                into: list[torch.Tensor | None] = [None] * self._size
                into[root] = None if mine else flat
                gives = flat if mine else None
                yield from self._rounds.share("broadcast", gives, into, flat.dtype, len(flat), root)
                if not mine:
                    _put(flat, tensor)

        return steps(), tensors

    @_or_gloo
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> _Plan:
        if not _ours(inputs) or not _ours(outputs[0]):
            return None
        _check_pieces(outputs[0], inputs[0], self._size)
        return self._gather("all_gather", inputs[0], outputs[0], -1), outputs[0]

    @_or_gloo
    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> _Plan:
        if not _ours(inputs):
            return None
        at_root = self._rank == opts.rootRank
        into = outputs[0] if at_root else []
        _check_pieces(into, inputs[0], self._size if at_root else 0)
        return self._gather("gather", inputs[0], into, opts.rootRank), into

    def _gather(self, kind: str, mine: torch.Tensor, outputs: _Tensors, root: int) -> Steps:
        flat, flats = _flat(mine), [_flat(tensor) for tensor in outputs]
        yield from self._rounds.share(kind, flat, flats, flat.dtype, len(flat), root)
        for each, tensor in zip(flats, outputs, strict=True):
            _put(each, tensor)

    @_or_gloo
    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> _Plan:
        plan: _Plan = ShmGroup.all_gather_single_coalesced.plan(self, [output], [input], opts)
        return plan

    @_or_gloo
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> _Plan:
        if not _ours([*outputs, *inputs]):
            return None
        for output, mine in zip(outputs, inputs, strict=True):
            _check_whole(output, mine, self._size)

        def steps() -> Steps:
            for output, given in zip(outputs, inputs, strict=True):
                flat, mine = _flat(output), _flat(given)
                into = flat.split([len(mine)] * self._size)
                yield from self._rounds.share("all_gather", mine, into, mine.dtype, len(mine))
                _put(flat, output)

        return steps(), outputs

    @_or_gloo
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> _Plan:
        if not _ours(outputs):
            return None
        root, mine, at_root = opts.rootRank, outputs[0], self._rank == opts.rootRank
        given = inputs[0] if at_root else []
        _check_pieces(given, mine, self._size if at_root else 0)

        def steps() -> Steps:
            into: list[torch.Tensor | None] = [None] * self._size
            flat = into[root] = _flat(mine)
            pieces = [_flat(tensor) for tensor in given]
            yield from self._rounds.exchange("scatter", pieces, into, flat.dtype, len(flat), root)
            _put(flat, mine)

        return steps(), outputs

    @_or_gloo
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> _Plan:
        op = int(opts.reduceOp.op)
        if not _reducible(outputs, op) or not _ours(inputs[0]):
            return None
        if len({piece.numel() for piece in inputs[0]}) > 1:
            return None
        _check_pieces(inputs[0], outputs[0], self._size)
        return self._reduce_scatter(outputs[0], inputs[0], op), outputs

    @_or_gloo
    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> _Plan:
        plan: _Plan = ShmGroup.reduce_scatter_single_coalesced.plan(self, [output], [input], opts)
        return plan

    @_or_gloo
    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> _Plan:
        op = int(opts.reduceOp.op)
        if not _reducible([*outputs, *inputs], op):
            return None
        for output, whole in zip(outputs, inputs, strict=True):
            _check_whole(whole, output, self._size)

        def steps() -> Steps:
            for output, whole in zip(outputs, inputs, strict=True):
                pieces = _flat(whole).split([output.numel()] * self._size)
                yield from self._reduce_scatter(output, pieces, op)

        return steps(), outputs

    def _reduce_scatter(self, output: torch.Tensor, pieces: _Tensors, op: int) -> Steps:
        flat = _flat(output)
        yield from self._rounds.reduce_scatter([_flat(piece) for piece in pieces], flat, op)
        _put(flat, output)

    @_or_gloo
    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> _Plan:
        if not _ours([*outputs, *inputs]):
            return None
        for tensors in (outputs, inputs):
            _refuse(len(tensors) != self._size, f"{len(tensors)} tensors for {self._size} ranks")
            _refuse(any(t.dtype != outputs[0].dtype for t in tensors), "tensors of several dtypes")

        def steps() -> Steps:
            flats, pieces = ([_flat(tensor) for tensor in each] for each in (outputs, inputs))
            yield from self._rounds.exchange("all_to_all", pieces, flats, flats[0].dtype, -1)
            for flat, tensor in zip(flats, outputs, strict=True):
                _put(flat, tensor)

        return steps(), outputs

    @_or_gloo
    def all_to_all_single(
        self, output: Any, input: Any, takes: Any, gives: Any, opts: Any = None
    ) -> _Plan:
        if not _ours([output, input]):
            return None
        _refuse(output.dtype != input.dtype, "tensors of several dtypes")
        takes, gives = self._rows(output, takes), self._rows(input, gives)

        def steps() -> Steps:
            flat = _flat(output)
            into, pieces = flat.split(takes), _flat(input).split(gives)
            yield from self._rounds.exchange("all_to_all", pieces, into, flat.dtype, -1)
            _put(flat, output)

        return steps(), [output]

    def _rows(self, tensor: torch.Tensor, splits: Sequence[int]) -> list[int]:
        """Elements for each rank, of a tensor that is split along its first dim."""
        rows = tensor.size(0) if tensor.dim() else 1
        if not splits:
            _refuse(rows % self._size != 0, f"{rows} rows do not divide among {self._size} ranks")
            splits = [rows // self._size] * self._size
        _refuse(len(splits) != self._size, f"{len(splits)} splits for {self._size} ranks")
        _refuse(sum(splits) != rows, f"splits of {sum(splits)} rows for a tensor of {rows}")
        return [n * (tensor.numel() // max(1, rows)) for n in splits]

    @_or_gloo
    def barrier(self, opts: Any = None) -> _Plan:
        return self._rounds.barrier(), []

    # C++ (functional collectives, DTensor) asks for these by either name. Where it finds none it issues
    # to Gloo itself with the interpreter's lock held, for which a thread of Gloo may wait in vain.
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single


def _refuse(wrong: bool, why: str) -> None:
    if wrong:
        raise ValueError(f"{why}.")


def _check_pieces(pieces: _Tensors, mine: torch.Tensor, count: int) -> None:
    _refuse(len(pieces) != count, f"{len(pieces)} tensors for {count} ranks")
    for piece in pieces:
        _refuse(piece.dtype != mine.dtype, "tensors of several dtypes")
        _refuse(piece.numel() != mine.numel(), "tensors of several sizes")


def _check_whole(whole: torch.Tensor, piece: torch.Tensor, count: int) -> None:
    _refuse(whole.dtype != piece.dtype, "tensors of several dtypes")
    wrong = whole.numel() != piece.numel() * count
    _refuse(wrong, f"{whole.numel()} elements for {count} pieces of {piece.numel()}")


def _ours(tensors: _Tensors) -> bool:
    """Whether memory can carry these; the answer is the same on all ranks, for shapes do not matter."""
    return all(t.is_cpu and t.layout == torch.strided and not t.is_quantized for t in tensors)


def _reducible(tensors: _Tensors, op: int) -> bool:
    return _ours(tensors) and all(foldable(op, t.dtype) for t in tensors)


def _is_flat(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor in a row: its own where they lie so, else a copy."""
    tensor = tensor.data  # without the history and the version counter, as in Gloo
    if not _is_flat(tensor):
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
    return tensor if tensor.dim() == 1 else tensor.view(-1)


def _put(flat: torch.Tensor, tensor: torch.Tensor) -> None:
    """Write the elements back where `_flat` had to copy."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.data.copy_(flat.view(tensor.shape))
