"""Checks at the start that all ranks can write to a folder, see each other's files, and have enough space.

Otherwise a folder that the ranks do not share would be noticed hours later, when it is read.
"""

from __future__ import annotations

import contextlib
import secrets
import time

from paceline.checkpoint.cloud_errors import FIX, StorageError
from paceline.checkpoint.store import Store
from paceline.errors import RankDisagreement, SaveFailed, rank_location
from paceline.job import collectives
from paceline.job.job import Job
from paceline.machine import format_bytes

_SEEN_WITHIN_S = 5.0  # clients of a file server may cache for a while that a file does not exist


def check_shared(job: Job, store: Store, folder: str, size_bytes: int) -> None:
    """Refuse a folder that cannot hold checkpoints of `size_bytes`. Called by all ranks.

    Raises:
        SaveFailed: a rank cannot write there, or there is no space.
        RankDisagreement: the ranks do not write to the same folder.
    """
    token = secrets.token_hex(8)
    own = _probe(job.rank, token)
    why, fix = "", "choose another folder, or make space there."
    try:
        store.write(own, [token.encode()])
        store.remove(own)  # the permission to write may not include that to delete
        store.write(own, [token.encode()])
        free = store.free_bytes()
        if job.rank == 0 and free is not None and free < size_bytes:
            why = f"a save takes {format_bytes(size_bytes)} and {format_bytes(free)} are free"
    except StorageError as error:
        why, fix = str(error), FIX
        own = ""  # there is nothing to remove, and trying takes as long again
    except OSError as error:
        why = f"{type(error).__name__}: {error}"
    try:
        answers = collectives.gather(job, [why, fix, token])
        _refuse_unwritable(job, folder, [answer[:2] for answer in answers])
        _refuse_different(job, store, folder, [rank_token for _, _, rank_token in answers])
    finally:
        if own:
            with contextlib.suppress(OSError):  # it may not exist
                store.remove(own)


def _probe(rank: int, token: str) -> str:
    return f".paceline-probe-{rank}-{token}"  # another job may probe the folder at the same time


def _refuse_unwritable(job: Job, folder: str, whys: list[list[str]]) -> None:
    for rank, (why, fix) in enumerate(whys):
        if why:
            raise SaveFailed(
                f"checkpoints cannot be saved in {folder}: {why}.",
                where=rank_location(rank, job.world_size) if rank == job.rank else f"rank {rank}",
                fix=fix,
                path=folder,
            )


def _refuse_different(job: Job, store: Store, folder: str, tokens: list[str]) -> None:
    """Each rank reads what the next one wrote. If there are two folders, a rank finds nothing."""
    following = (job.rank + 1) % job.world_size
    seen = collectives.gather(
        job, _appears(store, _probe(following, tokens[following]), tokens[following].encode())
    )
    if all(seen):
        return
    fix = "give all ranks the same folder; take a time in its name once, before the ranks start."
    collectives.agree(job, "folder of the checkpoints", folder, fix=fix)
    rank = seen.index(False)
    raise RankDisagreement(
        f"ranks do not share {folder}: rank {rank} does not see what rank "
        f"{(rank + 1) % job.world_size} has just written there.",
        fix="use storage that all hosts share, and an absolute path.",
        values=seen,
    )


def _appears(store: Store, path: str, content: bytes) -> bool:
    """Whether a file with this content exists, or appears soon."""
    until = time.monotonic() + _SEEN_WITHIN_S
    while True:
        with contextlib.suppress(OSError):
            if bytes(store.read(path, 0, len(content))) == content:
                return True
        if time.monotonic() > until:
            return False
        time.sleep(0.2)
