"""Finds known messages in text of any size, and orders them by what they say about the cause.

Text is read in blocks, so a log need not fit into memory. A pattern is searched by its longest literal piece;
a regular expression runs only where that piece occurs.
"""

from __future__ import annotations

import heapq
import io
import re
import tomllib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import BinaryIO, TypeVar

T = TypeVar("T")

KINDS = ("cause", "sign", "follower", "note")  # the most useful first

_BLOCK_BYTES = 1 << 20
_GAP = rb"[^\n\r]{0,300}?"
_BEGIN = rb"(?<![^\W_])"  # such as `loss=nan` in `train_loss=nan`
_SHOWN_CHARS = 200
_BEFORE_CHARS = 60
_MAX_ERRORS = 50
# Colours of a terminal, and the time at the begin of a line that Kubernetes, Docker or journald adds: the
# lines of one error would have different prefixes.
_ADDED = re.compile(
    rb"\x1b\[[0-9;]*[A-Za-z]"
    rb"|^\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)? "
    rb"|^[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d ",
    re.MULTILINE,
)
_TRACEBACK = b"Traceback (most recent call last):"
_FRAME = b'  File "'  # its source line follows, indented by 4
_EXCEPTION = re.compile(rb"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?::|\s*$)")
# Such as `struct.error`. A line of a log may begin so too, so it is tried only while a traceback is open.
_DOTTED = re.compile(rb"(?:[A-Za-z_]\w*\.)+\w+(?::|\s*$)")
# These repeat an error that has its own traceback.
_WRAPPERS = re.compile(rb".*(?:ChildFailedError|: Caught \w+ in )")
_MAX_REPORTS = 20
_MAX_OPEN = 1000  # errors that have not ended; each may have a prefix of its own
# The first line of an error of Paceline, as a traceback or a command prints it (see `errors.py`), or of the
# launcher's report of a hang.
_REPORT = re.compile(rb"(?<![\w.])(?:paceline(?:(?:\.\w+)*\.[A-Z]\w*| \w+)?|hang): ")
_REASON = re.compile(rb"^(?:  )?(?:why|fix): ", re.MULTILINE)
_LOST_PEER = b"paceline.errors.PeerFailed: "


@dataclass(frozen=True)
class Cause:
    """An entry of causes.toml, which documents the fields."""

    name: str
    what: str
    says: tuple[str, ...]
    why: str
    fix: str
    kind: str = "cause"
    facts: str | None = None

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
class Report:
    """An error of Paceline with its own cause or fix: the number of its first line, and its text."""

    line: int
    text: str


@dataclass(frozen=True)
class Reading:
    """The messages of a text.

    Args:
        lines: How many lines the text has.
        reports: The errors of Paceline itself, each once; those of ranks that only lost a peer if there are
            no others.
        found: The first message of each entry that no report is about; the most useful kind first, then by
            line.
        unknown: Line and text of the first Python error that is no report and matches no entry.
    """

    lines: int
    reports: tuple[Report, ...]
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
    tracebacks, reports = _Tracebacks(), _Reports()
    for first, text in _blocks(stream):
        block = _ADDED.sub(b"", text)
        for cause in list(open_entries):
            hit = _first_message(cause, block, first)
            if hit is not None:
                found.append(hit)
                open_entries.remove(cause)
        tracebacks.take(first, block)
        reports.take(first, block)
        lines = first + block.count(b"\n") - block.endswith(b"\n")
    reports_by_line = reports.end()
    # The job knew more than the table does, such as the kernel's count of the processes that it killed.
    found = [
        hit for hit in found if not any(hit.cause.search(text) for text in reports_by_line.values())
    ]
    found.sort(key=lambda hit: (KINDS.index(hit.cause.kind), hit.line))
    shown = [Report(line, text.decode(errors="replace")) for line, text in reports_by_line.items()]
    return Reading(
        lines, tuple(shown), tuple(found), tracebacks.first_unknown(reports_by_line.values())
    )


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


class _OpenErrors(dict[bytes, T]):
    """Errors that have not ended, by the prefix of their lines, such as `[rank1]: `; the oldest first."""

    def __init__(self) -> None:
        self._lengths: set[int] = (
            set()
        )  # of the prefixes so far: few, also if there are many prefixes

    def begin(self, prefix: bytes, entry: T) -> None:
        """Add an error; of too many, forget the oldest."""
        self.pop(prefix, None)
        self[prefix] = entry
        self._lengths.add(len(prefix))
        if len(self) > _MAX_OPEN:
            del self[next(iter(self))]

    def prefixes_of(self, line: bytes) -> list[bytes]:
        """The prefixes that the line begins with."""
        return [line[:n] for n in self._lengths if n <= len(line) and line[:n] in self]


class _Tracebacks:
    """The last lines of Python tracebacks, also if a launcher put a prefix before each line."""

    def __init__(self) -> None:
        self._open = _OpenErrors[None]()
        self._errors: list[tuple[int, bytes]] = []

    def take(self, first: int, block: bytes) -> None:
        if len(self._errors) >= _MAX_ERRORS or not (self._open or _TRACEBACK in block):
            return
        lines = block.split(b"\n")
        for index, line in enumerate(lines):
            at = line.find(_TRACEBACK)
            if at >= 0:
                prefix = line[line.rfind(b"\r", 0, at) + 1 : at].removesuffix(b"Original ")
                # A progress bar, such as `[00:01, 9.5it/s]`, has no new line after it.
                self._open.begin(b"" if prefix.endswith(b"]") else prefix, None)
                continue
            for prefix in self._open.prefixes_of(line):
                body = line[len(prefix) :]
                if not body.strip() or body[:1].isspace() or _is_within(lines, index, prefix):
                    continue
                is_error = _EXCEPTION.match(body) or _DOTTED.match(body)
                if is_error:
                    self._errors.append((first + index, body))
                if is_error or prefix:  # without a prefix, the line may be that of another process
                    del self._open[prefix]
                    break

    def first_unknown(self, reports: Collection[bytes]) -> tuple[int, str] | None:
        for number, body in self._errors:
            is_reported = _WRAPPERS.match(body) or any(text.startswith(body) for text in reports)
            if not is_reported and not any(cause.search(body) for cause in causes()):
                return number, _shown(body, 0)
        return None


def _is_within(lines: list[bytes], index: int, prefix: bytes) -> bool:
    """Whether a line of the log is between two lines of a traceback, which another stream has written."""
    before, after = lines[index - 1], b"".join(lines[index + 1 : index + 2])
    frame = prefix + _FRAME
    return after.startswith(frame) or (
        before.startswith(frame) and after.startswith(prefix + b"    ")
    )


class _Reports:
    """Errors of Paceline with their indented lines, also if a launcher put a prefix before each line."""

    def __init__(self) -> None:
        self._open = _OpenErrors[tuple[int, list[bytes]]]()
        # By first line, which ranks have in common.
        self._texts: dict[bytes, tuple[int, bytes]] = {}

    def take(self, first: int, block: bytes) -> None:
        if not (self._open or b"paceline" in block or b"hang: " in block):
            return
        for number, line in enumerate(block.removesuffix(b"\n").split(b"\n"), first):
            for prefix in self._open.prefixes_of(line):
                body = line[len(prefix) :].rstrip()
                if body.startswith((b"  ", b"why: ", b"fix: ")):
                    self._open[prefix][1].append(body)
                else:
                    self._close(prefix)
            if begin := _REPORT.search(line):
                prefix = line[: begin.start()]
                self._open.begin(prefix, (number, [line[begin.start() :].rstrip()]))

    def _close(self, prefix: bytes) -> None:
        number, lines = self._open.pop(prefix)
        text = b"\n".join(lines)
        is_lost_peer = text.startswith(_LOST_PEER)
        alike = [each for each in self._texts if each.startswith(_LOST_PEER) == is_lost_peer]
        if _REASON.search(text) and len(alike) < _MAX_REPORTS:
            self._texts.setdefault(lines[0], (number, text))

    def end(self) -> dict[int, bytes]:
        """The texts by the number of their first line."""
        for prefix in list(self._open):
            self._close(prefix)
        texts = list(self._texts.values())
        causes = [each for each in texts if not each[1].startswith(_LOST_PEER)]
        return dict(sorted(causes or texts))
