"""Forks of a rank wait for the threads of Gloo, once, where Python needs it."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os, time
from paceline.job.forks import wait_before_forks

pauses = []
time.sleep = pauses.append
wait_before_forks()
wait_before_forks()
pid = os.fork()
if pid == 0:
    os._exit(0)
os.waitpid(pid, 0)
print(len(pauses))
"""


def test_a_fork_waits_once_before_python_312() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ("1" if sys.version_info < (3, 12) else "0")
