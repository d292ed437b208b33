"""The output of ranks: a terminal for rank 0, the log files of torchrun, and a reader that does not read."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from launching import DEADLINE_S, environment, finish, run, start


def _read_terminal(fd: int, enough: Callable[[bytes], bool]) -> bytes:
    """What is written to a pseudo-terminal until this is true, or its other end is closed."""
    shown, deadline = b"", time.monotonic() + DEADLINE_S
    # Reading a pseudo-terminal raises an error when its other end is closed.
    with contextlib.suppress(OSError):
        while not enough(shown):
            ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, shown
            shown += os.read(fd, 65536)
    return shown


def test_rank_0_has_a_terminal_where_the_launcher_has_one(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("""
import os, sys
print("terminal", sys.stdout.isatty(), sys.stderr.isatty())
if os.environ["RANK"] == "0":
    print("size", os.get_terminal_size().columns)
    print("\\r\\x1b[2K 50% ###", end="", flush=True)
    print("\\r\\x1b[2K100% ######")
""")
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 77, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", "run", "--nproc-per-node=2", "train.py"],
        cwd=tmp_path,
        env=environment(),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    try:
        shown = _read_terminal(ours, lambda _: False)
        assert process.wait(timeout=60) == 0
    finally:
        os.close(ours)
        process.kill()
        process.wait()
    text = shown.decode().replace("\r\n", "\n")
    assert "\nterminal True True\n" in text
    assert "[1] terminal False False\n" in text
    assert "\nsize 77\n" in text
    assert "\r\x1b[2K100% ######\n" in text


PRINTS_ON = """
import os, pathlib, sys, time
print("begun", flush=True)
while not pathlib.Path("closed").exists():
    time.sleep(0.05)
for _ in range(1000):
    print("x" * 999, flush=True)
pathlib.Path("done" + os.environ["RANK"]).touch()
"""


def test_a_job_goes_on_after_its_terminal_was_closed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PRINTS_ON)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", "run", "--nproc-per-node=2", "train.py"],
        cwd=tmp_path,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        _read_terminal(ours, lambda shown: shown.count(b"begun") == 2)
        os.close(ours)
        (tmp_path / "closed").touch()
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.wait()
    assert sorted(path.name for path in tmp_path.glob("done*")) == ["done0", "done1"]


def test_a_job_needs_no_standard_streams(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('lost', flush=True)\nopen('done', 'w').close()\n")
    command = f"exec {sys.executable} -m paceline run train.py <&- >&- 2>&-"
    env = environment()
    done = subprocess.run(command, shell=True, cwd=tmp_path, env=env, timeout=60)
    assert done.returncode == 0
    assert (tmp_path / "done").exists()


def test_log_files_are_where_torchrun_puts_them(tmp_path: Path) -> None:
    script = "import os, sys; print('out'); print('err', file=sys.stderr)"
    words = "--nproc-per-node=2 --log-dir logs --redirects 1 --tee 0:2"
    done = run(words, script, tmp_path)
    assert done.code == 0
    assert done.out == ""
    assert sorted(line for line in done.err.splitlines() if "err" in line) == ["[0] err", "[1] err"]
    files = {
        str(path.relative_to(tmp_path / "logs")).split("/", 1)[1]: path.read_text()
        for path in (tmp_path / "logs").rglob("*.log")
    }
    assert files == {
        "attempt_0/0/stdout.log": "out\n",
        "attempt_0/0/stderr.log": "err\n",
        "attempt_0/1/stdout.log": "out\n",
    }


WRITES_FOR_EVER = """
import sys
while True:
    print("x" * 999)
"""


@pytest.mark.ci
def test_a_signal_ends_a_job_whose_output_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WRITES_FOR_EVER)
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", "run", "--nproc-per-node=2", "train.py"],
        cwd=tmp_path,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith(b"paceline: 2 ranks")
    assert process.stdout.readline().startswith(b"[")
    ranks = psutil.Process(process.pid).children()
    # From here on nothing reads the pipe, and the launcher has a message to write.
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 128 + signal.SIGTERM
    assert not any(rank.is_running() for rank in ranks)
    process.stdout.close()


PRINTS = """
import os, sys, time
# One line without an end, or many.
chunk = "x" * (1 << 20) if os.environ["RANK"] == "0" else ("x" * 99 + "\\n") * 10486
for _ in range(150):
    sys.stdout.write(chunk)
print("\\nthat was all", flush=True)
while not os.path.exists("looked"):
    time.sleep(0.01)
raise OSError("disk is full")
"""


@pytest.mark.slow
def test_much_output_needs_no_memory(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PRINTS)
    process = start(["run", "--nproc-per-node=2", "train.py"], tmp_path)
    assert process.stdout is not None
    size, last = 0, b""
    ended: set[bytes] = set()
    while len(ended) < 2:
        data = os.read(process.stdout.fileno(), 1 << 20)
        assert data, process.communicate()
        size += len(data)
        ended |= set(re.findall(rb"(\[\d\]) that was all", last + data))
        last = data[-100:]
    most = _peak_kib(process)
    (tmp_path / "looked").touch()
    done = finish(process)
    assert size > 300 << 20
    # Most of this is torch; a copy of the output would be 300 MiB more.
    assert most < 450 << 10, f"{most >> 10} MiB"
    assert re.search(r"ranks? (0 and 1|0|1) of 2 failed: OSError: disk is full", done.err)


def _peak_kib(process: subprocess.Popen[str]) -> int:
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])
