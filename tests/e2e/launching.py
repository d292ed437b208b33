"""Starts the command in its own process, and waits for its end with a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paceline

DEADLINE_S = 60.0


@dataclass(frozen=True)
class Finished:
    """How a run of the command ended."""

    code: int
    out: str
    err: str


def environment(**more: str) -> dict[str, str]:
    """This environment, in which the command finds the package under test."""
    # What a developer's shell has set must not change what the tests see.
    dropped = ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    source = str(Path(paceline.__file__).parent.parent)
    path = os.pathsep.join(filter(None, [source, kept.get("PYTHONPATH", "")]))
    return kept | {"PYTHONPATH": path} | more


def start(words: Sequence[str], cwd: Path, **more: str) -> subprocess.Popen[str]:
    """Start `paceline` with these words."""
    return spawn([sys.executable, "-m", "paceline", *words], cwd, **more)


def node_words(port: int, *more: str) -> list[str]:
    """`paceline run` on one of two nodes, whose rendezvous is on this port."""
    words = ["run", "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=job"]
    return [*words, f"--rdzv-endpoint=localhost:{port}", *more]


def spawn(
    command: Sequence[str], cwd: Path, *, own_group: bool = False, **more: str
) -> subprocess.Popen[str]:
    """Start any command, with its output for `finish`."""
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=environment(**more),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=own_group,
    )


def finish(process: subprocess.Popen[str], deadline_s: float = DEADLINE_S) -> Finished:
    """Wait for the end; after the deadline kill it, with its own group if it has one, and fail."""
    try:
        out, err = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):  # it has ended, and a child holds its output
            if os.getpgid(process.pid) == process.pid:
                os.killpg(process.pid, signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.communicate(timeout=5)
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"not finished in {deadline_s} s:\n{out}\n{err}") from None
    return Finished(process.returncode, out, err)


def wait_until(
    condition: Callable[[], Any], *processes: subprocess.Popen[str], deadline_s: float = DEADLINE_S
) -> Any:
    """Wait until this is true, and return it; fails if one of the processes ends, or at the deadline."""
    deadline = time.monotonic() + deadline_s
    while not (found := condition()):
        for process in processes:
            assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return found


def run(
    words: str, script: str, tmp_path: Path, deadline_s: float = DEADLINE_S, **more: str
) -> Finished:
    """Run `paceline run WORDS train.py` with this script."""
    (tmp_path / "train.py").write_text(script)
    return finish(start(["run", *words.split(), "train.py"], tmp_path, **more), deadline_s)


# Calls the launcher for each command line, with the output of each in files of its own.
_EACH = """
import json, os, sys
from paceline.launch import run
codes = []
for number, words in enumerate(json.loads(sys.argv[1])):
    for fd in (1, 2):
        os.dup2(os.open(f"{number}.{fd}", os.O_WRONLY | os.O_CREAT), fd)
    try:
        codes.append(run(words))
    except SystemExit as error:
        codes.append(error.code)
    sys.stdout.flush()
with open("codes", "w") as file:
    json.dump(codes, file)
"""


def run_each(cases: Sequence[tuple[str, str]], folder: Path) -> list[Finished]:
    """As `run` for each (words, script), in one launcher process.

    `{}` in the words is the script; without it, the script is the last word.
    """
    lines = []
    for number, (words, script) in enumerate(cases):
        (folder / f"case{number}.py").write_text(script)
        line = words if "{}" in words else f"{words} {{}}"
        lines.append(line.format(f"case{number}.py").split())
    done = finish(spawn([sys.executable, "-c", _EACH, json.dumps(lines)], folder))
    assert done == Finished(0, "", "")
    codes = json.loads((folder / "codes").read_text())
    read = [[(folder / f"{n}.{fd}").read_text() for fd in (1, 2)] for n in range(len(codes))]
    return [Finished(code, *texts) for code, texts in zip(codes, read, strict=True)]


def rows_of(benchmark: str, words: Sequence[str], deadline_s: float) -> list[dict[str, Any]]:
    """The rows of `benchmarks/BENCHMARK.py --json`, which writes no file."""
    path = Path(__file__).resolve().parents[2] / "benchmarks" / f"{benchmark}.py"
    done = subprocess.run(
        [sys.executable, str(path), "--json", *words],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=deadline_s,
    )
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    assert rows, done.stderr
    return rows


def alive(pid: int) -> bool:
    """Whether this process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def unused_port() -> int:
    """A free port outside the range from which the kernel chooses free ports."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(max(1024, first - 10_000), first)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def wait_served(port: int) -> None:
    """Wait until a process listens on this port."""
    needle = f":{port:04X} "

    def is_served() -> bool:
        tables = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]
        lines = [line for table in tables for line in table.splitlines()]
        return any(needle in line and " 0A " in line for line in lines)

    wait_until(is_served, deadline_s=20)
