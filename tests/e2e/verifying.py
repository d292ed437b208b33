"""Runs `paceline verify` in forks of one process that has imported torch, since each import takes seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

# Reads one command a line, and answers with its exit code and the processes that it leaves behind: a
# subreaper becomes their parent.
_SERVER = """
import contextlib, ctypes, json, os, sys, tempfile, time, traceback
import psutil
from paceline.cli.main import main
from paceline.verify import session

PR_SET_CHILD_SUBREAPER = 36
END_S = 10  # helpers of a rank end after it: torch's loader workers look for their rank every 5 s
session.preload()
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
while line := sys.stdin.readline():
    words, folder = json.loads(line)
    pid = os.fork()
    if pid == 0:
        os.chdir(folder)
        os.environ["TMPDIR"] = folder
        tempfile.tempdir = None
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for fd, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(f"{name}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), fd)
        code = 70
        try:
            code = main(["verify", *words])
        except SystemExit as end:
            code = end.code
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    until = time.monotonic() + END_S
    left = [None]
    while left and time.monotonic() < until:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = [process.pid for process in psutil.Process().children()]
        time.sleep(0.05 if left else 0)
    print(json.dumps([code, left]), flush=True)
"""


_servers: list[subprocess.Popen[str]] = []


def start_server() -> subprocess.Popen[str]:
    """Start the process of which all commands are forks, if it does not run."""
    if not _servers:
        command = [sys.executable, "-c", _SERVER]
        pipe = subprocess.PIPE
        _servers.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
    return _servers[0]


def end_server() -> None:
    """End this process and all commands."""
    while _servers:
        with _servers.pop() as server:
            for process in psutil.Process(server.pid).children(recursive=True):
                process.kill()
            server.kill()


def verify(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `paceline verify` in this folder. It must leave no file and no process."""
    server = start_server()
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        server.stdin.write(json.dumps([words, str(folder)]) + "\n")
        server.stdin.flush()
        code, left = json.loads(server.stdout.readline())
        assert not left
    except BaseException:
        end_server()  # such as the time limit of the test
        raise
    assert not list(folder.glob("paceline-verify-*"))
    out, err = ((folder / f"{name}.txt").read_text() for name in ("stdout", "stderr"))
    return subprocess.CompletedProcess(words, code, out, err)


def verify_json(*words: str, folder: Path) -> tuple[int, dict[str, Any]]:
    """The exit code and the facts."""
    done = verify("--json", *words, folder=folder)
    assert done.stdout, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, facts
