"""Lines on their way from ranks to the console: whole, prefixed, bounded."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator

import pytest

from paceline.launch.output import LINE_BYTES, Console, Pump, Stream


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
