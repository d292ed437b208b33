"""Lines on their way from ranks to the console: whole, prefixed, bounded."""

from __future__ import annotations

import os
import re
import select
import threading
from collections.abc import Iterator

import pytest

from paceline.launch.output import LINE_BYTES, Console, LogFile, Pump, Stream


class Reader:
    """Reads a pipe to its end in a thread."""

    def __init__(self) -> None:
        self.fd, self.write_fd = os.pipe()
        self.data = b""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while chunk := os.read(self.fd, 1 << 16):
            self.data += chunk

    def close(self) -> bytes:
        os.close(self.write_fd)
        self._thread.join(20)
        os.close(self.fd)
        return self.data


@pytest.fixture
def pump() -> Iterator[Pump]:
    made = Pump()
    yield made
    made.stop(timeout_s=10)


def _stream(console: Console, prefix: bytes) -> tuple[int, Stream]:
    ours, theirs = os.pipe()
    return theirs, Stream(ours, console, prefix)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.close(fd)


def _pass(pump: Pump, outputs: list[tuple[bytes, bytes]]) -> bytes:
    """Write each of `outputs`, (prefix, data), through one console at the same time."""
    reader = Reader()
    console = Console(reader.write_fd)
    streams, writers = [], []
    for prefix, data in outputs:
        theirs, stream = _stream(console, prefix)
        pump.add(stream)
        streams.append(stream)
        writers.append(threading.Thread(target=_write_all, args=(theirs, data)))
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(20)
    assert pump.finish(streams, stalled_s=10)
    return reader.close()


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (b"a\nb\n", b"[3] a\n[3] b\n"),
        (b"no end", b"[3] no end\n"),
        (b"\n\n", b"[3] \n[3] \n"),
        (b"10%\r20%\r30%\n", b"[3] 10%\r[3] 20%\r[3] 30%\n"),
        (b"dos\r\nline\r\n", b"[3] dos\r\n[3] line\r\n"),
        (b"\xff\x00\xfe\n", b"[3] \xff\x00\xfe\n"),
        (b"", b""),
    ],
)
def test_each_line_has_its_prefix(pump: Pump, written: bytes, shown: bytes) -> None:
    assert _pass(pump, [(b"[3] ", written)]) == shown


def test_without_a_prefix_bytes_pass_as_they_are(pump: Pump) -> None:
    assert _pass(pump, [(b"", b"\x1b[2Jraw\rno end")]) == b"\x1b[2Jraw\rno end"


def test_lines_of_two_ranks_stay_whole(pump: Pump) -> None:
    long = LINE_BYTES * 3
    data = {
        name: b"".join(name * n + b"\n" for n in (1, long, 5, 70_000, long))
        for name in (b"a", b"b")
    }
    shown = _pass(pump, [(b"[0] ", data[b"a"]), (b"[1] ", data[b"b"])])
    for prefix, name in ((b"[0] ", b"a"), (b"[1] ", b"b")):
        lines = [line for line in shown.splitlines(keepends=True) if line.startswith(prefix)]
        assert b"".join(line.removeprefix(prefix) for line in lines) == data[name]


def test_a_reader_that_stands_still_holds_up_the_writer(pump: Pump) -> None:
    read, write = os.pipe()
    theirs, stream = _stream(Console(write), b"[0] ")
    pump.add(stream)
    line, lines = b"x" * 999 + b"\n", 0
    while lines < 10_000 and select.select([], [theirs], [], 0.5)[1]:
        lines += os.write(theirs, line) // len(line)
    assert 0 < lines * len(line) < LINE_BYTES
    os.close(theirs)
    shown: list[bytes] = []
    reader = threading.Thread(
        target=lambda: shown.extend(iter(lambda: os.read(read, 1 << 16), b""))
    )
    reader.start()
    assert pump.finish([stream], stalled_s=10)
    os.close(write)
    reader.join(20)
    os.close(read)
    assert b"".join(shown) == (b"[0] " + line) * lines


def test_a_reader_that_has_gone_does_not_stop_the_ranks(pump: Pump) -> None:
    read, write = os.pipe()
    os.close(read)
    theirs, stream = _stream(Console(write), b"[0] ")
    pump.add(stream)
    writer = threading.Thread(target=_write_all, args=(theirs, b"line\n" * 100_000))
    writer.start()
    writer.join(20)
    assert not writer.is_alive()
    assert pump.finish([stream], stalled_s=10)
    os.close(write)


def test_a_full_disk_under_a_log_file_does_not_stop_the_rank(pump: Pump) -> None:
    said: list[str] = []
    reader = Reader()
    theirs, stream = _stream(Console(reader.write_fd), b"[0] ")
    stream.files.append(LogFile("/dev/full", said.append))
    pump.add(stream)
    writer = threading.Thread(target=_write_all, args=(theirs, b"line\n" * 50_000))
    writer.start()
    writer.join(20)
    assert pump.finish([stream], stalled_s=10)
    assert reader.close() == b"[0] line\n" * 50_000
    assert said == ["/dev/full cannot be written: No space left on device"]


def test_a_console_that_nobody_reads_blocks_neither_messages_nor_other_consoles(pump: Pump) -> None:
    read, write = os.pipe()
    theirs, stream = _stream(Console(write), b"[0] ")
    pump.add(stream)
    while select.select([], [theirs], [], 0.5)[1]:
        os.write(theirs, b"x" * 999 + b"\n")
    reader = Reader()
    pump.say("to standard output\n", stream.console or Console(write))
    errors = Console(reader.write_fd)
    pump.say("to standard error\n", errors)
    assert pump.call(lambda: None, stalled_s=5)
    assert not pump.drain(stalled_s=0.2)
    assert reader.close() == b"to standard error\n"
    os.close(read)
    os.close(theirs)
    assert pump.finish([stream], stalled_s=5)
    os.close(write)


class Terminal:
    """What a terminal of 40 columns shows of what is written to it."""

    def __init__(self) -> None:
        self.lines = [bytearray()]
        self.row = self.column = 0

    def write(self, data: bytes) -> None:
        for part in re.findall(rb"\x1b\[[0-?]*[@-~]|.|\n", data):
            if part == b"\n":
                self.row, self.column = self.row + 1, 0
                self.lines += [bytearray()] * (self.row == len(self.lines))
            elif part == b"\r":
                self.column = 0
            elif part == b"\x1b[A" or part == b"\x1b[1A":
                self.row -= 1
            elif part in (b"\x1b[K", b"\x1b[2K"):
                del self.lines[self.row][self.column if part == b"\x1b[K" else 0 :]
            elif not part.startswith(b"\x1b"):
                if self.column == 40:  # it wraps
                    self.write(b"\n")
                line = self.lines[self.row]
                line += b" " * (self.column - len(line))
                line[self.column : self.column + 1] = part
                self.column += 1

    @property
    def text(self) -> list[str]:
        return [line.decode().rstrip() for line in self.lines]


def _drawn(*writes: tuple[int, bytes]) -> list[str]:
    """What a terminal shows after writes of rank 0, which has a terminal, and of others, which have pipes."""
    console = Console(-1)
    console.is_terminal, console.closed = True, False
    screen = Terminal()
    console.flush = lambda: (screen.write(bytes(console._pending)), console._pending.clear(), 0)[2]  # type: ignore[method-assign]
    streams = {
        rank: Stream(-1, console, b"[%d] " % rank, is_terminal=rank == 0)
        for rank in sorted({rank for rank, _ in writes})
    }
    for rank, data in writes:
        streams[rank].feed(data)
    for stream in streams.values():
        stream.emit_lines(end=True)
    return screen.text


def test_a_bar_of_full_width_is_drawn_in_place() -> None:
    bars = [b"\r%3d%%" % n + b"#" * 32 for n in range(0, 101, 10)]
    shown = _drawn(*((0, bar) for bar in bars), (0, b"\nloss 0.5\n"))
    assert shown == ["[0] 100%" + "#" * 32, "[0] loss 0.5", ""]


def test_two_ranks_with_bars_show_one_moving_and_one_final_bar() -> None:
    writes = [(rank, b"\r%3d%%" % n) for n in range(0, 101, 10) for rank in (0, 1)]
    shown = _drawn(*writes, (1, b"\n"), (0, b"\n"))
    assert shown == ["[1] 100%", "[0] 100%", ""]


def test_a_display_of_two_lines_is_drawn_in_place() -> None:
    frame = b"\x1b[1mtask 1 %d\x1b[0m" + b"-" * 28 + b"\ntask 2 %d" + b"=" * 28
    up = b"\r\x1b[2K\x1b[1A\x1b[2K"
    writes = [(0, b"\x1b[?25l" + frame % (0, 0))] + [(0, up + frame % (n, n)) for n in range(1, 10)]
    shown = _drawn(*writes, (0, b"\n\x1b[?25h"))
    assert shown == ["[0] task 1 9" + "-" * 28, "[0] task 2 9" + "=" * 28, ""]


def test_a_line_of_another_rank_goes_above_a_bar() -> None:
    shown = _drawn(
        (0, b"\r 10%"), (1, b"loaded\n"), (0, b"\r 20%"), (2, b"\x1b[Asaved\n"), (0, b"\r 30%\n")
    )
    assert shown == ["[1] loaded", "[2] saved", "[0]  30%", ""]


def test_a_line_of_another_rank_goes_above_a_display_of_two_lines() -> None:
    up = b"\r\x1b[2K\x1b[1A\x1b[2K"
    shown = _drawn(
        (0, b"a 1\nb 1"), (0, up + b"a 2\nb 2"), (1, b"loaded\n"), (0, up + b"a 3\nb 3\n")
    )
    assert shown == ["[1] loaded", "[0] a 3", "[0] b 3", ""]


def test_an_escape_sequence_in_two_writes_stays_whole() -> None:
    stream_parts = [(0, b"old\n"), (0, b"\r\x1b["), (0, b"2Knew\n")]
    assert _drawn(*stream_parts) == ["[0] old", "[0] new", ""]
