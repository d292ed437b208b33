"""Lines on their way from ranks to the console: whole, prefixed, bounded."""

from __future__ import annotations

import fcntl
import os
import select
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.launch.output import LINE_BYTES, Console, LogFile, Pump, Stream


class Reader:
    """Reads a pipe to its end in a thread."""

    def __init__(self, *pipe: int) -> None:
        self.fd, self.write_fd = pipe or os.pipe()
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


def _stream(pump: Pump, console: Console, prefix: bytes = b"[0] ") -> tuple[int, Stream]:
    """A stream that the pump reads, and the end of its pipe that a rank writes to."""
    ours, theirs = os.pipe()
    stream = Stream(ours, console, prefix)
    pump.add(stream)
    return theirs, stream


def _write_all(fd: int, data: bytes) -> None:
    with open(fd, "wb") as file:
        file.write(data)


def _pass(pump: Pump, outputs: list[tuple[bytes, bytes]]) -> bytes:
    """Write each of `outputs`, (prefix, data), through one console at the same time."""
    reader = Reader()
    console = Console(reader.write_fd)
    streams, writers = [], []
    for prefix, data in outputs:
        theirs, stream = _stream(pump, console, prefix)
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


@pytest.mark.parametrize("prefix", [b"", b"[0] "])
def test_output_is_read_on_as_soon_as_the_console_has_room(
    monkeypatch: pytest.MonkeyPatch, prefix: bytes
) -> None:
    monkeypatch.setattr("paceline.launch.output._IDLE_S", 1000.0)  # nothing waits for the next look
    pump = Pump()
    read, write = os.pipe()
    console = Console(write)
    theirs, stream = _stream(pump, console, prefix)
    line = b"x" * 99 + b"\n"
    writer = threading.Thread(target=_write_all, args=(theirs, line * 40_000))
    writer.start()
    deadline = time.monotonic() + 20
    while not console.full and time.monotonic() < deadline:
        time.sleep(0.001)
    reader = Reader(read, write)
    writer.join(20)
    assert pump.finish([stream], stalled_s=10)
    assert reader.close() == (prefix + line) * 40_000
    pump.stop(timeout_s=10)


def test_the_thread_sleeps_while_an_ended_stream_waits_for_a_line_of_another(pump: Pump) -> None:
    read, write = os.pipe()
    console = Console(write)
    ended, other = Stream(-1, console, b"[0] "), Stream(-1, console, b"[1] ")
    console.write(b"[1] a line without an end", other)
    ended.closing = ended.ended = True
    pump._streams.append(ended)
    assert not ended.free
    assert pump._timeout_s() > 0
    pump._streams.remove(ended)
    for fd in (read, write):
        os.close(fd)


def test_a_reader_that_does_not_read_blocks_the_writer(pump: Pump) -> None:
    read, write = os.pipe()
    theirs, stream = _stream(pump, Console(write))
    line, lines = b"x" * 999 + b"\n", 0
    while lines < 10_000 and select.select([], [theirs], [], 0.5)[1]:
        lines += os.write(theirs, line) // len(line)
    held = fcntl.fcntl(write, fcntl.F_GETPIPE_SZ)
    assert held <= lines * len(line) < held + LINE_BYTES
    os.close(theirs)
    reader = Reader(read, write)
    assert pump.finish([stream], stalled_s=10)
    assert reader.close() == (b"[0] " + line) * lines


def test_a_reader_that_has_ended_does_not_stop_the_ranks(pump: Pump) -> None:
    read, write = os.pipe()
    os.close(read)
    theirs, stream = _stream(pump, Console(write))
    _write_all(theirs, b"line\n" * 100_000)
    assert pump.finish([stream], stalled_s=10)
    os.close(write)


def test_an_error_in_a_callback_does_not_stop_the_output(pump: Pump) -> None:
    errors: list[Exception] = []
    pump.on_error = errors.append
    read, write = os.pipe()
    os.write(write, b"x")
    pump.watch(read, lambda: next(iter(())))
    pump.on_turn = lambda: {}["size"]
    reader = Reader()
    theirs, stream = _stream(pump, Console(reader.write_fd))
    _write_all(theirs, b"line\n")
    assert pump.finish([stream], stalled_s=10)
    assert reader.close() == b"[0] line\n"
    assert len(errors) == 1
    os.close(read)
    os.close(write)


def test_a_full_disk_under_a_log_file_does_not_stop_the_rank(pump: Pump) -> None:
    said: list[str] = []
    reader = Reader()
    theirs, stream = _stream(pump, Console(reader.write_fd))
    stream.files.append(LogFile("/dev/full", said.append))
    _write_all(theirs, b"line\n" * 50_000)
    assert pump.finish([stream], stalled_s=10)
    assert reader.close() == b"[0] line\n" * 50_000
    assert said == ["/dev/full cannot be written: No space left on device"]
    assert "/dev/full" not in [os.path.realpath(fd) for fd in os.scandir("/proc/self/fd")]


def test_a_full_disk_is_told_once_and_output_goes_on_when_there_is_room(tmp_path: Path) -> None:
    reader = Reader()
    fd = os.open("/dev/full", os.O_WRONLY)
    console = Console(fd)
    console.other = Console(reader.write_fd)
    stream = Stream(-1, console, b"[0] ")
    stream.feed(b"lost\n")
    stream.feed(b"lost too\n")
    with open(tmp_path / "log", "wb") as file:
        os.dup2(file.fileno(), fd)
    stream.feed(b"later\n")
    os.close(fd)
    assert (tmp_path / "log").read_bytes() == b"[0] later\n"
    said = reader.close().decode()
    assert said.endswith("cannot be written: No space left on device; output is lost\n")
    assert said.count("\n") == 1


def test_a_console_that_is_not_read_blocks_neither_messages_nor_other_consoles(pump: Pump) -> None:
    read, write = os.pipe()
    console = Console(write)
    theirs, stream = _stream(pump, console)
    while select.select([], [theirs], [], 0.5)[1]:
        os.write(theirs, b"x" * 999 + b"\n")
    reader = Reader()
    pump.say("to standard output\n", console)
    pump.say("to standard error\n", Console(reader.write_fd))
    assert pump.call(lambda: None, stalled_s=5)
    assert not pump.drain(stalled_s=0.2)
    assert reader.close() == b"to standard error\n"
    os.close(read)
    os.close(theirs)
    assert pump.finish([stream], stalled_s=5)
    os.close(write)


def test_rank_0_draws_on_a_terminal_and_lines_of_others_replace_its_bar() -> None:
    reader = Reader()
    console = Console(reader.write_fd)
    console.is_terminal = True
    rank0, rank1 = Stream(-1, console), Stream(-1, console, b"[1] ")
    for stream, data in (
        (rank0, b"\r 10%"),
        (rank1, b"\r 1%\r 2%\x1b[Aloaded\x1b[31m!\n"),
        (rank0, b"\r 20%"),
        (rank0, b"\ncontinue? "),
        (rank1, b"saved\n"),
    ):
        stream.feed(data)
    console.write(b"paceline: bye\n")
    assert reader.close() == (
        b"\r 10%\r\x1b[K[1]  2%loaded\x1b[31m!\n\r 20%\ncontinue? \n[1] saved\npaceline: bye\n"
    )


@pytest.mark.parametrize("size", [1, 2, 1000])
def test_of_lines_of_other_ranks_the_last_state_is_shown(size: int) -> None:
    reader = Reader()
    console = Console(reader.write_fd)
    console.is_terminal = True
    stream = Stream(-1, console, b"[1] ")
    written = b"10%\r20%\r\r30%\n\rone\r\n\nlast"
    for start in range(0, len(written), size):
        stream.feed(written[start : start + size])
    stream.emit_lines(end=True)
    assert reader.close() == b"[1] 30%\n[1] one\r\n[1] \n[1] last\n"


def test_a_long_line_of_another_rank_costs_no_more_than_its_length() -> None:
    reader = Reader()
    console = Console(reader.write_fd)
    console.is_terminal = True
    stream = Stream(-1, console, b"[1] ")
    began = time.process_time()
    for _ in range(16):
        stream.feed(b"x" * 4096)
    stream.feed(b"\n")
    assert time.process_time() - began < 5  # a quadratic search takes minutes
    while console.pending:
        console.flush()
    assert reader.close() == b"[1] " + b"x" * 65536 + b"\n"
