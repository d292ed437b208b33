"""Finds known messages in text of any size, and orders them by what they say about the cause.

Text is read in blocks, so a log need not fit into memory. A pattern is searched by its longest literal piece;
a regular expression runs only where that piece occurs.
"""

from __future__ import annotations

import heapq
import io
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import BinaryIO

KINDS = ("cause", "sign", "follower", "note")  # the most useful first

_BLOCK_BYTES = 1 << 20
_GAP = rb"[^\n\r]{0,300}?"
_BEGIN = rb"(?<![^\W_])"  # such as `loss=nan` in `train_loss=nan`
_SHOWN_CHARS = 200
_BEFORE_CHARS = 60
_COLORS = re.compile(rb"\x1b\[[0-9;]*[A-Za-z]")
_TRACEBACK = b"Traceback (most recent call last):"
_PREFIX = re.compile(rb"\[\w+\]:? ")  # that launchers put before the lines of a rank
_EXCEPTION = re.compile(rb"(?:[A-Za-z_]\w*\.)*(?:(?<=\.)\w+|[A-Z]\w*)(?::|\s*$)")
# These repeat an error that has its own traceback.
_WRAPPERS = re.compile(rb".*(?:ChildFailedError|: Caught \w+ in )")
# The first line of an error of Paceline, or of the launcher's report of a failure or a hang.
_REPORT = re.compile(
    rb"^(?:\[\w+\]:? )?((?:paceline\.(?:\w+\.)*[A-Z]\w*: (?<!PeerFailed: )|hang: |"
    rb"paceline: rank [^\n]* failed: )[^\n]*)(?=\n(?:\[\w+\]:? )?(?:  | {6}|why:))",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Cause:
    """An entry of causes.toml, which documents the fields."""

    name: str
    what: str
    says: tuple[str, ...]
    why: str
    fix: str
    kind: str = "cause"
    port: bool = False

    @cached_property
    def _patterns(self) -> list[tuple[bytes, re.Pattern[bytes]]]:
        pieces = [[piece.encode() for piece in text.split("*")] for text in self.says]
        return [
            (max(p, key=len), re.compile(_BEGIN + _GAP.join(map(re.escape, p)) + _end_of(p[-1])))
            for p in pieces
        ]

    def search(self, text: bytes) -> tuple[int, int] | None:
        """Begin and end of the first message of this entry."""
        return next(self.messages(text), None)

    def messages(self, text: bytes) -> Iterator[tuple[int, int]]:
        """Begin and end of the messages of this entry, at most one of a line."""
        # Each pattern goes once through the text.
        hits = [p.finditer(text) for literal, p in self._patterns if literal in text]
        end = -1
        for hit in heapq.merge(*hits, key=re.Match.start):
            if hit.start() >= end:
                yield hit.span()
                end = text.find(b"\n", hit.end())
                if end < 0:
                    return


def _end_of(piece: bytes) -> bytes:
    return rb"(?!\w)" if piece.lower().endswith(b"nan") else b""


@dataclass(frozen=True)
class Found:
    """A known message: its entry, its line number from 1, and the shortened text of the line."""

    cause: Cause
    line: int
    text: str


@dataclass(frozen=True)
class Reading:
    """The messages of a text.

    Args:
        lines: How many lines the text has.
        report: Line and text of the first line of the first error or report of Paceline itself, which says
            more than the table.
        found: The first message of each entry; the most useful kind first, then by line.
        unknown: Line and text of the first Python error that matches no entry.
    """

    lines: int
    report: tuple[int, str] | None
    found: tuple[Found, ...]
    unknown: tuple[int, str] | None


@cache
def causes() -> tuple[Cause, ...]:
    """The entries of causes.toml, in their order."""
    text = Path(__file__).with_name("causes.toml").read_text(encoding="utf-8")
    return tuple(Cause(**{**c, "says": tuple(c["says"])}) for c in tomllib.loads(text)["cause"])


def recognise(text: str) -> Found | None:
    """The most useful known message in a short text."""
    return next(iter(read(io.BytesIO(text.encode(errors="backslashreplace"))).found), None)


def read(stream: BinaryIO) -> Reading:
    """Read all of `stream`, with a few blocks of it in memory at a time."""
    open_entries, found, lines = list(causes()), [], 0
    report: tuple[int, str] | None = None
    unknown: tuple[int, str] | None = None
    tracebacks: set[bytes] = set()
    before = b""  # the last line of the previous block: a report is known by the line after its first one
    for first, text in _blocks(stream):
        block = _COLORS.sub(b"", text)
        for cause in list(open_entries):
            hit = _first_message(cause, block, first)
            if hit is not None:
                found.append(hit)
                open_entries.remove(cause)
        unknown = unknown or _first_unknown(block, first, tracebacks)
        if report is None and (begin := _REPORT.search(before + block)):
            lines_before = (before + block).count(b"\n", 0, begin.start(1))
            number = first - before.count(b"\n") + lines_before
            report = number, begin[1].decode(errors="replace")
        before = block[block.rfind(b"\n", 0, -1) + 1 :]
        lines = first + block.count(b"\n") - block.endswith(b"\n")
    found.sort(key=lambda hit: (KINDS.index(hit.cause.kind), hit.line))
    return Reading(lines, report, tuple(found), unknown)


def _blocks(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Blocks of whole lines, and the number of the first line; a line longer than a block comes in pieces."""
    number, rest = 1, b""
    while data := stream.read(_BLOCK_BYTES):
        data = rest + data
        cut = data.rfind(b"\n") + 1
        if cut == 0 and len(data) > _BLOCK_BYTES:
            cut = len(data)
        rest = data[cut:]
        if cut:
            yield number, data[:cut]
            number += data.count(b"\n", 0, cut)
    if rest:
        yield number, rest


def _first_message(cause: Cause, block: bytes, first_line: int) -> Found | None:
    for span in cause.messages(block):
        begin = block.rfind(b"\n", 0, span[0]) + 1
        end = block.find(b"\n", span[1])
        end = len(block) if end < 0 else end
        line = block[begin:end]
        # If a line matches two entries, the earlier entry counts.
        if next(other for other in causes() if other.search(line)) is cause:
            number = first_line + block.count(b"\n", 0, begin)
            return Found(cause, number, _shown(line, span[0] - begin))
    return None


def _shown(line: bytes, at: int) -> str:
    """The part of a line around a message, without what a progress bar has overwritten."""
    # A character has at most 4 bytes.
    begin = max(line.rfind(b"\r", 0, at) + 1, at - 4 * _BEFORE_CHARS)
    text = line[begin:at].decode(errors="replace")
    rest = line[at : at + 4 * _SHOWN_CHARS].split(b"\r")[0].decode(errors="replace")
    cut = text if len(text) <= _BEFORE_CHARS else f"... {text[-_BEFORE_CHARS:]}"
    return f"{cut}{rest if len(rest) <= _SHOWN_CHARS else f'{rest[:_SHOWN_CHARS]} ...'}".strip()


def _first_unknown(block: bytes, first_line: int, tracebacks: set[bytes]) -> tuple[int, str] | None:
    """The last line of a traceback, if no entry is about it.

    Args:
        tracebacks: The prefixes of the tracebacks that have not ended; kept from block to block.
    """
    if not (tracebacks or _TRACEBACK in block):
        return None
    for number, line in enumerate(block.split(b"\n"), first_line):
        prefix, is_begin, _ = line.partition(_TRACEBACK)
        if is_begin:
            prefix = prefix.removesuffix(b"Original ")
            tracebacks.add(prefix if _PREFIX.fullmatch(prefix) else b"")
            continue
        for prefix in [each for each in tracebacks if line.startswith(each)]:
            body = line[len(prefix) :]
            if _EXCEPTION.match(body):
                tracebacks.discard(prefix)
                is_known = body.startswith(b"paceline.") or _WRAPPERS.match(body)
                if not is_known and not any(cause.search(body) for cause in causes()):
                    return number, _shown(body, 0)
    return None
