"""One job owns a folder of checkpoints: whose record and lock count, and what a failing storage leaves."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.checkpoint import owner, store
from paceline.checkpoint.cloud_errors import StorageError
from paceline.checkpoint.owner import RECORD, Ownership
from paceline.checkpoint.store import committed, open_store, read_manifest, verify
from paceline.errors import CheckpointError
from paceline.job.job import Job
from paceline.machine import start_ticks

HOLDS = """
import fcntl, sys, time
with open(sys.argv[1], "r+") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    print("locked", flush=True)
    time.sleep(float(sys.argv[2]))
"""


@pytest.fixture(params=["disk", "object store"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "disk":
        yield str(tmp_path)
        return
    url = f"memory://owner-{time.monotonic_ns()}"
    yield url
    open_store(url).remove("")


def _record(pid: int, host: str) -> str:
    ticks = start_ticks(pid) or 0
    return json.dumps(
        {"host": host, "pid": pid, "ticks": ticks, "started": "a day", "token": "00ff"}
    )


def _train(job: Job, folder: str) -> None:
    model = paceline.ddp(job, torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.ones(16, 4))
    batches = paceline.Batches(job, data, global_batch=4)
    checkpoints = paceline.Checkpoints(folder, every_steps=2)
    training = paceline.Training(job, model, optimizer, batches, checkpoints=checkpoints)
    for step in training.steps(epochs=1):
        for (x,) in step:
            step.backward(model(x).mean())
        step.update()


@pytest.mark.parametrize("call", ["the owner before 4", "the owner after 4", "the manifest of 4"])
def test_what_the_storage_reports_as_failed_is_whole_or_absent(
    job: Job, folder: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last save fails once: it is repeated, or what was written counts."""
    check, write = Ownership.check, type(open_store(folder)).write
    calls: list[Ownership] = []
    failed: list[str] = []

    def check_late(self: Ownership) -> None:
        calls.append(self)
        if (
            call
            == f"the owner {'before' if len(calls) % 2 else 'after'} {(len(calls) + 1) // 2 * 2}"
        ):
            raise StorageError("timed out")
        check(self)

    def write_and_fail(self: Any, path: str, parts: Any) -> None:
        write(self, path, parts)
        if (
            call == "the manifest of 4"
            and "step-4" in path
            and path.endswith(store.NAME)
            and not failed
        ):
            failed.append(path)
            raise StorageError("timed out")

    monkeypatch.setattr(Ownership, "check", check_late)
    monkeypatch.setattr(type(open_store(folder)), "write", write_and_fail)
    _train(job, folder)
    found = open_store(folder)
    assert committed(found) == [2, 4]
    for step in (2, 4):
        verify(found, read_manifest(found, step))


def test_two_names_of_a_folder_are_one(job: Job, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "latest").symlink_to("run")
    first = paceline.Checkpoints(tmp_path / "run")
    first.save(job, 1, {"w": torch.ones(3)})
    assert paceline.Checkpoints(tmp_path / "latest", resume="must").resume(job)["w"].sum() == 3


@pytest.mark.parametrize("host", ["another", None])
def test_a_lock_may_outlive_its_owner(
    tmp_path: Path, host: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "_WAIT_S", 0.2)
    record = tmp_path / RECORD
    record.touch()
    words = [sys.executable, "-c", HOLDS, str(record), "2"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as holds:
        assert holds.stdout is not None
        assert holds.stdout.readline() == "locked\n"
        if host is None:
            record.write_text(_record(holds.pid, os.uname().nodename))
            began = time.monotonic()
            with pytest.raises(CheckpointError, match="another job saves its checkpoints"):
                owner.take(open_store(tmp_path))
            assert time.monotonic() - began < 1.5
        with subprocess.Popen(["true"]) as ended:
            pass
        record.write_text(_record(ended.pid, host or os.uname().nodename))
        owned, is_new = owner.take(open_store(tmp_path))
    assert is_new
    with open(record) as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    del owned


def test_a_process_that_has_ended_and_waits_for_its_parent_owns_nothing(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "_WAIT_S", 0.3)
    found = open_store(folder)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as ended:
        found.write(RECORD, [_record(ended.pid, os.uname().nodename).encode()])
        if not found.has_rename:
            with pytest.raises(CheckpointError, match=f"pid {ended.pid}, since a day"):
                owner.take(found)
        ended.kill()
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # a zombie
        assert owner.take(found)[1]


def test_the_record_of_another_user_needs_no_lock(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def refuse(path: Any, flags: int, *mode: Any, **more: Any) -> int:
        if str(path).endswith(RECORD) and flags & os.O_RDWR:
            raise PermissionError(13, "Permission denied")
        return opened(path, flags, *mode, **more)

    monkeypatch.setattr(os, "open", refuse)
    paceline.Checkpoints(tmp_path).save(job, 1, {"w": torch.ones(3)})
    assert committed(open_store(tmp_path)) == [1]
