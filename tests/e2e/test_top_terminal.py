"""A real run of two ranks on a terminal, its own display, and `paceline top` on another terminal."""

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
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import DEADLINE_S, environment
from scripts import training_script

TRAINS = training_script(
    """
training.log(loss=step.loss)
time.sleep(0.03)
if step.number == 40 and job.rank == 0:
    with open("ready", "w") as file:
        file.write("x")
    with open("go") as file:
        file.read(1)
""",
    epochs=7,
    report='"run", progress=True',
)


class Terminal:
    """A program on a pseudo-terminal of 60 columns, whose output is read in a thread."""

    def __init__(self, words: list[str], cwd: Path) -> None:
        self.ours, self.theirs = pty.openpty()
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 60, 0, 0))
        self.modes = termios.tcgetattr(self.theirs)
        self.shown = ""
        self._changed = threading.Condition()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "paceline", *words],
            cwd=cwd,
            env=environment(TERM="xterm-256color"),
            stdin=self.theirs,
            stdout=self.theirs,
            stderr=self.theirs,
        )
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        # Reading a pseudo-terminal raises an error when its other end is closed.
        with contextlib.suppress(OSError):
            while chunk := os.read(self.ours, 65536):
                with self._changed:
                    self.shown += chunk.decode(errors="replace")
                    self._changed.notify_all()

    def wait_for(self, found: Callable[[str], object]) -> None:
        """Wait until what was shown satisfies `found`."""
        with self._changed:
            assert self._changed.wait_for(lambda: found(self.shown), DEADLINE_S), self.shown

    def end(self) -> int:
        """Wait for the end; returns the exit code."""
        code = self.process.wait(timeout=DEADLINE_S)
        os.close(self.theirs)
        self._thread.join(DEADLINE_S)
        os.close(self.ours)
        return code


@pytest.mark.ci
def test_a_run_on_a_terminal_and_top_on_another(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    pipes = {}
    for name in ("ready", "go"):
        os.mkfifo(tmp_path / name)
        pipes[name] = os.open(tmp_path / name, os.O_RDWR)
    job = Terminal(["run", "--nproc-per-node=2", "train.py"], tmp_path)
    assert select.select([pipes["ready"]], [], [], DEADLINE_S)[0], job.shown
    top = Terminal(["top", "run"], tmp_path)
    top.wait_for(lambda shown: re.search(r"rank 1 .*GB", shown) and "\x1b[?1049h" in shown)
    top.process.send_signal(signal.SIGTERM)
    os.write(pipes["go"], b"x")
    assert top.process.wait(timeout=DEADLINE_S) == 0
    modes = termios.tcgetattr(top.theirs)
    assert top.end() == 0
    assert modes == top.modes
    left = top.shown.rindex("\x1b[?1049l")  # the screen as it was before; then the last frame
    assert re.search(r"step \d+/56", top.shown[left:])
    assert top.shown.rindex("\x1b[?25h") > top.shown.rindex("\x1b[?25l")

    assert job.end() == 0
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", job.shown)
    assert re.search(r"rank 1 [=DC.]{10,}", plain)
    assert "56/56" in plain
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "top", "run", "--once"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert re.search(r"step 56/56 .*finished", done.stdout)
    assert "\x1b" not in done.stdout
    for fd in pipes.values():
        os.close(fd)
