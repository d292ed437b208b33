"""Storage that is full, read-only or forbidden, under the installed command."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import Finished, run

SCRIPT = """
import ctypes, os, time, torch, paceline
from torch.utils.data import TensorDataset

if os.environ.get("POWERLESS"):  # capset: without capabilities, permissions apply to root
    ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
folder = os.environ["FOLDER"]
with paceline.join(seed=1, timeout_s=30) as job:
    model = paceline.ddp(job, torch.nn.Linear(512, 512))  # 1 MiB of weights
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.ones(64, 512))
    training = paceline.Training(
        job, model, optimizer, paceline.Batches(job, data, global_batch=8),
        checkpoints=paceline.Checkpoints(folder, every_steps=2, keep=2),
    )
    ballast = os.path.join(folder, "ballast")
    for step in training.steps(until=8):
        for (x,) in step:
            step.backward(model(x).square().sum(), count=len(x), reduction="sum")
        step.update()
        if job.rank == 0 and step.number == int(os.environ.get("FILL_AT", -1)):
            before = os.path.join(folder, f"step-{step.number - 1}")
            until = time.monotonic() + 20
            while not os.path.isdir(before) and time.monotonic() < until:
                time.sleep(0.01)  # the save from before is in the background
            with open(ballast, "wb") as file:
                try:
                    while True:
                        file.write(bytes(1 << 16))
                        file.flush()
                except OSError:
                    pass
        if job.rank == 0 and step.number == int(os.environ.get("FREE_AT", -1)):
            os.remove(ballast)
    if job.rank == 0:
        print("trained to", training.number)
"""


def train(tmp_path: Path, folder: Path, **more: str) -> Finished:
    return run("--nproc-per-node=2", SCRIPT, tmp_path, FOLDER=str(folder), **more)


def steps_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("step-"))


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    size = "size=8m"
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting needs root")
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", size, "none", place], check=False)
    if made.returncode != 0:
        pytest.skip("mounting is not permitted")
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


@pytest.mark.ci
def test_a_disk_that_fills_up_ends_with_74_and_harms_nothing(tmpfs: Path, tmp_path: Path) -> None:
    done = train(tmp_path, tmpfs, FILL_AT="5")
    assert done.code == 74, done.err
    assert "trained to" not in done.out
    assert "No space left on device" in done.err
    assert "SaveFailed" in done.err
    left = steps_in(tmpfs)
    assert left, "the checkpoints from before must stay"
    (tmpfs / "ballast").unlink()
    done = train(tmp_path, tmpfs)
    assert (done.code, "trained to 8" in done.out) == (0, True)
    assert "resum" in done.err + done.out
    assert steps_in(tmpfs)[-1] == "step-8"


@pytest.mark.slow
def test_a_disk_that_is_full_for_a_while_costs_a_warning(tmpfs: Path, tmp_path: Path) -> None:
    done = train(tmp_path, tmpfs, FILL_AT="3", FREE_AT="6")
    assert (done.code, "trained to 8" in done.out) == (0, True), done.err
    assert "step 4" in done.err
    assert steps_in(tmpfs)[-1] == "step-8"


@pytest.mark.slow
def test_too_little_space_is_found_at_the_start(tmpfs: Path, tmp_path: Path) -> None:
    (tmpfs / "ballast").write_bytes(bytes(7 << 20) + bytes(1 << 19))
    done = train(tmp_path, tmpfs)
    assert done.code == 74
    assert "SaveFailed" in done.err
    assert "MiB" in done.err
    assert "trained to" not in done.out


@pytest.mark.ci
def test_a_read_only_disk_is_found_at_the_start(tmpfs: Path, tmp_path: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", tmpfs], check=True)
    done = train(tmp_path, tmpfs)
    assert done.code == 74
    assert "Read-only file system" in done.err
    assert "/train.py:" in done.err.splitlines()[-2], "the user's line and not ours"


@pytest.mark.slow
def test_a_folder_that_may_not_be_written_is_found_at_the_start(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("changing the owner of a folder needs root")
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o755)
    os.chown(folder, 65534, 65534)
    done = train(tmp_path, folder, POWERLESS="1")
    assert done.code == 74, done.err
    assert "Permission denied" in done.err
    assert list(folder.iterdir()) == []
