"""Who writes which part of which tensor, and who needs which: a front to the planner of torch's DCP.

`torch.distributed.checkpoint` tells the boxes of a (sharded) tensor that this rank holds, and matches the
boxes that were saved to those that are wanted. We share out what several ranks hold, by bytes, and exchange
plans as JSON: `dcp.save` would pickle them, use the training's groups, and plan anew for each save.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from paceline.checkpoint.manifest import DTYPES, Chunk, Saved
from paceline.errors import CheckpointError
from paceline.job import collectives
from paceline.job.job import Job

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import ReadItem

# Digests and reads go by pieces of about this size, and shares of ranks differ by less than one.
PIECE_BYTES = 16 << 20

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes
Key = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor that this rank writes, and its place in the rank's file, in bytes.

    Args:
        start: Of the box in the tensor as this rank holds it.
    """

    name: str
    dtype: torch.dtype
    box: Box
    start: tuple[int, ...]
    offset: int
    size_bytes: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The box as a view."""
        return narrowed(local(tensor), self.start, self.box[1])


@dataclass(frozen=True)
class Layout:
    """The plan of a save: this rank's pieces, in the order of its file, and every tensor's shape."""

    mine: list[Piece]
    size_bytes: int
    shapes: dict[str, tuple[str, tuple[int, ...]]]


class Planner:
    """Plans saves, anew only when tensors have changed their shapes. Collective: as the methods say."""

    def __init__(self) -> None:
        self._signature = b""
        self._layout: Layout | None = None

    def plan(self, job: Job, tensors: dict[str, torch.Tensor]) -> Layout:
        """Share out the tensors: what several ranks hold goes to the one that has least to write.

        Raises:
            CheckpointError: on all ranks, where they hold different shapes, or not the whole.

        Collective: all ranks, for each save.
        """
        text = repr(
            [(n, t.shape, t.dtype, getattr(t, "placements", 0)) for n, t in tensors.items()]
        )
        signature = hashlib.sha256(text.encode()).digest()
        changed = self._layout is None or signature != self._signature
        if any(int(t) for t in collectives.gather_tensor(job, torch.tensor([int(changed)]))):
            self._layout = _shared_out(job, tensors)
            self._signature = signature
        assert self._layout is not None
        return self._layout


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor, whose class takes 0.4 s to import."""
    return hasattr(tensor, "placements")


def sharded_like(own: Any, value: Any) -> Any:
    """This rank's shard of `value`, which all ranks hold whole, where `own` is sharded; else `value`."""
    whole = isinstance(value, torch.Tensor) and not is_sharded(value)
    if not is_sharded(own) or not whole or value.shape != own.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    value = value.to(own.device)
    return distribute_tensor(value, own.device_mesh, own.placements, src_data_rank=None)


def narrowed(tensor: torch.Tensor, start: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """A box of a tensor, as a view."""
    for dim, (first, size) in enumerate(zip(start, sizes, strict=True)):
        if (first, size) != (0, tensor.shape[dim]):
            tensor = tensor.narrow(dim, first, size)
    return tensor


def _shared_out(job: Job, tensors: dict[str, torch.Tensor]) -> Layout:
    from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

    rows, starts = [], {}
    for item in create_default_local_save_plan(tensors, False).items:
        name, data = item.index.fqn, item.tensor_data
        assert data is not None
        if 0 in data.chunk.sizes and 0 not in data.size:
            continue  # more ranks than rows: this one holds nothing of it
        dtype = str(tensors[name].dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise CheckpointError(f"{name} has the dtype {dtype}, which cannot be saved.")
        held = tuple(data.chunk.offsets)
        for offsets, sizes in _pieces((held, tuple(data.chunk.sizes)), DTYPES[dtype]):
            rows.append([name, dtype, list(data.size), offsets, sizes])
            starts[name, offsets] = tuple(o - h for o, h in zip(offsets, held, strict=True))
    of_all = collectives.gather(job, rows)
    holders: dict[Key, list[int]] = {}
    facts: dict[Key, tuple[str, tuple[int, ...], tuple[int, ...]]] = {}
    for rank, theirs in enumerate(of_all):
        for name, dtype, shape, offsets, sizes in theirs:
            key = (name, tuple(offsets))
            fact = (dtype, tuple(shape), tuple(sizes))
            if facts.setdefault(key, fact) != fact:
                raise _differing(name, facts[key], fact, rank)
            holders.setdefault(key, []).append(rank)
    _refuse_incomplete(facts)
    sizes_bytes = {k: DTYPES[dtype] * math.prod(box) for k, (dtype, _, box) in facts.items()}
    loads = [0] * job.world_size
    mine: list[Key] = []
    for key in sorted(facts, key=lambda k: (-sizes_bytes[k], k)):  # the largest first: even shares
        rank = min(holders[key], key=lambda r: loads[r])
        loads[rank] += sizes_bytes[key]
        if rank == job.rank:
            mine.append(key)
    # Wide types first: then each piece lies at a multiple of its own size, without gaps.
    mine.sort(key=lambda k: (-DTYPES[facts[k][0]], k))
    pieces, offset = [], 0
    for key in mine:
        name, offsets = key
        box = (offsets, facts[key][2])
        own = tensors[name].dtype
        pieces.append(Piece(name, own, box, starts[key], offset, sizes_bytes[key]))
        offset += sizes_bytes[key]
    shapes = {name: (dtype, shape) for (name, _), (dtype, shape, _) in facts.items()}
    return Layout(pieces, offset, shapes)


def _pieces(box: Box, itemsize: int) -> list[Box]:
    """Cut a box along its first dim into pieces of about `PIECE_BYTES`."""
    offsets, sizes = box
    if not sizes:
        return [box]
    row_bytes = max(1, math.prod(sizes[1:]) * itemsize)
    rows = max(1, PIECE_BYTES // row_bytes)
    firsts = range(0, sizes[0], rows) or [0]
    return [
        ((offsets[0] + at, *offsets[1:]), (min(rows, sizes[0] - at), *sizes[1:])) for at in firsts
    ]


def _refuse_incomplete(facts: dict[Key, tuple[str, tuple[int, ...], tuple[int, ...]]]) -> None:
    volumes: dict[str, int] = {}
    for (name, _), (_, shape, box) in facts.items():
        volumes[name] = volumes.get(name, -math.prod(shape)) + math.prod(box)
    for name, left in volumes.items():
        if left:
            raise CheckpointError(
                f"{name} cannot be saved: the ranks do not hold exactly the whole of it.",
                why="they hold different shapes, or shards of some are missing.",
                parameter=name,
            )


def _differing(name: str, first: Any, other: Any, rank: int) -> CheckpointError:
    return CheckpointError(
        f"{name} is {first[0]} {list(first[1])} on one rank and {other[0]} {list(other[1])} on rank {rank}.",
        fix="keep what each rank has for itself under names of its own.",
        parameter=name,
    )


def fill(
    wanted: dict[str, torch.Tensor],
    saved: dict[str, Saved],
    each: Callable[[Saved, Chunk, list[ReadItem], Callable[[ReadItem], torch.Tensor]], None],
) -> None:
    """Call `each` for every saved box that this rank needs, with its reads and where they go."""
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
    reads: dict[MetadataIndex, list[ReadItem]] = {}
    for item in plan.items:
        reads.setdefault(item.storage_index, []).append(item)
    boxes = {
        MetadataIndex(name, c.offsets): (saved[name], c)
        for name in wanted
        for c in saved[name].chunks
    }
    for index, items in reads.items():
        each(*boxes[index], items, planner.resolve_tensor)
