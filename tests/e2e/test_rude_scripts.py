"""Scripts that close the launcher's files, block signals, fork or print much: the report is still right."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from launching import finish, run, start

# Rank 1 goes on with the case; rank 0 waits until it is ended.
ALONE = """
import os, signal, sys, time
if os.environ["RANK"] == "0":
    time.sleep(600)
"""
RUDE = [
    # The control socket is among these descriptors; the error still reaches the launcher.
    ("os.closerange(3, 4096)\nraise OSError('disk is gone')", 1, "OSError: disk is gone"),
    ("os.closerange(3, 4096)\nopen('a', 'w'), open('b', 'w')\nsys.exit(5)", 5, "exit code 5"),
    # The script's own hook ends the process before the usual report.
    ("sys.excepthook = lambda *a: os._exit(9)\nraise OSError('x')", 9, "OSError: x"),
]


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [RUDE[0], *(pytest.param(*r, marks=pytest.mark.slow) for r in RUDE[1:])],
)
def test_the_error_is_reported(tmp_path: Path, end: str, code: int, said: str) -> None:
    done = run("--nproc-per-node=2", ALONE + end, tmp_path, PACELINE_PRELOAD="0")
    assert done.code == code, done
    assert f"paceline: rank 1 of 2 failed: {said}" in done.err
    assert "train.py:" in done.err  # with the line
    assert "os._exit() or from native code" not in done.err
    assert done.err.count("Traceback") == (0 if "exit" in end else 1)


BLOCKS = """
import os, signal, time
if os.environ["RANK"] == "1":
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    open("blocked", "w").close()
    time.sleep(600)
while not os.path.exists("blocked"):
    time.sleep(0.01)
raise OSError("x")
"""


@pytest.mark.slow
def test_a_rank_that_blocks_signals_is_ended(tmp_path: Path) -> None:
    words = "--nproc-per-node=2 --shutdown-timeout=1"
    done = run(words, BLOCKS, tmp_path, PACELINE_PRELOAD="0")
    assert (done.code, "rank 0 of 2 failed: OSError: x" in done.err) == (1, True), done
    assert "rank 1" not in done.err


FORKS = """
import os, sys
if os.fork() == 0:
    raise OSError("in the child")
assert os.waitstatus_to_exitcode(os.wait()[1]) == 1
print("went on")
"""


@pytest.mark.slow
def test_a_forked_child_is_not_the_rank(tmp_path: Path) -> None:
    done = run("--nproc-per-node=2", FORKS, tmp_path, PACELINE_PRELOAD="0")
    assert done.code == 0, done
    assert done.out.count("went on") == 2
    assert done.err.count("OSError: in the child") == 2
    assert "failed" not in done.err


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
    process = start(["run", "--nproc-per-node=2", "train.py"], tmp_path, PACELINE_PRELOAD="0")
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
