"""Reads a checkpoint on any number of ranks; no byte is used before its digest is checked."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from paceline.checkpoint import codec, layout
from paceline.checkpoint.manifest import Chunk, Manifest
from paceline.checkpoint.store import Store, check_sizes, read_chunk
from paceline.parallel.modules import is_sharded

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
    check_sizes(store, manifest)
    found = {}
    for name, saved in manifest.tensors.items():
        dtype, template = getattr(torch, saved.dtype), like(name)
        if not wants(name):
            found[name] = torch.empty(0, dtype=dtype)
        elif template is not None and is_sharded(template) and tuple(template.shape) == saved.shape:
            found[name] = torch.empty_like(template, dtype=dtype, requires_grad=False)
        else:
            found[name] = torch.empty(saved.shape, dtype=dtype)
    fill(store, manifest, {name: t for name, t in found.items() if wants(name)})
    return codec.decode(manifest.tree, found), found


def fill(store: Store, manifest: Manifest, wanted: dict[str, torch.Tensor]) -> None:
    """Read tensors by path; those in `wanted` may be sharded.

    Raises:
        Damaged, OSError: see `read`; some tensors may be filled.
    """

    def load(name: str, chunk: Chunk, copies: list[layout.Copy]) -> None:
        saved = manifest.tensors[name]
        data = read_chunk(store, manifest.files_in, saved, chunk)
        if data:
            whole = torch.frombuffer(data, dtype=getattr(torch, saved.dtype)).view(chunk.sizes)
            for (offsets, sizes), target in copies:
                target.copy_(layout.narrowed(whole, offsets, sizes))

    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        reads = layout.plan_reads(wanted, manifest.tensors)
        for future in [pool.submit(load, *read) for read in reads]:
            future.result()
