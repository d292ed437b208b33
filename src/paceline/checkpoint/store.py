"""Folders of checkpoints, local or wherever fsspec reaches: write, commit last, list, set aside, remove.

Local: files are written into `unfinished-N`, flushed, and the folder is renamed to `step-N`. Where there is
no rename (object stores) files go into `step-N` at once and the manifest, written last, is the commit.
Either way a folder without a manifest was never saved. Failures are OSErrors of the system.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from paceline.checkpoint.manifest import NAME, Damaged, Manifest

_one_at_a_time = threading.RLock()


class Store(Protocol):
    """Where checkpoints are. Paths are relative to it.

    Collective: none; calls for different files may come from different ranks.
    """

    root: str

    def scratch(self, step: int) -> str:
        """The folder that a save of `step` is written into."""

    def names(self, path: str = "") -> list[str]:
        """What a folder holds; nothing where there is none."""

    def size(self, path: str) -> int:
        """Of a file, in bytes; FileNotFoundError where there is none."""

    def read(self, path: str, offset: int, size: int) -> bytearray:
        """Bytes of a file; fewer where it ends before."""

    def write(self, path: str, parts: Iterable[memoryview | bytes]) -> None:
        """Write a file anew and flush it to disk; its folder is made."""

    def seal(self, step: int) -> None:
        """Make the written folder of `step`, manifest included, the checkpoint."""

    def rename(self, old: str, new: str) -> None:
        """Give a folder another name."""

    def remove(self, path: str) -> None:
        """Remove a folder, or a file, so that it is not seen in part."""

    def free_bytes(self) -> int | None:
        """How much fits, where that is known."""


class LocalStore:
    """A folder of this host or of a file system that it mounts. Collective: as `Store`."""

    def __init__(self, root: str) -> None:
        self.root = root

    def _path(self, path: str) -> str:
        return os.path.join(self.root, path) if path else self.root

    def scratch(self, step: int) -> str:
        return f"unfinished-{step}"

    def names(self, path: str = "") -> list[str]:
        try:
            return os.listdir(self._path(path))
        except FileNotFoundError:
            return []

    def size(self, path: str) -> int:
        return os.stat(self._path(path)).st_size

    def read(self, path: str, offset: int, size: int) -> bytearray:
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
        full = self._path(path)
        os.makedirs(os.path.dirname(full), exist_ok=True)
        with open(full, "wb", buffering=0) as file:
            for part in parts:
                left = memoryview(part)
                while left:  # a disk that fills up takes a part first
                    left = left[file.write(left) :]
            os.fsync(file.fileno())

    def seal(self, step: int) -> None:
        self._flush(self.scratch(step))
        os.rename(self._path(self.scratch(step)), self._path(f"step-{step}"))
        self._flush("")

    def rename(self, old: str, new: str) -> None:
        os.makedirs(os.path.dirname(self._path(new)), exist_ok=True)
        os.rename(self._path(old), self._path(new))
        self._flush("")

    def remove(self, path: str) -> None:
        full = self._path(path)
        if os.path.isfile(full):
            os.remove(full)
            return
        if path.startswith("step-"):
            doomed = self._path(f"unfinished-removed-{path}")
            shutil.rmtree(doomed, ignore_errors=True)  # of a process that was killed here
            os.rename(full, doomed)
            full = doomed
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(full)

    def free_bytes(self) -> int | None:
        facts = os.statvfs(self.root)
        return facts.f_bavail * facts.f_frsize

    def _flush(self, path: str) -> None:
        descriptor = os.open(self._path(path), os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def _storage_errors() -> Iterator[None]:
    """Whatever a file system of fsspec raises is an OSError here; one call at a time.

    Some have one connection, which instances and threads share.
    """
    try:
        with _one_at_a_time:
            yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


class RemoteStore:
    """A folder behind fsspec. Collective: as `Store`."""

    def __init__(self, url: str) -> None:
        self.root = url
        from fsspec.core import url_to_fs

        self._fs: Any
        self._fs, self._base = url_to_fs(url)

    def _path(self, path: str) -> str:
        return f"{self._base.rstrip('/')}/{path}"

    def scratch(self, step: int) -> str:
        return f"step-{step}"

    @_storage_errors()
    def names(self, path: str = "") -> list[str]:
        # Listings are cached by default, and other ranks write there.
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

    def seal(self, step: int) -> None:
        return  # the manifest was the last file

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
            self._fs.rm_file(self._path(f"{path}/{NAME}"))  # from here on it was never saved
        self._fs.rm(self._path(path), recursive=True)

    def _make(self, folder: str) -> None:
        for attempt in range(3):
            try:
                self._fs.makedirs(folder, exist_ok=True)
            except Exception:  # mostly another rank was first, for a part of the path
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
    return LocalStore(url.removeprefix("file://"))


def committed(store: Store) -> list[int]:
    """The steps that are saved, in order."""
    steps = sorted(
        int(name[5:])
        for name in store.names()
        if name.startswith("step-") and name[5:].isascii() and name[5:].isdigit()
    )
    return [step for step in steps if NAME in store.names(f"step-{step}")]


def commit(store: Store, manifest: Manifest) -> None:
    """Write the manifest and make the folder the checkpoint of its step.

    Raises:
        OSError: it cannot be written; or files of other ranks cannot be seen from here.

    Collective: none; for one rank, after all have written.
    """
    folder = store.scratch(manifest.step)
    for name, size in manifest.files.items():
        if store.size(f"{folder}/{name}") != size:
            raise OSError(f"{name}, which its rank has written, has another size as seen from here")
    for name in set(store.names(folder)) - set(manifest.files):
        store.remove(f"{folder}/{name}")  # of a process that was killed here, with more ranks
    store.write(f"{folder}/{NAME}", [manifest.render().encode()])
    store.seal(manifest.step)


def read_manifest_text(store: Store, step: int) -> str:
    """The text of a committed manifest.

    Raises:
        Damaged: it is not there, or is no text.
    """
    path = f"step-{step}/{NAME}"
    try:
        return store.read(path, 0, store.size(path)).decode()
    except (FileNotFoundError, UnicodeDecodeError) as error:
        raise Damaged(f"{NAME}: {error}") from error
