"""Whether a checkpoint holds the bytes that were saved. Needs no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from paceline.checkpoint.manifest import Chunk, Damaged, Manifest, Saved
from paceline.checkpoint.store import Store


def check_sizes(store: Store, manifest: Manifest) -> None:
    """Raise Damaged where a file is missing or has another size."""
    for name, size in manifest.files.items():
        try:
            actual = store.size(f"step-{manifest.step}/{name}")
        except FileNotFoundError as error:
            raise Damaged(f"{name} is missing") from error
        if actual != size:
            raise Damaged(f"{name} has {actual} bytes in place of {size}")


def read_chunk(store: Store, folder: str, saved: Saved, chunk: Chunk) -> bytearray:
    """The bytes of a box, which are those that were saved.

    Raises:
        Damaged: they are others.
    """
    data = store.read(f"{folder}/{chunk.file}", chunk.offset, saved.size_bytes(chunk))
    if hashlib.sha256(data).hexdigest() != chunk.sha256:
        raise Damaged(f"{chunk.file} differs from its digest at byte {chunk.offset}")
    return data


def check(store: Store, manifest: Manifest) -> Iterator[int]:
    """Verify every byte of a checkpoint; give the bytes that are done.

    Raises:
        Damaged: something differs.
    """
    check_sizes(store, manifest)
    for saved in manifest.tensors.values():
        for chunk in saved.chunks:
            yield len(read_chunk(store, f"step-{manifest.step}", saved, chunk))
