"""Several jobs that save into one folder, with kills: what was reported as saved can be loaded."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.checkpoint.store import open_store, read_manifest, verify

SAVES = """
import os, sys, torch, paceline
from pathlib import Path

folder, log = sys.argv[1:]
with paceline.join() as job:
    checkpoints = paceline.Checkpoints(folder, keep=1000)
    state = checkpoints.resume(job)
    step = 0 if state is None else state["step"]
    while True:
        step += 1
        checkpoints.save(job, step, {"step": step, "w": torch.full((20_000,), float(step))})
        if job.rank == 0:
            with open(log, "a") as file:
                file.write(f"{step}\\n")
"""


def _start(folder: str, log: Path, script: Path, ranks: int) -> subprocess.Popen[str]:
    words = [sys.executable, str(script), folder, str(log)]
    if ranks > 1:
        words = [sys.executable, "-m", "paceline", "run", f"--nproc-per-node={ranks}", *words[1:]]
    return subprocess.Popen(words, stderr=subprocess.PIPE, text=True, start_new_session=True)


def _kill(job: subprocess.Popen[str]) -> str:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)
    return job.communicate()[1]


def _saved(log: Path) -> list[int]:
    return [int(line) for line in log.read_text().splitlines()] if log.exists() else []


def _wait_for(log: Path, steps: int, *jobs: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 60
    while len(_saved(log)) < steps and any(job.poll() is None for job in jobs):
        assert time.monotonic() < until
        time.sleep(0.01)


def _check(folder: str, *logs: Path) -> None:
    store = open_store(folder)
    for step in {step for log in logs for step in _saved(log)}:
        verify(store, read_manifest(store, step))


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.ci)])
def test_a_second_job_is_refused_while_the_first_lives(tmp_path: Path, ranks: int) -> None:
    script, folder = tmp_path / "train.py", str(tmp_path / "saves")
    script.write_text(SAVES)
    first = _start(folder, tmp_path / "a", script, ranks)
    _wait_for(tmp_path / "a", 3, first)
    second = _start(folder, tmp_path / "b", script, ranks)
    _, text = second.communicate(timeout=60)
    assert second.returncode != 0
    owner = json.loads((tmp_path / "saves/.paceline-owner").read_text())
    assert "another job saves its checkpoints in" in text
    assert f"host {owner['host']}, pid {owner['pid']}, since {owner['started']}" in text
    _kill(first)
    assert not _saved(tmp_path / "b")
    done = len(_saved(tmp_path / "a"))
    third = _start(folder, tmp_path / "a", script, ranks)  # at once
    _wait_for(tmp_path / "a", done + 2, third)
    assert len(_saved(tmp_path / "a")) >= done + 2, _kill(third)
    _kill(third)
    _check(folder, tmp_path / "a")


LEAVES = """
import sys, torch, paceline

with paceline.join() as job:
    checkpoints = paceline.Checkpoints(sys.argv[1])
    checkpoints.resume(job)
    checkpoints.save(job, 1, {"step": 1, "w": torch.ones(3)})
    checkpoints.close(job)
print("left", flush=True)
sys.stdin.read()
"""


@pytest.mark.ci
def test_a_process_that_has_left_its_job_does_not_keep_the_folder(tmp_path: Path) -> None:
    script, folder = tmp_path / "train.py", str(tmp_path / "saves")
    script.write_text(SAVES)
    words = [sys.executable, "-c", LEAVES, folder]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "left\n"
        second = _start(folder, tmp_path / "log", script, 1)
        _wait_for(tmp_path / "log", 1, second)
        text = _kill(second)
        assert first.poll() is None
    assert _saved(tmp_path / "log"), text
    _check(folder, tmp_path / "log")


@pytest.mark.parametrize(
    ("where", "seed"),
    [
        pytest.param(where, seed, marks=pytest.mark.slow if seed else pytest.mark.ci)
        for where in ("disk", "object store")
        for seed in range(10)
    ],
)
def test_what_was_saved_can_be_loaded(tmp_path: Path, where: str, seed: int) -> None:
    """Jobs start on a folder and are killed at random moments; on an object store the last start owns it."""
    rng = random.Random(seed)
    script, folder = tmp_path / "train.py", f"{tmp_path}/saves"
    script.write_text(SAVES)
    if where == "object store":
        folder = f"local://{folder}"  # by fsspec, without locks
        # The processes have other host names, as on several hosts.
        script.write_text(
            f"import socket; socket.gethostname = lambda: 'host-%d' % os.getpid()\n{SAVES}".replace(
                "import socket;", "import os, socket;"
            )
        )
    jobs, logs = [], []
    for number in range(4):
        logs.append(tmp_path / f"log-{number}")
        jobs.append(_start(folder, logs[-1], script, 1))
        time.sleep(rng.uniform(1.0, 3.0))
        if rng.random() < 0.5:
            _kill(jobs.pop(rng.randrange(len(jobs))))
    for job in jobs:
        _kill(job)
    logs.append(tmp_path / "last")
    last = _start(folder, logs[-1], script, 1)
    _wait_for(logs[-1], 1, last)
    assert _saved(logs[-1]), _kill(last)
    _kill(last)
    _check(folder, *logs)
