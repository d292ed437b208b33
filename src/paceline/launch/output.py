"""Output of the ranks, on its way to the launcher's terminal, pipe or log files.

One thread reads all streams, adds the rank prefix to each line, and writes the lines. Writes do not block: a
console that cannot take more keeps the rest, and the streams that it shows are not read until it can. A rank
that writes faster than its output is read therefore blocks on its own pipe, as it would without the launcher,
and nothing else waits.
"""

from __future__ import annotations

import errno
import os
import re
import select
import selectors
import stat
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

LINE_BYTES = 1 << 20  # a longer unfinished line is written in parts
_TAIL_BYTES = 8192  # end of each stream, kept for the report of a failed job
_READ_BYTES = 1 << 18
_PENDING_BYTES = 1 << 18  # if a console has more to write, its streams are not read
_TURN_S = 0.05
_IDLE_S = 0.25
# How long a line that is too long to keep may pause before another rank may write.
_HOLD_S = 1.0

_LINE_BREAK = re.compile(rb"\n|\r(?!\n)")
_COLOUR = re.compile(rb"\x1b\[[0-9;]*m")
_ESCAPES = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[^\[\]]")
_ERASE_LINE = b"\r\x1b[K"


class Console:
    """One of the launcher's own outputs, shared by the streams that it shows.

    Only the pump's thread may call the methods.

    Attributes:
        other: The console that reports a full disk of this one; None if there is none.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.is_terminal = os.isatty(fd)
        self._is_file = False
        try:
            status = os.fstat(fd)
            self.closed, self.identity = False, (status.st_dev, status.st_ino)
            self._is_file = stat.S_ISREG(status.st_mode)
        except OSError:  # the launcher was started without it
            self.closed, self.identity = True, (-1, fd)
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self.other: Console | None = None
        self._pending = bytearray()
        self._holder: Stream | None = None
        self._written_at = 0.0
        self._mid_line = self._has_progress_bar = False

    def free_for(self, stream: Stream) -> bool:
        """Whether no other stream is in the middle of a line, or has paused there for too long."""
        if self._holder in (None, stream) or self.is_terminal:
            return True
        return time.monotonic() - self._written_at > _HOLD_S

    def held_by(self, stream: Stream) -> bool:
        """Whether the last line is unfinished and from this stream."""
        return self._holder is stream

    @property
    def pending(self) -> bool:
        """Whether there is data that could not be written yet."""
        return bool(self._pending)

    @property
    def full(self) -> bool:
        """Whether its streams must not be read now."""
        return len(self._pending) > _PENDING_BYTES

    def write(self, data: bytes, stream: Stream | None = None) -> None:
        """Write as much as possible and keep the rest for `flush`; `stream` is None for a message."""
        if not data or self.closed:
            return
        foreign = stream is None or (bool(stream.prefix) and self._holder is not stream)
        if self._mid_line and foreign:
            # The rank that draws a progress bar draws it again below this line.
            self._pending += _ERASE_LINE if self._has_progress_bar and stream is not None else b"\n"
            self._mid_line = False
        self._pending += data
        newline = data.rfind(b"\n")
        rest = data[newline + 1 :]
        # Escape sequences, such as one that shows the cursor, begin no line.
        self._mid_line = bool(_ESCAPES.sub(b"", rest)) or (self._mid_line and newline < 0)
        self._holder = stream if self._mid_line else None
        self._has_progress_bar = self.is_terminal and (
            b"\r" in rest or (self._has_progress_bar and newline < 0)
        )
        self._written_at = time.monotonic()
        self.flush()

    def flush(self) -> int:
        """Write what can be written without blocking; the number of bytes."""
        written = 0
        while self._pending and not self.closed:
            try:
                count = self._write_some()
            except BlockingIOError:
                break
            except OSError as error:
                self._pending.clear()
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    self.closed = True  # the reader is gone; the job goes on without it
                elif self.other is not None:
                    other, self.other = self.other, None
                    name = "standard output" if self.fd == 1 else "standard error"
                    text = f"paceline: {name} cannot be written: {error.strerror}; output is lost\n"
                    other.write(text.encode())
                break
            del self._pending[:count]
            written += count
        return written

    def _write_some(self) -> int:
        """Write some of what is pending; the number of bytes.

        Raises:
            BlockingIOError: nothing can be written now.
        """
        # Not O_NONBLOCK, which would also affect other programs that share our output.
        if not self._poll.poll(0):
            raise BlockingIOError
        # A pipe that is ready takes PIPE_BUF bytes. A file takes all, and is always ready.
        size = len(self._pending) if self._is_file else select.PIPE_BUF
        return os.write(self.fd, self._pending[:size])


@dataclass(frozen=True)
class Consoles:
    """The launcher's own outputs; one object if both are the same terminal, pipe or file."""

    out: Console
    err: Console

    @staticmethod
    def of_this_process() -> Consoles:
        """Standard output and error of this process."""
        out, err = Console(1), Console(2)
        if out.identity == err.identity:
            return Consoles(out, out)
        out.other, err.other = err, out
        return Consoles(out, err)


class LogFile:
    """A log file of a rank. The first error ends it, and the job goes on without it.

    Args:
        failed: Called with a message about the error.
    """

    def __init__(self, path: str, failed: Callable[[str], None]) -> None:
        self.path = path
        self._failed = failed
        self._fd = -1
        try:
            # Unbuffered: the last lines of a killed job are the important ones.
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            self._report(error)

    def write(self, data: bytes) -> None:
        """Append `data`."""
        view = memoryview(data)
        while view and self._fd >= 0:
            try:
                view = view[os.write(self._fd, view) :]
            except OSError as error:
                self._report(error)
                self.close()

    def close(self) -> None:
        """Close it."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            try:
                os.close(fd)
            except OSError as error:  # network file systems report write errors here
                self._report(error)

    def _report(self, error: OSError) -> None:
        self._failed(f"{self.path} cannot be written: {error.strerror}")


@dataclass(eq=False)
class Stream:
    """One output of one rank, from its pipe or pseudo-terminal to a console and files.

    Args:
        fd: The launcher's end, read without blocking.
        console: Where it is shown; None if it is not.
        prefix: Put before each line; if empty, bytes pass unchanged, as those of a pseudo-terminal do.
        terminal: Whether the rank writes to a pseudo-terminal.
        files: Get the bytes unchanged.
    """

    fd: int
    console: Console | None
    prefix: bytes = b""
    terminal: bool = False
    files: list[LogFile] = field(default_factory=list)
    tail: bytes = field(default=b"", init=False)
    _kept: bytearray = field(default_factory=bytearray, init=False)
    _line_open: bool = field(default=False, init=False)
    closing: bool = field(default=False, init=False)  # the rank has ended: no more data will come
    ended: bool = field(default=False, init=False)  # all data is read
    closed: bool = field(default=False, init=False)  # all data is passed on

    def feed(self, data: bytes) -> None:
        """Take data that the rank wrote."""
        self.tail = (self.tail + data[-_TAIL_BYTES:])[-_TAIL_BYTES:]
        for file in self.files:
            file.write(data)
        if not self.prefix:
            if self.console is not None:
                self.console.write(data, self)
            return
        self._kept += data
        if self._shares_terminal and b"\r" in self._kept:
            # Progress bars of two ranks would overwrite each other: only rank 0 draws, and of the others
            # the last state of each line is shown.
            self._kept[:] = b"\n".join(map(_last_state, self._kept.split(b"\n")))
        self.emit_lines()

    @property
    def free(self) -> bool:
        """Whether lines may be written now."""
        return self.console is None or self.console.free_for(self)

    @property
    def full(self) -> bool:
        """Whether it must not be read now."""
        if self.console is None:
            return False
        return self.console.full or (len(self._kept) > LINE_BYTES and not self.free)

    @property
    def _shares_terminal(self) -> bool:
        return bool(self.prefix) and self.console is not None and self.console.is_terminal

    def emit_lines(self, *, end: bool = False) -> None:
        """Pass on complete lines, and a line that is too long to keep; all text at the `end`."""
        if self._kept and self.free:
            size = self._complete()
            if end or len(self._kept) - size > LINE_BYTES:
                size = len(self._kept)
            with memoryview(self._kept) as kept:
                text = bytes(kept[:size])
            del self._kept[:size]
            self._emit(text)
        if end and self.prefix and self.console is not None and self.console.held_by(self):
            # The job's next message begins a line.
            self._emit(b"\n")

    def _complete(self) -> int:
        """How many of the kept bytes are complete lines."""
        newline = self._kept.rfind(b"\n") + 1
        if self._shares_terminal:
            return newline
        # A progress bar in a pipe ends lines with a carriage return; the last one may be half of \r\n.
        return max(newline, self._kept.rfind(b"\r", 0, len(self._kept) - 1) + 1)

    def _emit(self, text: bytes) -> None:
        if not text or self.console is None:
            return
        if self._shares_terminal:  # it must not move the cursor over the lines of others
            text = _ESCAPES.sub(lambda e: e[0] if _COLOUR.fullmatch(e[0]) else b"", text)
        self.console.write(self._prefix_lines(text), self)

    def _prefix_lines(self, text: bytes) -> bytes:
        head = b"" if self._line_open else self.prefix
        if b"\r" in text:
            body = _LINE_BREAK.sub(lambda found: found.group() + self.prefix, text)
        else:
            body = text.replace(b"\n", b"\n" + self.prefix)
        self._line_open = not text.endswith((b"\n", b"\r"))
        shown = len(body) if self._line_open else len(body) - len(self.prefix)
        return b"".join((head, memoryview(body)[:shown]))


def _last_state(line: bytearray) -> bytearray:
    """What a line shows at its end: the text after the last carriage return that more text follows."""
    return line[line.rfind(b"\r", 0, len(line.rstrip(b"\r"))) + 1 :]


class Pump:
    """The thread that reads the streams, writes the consoles, and watches other descriptors.

    An exception does not end the thread, since the ranks would wait forever to write their output. What
    was read in that turn is lost.

    Attributes:
        on_turn: Called after each turn of the loop.
        on_error: Called with the first exception.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._streams: list[Stream] = []
        self._consoles: set[Console] = set()
        self._tasks: list[Callable[[], None]] = []
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._run_tasks)
        self._stopping = False
        self._moved_bytes = 0
        self._turn = threading.Condition()
        self.on_turn: Callable[[], None] = lambda: None
        self.on_error: Callable[[Exception], None] = lambda error: None
        self._has_error = False
        self._thread = threading.Thread(target=self._loop, name="paceline-output", daemon=True)
        self._thread.start()

    def watch(self, fd: int, ready: Callable[[], None]) -> None:
        """Call `ready` in the thread whenever `fd` can be read."""
        self._post(lambda: self._register(fd, ready))

    def unwatch(self, fd: int, then: Callable[[], None]) -> None:
        """Stop watching `fd`, then call `then`, which may close it."""

        def unregister() -> None:
            self._unregister(fd)
            then()

        if threading.current_thread() is self._thread:
            unregister()  # otherwise the descriptor, still ready, would call again
        else:
            self._post(unregister)

    def add(self, stream: Stream) -> None:
        """Read this stream from now on."""
        os.set_blocking(stream.fd, False)

        def begin() -> None:
            self._streams.append(stream)
            if stream.console is not None:
                self._consoles.add(stream.console)
            self._register(stream.fd, lambda: self._read(stream))

        self._post(begin)

    def say(self, text: str, console: Console) -> None:
        """Write a message of the launcher after a complete line; does not block."""

        def write() -> None:
            self._consoles.add(console)
            console.write(text.encode(errors="backslashreplace"))

        self._post(write)

    def finish(self, streams: Sequence[Stream], *, stalled_s: float) -> bool:
        """Read the rest of the streams of ended ranks, close them, and write what they held.

        False if no output moved for `stalled_s` seconds: nobody reads our output.
        """

        def close() -> None:
            for stream in streams:
                stream.closing = True

        self._post(close)

        def done() -> bool:
            return all(s.closed and not (s.console and s.console.pending) for s in streams)

        return self._wait_moving(done, stalled_s)

    def call(self, task: Callable[[], None], *, stalled_s: float) -> bool:
        """Have the thread do `task`, and wait for it.

        False if no output moved for `stalled_s` seconds.
        """
        done = threading.Event()

        def run() -> None:
            try:
                task()
            finally:
                done.set()

        self._post(run)
        return self._wait_moving(done.is_set, stalled_s)

    def drain(self, *, stalled_s: float) -> bool:
        """Wait until all messages are written; False if no output moved for `stalled_s` seconds."""
        self.call(lambda: None, stalled_s=stalled_s)
        return self._wait_moving(lambda: not any(c.pending for c in self._consoles), stalled_s)

    def _wait_moving(self, done: Callable[[], bool], stalled_s: float) -> bool:
        moved, since = self._moved_bytes, time.monotonic()
        while not done():
            if not self._thread.is_alive():
                return False
            with self._turn:
                self._turn.wait(_TURN_S)
            if self._moved_bytes != moved:
                moved, since = self._moved_bytes, time.monotonic()
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
            self._try(task)

    def _register(self, fd: int, ready: Callable[[], None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, ready)

    def _unregister(self, fd: int) -> None:
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def _loop(self) -> None:
        while not self._stopping:
            for key, _ in self._selector.select(self._timeout_s()):
                if not self._try(key.data):
                    self._unregister(key.fd)
            # First the consoles: a stream is not read while its console is full.
            for console in self._consoles:
                self._try(self._flush, console)
            for stream in list(self._streams):
                self._try(self._attend, stream)
            for console in self._consoles:
                self._try(self._wait_writable, console)
            self._try(self.on_turn)
            with self._turn:
                self._turn.notify_all()

    def _try(self, task: Callable[..., None], *args: object) -> bool:
        """Call `task`; False if it raised."""
        try:
            task(*args)
        except Exception as error:
            if not self._has_error:
                self._has_error = True
                self.on_error(error)
            return False
        return True

    def _flush(self, console: Console) -> None:
        self._moved_bytes += console.flush()

    def _wait_writable(self, console: Console) -> None:
        is_watched = console.fd in self._selector.get_map()
        if console.pending and not is_watched:
            self._selector.register(console.fd, selectors.EVENT_WRITE, lambda: None)
        elif is_watched and not console.pending:
            self._selector.unregister(console.fd)

    def _timeout_s(self) -> float:
        if any(s.closing and not s.ended and not s.full for s in self._streams):
            return 0.0
        return _IDLE_S

    def _attend(self, stream: Stream) -> None:
        """Do what is due without new data: late lines, the end, a pause while its console is full."""
        stream.emit_lines()
        if stream.closing and not stream.ended and not stream.full:
            self._read(stream)
        if stream.ended:
            if stream.free:
                self._close(stream)
        elif stream.full:
            self._unregister(stream.fd)
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
            data = b""  # the other end of a pseudo-terminal was closed
        if data:
            stream.feed(data)
            self._moved_bytes += len(data)
        else:
            stream.ended = True
            self._unregister(stream.fd)

    def _close(self, stream: Stream) -> None:
        self._unregister(stream.fd)
        stream.emit_lines(end=True)
        os.close(stream.fd)
        for file in stream.files:
            file.close()
        self._streams.remove(stream)
        stream.closed = True
