"""What ranks write, on its way to the launcher's terminal, pipe or files.

One thread reads all streams, whole lines at a time, and writes them where they belong. It keeps at most
`LINE_BYTES` of an unfinished line: a rank that writes faster than the reader reads is held up by its
pipe, as it would be without us. It knows nothing of ranks but the prefix that their lines carry.
"""

from __future__ import annotations

import os
import re
import select
import selectors
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO

_TAIL_BYTES = 8192  # for the folder that a failed job leaves
LINE_BYTES = 1 << 20
_READ_BYTES = 1 << 16
# A prompt has no end of line; a bar or a line in two writes is whole within this time.
_PROMPT_S = 0.05
_TICK_S = 0.25
# How long a line too long to keep may pause without another rank's lines breaking in.
_HOLD_S = 1.0

_BREAKS = re.compile(rb"\n|\r(?!\n)")
# Colours do not move the cursor, so a coloured line still is a plain one.
_COLOURS = re.compile(rb"\x1b\[[0-9;]*m")
_MOVES = re.compile(rb"[\x1b\r\b](?!\n)")
_ERASE_LINE = b"\r\x1b[K"


class Console:
    """One of the launcher's own outputs, shared by the streams that end there."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.is_terminal = os.isatty(fd)
        try:
            status = os.fstat(fd)
            self.closed, self.identity = False, (status.st_dev, status.st_ino)
        except OSError:  # we were started without it
            self.closed, self.identity = True, (-1, fd)
        self._lock = threading.Lock()
        self._holder: Stream | None = None
        self._written_at = 0.0
        self._mid_line = False
        self._drawing = False

    def free_for(self, stream: Stream) -> bool:
        """Whether no other stream is in the middle of a line, or it has been there for too long."""
        if self._holder in (None, stream) or self.is_terminal:
            return True
        return time.monotonic() - self._written_at > _HOLD_S

    def held_by(self, stream: Stream) -> bool:
        """Whether the last line written is this stream's, and is open."""
        return self._holder is stream

    def write(self, data: bytes, stream: Stream | None = None, *, drawing: bool = False) -> None:
        """Write it all, waiting for a slow reader."""
        if not data:
            return
        with self._lock:
            foreign = stream is None or (bool(stream.prefix) and self._holder is not stream)
            if self._mid_line and foreign:
                # A progress bar is drawn again by its owner; any other text is kept.
                data = (_ERASE_LINE if self._drawing else b"\n") + data
            self._mid_line = not data.endswith(b"\n")
            self._holder = stream if self._mid_line else None
            self._drawing = drawing
            self._write(data)
            self._written_at = time.monotonic()

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view and not self.closed:
            try:
                view = view[os.write(self.fd, view) :]
            except BlockingIOError:
                # Somebody made our output non-blocking; it may be shared with other programs.
                select.select([], [self.fd], [], 1.0)
            except OSError:
                # Nobody reads any more. A training of days goes on without its viewer.
                self.closed = True


@dataclass(eq=False)
class Stream:
    """One output of one rank, from its pipe or pseudo-terminal to a console and files.

    Args:
        fd: Our end, read without blocking.
        console: Where it is shown; None if it is not.
        prefix: Put before each line; empty: bytes pass as they are.
        files: Get the bytes as they are.
        matches: A file and the words of which one must be in a line to be copied there.
    """

    fd: int
    console: Console | None
    prefix: bytes = b""
    is_terminal: bool = False
    files: list[BinaryIO] = field(default_factory=list)
    matches: tuple[BinaryIO, Sequence[str]] | None = None
    tail: bytes = field(default=b"", init=False)
    _kept: bytearray = field(default_factory=bytearray, init=False)
    _line_open: bool = field(default=False, init=False)
    _fed_at: float = field(default=0.0, init=False)
    # Its rank has ended: what cannot be read at once will never come.
    closing: bool = field(default=False, init=False)
    ended: bool = field(default=False, init=False)
    closed: bool = field(default=False, init=False)

    def feed(self, data: bytes) -> None:
        """Take what the rank wrote."""
        self.tail = (self.tail + data)[-_TAIL_BYTES:]
        for file in self.files:
            file.write(data)
        if self.matches is None and not self.prefix:
            if self.console is not None:
                self.console.write(data, self)
            return
        self._kept += data
        self._fed_at = time.monotonic()
        self.settle()

    @property
    def free(self) -> bool:
        """Whether lines may be written now."""
        return self.console is None or self.console.free_for(self)

    @property
    def full(self) -> bool:
        """Whether it must not be read on: another stream is in the middle of a very long line."""
        return len(self._kept) > LINE_BYTES and not self.free

    @property
    def unfinished(self) -> bool:
        """Whether it holds text that may have to be written without its end."""
        return self.is_terminal and bool(self._kept)

    def settle(self, *, end: bool = False) -> None:
        """Pass on the lines that are whole, and others that have waited long enough."""
        if self._kept and self.free:
            whole = self._whole()
            lines = bytes(self._kept[:whole])
            del self._kept[:whole]
            self._emit(lines)
            if self._kept and (end or self._overdue()):
                rest = bytes(self._kept)
                self._kept.clear()
                self._emit(rest)
        if end and self.prefix and self.console is not None and self.console.held_by(self):
            self._emit(b"\n")

    def _whole(self) -> int:
        """How many of the kept bytes are lines with their end."""
        newline = self._kept.rfind(b"\n") + 1
        if self.is_terminal:
            return newline
        # A progress bar in a pipe ends its lines with a carriage return; a last one may be half of \r\n.
        return max(newline, self._kept.rfind(b"\r", 0, len(self._kept) - 1) + 1)

    def _overdue(self) -> bool:
        if len(self._kept) > LINE_BYTES:
            return True
        if not self.is_terminal:
            return False
        return bool(_MOVES.search(self._kept)) or time.monotonic() - self._fed_at > _PROMPT_S

    def _emit(self, text: bytes) -> None:
        if not text:
            return
        if self.matches is not None:
            self._copy_matches(text)
        if self.console is None:
            return
        # On a terminal each line is judged by itself: bars are passed as they are.
        for part in text.splitlines(keepends=True) if self.is_terminal else (text,):
            draws = self.is_terminal and bool(_MOVES.search(_COLOURS.sub(b"", part)))
            self.console.write(part if draws else self._prefixed(part), self, drawing=draws)
            self._line_open = not part.endswith((b"\n", b"\r"))

    def _prefixed(self, text: bytes) -> bytes:
        if not self.prefix:
            return text
        head = b"" if self._line_open else self.prefix
        if b"\r" in text:
            body = _BREAKS.sub(lambda found: found.group() + self.prefix, text)
        else:
            body = text.replace(b"\n", b"\n" + self.prefix)
        if text.endswith((b"\n", b"\r")):
            body = body[: len(body) - len(self.prefix)]
        return head + body

    def _copy_matches(self, text: bytes) -> None:
        assert self.matches is not None
        file, words = self.matches
        for line in text.splitlines(keepends=True):
            if any(word.encode() in line for word in words):
                file.write(self.prefix + line)


class Pump:
    """The thread that reads the streams, and calls back when other descriptors become readable."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._streams: list[Stream] = []
        self._tasks: list[Callable[[], None]] = []
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._run_tasks)
        self._stopping = False
        self._moved = 0
        self._turned = threading.Condition()
        self.on_tick: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._loop, name="paceline-output", daemon=True)
        self._thread.start()

    def watch(self, fd: int, ready: Callable[[], None]) -> None:
        """Call `ready` in the thread whenever `fd` can be read."""
        self._post(lambda: self._register(fd, ready))

    def unwatch(self, fd: int, then: Callable[[], None]) -> None:
        """Stop watching `fd`, then call `then`, which may close it."""

        def leave() -> None:
            self._leave(fd)
            then()

        if threading.current_thread() is self._thread:
            leave()  # or the descriptor, still ready, would call again
        else:
            self._post(leave)

    def add(self, stream: Stream) -> None:
        """Read this stream from now on."""
        os.set_blocking(stream.fd, False)

        def begin() -> None:
            self._streams.append(stream)
            self._register(stream.fd, lambda: self._read(stream))

        self._post(begin)

    def finish(self, streams: Sequence[Stream], *, stalled_s: float) -> bool:
        """Read what is left in streams whose rank has ended, and close them.

        Gives False when nothing has moved for `stalled_s` seconds: nobody reads our output.
        """

        def close() -> None:
            for stream in streams:
                stream.closing = True

        self._post(close)
        return self._wait_moving(lambda: all(stream.closed for stream in streams), stalled_s)

    def call(self, task: Callable[[], None], *, stalled_s: float) -> bool:
        """Have the thread do `task`, and wait as long as any output moves meanwhile.

        Gives False when nothing has moved for `stalled_s` seconds.
        """
        done = threading.Event()

        def run() -> None:
            task()
            done.set()

        self._post(run)
        return self._wait_moving(done.is_set, stalled_s)

    def _wait_moving(self, done: Callable[[], bool], stalled_s: float) -> bool:
        moved, since = self._moved, time.monotonic()
        while not done():
            if not self._thread.is_alive():
                return False
            with self._turned:
                self._turned.wait(_PROMPT_S)
            if self._moved != moved:
                moved, since = self._moved, time.monotonic()
            elif time.monotonic() - since > stalled_s:
                return False
        return True

    def stop(self, *, timeout_s: float) -> None:
        """End the thread."""
        self._stopping = True
        self._post(lambda: None)
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._selector.close()
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _post(self, task: Callable[[], None]) -> None:
        with self._lock:
            self._tasks.append(task)
        try:
            os.write(self._wake_write, b"x")
        except BlockingIOError:
            return  # the pipe is full of wake-ups already

    def _run_tasks(self) -> None:
        try:
            os.read(self._wake_read, _READ_BYTES)
        except BlockingIOError:
            return
        with self._lock:
            tasks, self._tasks = self._tasks, []
        for task in tasks:
            task()

    def _register(self, fd: int, ready: Callable[[], None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, ready)

    def _leave(self, fd: int) -> None:
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def _loop(self) -> None:
        while not self._stopping:
            for key, _ in self._selector.select(self._patience()):
                key.data()
            for stream in list(self._streams):
                self._attend(stream)
            if self.on_tick is not None:
                self.on_tick()
            with self._turned:
                self._turned.notify_all()

    def _patience(self) -> float:
        if any(stream.closing and not stream.full for stream in self._streams):
            return 0.0
        return _PROMPT_S if any(stream.unfinished for stream in self._streams) else _TICK_S

    def _attend(self, stream: Stream) -> None:
        """What is due without news: late lines, the end, a pause while another writes."""
        stream.settle()
        if stream.closing and not stream.ended and not stream.full:
            self._read(stream)
        if stream.ended:
            if stream.free:
                self._close(stream)
        elif stream.full:
            self._leave(stream.fd)
        elif stream.fd not in self._selector.get_map():
            self._register(stream.fd, lambda: self._read(stream))

    def _read(self, stream: Stream) -> None:
        if stream.ended or stream.full:
            return
        try:
            data = os.read(stream.fd, _READ_BYTES)
        except BlockingIOError:
            stream.ended = stream.closing
            return
        except OSError:
            data = b""  # the far end of a pseudo-terminal was closed
        if data:
            stream.feed(data)
            self._moved += len(data)
        else:
            stream.ended = True
            self._leave(stream.fd)

    def _close(self, stream: Stream) -> None:
        self._leave(stream.fd)
        stream.settle(end=True)
        os.close(stream.fd)
        for file in stream.files:
            file.close()
        self._streams.remove(stream)
        stream.closed = True
