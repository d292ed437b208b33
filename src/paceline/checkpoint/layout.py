"""Which rank writes which part of a tensor, and which parts a rank reads; uses the planner of torch's DCP.

`torch.distributed.checkpoint` gives the parts of a (sharded) tensor that this rank holds, and matches saved
parts with wanted ones. Parts that several ranks hold are divided here, evenly by bytes, and plans travel as
JSON. `dcp.save` would pickle them, use the process groups of the training, and plan again for each save.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.checkpoint.manifest import ITEM_BYTES, Chunk, SavedTensor
from paceline.errors import CheckpointError
from paceline.job import collectives
from paceline.job.job import Job
from paceline.parallel.modules import local

# Tensors are cut into pieces of about this size, each with a digest; shares of ranks differ by less than one.
PIECE_BYTES = 16 << 20

RNG = "$rng."  # prefix of the random generators of a rank

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes
Key = tuple[str, tuple[int, ...]]  # name and offsets
Shape = tuple[str, tuple[int, ...]]  # dtype and global shape
Copy = tuple[Box, torch.Tensor]  # a part of a chunk, and the tensor that it is copied into
Row = tuple[str, str, list[int], list[int], list[int]]  # name, dtype, global shape, offsets, sizes


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor that this rank writes, and its place in the rank's file, in bytes.

    Args:
        start: First index of the part in this rank's local tensor.
    """

    name: str
    dtype: torch.dtype
    box: Box
    start: tuple[int, ...]
    offset: int
    size_bytes: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part as a view."""
        return narrowed(local(tensor), self.start, self.box[1])


@dataclass(frozen=True)
class Layout:
    """The plan of a save: this rank's pieces in the order of its file, and all shapes."""

    mine: list[Piece]
    size_bytes: int
    shapes: dict[str, Shape]


class Planner:
    """Plans saves, and plans again only if a rank's tensors have changed their names or shapes."""

    def __init__(self) -> None:
        self._signature = ""  # of the tensors that the layout was made for
        self._layout: Layout | None = None

    def plan(self, job: Job, tensors: dict[str, torch.Tensor]) -> Layout:
        """Divide the tensors among the ranks. Called by all ranks for each save.

        Raises:
            CheckpointError: on all ranks: they hold different shapes, or not all parts of a tensor.
        """
        signature = repr(
            [(n, t.shape, t.dtype, getattr(t, "placements", 0)) for n, t in tensors.items()]
        )
        changed = self._layout is None or signature != self._signature
        if any(collectives.gather(job, bool(changed))):
            self._layout = _divide(job, tensors)
            self._signature = signature
        assert self._layout is not None
        return self._layout


def described(value: Any) -> str:
    """What values must have in common to be loaded: the shape, and whether they are complex."""
    if value is None:
        return "no such name"
    if not hasattr(value, "shape"):
        return type(value).__name__
    return (
        f"shape {list(value.shape)}{' of complex values' if 'complex' in str(value.dtype) else ''}"
    )


def narrowed(tensor: torch.Tensor, start: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """A part of a tensor, as a view."""
    for dim, (first, size) in enumerate(zip(start, sizes, strict=True)):
        if (first, size) != (0, tensor.shape[dim]):
            tensor = tensor.narrow(dim, first, size)
    return tensor


def _divide(job: Job, tensors: dict[str, torch.Tensor]) -> Layout:
    rows, starts = _held_pieces(tensors)
    reports = collectives.gather(job, [rows, list(tensors)])
    _refuse_lost(job, [set(names) for _, names in reports])
    shapes, indices = _assign([rows for rows, _ in reports])
    # Wide types first: each piece then lies at a multiple of its own size, without gaps.
    mine = sorted(
        (rows[i] for i in indices[job.rank]),
        key=lambda row: (-ITEM_BYTES[row[1]], row[0], tuple(row[3])),
    )
    pieces, offset = [], 0
    for name, dtype, _, offsets, sizes in mine:
        size_bytes = ITEM_BYTES[dtype] * math.prod(sizes)
        own, box = tensors[name].dtype, (tuple(offsets), tuple(sizes))
        pieces.append(Piece(name, own, box, starts[name, box[0]], offset, size_bytes))
        offset += size_bytes
    return Layout(pieces, offset, shapes)


def _held_pieces(tensors: dict[str, torch.Tensor]) -> tuple[list[Row], dict[Key, tuple[int, ...]]]:
    """The pieces that this rank holds, and where each starts in the local tensor."""
    from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

    rows: list[Row] = []
    starts = {}
    for item in create_default_local_save_plan(tensors, False).items:
        name, data = item.index.fqn, item.tensor_data
        assert data is not None
        if 0 in data.chunk.sizes and 0 not in data.size:
            continue  # more ranks than rows: this rank holds nothing of it
        dtype = str(tensors[name].dtype).removeprefix("torch.")
        if dtype not in ITEM_BYTES:
            raise CheckpointError(f"{name} has the dtype {dtype}, which cannot be saved.")
        held = tuple(data.chunk.offsets)
        for offsets, sizes in _pieces((held, tuple(data.chunk.sizes)), ITEM_BYTES[dtype]):
            rows.append((name, dtype, list(data.size), list(offsets), list(sizes)))
            starts[name, offsets] = tuple(o - h for o, h in zip(offsets, held, strict=True))
    return rows, starts


def _assign(held: Sequence[list[Row]]) -> tuple[dict[str, Shape], list[list[int]]]:
    """Give each piece to the rank among its holders that has least to write.

    Args:
        held: What each rank holds, in rank order.

    Returns:
        Dtype and shape of each tensor; for each rank, the indices in its rows of what it writes.
    """
    holders: dict[Key, list[int]] = {}
    facts: dict[Key, tuple[str, list[int], list[int]]] = {}
    for rank, rows in enumerate(held):
        for name, dtype, shape, offsets, sizes in rows:
            key = (name, tuple(offsets))
            fact = (dtype, shape, sizes)
            if facts.setdefault(key, fact) != fact:
                raise _difference_error(name, facts[key], fact, rank)
            holders.setdefault(key, []).append(rank)
    _refuse_incomplete(facts)
    size_bytes = {k: ITEM_BYTES[dtype] * math.prod(sizes) for k, (dtype, _, sizes) in facts.items()}
    loads = [0] * len(held)
    owner = {}
    for key in sorted(facts, key=lambda k: (-size_bytes[k], k)):  # the largest first: even shares
        owner[key] = min(holders[key], key=lambda rank: loads[rank])
        loads[owner[key]] += size_bytes[key]
    indices = [
        [i for i, row in enumerate(rows) if owner[row[0], tuple(row[3])] == rank]
        for rank, rows in enumerate(held)
    ]
    shapes = {name: (dtype, tuple(shape)) for (name, _), (dtype, shape, _) in facts.items()}
    return shapes, indices


def _pieces(box: Box, itemsize: int) -> list[Box]:
    """Cut a part along its first dim into pieces of about `PIECE_BYTES`."""
    offsets, sizes = box
    if not sizes:
        return [box]
    row_bytes = max(1, math.prod(sizes[1:]) * itemsize)
    rows = max(1, PIECE_BYTES // row_bytes)
    firsts = range(0, sizes[0], rows) or [0]
    return [
        ((offsets[0] + at, *offsets[1:]), (min(rows, sizes[0] - at), *sizes[1:])) for at in firsts
    ]


def _refuse_lost(job: Job, names: Sequence[set[str]]) -> None:
    """Raise CheckpointError if a rank has a tensor that no rank has whose values are saved."""
    saved = set().union(*(names[rank] for rank in job.state_ranks))
    for rank, own in enumerate(names):
        if lost := sorted(name for name in own - saved if not name.startswith(RNG)):
            raise CheckpointError(
                f"{lost[0]} cannot be saved: rank {rank} holds it and rank 0 does not.",
                why="a checkpoint has the structure of rank 0's state, so other values would be lost.",
                fix="give all ranks the same state; an optimizer that divides its state over the ranks needs "
                "`fsdp` in its place.",
                parameter=lost[0],
            )


def _refuse_incomplete(facts: dict[Key, tuple[str, list[int], list[int]]]) -> None:
    volumes: dict[str, int] = {}
    for (name, _), (_, shape, box) in facts.items():
        volumes[name] = volumes.get(name, -math.prod(shape)) + math.prod(box)
    for name, left in volumes.items():
        if left:
            raise CheckpointError(
                f"{name} cannot be saved: the parts on the ranks do not add up to the tensor.",
                why="the ranks hold different shapes, or shards are missing.",
                parameter=name,
            )


def _difference_error(name: str, first: Any, other: Any, rank: int) -> CheckpointError:
    return CheckpointError(
        f"{name} is {first[0]} {list(first[1])} on one rank and {other[0]} {list(other[1])} on rank {rank}.",
        fix="save values that differ between ranks under different names.",
        parameter=name,
    )


def plan_reads(
    wanted: dict[str, torch.Tensor], saved: dict[str, SavedTensor]
) -> list[tuple[str, Chunk, list[Copy]]]:
    """The saved chunks that this rank needs, by name, and for each the copies from it into `wanted`."""
    from torch.distributed.checkpoint import DefaultLoadPlanner, LoadPlan, Metadata
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    metadata = Metadata(
        {
            name: TensorStorageMetadata(
                TensorProperties(dtype=getattr(torch, saved[name].dtype)),
                torch.Size(saved[name].shape),
                [
                    ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes))
                    for c in saved[name].chunks
                ],
            )
            for name in wanted
        }
    )
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    planner.set_up_planner(wanted, metadata, True)
    plan: LoadPlan = planner.create_local_plan()
    copies: dict[MetadataIndex, list[Copy]] = {}
    for item in plan.items:
        source = (tuple(item.storage_offsets), tuple(item.lengths))
        copies.setdefault(item.storage_index, []).append((source, planner.resolve_tensor(item)))
    boxes = {
        MetadataIndex(name, c.offsets): (name, c) for name in wanted for c in saved[name].chunks
    }
    return [(*boxes[index], found) for index, found in copies.items()]
