"""The collectives over a shared segment, in rounds, and the reductions they use.

In a round each rank writes its slot, all ranks synchronize, and each rank reads what it needs. Slots
alternate between even and odd rounds: after a rank has synchronized in round t, it may write its slot of
round t + 1 at once, because all ranks have finished reading what that slot held in round t - 1.

Each collective is a generator that yields when it would have to wait, so any thread can continue it.
Tensors are flat and contiguous. Reductions add in rank order, so all ranks get the same bits.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from paceline.shm.segment import Segment
from paceline.shm.shared_buckets import MIN_BYTES, SharedBuckets

Collective = Generator[None, None, None]

KINDS = ("barrier", "all_reduce", "broadcast", "all_gather", "reduce_scatter")
_DTYPES = tuple(sorted((d for d in vars(torch).values() if isinstance(d, torch.dtype)), key=str))
_DTYPE_INDEX = {dtype: index for index, dtype in enumerate(_DTYPES)}
# Bits of the fields of a signature. The remaining 6 bits hold the kind.
_COUNT_BITS, _ROOT_BITS, _OP_BITS, _DTYPE_BITS = 34, 12, 4, 8
# Up to this size each rank reduces the whole tensor, which needs one round fewer.
_SMALL_BYTES = 32 << 10
_POLLS = 40  # checks of the other ranks' counters before a collective yields
_move = ctypes.memmove

# Operations are plain integers here: comparing or hashing torch's enumeration takes a microsecond.
_MEMBERS: dict[str, Any] = dict(ReduceOp.RedOpType.__members__)
OPS = {name.lower(): int(op) for name, op in _MEMBERS.items()}
_OP_NAMES = {op: name for name, op in OPS.items()}
_SUM, _AVG = OPS["sum"], OPS["avg"]
_FUNCTIONS: dict[int, Callable[..., torch.Tensor]] = {
    _SUM: torch.add,
    _AVG: torch.add,
    OPS["product"]: torch.mul,
    OPS["min"]: torch.minimum,
    OPS["max"]: torch.maximum,
    OPS["band"]: torch.bitwise_and,
    OPS["bor"]: torch.bitwise_or,
    OPS["bxor"]: torch.bitwise_xor,
}
_HALVES = (torch.bfloat16, torch.float16)
_FLOATS = (torch.float32, torch.float64, *_HALVES)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_BITWISE = (OPS["band"], OPS["bor"], OPS["bxor"])
_IN_FLOAT32 = (_SUM, OPS["product"], _AVG)  # operations that round, so 16-bit floats need float32
_SUPPORTED = {(op, dtype) for op in _FUNCTIONS if op != _AVG for dtype in _INTEGERS}
_SUPPORTED |= {(op, dtype) for op in _FUNCTIONS if op not in _BITWISE for dtype in _FLOATS}


class CallMismatch(Exception):
    """The ranks called different collectives. `args[0]` describes the call of each rank."""


def can_reduce(op: int, dtype: torch.dtype) -> bool:
    """Whether `reduce_parts` supports this operation on this dtype."""
    return (op, dtype) in _SUPPORTED


def reduce_parts(op: int, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Reduce flat tensors of one length into `out`, in the given order.

    16-bit floats are added and multiplied in float32 and rounded once. `out` may be one of two parts, but
    not one of three or more.
    """
    function = _FUNCTIONS[op]
    # torch itself widens and rounds once for two 16-bit operands.
    widen = out.dtype in _HALVES and op in _IN_FLOAT32 and (len(parts) > 2 or op == _AVG)
    into = parts[0].float() if widen else out
    function(into if widen else parts[0], parts[1], out=into)
    for part in parts[2:]:
        function(into, part, out=into)
    if op == _AVG:
        into.div_(len(parts))
    if widen:
        out.copy_(into)


class Collectives:
    """The collectives of one group. One runs at a time, in the same order on all ranks.

    Attributes:
        buckets: the gradient buckets that all ranks have mapped.
        round: the number of rounds done.
        polls: number of times that a collective checks the other ranks before it yields.

    Raises:
        CallMismatch: in each method, if the ranks called different collectives.
    """

    def __init__(self, segment: Segment, *, spin: bool) -> None:
        self.segment = segment
        self.buckets = SharedBuckets(segment)
        self.round = 0
        self.polls = _POLLS if spin else 1
        self._rank, self._size = segment.rank, segment.size
        self._slot_bytes = segment.slot_bytes

    def _synchronize(self) -> Collective:
        """Announce that this rank has written its slot, and wait for all ranks."""
        round_number = self.round + 1
        rounds = self.segment.rounds
        rounds[self._rank] = round_number
        while True:
            for _ in range(self.polls):
                if min(rounds) >= round_number:
                    self.segment.wake()
                    self.round = round_number
                    return
            yield

    def _synchronize_chunk(
        self, begin: int, kind: str, dtype: torch.dtype, count: int, op: int, root: int
    ) -> Collective:
        """Synchronize for the chunk that begins at `begin`. The first compares the calls of all ranks."""
        if begin:
            yield from self._synchronize()
            return
        own = _signature(kind, dtype, count, op, root)
        signatures = self.segment.signatures[self.round & 1]
        signatures[self._rank] = own
        yield from self._synchronize()
        found = signatures.tolist()
        if found.count(own) != self._size:
            raise CallMismatch([_describe(each) for each in found])

    def barrier(self) -> Collective:
        """Wait until all ranks have called it."""
        yield from self._synchronize_chunk(0, "barrier", torch.uint8, 0, 0, -1)

    def all_reduce(self, flat: torch.Tensor, op: int, bucket_id: int | None = None) -> Collective:
        """Reduce `flat` over the ranks, in place.

        Args:
            bucket_id: What `SharedBuckets.find` returned when the work was issued.
        """
        if bucket_id is not None and flat.nbytes >= MIN_BYTES:
            done = yield from self._all_reduce_buckets(flat, op, bucket_id)
            if done:
                return
        if self._size > 2 and flat.nbytes > _SMALL_BYTES:
            yield from self._all_reduce_by_shares(flat, op)
        else:
            yield from self._all_reduce_whole(flat, op)

    def _all_reduce_buckets(
        self, flat: torch.Tensor, op: int, bucket_id: int
    ) -> Generator[None, None, bool]:
        """Each rank reduces its share of the shared buckets in place and writes it to all of them.

        Returns False if any rank has no shared bucket. Between the two synchronizations only one rank
        accesses each share. After the second, the memory is an ordinary gradient again.
        """
        buckets, dtype = self.buckets, flat.dtype
        ids = self.segment.bucket_ids[self.round & 1]
        ids[self._rank] = bucket_id
        yield from self._synchronize_chunk(0, "all_reduce", dtype, flat.numel(), op, -1)
        key = tuple(ids)
        if 0 in key:
            return False
        if not buckets.is_known(key, dtype):
            yield from self._map_buckets(key, dtype, flat.numel())
        parts = buckets.parts(key, dtype)
        if parts is None:
            return False
        buffer = torch.empty_like(parts[0][0]) if self._size > 2 else None
        for chunks in zip(*parts, strict=True):
            out = chunks[self._rank] if buffer is None else buffer[: len(chunks[0])]
            reduce_parts(op, chunks, out)
            for chunk in chunks:
                if chunk is not out:
                    chunk.copy_(out)
        yield from self._synchronize()
        return True

    def _map_buckets(self, key: tuple[int, ...], dtype: torch.dtype, count: int) -> Collective:
        """Map these buckets of all ranks, on all ranks. Keep None if any rank could not."""
        buckets = self.buckets
        descriptors = yield from self._gather_number(buckets.descriptor(key[self._rank]))
        parts = buckets.map_buckets(descriptors, dtype, count)
        mapped = yield from self._gather_number(int(parts is not None))
        buckets.keep(key, dtype, parts if all(mapped) else None)

    def _gather_number(self, number: int) -> Generator[None, None, list[int]]:
        cells = self.segment.views(self.round, torch.int64, 0, 1)
        cells[self._rank].fill_(number)
        yield from self._synchronize()
        return [int(cell) for cell in cells]

    def _all_reduce_whole(self, flat: torch.Tensor, op: int) -> Collective:
        """Each rank reduces the whole tensor."""
        rank, segment, dtype = self._rank, self.segment, flat.dtype
        total, width, source = flat.numel(), dtype.itemsize, flat.data_ptr()
        max_count = self._slot_bytes // width
        for begin in range(0, max(1, total), max_count):
            round_number, count = self.round, min(max_count, total - begin)
            _move(segment.address(round_number, rank), source + begin * width, count * width)
            yield from self._synchronize_chunk(begin, "all_reduce", dtype, total, op, -1)
            if count:
                out = flat if count == total else flat[begin : begin + count]
                parts = list(segment.views(round_number, dtype, 0, count))
                if self._size == 2:
                    parts[rank] = out  # the same values as in the slot, but in the cache
                reduce_parts(op, parts, out)

    def _all_reduce_by_shares(self, flat: torch.Tensor, op: int) -> Collective:
        """Each rank reduces its share of every chunk, and publishes the result in the next round."""
        rank, size, segment, dtype = self._rank, self._size, self.segment, flat.dtype
        total, width, data = flat.numel(), dtype.itemsize, flat.data_ptr()
        # A slot holds a chunk, followed by the reduced share of the previous chunk.
        share = self._slot_bytes // (width * (size + 1)) & -16
        chunk = share * size
        previous = (0, 0)  # first element and length of the previous chunk in `flat`
        for begin in range(0, total + chunk, chunk):
            round_number, count = self.round, max(0, min(chunk, total - begin))
            slot, source = segment.address(round_number, rank), data + begin * width
            own, end = (min(count, s * share) * width for s in (rank, rank + 1))
            _move(slot, source, own)  # everything except its own share
            _move(slot + end, source + end, count * width - end)
            yield from self._synchronize_chunk(begin, "all_reduce", dtype, total, op, -1)
            for r in range(size):
                first, last = (min(previous[1], s * share) for s in (r, r + 1))
                _move(
                    data + (previous[0] + first) * width,
                    segment.address(round_number, r) + chunk * width,
                    (last - first) * width,
                )
            first, last = (min(count, s * share) for s in (rank, rank + 1))
            if last > first:
                parts = list(segment.views(round_number, dtype, first, last))
                parts[rank] = flat[begin + first : begin + last]
                out = segment.views(round_number + 1, dtype, chunk, chunk + last - first)[rank]
                reduce_parts(op, parts, out)
            previous = (begin, count)

    def reduce_scatter(
        self, pieces: Sequence[torch.Tensor], out: torch.Tensor, op: int
    ) -> Collective:
        """Reduce `pieces` over the ranks: piece r goes to `out` of rank r. All pieces have one size."""
        rank, size, segment, dtype = self._rank, self._size, self.segment, out.dtype
        piece, width = out.numel(), dtype.itemsize
        data = [each.data_ptr() for each in pieces]
        max_count = self._slot_bytes // (size * width) & -16
        for begin in range(0, max(1, piece), max_count):
            round_number, count = self.round, min(max_count, piece - begin)
            slot = segment.address(round_number, rank)
            for r in range(size):
                _move(slot + r * max_count * width, data[r] + begin * width, count * width)
            yield from self._synchronize_chunk(begin, "reduce_scatter", dtype, piece, op, -1)
            if count:
                parts = segment.views(
                    round_number, dtype, rank * max_count, rank * max_count + count
                )
                reduce_parts(op, parts, out[begin : begin + count])

    def broadcast(self, flat: torch.Tensor, root: int) -> Collective:
        """Copy `flat` of group rank `root` to `flat` of all ranks."""
        is_root = root == self._rank
        outputs = [] if is_root else [(root, flat)]
        yield from self._copy("broadcast", flat if is_root else None, outputs, flat, root)

    def all_gather(self, flat: torch.Tensor, outputs: Sequence[torch.Tensor]) -> Collective:
        """Copy `flat` of each rank into `outputs`, in rank order."""
        yield from self._copy("all_gather", flat, list(enumerate(outputs)), flat, -1)

    def _copy(
        self,
        kind: str,
        source: torch.Tensor | None,
        outputs: Sequence[tuple[int, torch.Tensor]],
        like: torch.Tensor,
        root: int,
    ) -> Collective:
        """Write `source` to the slot, if not None, and copy the slots of other ranks to `outputs`.

        Args:
            outputs: `(rank, tensor)` for each rank to copy from.
            like: A tensor with the dtype and size that all ranks copy.
        """
        rank, segment, total, slot_bytes = self._rank, self.segment, like.nbytes, self._slot_bytes
        data = source.data_ptr() if source is not None else 0
        targets = [(r, output.data_ptr()) for r, output in outputs]
        for begin in range(0, max(1, total), slot_bytes):
            round_number, size_bytes = self.round, min(slot_bytes, total - begin)
            if source is not None:
                _move(segment.address(round_number, rank), data + begin, size_bytes)
            yield from self._synchronize_chunk(begin, kind, like.dtype, like.numel(), 0, root)
            for r, target in targets:
                _move(target + begin, segment.address(round_number, r), size_bytes)


@functools.lru_cache(maxsize=1024)
def _signature(kind: str, dtype: torch.dtype, count: int, op: int, root: int) -> int:
    """A call as one 64-bit integer, for the comparison between ranks."""
    signature = KINDS.index(kind)
    for bits, value in (
        (_DTYPE_BITS, _DTYPE_INDEX[dtype]),
        (_OP_BITS, op),
        (_ROOT_BITS, root + 1),
        (_COUNT_BITS, count),
    ):
        signature = signature << bits | value & (1 << bits) - 1
    return signature


def _describe(signature: int) -> str:
    """A signature in words, for an error message."""
    values = []
    for bits in (_COUNT_BITS, _ROOT_BITS, _OP_BITS, _DTYPE_BITS):
        values.append(signature & (1 << bits) - 1)
        signature >>= bits
    count, root, op, dtype = values
    text = KINDS[signature]
    if text == "barrier":
        return text
    name = str(_DTYPES[dtype]).removeprefix("torch.")
    text += f" of {count} x {name}"
    if "reduce" in text:
        text += f", {_OP_NAMES[op]}"
    return text + (f", root {root - 1}" if root else "")
