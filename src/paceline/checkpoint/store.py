"""Folders of checkpoints on a disk or behind fsspec: write, commit, list, set aside, remove. Needs no torch.

On a disk, files are written into `unfinished-step-N`, flushed, and the folder is renamed to `step-N`. Object
stores have no rename: files are written into `parts/step-N-TOKEN-K`, a new folder for each attempt, and then
`step-N/manifest.json`, which names that folder, in one request. In both cases the manifest is written last,
and a folder without one is not a checkpoint. Every failure is an OSError.

Behind fsspec a checkpoint is moved by moving its manifest. The assumption is that a read or a listing that
begins after a write has ended sees it, as S3, GCS and Azure promise.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import os
import re
import shutil
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from paceline.checkpoint.cloud_errors import EXTRAS, StorageError, as_storage_error, check_address
from paceline.checkpoint.manifest import (
    IN_PARTS,
    NAME,
    Chunk,
    Damaged,
    Manifest,
    SavedTensor,
    parse,
)
from paceline.errors import CheckpointError, ConfigError

_FOLDER = re.compile(r"step-(0|[1-9]\d*)", re.ASCII)
_SCRATCH = re.compile(
    rf"unfinished-({_FOLDER.pattern}-[0-9a-f]+-\d+|removed-{_FOLDER.pattern})|\.paceline-probe-.+",
    re.ASCII,
)
_remote_lock = threading.RLock()
PARTS = "parts"  # folder of the files of checkpoints, in stores without rename


class Store:
    """Checkpoints in a folder of this host or of a mounted file system. Paths are relative to it.

    Ranks may write different files at once.
    """

    has_rename = True

    def __init__(self, root: str) -> None:
        self.root = root

    def _path(self, path: str) -> str:
        # The name of an attempt comes through the job's store, which other users of the host can write to.
        if ".." in path.split("/"):
            raise ValueError(f"{path} leads out of {self.root}")
        return os.path.join(self.root, path) if path else self.root

    def scratch(self, folder: str, attempt: str) -> str:
        """The folder to write the files of a checkpoint into that will be named `folder`."""
        return f"unfinished-{folder}-{attempt}"

    def names(self, path: str = "") -> list[str]:
        """The names in a folder; empty if it does not exist, or is a file."""
        try:
            return os.listdir(self._path(path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def sizes(self, folder: str, names: Iterable[str]) -> dict[str, int]:
        """The sizes of those files in a folder in bytes that exist, by name."""
        found = {}
        for name in names:  # a client of a file server may have an old listing of the folder
            with contextlib.suppress(FileNotFoundError):
                found[name] = os.stat(self._path(f"{folder}/{name}")).st_size
        return found

    def read(self, path: str, offset: int = 0, size: int = -1) -> bytearray:
        """Read bytes of a file, by default all; fewer if it is shorter."""
        with open(self._path(path), "rb") as file:
            file.seek(offset)
            return bytearray(file.read(size))

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

    def seal(self, scratch: str, folder: str) -> None:
        """Turn the scratch folder, which now has a manifest, into `folder`."""
        flush(self._path(scratch))
        self.rename(scratch, folder)

    def rename(self, old: str, new: str) -> None:
        """Rename a folder; creates the parent of the new name.

        A folder of that name without a manifest is first renamed to `incomplete-NAME`.
        """
        os.makedirs(os.path.dirname(self._path(new)), exist_ok=True)
        if os.path.lexists(self._path(new)) and NAME not in self.names(new):
            self.rename(new, unused_name(self, f"incomplete-{new}"))
        os.rename(self._path(old), self._path(new))
        flush(self.root)

    def remove(self, path: str) -> None:
        """Remove a file or a folder; a checkpoint is never seen in part."""
        full = self._path(path)
        if os.path.isfile(full):
            with contextlib.suppress(FileNotFoundError):  # of a probe that its rank removes now
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


class RemoteStore(Store):
    """A folder behind fsspec. Creating it does not connect to the storage.

    Raises:
        ConfigError: the address holds credentials, or its package is not installed.
    """

    has_rename = False

    def __init__(self, url: str) -> None:
        check_address(url)
        super().__init__(url.rstrip("/"))
        self._fs: Any = None
        self._is_object_store = url.partition("://")[0] in EXTRAS

    @contextlib.contextmanager
    def _call(self, operation: str, path: str) -> Iterator[tuple[Any, str]]:
        """Yield the file system and the full path. Every exception becomes an OSError."""
        try:
            with _remote_lock:
                if self._fs is None:
                    from fsspec.core import url_to_fs

                    self._fs, base = url_to_fs(self.root)
                    self._base = base.rstrip("/")
            # Some file systems have one connection, which instances and threads share.
            with contextlib.nullcontext() if self._fs.async_impl else _remote_lock:
                yield self._fs, f"{self._base}/{path}"
        except Exception as error:
            # `from None`: the texts of the cause may hold credentials.
            raise as_storage_error(error, operation, f"{self.root}/{path}") from None

    def scratch(self, folder: str, attempt: str) -> str:
        return f"{PARTS}/{folder}-{attempt}"

    def _list(self, path: str) -> dict[str, dict[str, Any]]:
        with self._call("list", path) as (fs, full):
            # fsspec caches listings, and other ranks write there.
            fs.invalidate_cache()
            try:
                entries = fs.ls(full.rstrip("/"), detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return {}
            return {Path(entry["name"].rstrip("/")).name: entry for entry in entries}

    def names(self, path: str = "") -> list[str]:
        return list(self._list(path))

    def sizes(self, folder: str, names: Iterable[str]) -> dict[str, int]:
        listed = self._list(folder)  # one request, also for many files
        return {name: int(listed[name]["size"]) for name in names if name in listed}

    def read(self, path: str, offset: int = 0, size: int = -1) -> bytearray:
        if size == 0:  # not a range in HTTP
            return bytearray()
        with self._call("read", path) as (fs, full):
            if size < 0:
                fs.invalidate_cache()  # it may know the size of an earlier file
                return bytearray(fs.cat_file(full))
            return bytearray(fs.cat_file(full, start=offset, end=offset + size))

    def write(self, path: str, parts: Iterable[memoryview | bytes]) -> None:
        with self._call("write", path) as (fs, full):
            # s3fs would create a missing bucket.
            if not self._is_object_store:
                self._make(fs, full.rpartition("/")[0])
            file = fs.open(full, "wb")
        try:
            for part in parts:
                with self._call("write", path):
                    file.write(part)
            with self._call("write", path):
                file.close()
        except BaseException:  # no manifest names a part of a file, so the next start removes it
            with contextlib.suppress(StorageError), self._call("close", path):
                file.close()
            raise

    def seal(self, scratch: str, folder: str) -> None:
        return  # the manifest, written last, is the commit

    def rename(self, old: str, new: str) -> None:
        """Move the manifest of a checkpoint."""
        with self._call("copy", f"{old}/{NAME}") as (fs, full):
            if not self._is_object_store:
                self._make(fs, f"{self._base}/{new}")
            fs.cp_file(full, f"{self._base}/{new}/{NAME}")
        self.remove(old)

    def remove(self, path: str) -> None:
        names = self.names(path)
        with self._call("delete", path) as (fs, full):
            if NAME in names:
                fs.rm_file(f"{full}/{NAME}")  # from here on it is not a checkpoint
            with contextlib.suppress(FileNotFoundError):
                fs.rm(full, recursive=True)

    def _make(self, fs: Any, folder: str) -> None:
        for attempt in range(3):
            try:
                fs.makedirs(folder, exist_ok=True)
                return
            except Exception:  # another rank may have created a part of the path
                fs.invalidate_cache()
                if attempt == 2 and not fs.isdir(folder):
                    raise

    def free_bytes(self) -> int | None:
        return None


def open_store(folder: str | Path) -> Store:
    """The store of a local path or of a URL that fsspec knows.

    Raises:
        ConfigError: see `RemoteStore`; the folder has no name; or a URL has become a Path, which drops
            one of its slashes.
    """
    url = os.fspath(folder)
    if not url:
        raise ConfigError(
            "the folder of the checkpoints has no name.",
            fix='name it, or pass "." for this folder.',
        )
    if "://" in url and not url.startswith("file://"):
        return RemoteStore(url)
    scheme, colon, _ = url.partition(":/")
    if colon and scheme in EXTRAS:
        raise ConfigError(f"{url} is not an address: Path drops a slash.", fix="pass a str.")
    return Store(os.path.abspath(url.removeprefix("file://")))  # the program may change its folder


def committed(store: Store) -> list[int]:
    """The steps of the committed checkpoints, in increasing order."""
    matches = [_FOLDER.fullmatch(name) for name in store.names()]
    return sorted(int(m[1]) for m in matches if m and NAME in store.names(m[0]))


def unused_name(store: Store, stem: str) -> str:
    """`stem-N` with an N above all that exist."""
    matches = (re.fullmatch(rf"{stem}-(\d+)", name) for name in store.names())
    return f"{stem}-{max((int(match[1]) for match in matches if match), default=0) + 1}"


def commit(store: Store, manifest: Manifest, scratch: str) -> None:
    """Write the manifest, and make its folder a checkpoint. Called by one rank, after all have written.

    Args:
        scratch: The folder that holds the files now.

    Raises:
        OSError: the manifest cannot be written, or files of other ranks are not visible here.
        CheckpointError: another `Checkpoints` of the job has saved this step.
    """
    if NAME in store.names(manifest.folder):
        raise CheckpointError(
            f"{store.root}/{manifest.folder} exists: another `Checkpoints` of this job has saved it.",
            fix="give each training a folder of its own.",
            path=store.root,
        )
    sizes = store.sizes(scratch, manifest.files)
    for name, size in manifest.files.items():
        if sizes.get(name) != size:
            here = f"{sizes[name]} bytes" if name in sizes else "missing"
            raise OSError(f"{name} is {here} here, but its rank has written {size} bytes")
    folder = scratch if store.has_rename else manifest.folder
    store.write(f"{folder}/{NAME}", [manifest.render().encode()])
    store.seal(scratch, manifest.folder)


def is_committed(store: Store, manifest: Manifest) -> bool:
    """Whether the folder has exactly this manifest.

    Raises:
        OSError: the storage cannot be read.
    """
    try:
        return store.read(f"{manifest.folder}/{NAME}") == manifest.render().encode()
    except FileNotFoundError:
        return False


def withdraw(store: Store, manifest: Manifest) -> None:
    """Undo `commit`, unless another job has written a checkpoint of that name since."""
    if is_committed(store, manifest):
        store.remove(manifest.folder)


def remove(store: Store, steps: Iterable[int]) -> None:
    """Remove the checkpoints of these steps, and their files unless another manifest names them.

    Raises:
        CheckpointError: one is of another program or format; it stays, and the others are removed.
    """
    parts, refused = set(), None
    for step in steps:
        try:
            parts.add(read_manifest(store, step).parts)
        except Damaged:
            pass
        except CheckpointError as error:
            refused = error
            continue
        store.remove(f"step-{step}")
    parts.discard("")
    for path in parts - _used_parts(store) if parts else ():
        store.remove(path)
    if refused is not None:
        raise refused


def sweep(store: Store) -> None:
    """Remove what saves have left that did not end. Called when a job has taken the folder."""
    for name in store.names():
        if _SCRATCH.fullmatch(name):
            try:
                store.remove(name)
            except OSError as error:
                # Another rank of the killed job may still write there. The next start removes it.
                if error.errno != errno.ENOTEMPTY:
                    raise
    attempts = {f"{PARTS}/{name}" for name in store.names(PARTS)}
    if attempts := set(filter(IN_PARTS.fullmatch, attempts)):  # not what others keep there
        for path in attempts - _used_parts(store):
            store.remove(path)


def _used_parts(store: Store) -> set[str]:
    """The folders of files that manifests name, also those of damaged checkpoints."""
    found: set[str] = set()
    for name in set(store.names()) - {PARTS}:
        if NAME in store.names(name):
            text = store.read(f"{name}/{NAME}").decode(errors="replace")
            found |= set(IN_PARTS.findall(text))
    return found


def read_manifest(store: Store, step: int) -> Manifest:
    """The manifest of a committed step.

    Raises:
        Damaged: it is missing or does not match its digest.
        CheckpointError: `parse` refuses it.
    """
    folder = f"step-{step}"
    try:
        text = store.read(f"{folder}/{NAME}").decode()
    except (FileNotFoundError, UnicodeDecodeError) as error:
        raise Damaged(f"{NAME}: {error}") from error
    return dataclasses.replace(parse(text, f"{store.root}/{folder}"), folder=folder)


def check_sizes(store: Store, manifest: Manifest) -> None:
    """Raise Damaged if a file is missing or has another size."""
    sizes = store.sizes(manifest.files_in, manifest.files)
    for name, size in manifest.files.items():
        if name not in sizes:
            raise Damaged(f"{name} is missing")
        if sizes[name] != size:
            raise Damaged(f"{name} has {sizes[name]} bytes instead of {size}")


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
        len(read_chunk(store, manifest.files_in, saved, chunk))
        for saved in manifest.tensors.values()
        for chunk in saved.chunks
    )
