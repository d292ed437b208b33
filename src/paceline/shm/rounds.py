"""The collectives as rounds: every rank writes into its slot, all meet, every rank reads what it needs.

Each collective is a generator that yields where it would have to wait, so that whoever has time can carry
it on. Slots alternate between even and odd turns: a rank that has met the others in turn t may write its
slot of turn t + 1 at once, for all have finished reading what that held in turn t - 1.

Tensors are flat and contiguous. Raises `Mismatch` where ranks want different things.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Generator, Sequence

import torch

from paceline.shm.folding import OPS, fold
from paceline.shm.regions import LEAST_BYTES, Regions
from paceline.shm.segment import Segment

Steps = Generator[None, None, None]

KINDS = (
    "barrier",
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
)
_DTYPES = tuple(sorted((d for d in vars(torch).values() if isinstance(d, torch.dtype)), key=str))
_DTYPE_NUMBER = {dtype: number for number, dtype in enumerate(_DTYPES)}
_COUNT_BITS, _ROOT_BITS, _OP_BITS, _DTYPE_BITS = 34, 12, 4, 8
_SMALL_BYTES = 32 << 10  # up to here all ranks fold everything, which saves a meeting
_POLLS = 40
_OP_NAMES = {op: name for name, op in OPS.items()}
_move = ctypes.memmove


class Mismatch(Exception):
    """The ranks called different collectives, or with different tensors; `args[0]` has one text a rank."""


class Rounds:
    """The collectives of one group over its segment, one at a time.

    Attributes:
        regions: the gradients that all ranks have mapped.
        turn: how often the ranks have met.
        polls: how often a rank looks for the others before it yields.
        leaves: the operations of the group that are Gloo's.
        patience_s: how much longer than an operation's timeout the first rank of the segment may take.

    Collective: all ranks of the group; each method, in the same order.
    """

    leaves: frozenset[str] = frozenset()
    patience_s = 0.0

    def __init__(self, segment: Segment, *, spin: bool) -> None:
        self.segment = segment
        self.regions = Regions(segment)
        self.turn = 0
        self.polls = _POLLS if spin else 1
        self._rank, self._size = segment.rank, segment.size
        self._slot_bytes = segment.slot_bytes

    @property
    def away(self) -> bool:
        """Whether this rank waits for what the others' numbers do not tell."""
        return False

    def look(self, missing: Sequence[int], *, late: bool) -> Exception | None:
        """What has gone wrong where the segment does not reach; asked while this rank waits for `missing`."""

    def gave_up(self, error: BaseException, culprit: int) -> None:
        """Tell those whom the segment does not reach."""

    def culprit(self, error: BaseException) -> int:
        """Because of whom `error` was raised, as a place in the line's ranks."""
        return self._rank

    def _meet(self) -> Steps:
        """Say that this rank has written, and wait until all have."""
        turn = self.turn + 1
        posted = self.segment.posted
        posted[self._rank] = turn
        while True:
            for _ in range(self.polls):
                if min(posted) >= turn:
                    self.segment.ring()  # those who sleep cannot see it
                    self.turn = turn
                    return
            yield

    def _meet_for(self, kind: str, dtype: torch.dtype, count: int, op: int, root: int) -> Steps:
        """The first meeting of a collective, where all see that they want the same."""
        note = note_of(kind, dtype, count, op, root)
        notes = self.segment.notes[self.turn & 1]
        notes[self._rank] = note
        yield from self._meet()
        all_notes = notes.tolist()
        if all_notes.count(note) != self._size:
            raise Mismatch([describe(each) for each in all_notes])

    def barrier(self) -> Steps:
        """All have come."""
        yield from self._meet_for("barrier", torch.uint8, 0, 0, -1)

    def all_reduce(self, flat: torch.Tensor, op: int, region: int | None = None) -> Steps:
        """Reduce `flat` over ranks, in place.

        Args:
            region: What `Regions.offer` said when the operation was issued.
        """
        if region is not None and flat.nbytes >= LEAST_BYTES:
            done = yield from self._all_reduce_in_regions(flat, op, region)
            if done:
                return
        if self._size > 2 and flat.nbytes > _SMALL_BYTES:
            yield from self._all_reduce_by_shares(flat, op)
            return
        yield from self._fold_everything("all_reduce", flat, op, -1)

    def _all_reduce_in_regions(
        self, flat: torch.Tensor, op: int, region: int
    ) -> Generator[None, None, bool]:
        """Each rank reduces its share where it lies, and gives it to all; if all ranks offer a region.

        Nobody else reads or writes a rank's share between the two meetings, and nobody any of it after
        the second, so that the memory may be a gradient again.
        """
        regions, dtype, offers = self.regions, flat.dtype, self.segment.offers[self.turn & 1]
        offers[self._rank] = region
        yield from self._meet_for("all_reduce", dtype, flat.numel(), op, -1)
        numbers = tuple(offers)
        if 0 in numbers:
            return False
        if not regions.known(numbers, dtype):
            yield from self._introduce(numbers, dtype, flat.numel())
        parts = regions.parts(numbers, dtype)
        if parts is None:
            return False
        spare = torch.empty_like(parts[0][0]) if self._size > 2 else None
        for chunks in zip(*parts, strict=True):
            out = chunks[self._rank] if spare is None else spare[: len(chunks[0])]
            fold(op, chunks, out)
            for chunk in chunks:
                if chunk is not out:
                    chunk.copy_(out)
        yield from self._meet()
        return True

    def _introduce(self, numbers: tuple[int, ...], dtype: torch.dtype, count: int) -> Steps:
        """All map the regions of these numbers, and agree on whether all could."""
        regions = self.regions
        descriptors = yield from self._tell(regions.descriptor(numbers[self._rank]))
        parts = regions.map(descriptors, dtype, count)
        could = yield from self._tell(int(parts is not None))
        regions.keep(numbers, dtype, parts if all(could) else None)

    def _tell(self, number: int) -> Generator[None, None, list[int]]:
        """One small number of each rank, for all."""
        cells = self.segment.views(self.turn, torch.int64, 0, 1)
        cells[self._rank].fill_(number)
        yield from self._meet()
        return [int(cell) for cell in cells]

    def reduce(self, flat: torch.Tensor, op: int, root: int) -> Steps:
        """Reduce `flat` over ranks into that of `root`; the others' stay."""
        yield from self._fold_everything("reduce", flat, op, root)

    def _fold_everything(self, kind: str, flat: torch.Tensor, op: int, root: int) -> Steps:
        """Whoever wants the result reduces all of it."""
        rank, segment, dtype = self._rank, self.segment, flat.dtype
        total, width, source = flat.numel(), dtype.itemsize, flat.data_ptr()
        most = self._slot_bytes // width
        for begin in range(0, max(1, total), most):
            turn, count = self.turn, min(most, total - begin)
            _move(segment.address(turn, rank), source + begin * width, count * width)
            if begin:
                yield from self._meet()
            else:
                yield from self._meet_for(kind, dtype, total, op, root)
            if count and root in (-1, rank):
                out = flat if count == total else flat[begin : begin + count]
                parts = list(segment.views(turn, dtype, 0, count))
                if self._size == 2:
                    parts[rank] = out  # just read, so nearer than the slot
                fold(op, parts, out)

    def _all_reduce_by_shares(self, flat: torch.Tensor, op: int) -> Steps:
        """Each rank reduces its share of every chunk; shares travel back with the next chunk."""
        rank, size, segment, dtype = self._rank, self._size, self.segment, flat.dtype
        total, width, data = flat.numel(), dtype.itemsize, flat.data_ptr()
        # A slot holds a chunk, and after it the reduced share of the chunk before.
        share = self._slot_bytes // (width * (size + 1)) & -16
        chunk = share * size
        before = (0, 0)  # where the chunk before lies in `flat`
        for begin in range(0, total + chunk, chunk):
            turn, count = self.turn, max(0, min(chunk, total - begin))
            slot, source = segment.address(turn, rank), data + begin * width
            own, end = (min(count, s * share) * width for s in (rank, rank + 1))
            _move(slot, source, own)  # all but its own share
            _move(slot + end, source + end, count * width - end)
            if begin:
                yield from self._meet()
            else:
                yield from self._meet_for("all_reduce", dtype, total, op, -1)
            for r in range(size):
                first, last = (min(before[1], s * share) for s in (r, r + 1))
                _move(
                    data + (before[0] + first) * width,
                    segment.address(turn, r) + chunk * width,
                    (last - first) * width,
                )
            first, last = (min(count, s * share) for s in (rank, rank + 1))
            if last > first:
                parts = list(segment.views(turn, dtype, first, last))
                parts[rank] = flat[begin + first : begin + last]
                out = segment.views(turn + 1, dtype, chunk, chunk + last - first)[rank]
                fold(op, parts, out)
            before = (begin, count)

    def reduce_scatter(self, pieces: Sequence[torch.Tensor], out: torch.Tensor, op: int) -> Steps:
        """Reduce `pieces`, one per rank and of one size, and give each rank its own in `out`."""
        rank, size, segment, dtype = self._rank, self._size, self.segment, out.dtype
        piece, width = out.numel(), dtype.itemsize
        data = [each.data_ptr() for each in pieces]
        most = self._slot_bytes // (size * width) & -16
        for begin in range(0, max(1, piece), most):
            turn, count = self.turn, min(most, piece - begin)
            slot = segment.address(turn, rank)
            for r in range(size):
                _move(slot + r * most * width, data[r] + begin * width, count * width)
            if begin:
                yield from self._meet()
            else:
                yield from self._meet_for("reduce_scatter", dtype, piece, op, -1)
            if count:
                parts = segment.views(turn, dtype, rank * most, rank * most + count)
                fold(op, parts, out[begin : begin + count])

    def share(
        self,
        kind: str,
        mine: torch.Tensor | None,
        into: Sequence[torch.Tensor | None],
        dtype: torch.dtype,
        count: int,
        root: int = -1,
    ) -> Steps:
        """Everyone may read what others give: broadcast, gather, all-gather.

        Args:
            mine: What this rank gives, if it does.
            into: Where to put what each rank gives; None where it is not wanted.
            count: Elements that each gives.
        """
        rank, segment = self._rank, self.segment
        total, most = count * dtype.itemsize, self._slot_bytes
        source = mine.data_ptr() if mine is not None else 0
        targets = [(r, to.data_ptr()) for r, to in enumerate(into) if to is not None]
        for begin in range(0, max(1, total), most):
            turn, size_bytes = self.turn, min(most, total - begin)
            if mine is not None:
                _move(segment.address(turn, rank), source + begin, size_bytes)
            if begin:
                yield from self._meet()
            else:
                yield from self._meet_for(kind, dtype, count, 0, root)
            for r, target in targets:
                _move(target + begin, segment.address(turn, r), size_bytes)

    def exchange(
        self,
        kind: str,
        pieces: Sequence[torch.Tensor] | None,
        into: Sequence[torch.Tensor | None],
        dtype: torch.dtype,
        count: int,
        root: int = -1,
    ) -> Steps:
        """Everyone reads what others give to it alone: scatter, all-to-all.

        Args:
            pieces: What this rank gives to each, if it does.
            into: Where to put what each gives to this rank; None where it gives nothing.
            count: Elements of every piece; -1 where all give pieces, of any size.
        """
        rank, size, segment, width = self._rank, self._size, self.segment, dtype.itemsize
        most = self._slot_bytes // size & -64
        if count < 0:
            count = yield from self._longest(pieces or (), into)
        rounds = -(-count * width // most)
        for number in range(max(1, rounds)):
            turn, begin = self.turn, number * most
            for r, piece in enumerate(pieces or ()):
                left = max(0, min(most, piece.nbytes - begin))
                _move(segment.address(turn, rank) + r * most, piece.data_ptr() + begin, left)
            if number:
                yield from self._meet()
            else:
                yield from self._meet_for(kind, dtype, count, 0, root)
            for r, to in enumerate(into):
                if to is not None:
                    left = max(0, min(most, to.nbytes - begin))
                    _move(to.data_ptr() + begin, segment.address(turn, r) + rank * most, left)

    def _longest(
        self, pieces: Sequence[torch.Tensor], into: Sequence[torch.Tensor | None]
    ) -> Generator[None, None, int]:
        """Elements of the longest piece of all; all see whether givers and takers agree on sizes."""
        rank, size, segment, turn = self._rank, self._size, self.segment, self.turn
        gives = [piece.numel() for piece in pieces]
        takes = [0 if to is None else to.numel() for to in into]
        rows = segment.views(turn, torch.int64, 0, 2 * size)
        rows[rank].copy_(torch.tensor(gives + takes))
        yield from self._meet_for("all_to_all", torch.int64, 2 * size, 0, -1)
        table = torch.stack(list(rows))
        given, taken = table[:, :size], table[:, size:]
        if not torch.equal(given, taken.T):
            raise Mismatch(
                [
                    f"all_to_all of {g.tolist()}, takes {t.tolist()}"
                    for g, t in zip(given, taken, strict=True)
                ]
            )
        return int(given.max())


@functools.lru_cache(maxsize=1024)
def note_of(kind: str, dtype: torch.dtype, count: int, op: int, root: int) -> int:
    """One number for what a rank wants, to compare."""
    note = KINDS.index(kind)
    for bits, value in (
        (_DTYPE_BITS, _DTYPE_NUMBER[dtype]),
        (_OP_BITS, op),
        (_ROOT_BITS, root + 1),
        (_COUNT_BITS, count),
    ):
        note = note << bits | value & (1 << bits) - 1
    return note


def describe(note: int) -> str:
    """What a rank's note says, for an error."""
    values = []
    for bits in (_COUNT_BITS, _ROOT_BITS, _OP_BITS, _DTYPE_BITS):
        values.append(note & (1 << bits) - 1)
        note >>= bits
    count, root, op, dtype = values
    text = KINDS[note]
    if text == "barrier":
        return text
    text += f" of {count} x {str(_DTYPES[dtype]).removeprefix('torch.')}"
    if KINDS[note] in ("all_reduce", "reduce", "reduce_scatter"):
        text += f", {_OP_NAMES[op]}"
    return text + (f", root {root - 1}" if root else "")
