"""Whether checkpoints can be kept in a folder: all ranks write there, see each other, and there is room.

Asked at the start, since a save that cannot be read by all is found out hours later.
"""

from __future__ import annotations

import contextlib
import secrets
import time

from paceline.checkpoint.store import Store
from paceline.errors import RankDisagreement, SaveFailed, place
from paceline.job import collectives
from paceline.job.job import Job

_SEEN_WITHIN_S = 5.0  # a file server's clients may remember for a while that a file was not there


def check_shared(job: Job, store: Store, folder: str, size_bytes: int) -> None:
    """Refuse a folder in which checkpoints of `size_bytes` cannot be kept.

    Raises:
        SaveFailed: a rank cannot write there, or there is no room.
        RankDisagreement: the ranks do not write to one and the same folder.

    Collective: all ranks.
    """
    token = secrets.token_hex(8)
    own = f"probe-{job.rank}"
    why = ""
    try:
        store.write(own, [token.encode()])
        free = store.free_bytes()
        if job.rank == 0 and free is not None and free < size_bytes:
            why = f"a save takes {megabytes(size_bytes)} and {megabytes(free)} are free"
    except OSError as error:
        why = f"{type(error).__name__}: {error}"
    try:
        told = collectives.gather(job, [why, token])
        _refuse_unwritable(job, folder, [rank_why for rank_why, _ in told])
        _refuse_apart(job, store, folder, [rank_token for _, rank_token in told])
    finally:
        with contextlib.suppress(OSError):  # it may never have been written
            store.remove(own)


def _refuse_unwritable(job: Job, folder: str, whys: list[str]) -> None:
    for rank, why in enumerate(whys):
        if why:
            raise SaveFailed(
                f"checkpoints cannot be kept in {folder}: {why}.",
                where=place(rank, job.world_size) if rank == job.rank else f"rank {rank}",
                fix="give another folder, or make room there.",
                path=folder,
            )


def _refuse_apart(job: Job, store: Store, folder: str, tokens: list[str]) -> None:
    """Each rank looks for what the next one wrote: where there are two folders, some rank finds nothing."""
    other = (job.rank + 1) % job.world_size
    seen = collectives.gather(job, _comes(store, f"probe-{other}", tokens[other].encode()))
    if all(seen):
        return
    fix = "give all ranks one folder; where its name holds the time, take that once, before they start."
    collectives.agree(job, "folder of the checkpoints", folder, fix=fix)
    rank = seen.index(False)
    raise RankDisagreement(
        f"ranks do not share {folder}: rank {rank} does not see what rank "
        f"{(rank + 1) % job.world_size} has just written there.",
        fix="put it on storage that all hosts share, and name it from the root.",
        values=seen,
    )


def _comes(store: Store, path: str, content: bytes) -> bool:
    """Whether a file with this content is there, or soon is."""
    until = time.monotonic() + _SEEN_WITHIN_S
    while True:
        with contextlib.suppress(OSError):
            if bytes(store.read(path, 0, len(content))) == content:
                return True
        if time.monotonic() > until:
            return False
        time.sleep(0.2)


def megabytes(size_bytes: int) -> str:
    """As an error says it."""
    return f"{size_bytes / 1e6:,.1f} MB"
