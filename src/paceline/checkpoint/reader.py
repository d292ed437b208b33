"""Reads a checkpoint on any number of ranks; no byte is used before its digest is checked."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from paceline.checkpoint import codec, layout
from paceline.checkpoint.manifest import Chunk, Manifest, SavedTensor
from paceline.checkpoint.store import Store, check_sizes, read_chunk

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import ReadItem

_THREADS = 4


def read(
    store: Store,
    manifest: Manifest,
    like: Callable[[str], torch.Tensor | None] = lambda path: None,
    wants: Callable[[str], bool] = lambda path: True,
) -> tuple[Any, dict[str, torch.Tensor]]:
    """The saved state, and its tensors by path.

    Args:
        like: A tensor for a path. If it is sharded and has the saved shape, the result is sharded in the same
            way, on its device; all other results are whole, on the CPU.
        wants: Which tensors to read, by path; the others are empty.

    Raises:
        Damaged: a digest or a size differs, or a file is missing.
        OSError: the storage failed otherwise.
    """
    folder = manifest.folder
    check_sizes(store, manifest)
    found = {}
    for name, saved in manifest.tensors.items():
        dtype, template = getattr(torch, saved.dtype), like(name)
        if not wants(name):
            found[name] = torch.empty(0, dtype=dtype)
        elif (
            template is not None
            and layout.is_sharded(template)
            and tuple(template.shape) == saved.shape
        ):
            found[name] = torch.empty_like(template, dtype=dtype, requires_grad=False)
        else:
            found[name] = torch.empty(saved.shape, dtype=dtype)
    wanted = {name: t for name, t in found.items() if wants(name)}
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        jobs = []

        def each(
            saved: SavedTensor,
            chunk: Chunk,
            items: list[ReadItem],
            target: Callable[[ReadItem], torch.Tensor],
        ) -> None:
            def work() -> None:
                data = read_chunk(store, folder, saved, chunk)
                if not data:
                    return
                box = torch.frombuffer(data, dtype=getattr(torch, saved.dtype)).view(chunk.sizes)
                for item in items:
                    part = layout.narrowed(box, item.storage_offsets, item.lengths)
                    target(item).copy_(part)

            jobs.append(pool.submit(work))

        layout.fill(wanted, manifest.tensors, each)
        for job in jobs:
            job.result()
    return codec.decode(manifest.tree, found), found
