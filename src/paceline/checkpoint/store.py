"""Folders of checkpoints on a disk or behind fsspec: write, commit, list, set aside, remove. Needs no torch.

On a disk, files are written into `unfinished-step-N`, flushed, and the folder is renamed to `step-N`. Stores
without an atomic rename get the files in `step-N` at once. In both cases the manifest is written last, and a
folder without one is not a checkpoint. Every failure is an OSError.

When a training returns to an earlier step and then saves step N, the new folder is `rollback-N`. Its commit
supersedes every `step-M` with M >= N at once; `finish_rollback` then moves those away and renames it to
`step-N`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import re
import shutil
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from paceline.checkpoint.manifest import NAME, Chunk, Damaged, Manifest, SavedTensor, parse

_FOLDER = re.compile(r"(step|rollback)-(\d+)", re.ASCII)
_remote_lock = threading.RLock()


class Store:
    """Checkpoints in a folder of this host or of a mounted file system. Paths are relative to it.

    Ranks may write different files at once.
    """

    def __init__(self, root: str) -> None:
        self.root = root

    def _path(self, path: str) -> str:
        return os.path.join(self.root, path) if path else self.root

    def scratch(self, folder: str) -> str:
        """The folder to write a checkpoint into that will be named `folder`."""
        return f"unfinished-{folder}"

    def names(self, path: str = "") -> list[str]:
        """The names in a folder; empty if it does not exist, or is a file."""
        try:
            return os.listdir(self._path(path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def size(self, path: str) -> int:
        """The size of a file in bytes; FileNotFoundError if it does not exist."""
        return os.stat(self._path(path)).st_size

    def read(self, path: str, offset: int, size: int) -> bytearray:
        """Read bytes of a file; fewer if it is shorter."""
        data = bytearray(size)
        view, done = memoryview(data), 0
        with open(self._path(path), "rb", buffering=0) as file:
            file.seek(offset)
            while done < size and (count := file.readinto(view[done:])):
                done += count
        view.release()
        del data[done:]
        return data

    def write(self, path: str, parts: Iterable[memoryview | bytes]) -> None:
        """Write a new file and flush it to disk. Creates its folder."""
        full = self._path(path)
        os.makedirs(os.path.dirname(full), exist_ok=True)
        with open(full, "wb", buffering=0) as file:
            for part in parts:
                left = memoryview(part)
                while left:  # a disk that is nearly full writes a part
                    left = left[file.write(left) :]
            os.fsync(file.fileno())

    def seal(self, folder: str) -> None:
        """Turn the scratch folder, which now has a manifest, into `folder`."""
        flush(self._path(self.scratch(folder)))
        if os.path.lexists(self._path(folder)) and NAME not in self.names(folder):
            self.rename(
                folder, unused_name(self, f"incomplete-{folder}")
            )  # removed in part, or a file
        os.rename(self._path(self.scratch(folder)), self._path(folder))
        flush(self.root)

    def rename(self, old: str, new: str) -> None:
        """Rename a folder; creates the parent of the new name."""
        os.makedirs(os.path.dirname(self._path(new)), exist_ok=True)
        os.rename(self._path(old), self._path(new))
        flush(self.root)

    def remove(self, path: str) -> None:
        """Remove a file or a folder; a checkpoint is never seen in part."""
        full = self._path(path)
        if os.path.isfile(full):
            os.remove(full)
            return
        if _FOLDER.fullmatch(path):
            removed = self._path(f"unfinished-removed-{path}")
            shutil.rmtree(removed, ignore_errors=True)  # left by a process that was killed here
            os.rename(full, removed)
            full = removed
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(full)

    def free_bytes(self) -> int | None:
        """The free space, or None if unknown."""
        facts = os.statvfs(self.root)
        return facts.f_bavail * facts.f_frsize


def flush(path: str | Path) -> None:
    """Flush a local file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _storage_errors() -> Iterator[None]:
    """Turn the exceptions of an fsspec file system into OSErrors, and serialise its calls.

    Some file systems have one connection, which instances and threads share.
    """
    try:
        with _remote_lock:
            yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


class RemoteStore(Store):
    """A folder behind fsspec."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        from fsspec.core import url_to_fs

        self._fs: Any
        self._fs, self._base = url_to_fs(url)

    def _path(self, path: str) -> str:
        return f"{self._base.rstrip('/')}/{path}"

    def scratch(self, folder: str) -> str:
        return folder

    @_storage_errors()
    def names(self, path: str = "") -> list[str]:
        # fsspec caches listings, and other ranks write there.
        self._fs.invalidate_cache()
        try:
            entries = self._fs.ls(self._path(path), detail=False)
        except FileNotFoundError:
            return []
        return [Path(entry.rstrip("/")).name for entry in entries]

    @_storage_errors()
    def size(self, path: str) -> int:
        self._fs.invalidate_cache()
        return int(self._fs.size(self._path(path)))

    @_storage_errors()
    def read(self, path: str, offset: int, size: int) -> bytearray:
        return bytearray(self._fs.cat_file(self._path(path), start=offset, end=offset + size))

    @_storage_errors()
    def write(self, path: str, parts: Iterable[memoryview | bytes]) -> None:
        full = self._path(path)
        self._make(full.rpartition("/")[0])
        with self._fs.open(full, "wb") as file:
            for part in parts:
                file.write(part)

    def seal(self, folder: str) -> None:
        return  # the manifest, written last, is the commit

    @_storage_errors()
    def rename(self, old: str, new: str) -> None:
        self._make(self._path(new).rpartition("/")[0])
        self._fs.mv(self._path(old), self._path(new), recursive=True)

    @_storage_errors()
    def remove(self, path: str) -> None:
        if path.rsplit("/", maxsplit=1)[-1] in self.names(
            path.rpartition("/")[0]
        ) and self._fs.isfile(self._path(path)):
            self._fs.rm_file(self._path(path))
            return
        if NAME in self.names(path):
            self._fs.rm_file(self._path(f"{path}/{NAME}"))  # from here on it is not a checkpoint
        self._fs.rm(self._path(path), recursive=True)

    def _make(self, folder: str) -> None:
        for attempt in range(3):
            try:
                self._fs.makedirs(folder, exist_ok=True)
                return
            except Exception:  # another rank may have created a part of the path
                self._fs.invalidate_cache()
                if attempt == 2 and not self._fs.isdir(folder):
                    raise

    def free_bytes(self) -> int | None:
        return None


def open_store(folder: str | Path) -> Store:
    """The store of a local path or of a URL that fsspec knows."""
    url = os.fspath(folder)
    if "://" in url and not url.startswith("file://"):
        return RemoteStore(url)
    return Store(url.removeprefix("file://"))


def folders(store: Store) -> dict[int, str]:
    """The folders of the committed checkpoints by step, in increasing order."""
    steps, rollback = {}, None
    for name in store.names():
        match = _FOLDER.fullmatch(name)
        if match and NAME in store.names(name):
            step = int(match[2])
            if match[1] == "rollback":
                rollback = step
            else:
                steps[step] = name
    if rollback is not None:
        steps = {step: name for step, name in steps.items() if step < rollback}
        steps[rollback] = f"rollback-{rollback}"
    return dict(sorted(steps.items()))


def committed(store: Store) -> list[int]:
    """The steps of the committed checkpoints, in increasing order."""
    return list(folders(store))


def unused_name(store: Store, stem: str) -> str:
    """`stem-N` with the first N that is free."""
    names, number = store.names(), 1
    while f"{stem}-{number}" in names:
        number += 1
    return f"{stem}-{number}"


def set_aside(store: Store, steps: Iterable[int]) -> str:
    """Move the folders of these steps into a new folder `before-N`, and return its name."""
    folder = unused_name(store, "before")
    for step in steps:
        store.rename(f"step-{step}", f"{folder}/step-{step}")
    return folder


def finish_rollback(store: Store) -> tuple[list[int], str]:
    """Set aside the checkpoints that `rollback-N` supersedes, and rename it to `step-N`.

    If it is interrupted at any point, `folders` gives the same checkpoints as before, and it can be repeated.

    Returns:
        The superseded steps, and the folder that now holds them.
    """
    step, name = next(reversed(folders(store).items()), (0, ""))
    if not name.startswith("rollback-"):
        return [], ""
    superseded = []
    for other in store.names():
        match = _FOLDER.fullmatch(other)
        if match and match[1] == "step" and int(match[2]) >= step:
            if NAME in store.names(other):
                superseded.append(int(match[2]))
            else:
                store.remove(other)  # never committed
    folder = set_aside(store, sorted(superseded))
    store.rename(name, f"step-{step}")
    return sorted(superseded), folder


def commit(store: Store, manifest: Manifest) -> None:
    """Write the manifest, and make its folder a checkpoint. Called by one rank, after all have written.

    Raises:
        OSError: the manifest cannot be written, or files of other ranks are not visible here.
    """
    scratch = store.scratch(manifest.folder)
    for name, size in manifest.files.items():
        if store.size(f"{scratch}/{name}") != size:
            raise OSError(f"{name} has another size here than on the rank that wrote it")
    for name in set(store.names(scratch)) - set(manifest.files):
        store.remove(f"{scratch}/{name}")  # left by a killed process that had more ranks
    store.write(f"{scratch}/{NAME}", [manifest.render().encode()])
    store.seal(manifest.folder)


def read_manifest(store: Store, step: int, folder: str = "") -> Manifest:
    """The manifest of a committed step, in `folder` if that is known.

    Raises:
        Damaged: it is missing or does not match its digest.
        CheckpointError: `parse` refuses it.
    """
    folder = folder or folders(store).get(step, f"step-{step}")
    path = f"{folder}/{NAME}"
    try:
        text = store.read(path, 0, store.size(path)).decode()
    except (FileNotFoundError, UnicodeDecodeError) as error:
        raise Damaged(f"{NAME}: {error}") from error
    return dataclasses.replace(parse(text, f"{store.root}/{folder}"), folder=folder)


def check_sizes(store: Store, manifest: Manifest) -> None:
    """Raise Damaged if a file is missing or has another size."""
    for name, size in manifest.files.items():
        try:
            actual = store.size(f"{manifest.folder}/{name}")
        except FileNotFoundError as error:
            raise Damaged(f"{name} is missing") from error
        if actual != size:
            raise Damaged(f"{name} has {actual} bytes instead of {size}")


def read_chunk(store: Store, folder: str, saved: SavedTensor, chunk: Chunk) -> bytearray:
    """Read the bytes of a chunk.

    Raises:
        Damaged: they do not match their digest.
    """
    data = store.read(f"{folder}/{chunk.file}", chunk.offset, saved.size_bytes(chunk))
    if hashlib.sha256(data).hexdigest() != chunk.sha256:
        raise Damaged(f"{chunk.file} does not match its digest at byte {chunk.offset}")
    return data


def verify(store: Store, manifest: Manifest) -> int:
    """Compare every byte of a checkpoint with its digest, and return their number.

    Raises:
        Damaged: something differs.
    """
    check_sizes(store, manifest)
    return sum(
        len(read_chunk(store, manifest.folder, saved, chunk))
        for saved in manifest.tensors.values()
        for chunk in saved.chunks
    )
