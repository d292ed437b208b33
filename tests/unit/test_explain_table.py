"""The table of known messages, and how text is searched for them."""

from __future__ import annotations

import io
import os
import socket
import time
from pathlib import Path

import pytest

from paceline.cli import explain
from paceline.explain import reading
from paceline.explain.facts import port_owner
from paceline.explain.reading import KINDS, Reading, causes, read, recognise
from paceline.machine import format_bytes, owner_of_port

MESSAGES = [
    tuple(line.split(" | ", 2))
    for line in (Path(__file__).with_name("known_messages.txt")).read_text().splitlines()
    if not line.startswith("#")
]


def _lines(*lines: str) -> reading.Reading:
    return read(io.BytesIO("\n".join(lines).encode()))


@pytest.mark.parametrize(("name", "source", "message"), MESSAGES)
def test_each_message_gets_its_entry(name: str, source: str, message: str) -> None:
    found = _lines("epoch 3 loss 0.1", message, "bye").found
    assert [(hit.cause.name, hit.line) for hit in found] == [(name, 2)]


def test_each_entry_is_complete_and_has_a_message() -> None:
    assert {name for name, _, _ in MESSAGES} == {cause.name for cause in causes()}
    for cause in causes():
        assert cause.kind in KINDS
        assert cause.what
        assert cause.why.endswith(".")
        assert cause.fix


def test_lines_that_only_look_like_messages_are_not_found() -> None:
    harmless = ["except torch.OutOfMemoryError:", "loss: 0.3 nanoseconds 12"]
    harmless += ["[rank0]: epoch 3 step 7 loss 0.3219 lr 3e-4 tokens/s 812 exitcode: 0"]
    harmless += ["loss: nano", "ConnectionResetError(104, 'Connection reset by peer')"]
    assert _lines(*harmless).found == ()


def test_an_original_error_comes_before_earlier_followers() -> None:
    found = _lines(
        "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default",
        "RuntimeError: Connection closed by peer [127.0.0.1]:1",
        "  error_file: <N/A>",
        "MemoryError",
        "No CUDA GPUs are available",
    ).found
    names = [hit.cause.name for hit in found]
    assert names[:2] == ["host-out-of-memory", "cuda-no-such-device"]
    assert names[2:] == ["error-file-missing", "peer-lost", "omp-threads"]


def test_a_message_is_found_once_with_its_first_line() -> None:
    found = _lines("", *["CUDA out of memory"] * 3).found
    assert [(hit.cause.name, hit.line) for hit in found] == [("cuda-out-of-memory", 2)]


def test_a_line_that_matches_two_entries_belongs_to_the_earlier_one() -> None:
    shm = "unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)"
    found = _lines(shm, shm, "OSError: [Errno 28] No space left on device").found
    assert [(hit.cause.name, hit.line) for hit in found] == [("shared-memory", 1), ("disk-full", 3)]


def test_line_numbers_are_right_over_blocks_and_very_long_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reading, "_BLOCK_BYTES", 64)
    text = _lines(*["x" * 7] * 100, "y" * 1000, "CUDA out of memory", "end")
    assert [(hit.cause.name, hit.line) for hit in text.found] == [("cuda-out-of-memory", 102)]
    assert text.lines == 103


def test_a_report_at_any_place_of_a_block_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    report = "paceline: rank 1 of 2 failed: ValueError: bad"
    for size in range(60, 180):  # longer than the line
        monkeypatch.setattr(reading, "_BLOCK_BYTES", size)
        found = _lines("x" * 30, "y", report, "  where: rank 1", *["z" * 50] * 3)
        assert found.report == (3, report), size


def test_a_shown_line_is_short_and_without_colours_or_progress_bars() -> None:
    line = "\r 10% | bar" * 500 + "\r\x1b[31m" + "z" * 100 + " CUDA out of memory. " + "t" * 999
    shown = _lines(line).found[0].text
    assert shown.startswith("... zzz")
    assert " CUDA out of memory. ttt" in shown
    assert "bar" not in shown
    assert "\x1b" not in shown
    assert len(shown) < 300


def test_the_first_unknown_python_error_is_named() -> None:
    text = _lines(
        "[rank1]: Traceback (most recent call last):",
        "[rank0]: RuntimeError: Connection closed by peer [127.0.0.1]:1",
        '[rank1]:   File "train.py", line 3, in <module>',
        "[rank1]: ValueError: Caught ValueError in DataLoader worker process 0.",
        "[rank1]: Original Traceback (most recent call last):",
        '[rank1]:   File "data.py", line 9, in __getitem__',
        "[rank1]: mylib.BadSample: number 7",
        "Traceback (most recent call last):",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
    )
    assert text.unknown == (7, "mylib.BadSample: number 7")
    assert _lines("Traceback (most recent call last):", "MemoryError").unknown is None
    assert [hit.cause.name for hit in text.found] == ["peer-lost"]


def test_recognise_gives_the_most_useful_message() -> None:
    hit = recognise("Connection closed by peer\nCUDA out of memory")
    assert hit is not None
    assert hit.cause.name == "cuda-out-of-memory"
    assert recognise("ValueError: bad sample") is None


def test_the_owner_of_a_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        owner = owner_of_port(port)
    assert owner is not None
    assert owner.startswith(f"pid {os.getpid()} (")
    assert "started" in owner
    assert owner_of_port(port) is None


@pytest.mark.parametrize(
    "text",
    [
        "port: {}, useIpv6: false",
        "on [::]:{} (errno: 98",
        "0.0.0.0:{}",
        "at 22:22:33, socket.cpp:1759: port {}",
        "at 22:22:33, socket.cpp:1759: node7:{}",
    ],
)
def test_the_port_is_found_in_the_message(
    text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        log.write_text(f"address already in use {text.format(listener.getsockname()[1])}\n")
        assert explain.main([str(log)]) == 0
    assert f"is now used by pid {os.getpid()} (" in capsys.readouterr().out


def test_lines_of_an_earlier_entry_are_read_once() -> None:
    line = "[rank3]: ncclRemoteError: A call failed: Connection closed by remote peer, x\n"

    def read_lines(number: int) -> tuple[Reading, float]:
        began = time.process_time()
        found = read(io.BytesIO((line * number).encode()))
        return found, time.process_time() - began

    (few, few_s), (many, many_s) = read_lines(500), read_lines(10_000)
    assert many_s < 90 * few_s  # 20 times as many lines; 400 times if quadratic
    assert [hit.cause.name for hit in many.found] == [hit.cause.name for hit in few.found]


def test_a_time_and_a_line_of_a_file_are_no_ports() -> None:
    assert port_owner("[22:22:33] socket.cpp:1759: Address already in use") == ""
    told = port_owner("[22:22:33] Address already in use: port 1")
    assert told == "On this host, no process listens on port 1 now."


def test_bytes_have_units() -> None:
    assert [format_bytes(n) for n in (5, 64 << 20, 3 << 30)] == ["5 B", "64 MiB", "3.0 GiB"]


def _explained(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> list[str]:
    """The parts that are printed."""
    log = tmp_path / "log"
    log.write_text(text)
    assert explain.main([str(log)]) == 0
    return capsys.readouterr().out.replace(f"{log}:", "").split("\n\n")


def test_an_unknown_error_comes_after_causes_and_before_symptoms(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    error = "Traceback (most recent call last):\nmylib.Bad: 7\n"
    parts = _explained(tmp_path, capsys, f"loss: nan\n{error}Connection closed by peer\n")
    assert [part.split(" ")[0] for part in parts] == ["NaN", "The", "follows"]
    assert parts[1].endswith(" 3: mylib.Bad: 7")
    parts = _explained(tmp_path, capsys, f"Connection closed by peer\n{error}")
    assert parts[0].startswith("The first Python error that is not in the table")


REPORTS = {
    "paceline: rank 1 of 2 failed: killed by SIGKILL\n  where: rank 1, host n1, pid 7\n": True,
    "[1] paceline.errors.EvaluationError: 9 of 10 samples.\n[1]   where: rank 0 of 2\n": True,
    "hang: rank 0 has waited 12 s in all_reduce #4\n      rank 1 has not entered it\n": True,
    "paceline.errors.PeerFailed: rank 0 failed first.\n  why: it raised.\n": False,
    "paceline: rank 1 failed: killed by SIGKILL (host n1, pid 3); restart 1 of 3 begins\n": False,
    "what hang: none\n": False,
}


@pytest.mark.parametrize("report", REPORTS)
def test_a_report_of_paceline_is_named_first(
    report: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    parts = _explained(tmp_path, capsys, f"loss 1.0\n{report}CUDA out of memory\n")
    line = report.splitlines()[0].removeprefix("[1] ")
    expected = f"Paceline's own report says most; it begins at 2: {line}"
    assert (parts[0] == expected) == REPORTS[report]


def test_exit_codes_and_words(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"hello\n\xff\xfe")
    assert explain.main([str(log)]) == 1
    assert "No known message in" in capsys.readouterr().out
    assert explain.main([str(tmp_path / "none")]) == 2
    assert explain.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("cannot be read") == 2
