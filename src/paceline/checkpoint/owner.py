"""One job owns a folder of checkpoints. Rank 0 holds it: by a lock of the file system, and by a record.

The lock (`flock`) ends with the process that holds it, also on NFS. Where there is none (object stores, some
mounted file systems), the job that started last owns the folder: before and after each commit a job reads the
record, and withdraws its checkpoint if the record names another job. The new owner writes the record before
it looks for files that no manifest names, so whatever a job has reported as saved keeps its files.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import time
import weakref
from dataclasses import asdict, dataclass

from paceline import log
from paceline.checkpoint.store import Store
from paceline.errors import CheckpointError
from paceline.machine import process_status, start_ticks

RECORD = ".paceline-owner"
_WAIT_S = 5.0  # the processes of a job that was killed may need a moment to end
# A file server keeps the lock of a host that lost its power until its lease ends: with NFSv4 for 90 s.
_LEASE_S = 120.0
_POLL_S = 0.1


@dataclass(frozen=True)
class Owner:
    """The process that owns a folder, as its record stores it.

    Args:
        ticks: `start_ticks` of the process, because the kernel reuses pids.
        started: When it took the folder, such as "2026-11-28 09:15:02 UTC".
        token: Different for each time that a folder is taken.
    """

    host: str
    pid: int
    ticks: int
    started: str
    token: str

    def __str__(self) -> str:
        return f"host {self.host}, pid {self.pid}, since {self.started}"

    def is_alive_here(self) -> bool:
        """Whether it is another process of this host that runs."""
        if self.host != socket.gethostname() or self.pid == os.getpid():
            return False
        status = process_status(self.pid)
        return status is not None and status[0] not in "ZX" and status[1] == self.ticks


class Ownership:
    """A folder that this process owns, until this object is freed or the process ends."""

    def __init__(self, store: Store, lock: int | None, owner: Owner) -> None:
        self._store, self._lock, self._owner = store, lock, owner
        self._release = weakref.finalize(self, _close, lock)

    def check(self) -> None:
        """Raise CheckpointError if another job has taken the folder."""
        found = _read(self._store)
        if found is not None and found.token != self._owner.token:
            raise CheckpointError(
                f"another job has taken the folder {self._store.root} ({found}).",
                fix="give each job a folder of its own, and end one of the two jobs.",
                path=self._store.root,
            )

    def forget(self) -> None:
        """Close the lock without releasing it: a child process has inherited it."""
        self._release()


_owned: weakref.WeakValueDictionary[str, Ownership] = weakref.WeakValueDictionary()


def take(store: Store) -> tuple[Ownership, bool]:
    """Own a folder. Called by rank 0; several `Checkpoints` of a process share a folder.

    Returns:
        The ownership, and whether the process did not have it before.

    Raises:
        CheckpointError: another job that is alive owns it.
        OSError: the folder cannot be written.
    """
    name = os.path.realpath(store.root) if store.has_rename else store.root
    if (known := _owned.get(name)) is not None:
        return known, False
    lock = _locked(store) if store.has_rename else None
    try:
        # Without a lock the record can tell of processes of this host only.
        until = time.monotonic() + _WAIT_S
        while lock is None and (before := _read(store)) is not None and before.is_alive_here():
            if time.monotonic() > until:
                raise _taken(store, before)
            time.sleep(_POLL_S)
        owner = Owner(
            host=socket.gethostname(),
            pid=os.getpid(),
            ticks=start_ticks(os.getpid()) or 0,
            started=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            token=secrets.token_hex(8),
        )
        store.write(RECORD, [json.dumps(asdict(owner)).encode()])
    except BaseException:
        _close(lock)
        raise
    ownership = _owned[name] = Ownership(store, lock, owner)
    return ownership, True


def _locked(store: Store) -> int | None:
    """The descriptor of the locked record; None without locks, or if the record is another user's."""
    os.makedirs(store.root, exist_ok=True)
    lock = None
    try:
        # NFS grants an exclusive lock only on a file that is open for writing.
        lock = os.open(os.path.join(store.root, RECORD), os.O_RDWR | os.O_CREAT, 0o666)
        _wait_for_lock(store, lock)
        return lock
    except CheckpointError:
        _close(lock)
        raise
    except OSError as error:
        _close(lock)
        if lock is None and not isinstance(error, PermissionError):
            raise
        log.logger.info("%s has no locks (%s): the last job to start owns it", store.root, error)
        return None


def _wait_for_lock(store: Store, lock: int) -> None:
    began, is_told = time.monotonic(), False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            owner = _read(store)
            waited_s = time.monotonic() - began
            # A lock whose owner does not run here is another host's, or outlives its owner.
            if waited_s > (_WAIT_S if owner is None or owner.is_alive_here() else _LEASE_S):
                raise _taken(store, owner) from None
            if waited_s > _WAIT_S and not is_told:
                is_told = True
                text = "%s is locked by %s; waiting up to %.0f s for the lock to end with it."
                log.logger.info(text, store.root, owner or "another process", _LEASE_S)
            time.sleep(_POLL_S)


def _taken(store: Store, owner: Owner | None) -> CheckpointError:
    return CheckpointError(
        f"another job saves its checkpoints in {store.root} ({owner or 'its record cannot be read'}).",
        why="two jobs in one folder would overwrite each other's checkpoints.",
        fix="end that job, or give this one a folder of its own.",
        path=store.root,
    )


def _read(store: Store) -> Owner | None:
    """The record; None if there is none, or if it is being written."""
    try:
        return Owner(**json.loads(store.read(RECORD)))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _close(lock: int | None) -> None:
    if lock is not None:
        os.close(lock)


def _forget_all() -> None:
    for ownership in list(_owned.values()):
        ownership.forget()


# A loader's worker that outlives its rank must not keep the lock.
os.register_at_fork(after_in_child=_forget_all)
