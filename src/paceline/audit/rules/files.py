"""Files: one that several ranks write, and one that a rank reads while another one may still write it."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from paceline.audit.events import FileRead, FileWritten
from paceline.audit.evidence import RankLog
from paceline.audit.rules.collectives import sequence_of
from paceline.audit.rules.rule import Case, Finding, Judgement, NoFault
from paceline.errors import name_ranks


class _Access(NamedTuple):
    event: FileRead | FileWritten
    collectives: int  # of all ranks, which the rank entered before


def shared_files(case: Case) -> Judgement:
    """Each file is written by one rank, and others read it after a collective that follows the write."""
    of_ranks = [_accesses(log, case.world_size) for log in case.ranks]
    paths = sorted({path for own in of_ranks for path in own})
    found: list[Finding] = []
    written = 0
    for path in paths:
        writes = [
            [a for a in own.get(path, []) if isinstance(a.event, FileWritten)] for own in of_ranks
        ]
        written += any(writes)
        own = _written_by_several(path, writes) or _read_too_early(case, path, of_ranks, writes)
        found += [own] if own else []
    if found:
        return min(found, key=lambda each: each.is_note)
    return NoFault(f"{written} files were written, each by one rank, and read after a collective.")


def _accesses(log: RankLog, world_size: int) -> dict[str, list[_Access]]:
    """What a rank did with each file, in order."""
    calls = {id(call) for call in sequence_of(log, world_size)}
    found: defaultdict[str, list[_Access]] = defaultdict(list)
    entered = 0
    for event in log.events:
        entered += id(event) in calls
        if isinstance(event, FileRead | FileWritten):
            found[event.path].append(_Access(event, entered))
    return found


def _written_by_several(path: str, writes: list[list[_Access]]) -> Finding | None:
    """The finding if several ranks write one file: parts of it, or as a whole with other contents."""
    # Ranks that take turns have a collective between their writes.
    for place in sorted({a.collectives for own in writes for a in own}):
        events = [
            [a.event for a in own if a.collectives == place and isinstance(a.event, FileWritten)]
            for own in writes
        ]
        ranks = [rank for rank, own in enumerate(events) if own]
        contents = [{event.content for event in events[rank]} - {0} for rank in ranks]
        differ = all(contents) and any(own != contents[0] for own in contents)
        in_parts = sum(any(not e.is_whole for e in own) for own in events)
        if len(ranks) > 1 and (differ or in_parts > 1):
            return _several(path, events, ranks, differ=differ, in_parts=in_parts > 1)
    return None


def _several(
    path: str,
    events: list[list[FileWritten]],
    ranks: list[int],
    *,
    differ: bool,
    in_parts: bool,
) -> Finding:
    first = events[ranks[0]][0]
    return Finding(
        what=f"{name_ranks(ranks, len(events))} write the file {path}"
        + (", with different contents." * differ or "."),
        at=first.at,
        ranks=ranks,
        step=first.steps_done or None,
        why="the rank that writes last decides what is in it. While two ranks write, it may have parts of "
        "both, and another process may read half of it.",
        fix="write it on rank 0 only, with the values of all ranks (gather them first); or give each rank a "
        "file of its own.",
        evidence=f"writes of the ranks: {', '.join(str(len(own)) for own in events)}"
        + "; what they saved differs" * differ,
        effect=f"what {len(ranks) - 1} of {len(ranks)} ranks wrote is lost"
        if differ
        else f"{len(ranks)} ranks write at a time",
        # Files with equal values may have other bytes, such as their name in an archive.
        is_note=not (differ and in_parts),
    )


def _read_too_early(
    case: Case, path: str, of_ranks: list[dict[str, list[_Access]]], writes: list[list[_Access]]
) -> Finding | None:
    """The finding if no collective lies between the write of a rank and the read of another one."""
    if any(log.layouts for log in case.ranks):
        return None  # not all of the collectives of FSDP are seen
    for rank, own in enumerate(of_ranks):
        if writes[rank]:
            continue
        for read in own.get(path, []):
            for writer, of_writer in enumerate(writes):
                same = [a for a in of_writer if a.collectives == read.collectives]
                if not same:
                    continue
                return Finding(
                    what=f"rank {rank} reads {path}, and rank {writer} may still write it.",
                    at=read.event.at,
                    ranks=[rank],
                    step=read.event.steps_done or None,
                    why="no collective lies between the write and the read, so a slow write is read in part, "
                    "or not at all.",
                    fix="call dist.barrier() on all ranks after the write and before the read; or load on "
                    "one rank and broadcast.",
                    evidence=f"rank {writer} writes it at {same[0].event.at}; both ranks had entered "
                    f"{read.collectives} collectives",
                    effect=f"rank {rank} may get an older file, or a part of it",
                    is_note=True,  # the rank may wait for the file in another way
                )
    return None
