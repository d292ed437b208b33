"""Checkpoints on an S3 server: commit, kills, throttling, other numbers of ranks, credentials, commands.

Needs s3fs, moto, flask, flask-cors and boto3, installed without `constraints.txt`; skipped otherwise.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.checkpoint.manifest import NAME
from paceline.checkpoint.store import RemoteStore, committed, open_store, read_manifest, verify
from paceline.cli.main import main
from paceline.errors import LaunchFailed, SaveFailed
from paceline.testing import run_failing_ranks, run_ranks

pytest.importorskip("s3fs", reason="s3fs is not installed: pip install 'paceline[s3]'")
pytest.importorskip("moto", reason="moto is not installed: pip install 'moto[server]'")

import fsspec.asyn
from s3_server import SECRET, Server

# Its threads stay for the whole session, so they start before the first test.
_RESOLVER = ThreadPoolExecutor(1)
_RESOLVER.submit(int).result()
fsspec.asyn.get_loop().call_soon_threadsafe(fsspec.asyn.get_loop().set_default_executor, _RESOLVER)
URL = "s3://bucket/run"
_SLOW = pytest.mark.slow


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server()
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)
    with server.serving("bucket"):
        yield server
        _forget()


def _forget() -> None:
    """Close connections, which would otherwise be closed with a warning by the garbage collector."""
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()


def _train(
    job: Any, folder: str, until: int, every_steps: int = 2, keep: int = 3, before: Any = None
) -> list[list[float]]:
    """The weights after the last step."""
    torch.manual_seed(1)
    model = paceline.ddp(job, nn.Sequential(nn.Linear(5, 37), nn.Linear(37, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = TensorDataset(
        torch.randn(48, 5, generator=torch.Generator().manual_seed(3)), torch.ones(48, 1)
    )
    batches = paceline.Batches(job, data, global_batch=8)
    checkpoints = paceline.Checkpoints(folder, every_steps=every_steps, keep=keep)
    training = paceline.Training(job, model, optimizer, batches, checkpoints=checkpoints)
    numbers = []
    for step in training.steps(until=until):
        numbers.append(step.number)
        if before is not None:
            before(step, checkpoints)
        for x, y in step:
            step.backward(F.mse_loss(model(x), y, reduction="sum"), count=len(y), reduction="sum")
        step.update()
    return [numbers, *(p.detach().reshape(-1).tolist() for p in model.parameters())]


@pytest.mark.parametrize("nproc", [pytest.param(1, marks=_SLOW), 2, pytest.param(3, marks=_SLOW)])
def test_a_training_on_s3_resumes_like_one_on_disk(
    nproc: int, server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = run_ranks(_train, str(tmp_path), 8, nproc=nproc)
    run_ranks(_train, URL, 5, nproc=nproc)
    resumed = run_ranks(_train, URL, 8, nproc=nproc)
    for rank in range(nproc):
        assert resumed[rank][0] == [6, 7, 8]
        assert resumed[rank][1:] == whole[rank][1:]
    store = open_store(URL)
    assert committed(store) == [5, 6, 8]
    parts = {read_manifest(store, step).parts for step in (5, 6, 8)}
    files = [f"run/{folder}/rank-{rank}.bin" for folder in parts for rank in range(nproc)]
    manifests = [f"run/step-{step}/{NAME}" for step in (5, 6, 8)]
    assert sorted(server.all_keys()) == sorted(files + manifests)  # retention has removed the rest
    found = server.all_keys()
    bodies = [store.read(key.removeprefix("run/"), 0, 10**6) for key in found]
    assert len(bodies) == 3 * nproc + 3
    assert SECRET.encode() not in b"".join(bodies)
    model = nn.Sequential(nn.Linear(5, 37), nn.Linear(37, 1))
    paceline.load_weights(model, f"{URL}/step-8")
    assert [p.detach().reshape(-1).tolist() for p in model.parameters()] == whole[0][1:]
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    store.write("weights.pth", [(tmp_path / "weights.pth").read_bytes()])
    paceline.load_weights(nn.Sequential(nn.Linear(5, 37), nn.Linear(37, 1)), f"{URL}/weights.pth")

    assert [main(["ckpt", action, URL]) for action in ("ls", "show", "check")] == [0, 0, 0]
    assert "step 8: whole" in capsys.readouterr().out
    other = nproc % 3 + 1
    assert [found[0] for found in run_ranks(_train, URL, 10, nproc=other)] == [[9, 10]] * other

    assert main(["ckpt", "export", URL, str(tmp_path / "m.pth")]) == 0
    assert main(["ckpt", "rm", URL, "--step", "8"]) == 0
    assert 8 not in committed(store)
    assert not any("step-8-" in key for key in server.all_keys())
    assert main(["ckpt", "ls", "s3://nobucket/run"]) == 65
    assert main(["ckpt", "ls", f"s3://AKIAIOSFODNN7EXAMPLE:{SECRET}@bucket/run"]) == 65
    assert SECRET not in "".join(capsys.readouterr())


_POINTS = ["opened", "uploading", "uploaded", "manifest", "committed"]


def _killed(job: Any, point: str) -> None:
    """The last rank, or the one that commits, is killed during the save of step 4."""
    victim = 0 if point in ("manifest", "committed") else job.world_size - 1
    real, seen = RemoteStore._call, []

    def call(self: RemoteStore, operation: str, path: str) -> Any:
        if "/step-4-" in path and operation == "write":
            seen.append("part")
        elif path == f"step-4/{NAME}" and operation == "write":
            seen.append("manifest")
        last = seen[-1:] == ["manifest"]
        reached = {
            "opened": len(seen) == 1,
            "uploading": len(seen) == 3,
            "uploaded": (len(seen) > 0 and operation != "write") or last,
            "manifest": last,
            "committed": last and operation != "write",
        }
        if reached[point]:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, operation, path)

    if job.rank == victim:
        RemoteStore._call = call  # type: ignore[method-assign]
    try:
        _train(job, URL, 10)
    finally:
        RemoteStore._call = real  # type: ignore[method-assign]


def _kill_cases() -> list[Any]:
    fast = {(1, "manifest"), (2, "uploading")}
    cases = [(nproc, point) for nproc in (1, 2, 3) for point in _POINTS]
    # Only rank 0 has something to do on the storage after its own file is written.
    return [
        pytest.param(*case, marks=[] if case in fast else _SLOW)
        for case in cases
        if case[0] == 1 or case[1] != "uploaded"
    ]


@pytest.mark.parametrize(("nproc", "point"), _kill_cases())
def test_a_rank_that_is_killed_in_a_save_leaves_whole_checkpoints(
    nproc: int, point: str, server: Server, tmp_path: Path
) -> None:
    with pytest.raises(LaunchFailed):
        run_ranks(_killed, point, nproc=nproc)
    store = open_store(URL)
    expected = [2, 4] if point == "committed" else [2]
    assert committed(store) == expected
    for step in expected:
        assert verify(store, read_manifest(store, step)) > 0
    whole = run_ranks(_train, str(tmp_path), 10, nproc=nproc)
    resumed = run_ranks(_train, URL, 10, nproc=nproc)
    assert resumed[0][0] == list(range(expected[-1] + 1, 11))
    assert [rank[1:] for rank in resumed] == [rank[1:] for rank in whole]
    parts = {read_manifest(store, step).parts for step in committed(store)}
    assert {f"parts/{name}" for name in store.names("parts")} == parts


def test_requests_that_are_throttled_for_a_while_are_repeated(server: Server) -> None:
    refused: list[str] = []

    def fails(method: str, path: str) -> bool:
        throttled = method == "PUT" and "/step-4-" in path and len(refused) < 2
        refused.extend([path] * throttled)
        return throttled

    server.fails = fails
    run_ranks(_train, URL, 6, nproc=2)
    assert len(refused) == 2
    assert committed(open_store(URL)) == [2, 4, 6]


def _refused_once(job: Any, until: int) -> list[list[float]]:
    def before(step: Any, checkpoints: Any) -> None:
        checkpoints.finish(job)  # so that each save has its own outcome

    return _train(job, URL, until, before=before)


def test_training_goes_on_if_one_rank_cannot_upload(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # botocore's; those of s3fs take 1 s
    server.fails = lambda method, path: method == "PUT" and "/step-4-" in path and "rank-1" in path
    assert [len(numbers) for numbers, *_ in run_ranks(_refused_once, 8, nproc=2)] == [8, 8]
    store = open_store(URL)
    assert committed(store) == [2, 6, 8]
    assert not any("/step-4-" in key for key in server.all_keys())
    server.fails = lambda method, path: method == "PUT" and "step-10-" in path
    for outcome in run_failing_ranks(_refused_once, 10, nproc=2):
        assert isinstance(outcome.error, SaveFailed), outcome.text
        text = str(outcome.error)
        assert (
            "step 10 cannot be saved in s3://bucket/run: cannot write s3://bucket/run/parts/"
            in text
        )
        assert "reduce your request rate" in text
        assert "limits the rate of requests" in text
        assert SECRET not in outcome.text
    assert committed(store) == [2, 6, 8]
    assert [numbers for numbers, *_ in run_ranks(_train, URL, 8, nproc=2)] == [[], []]


def test_wrong_buckets_and_credentials_are_errors_on_all_ranks_at_the_start(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for outcome in run_failing_ranks(_train, "s3://nobucket/run", 4, nproc=3):
        assert isinstance(outcome.error, SaveFailed), outcome.text
        assert "s3://nobucket/run/.paceline-probe-" in str(outcome.error)
        assert "create the bucket, or correct its name" in outcome.error.fix
    assert len(server.all_keys()) == 0
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("HOME", "/nonexistent")  # no profile either
    for outcome in run_failing_ranks(_train, URL, 4, nproc=2):
        assert isinstance(outcome.error, SaveFailed), outcome.text
        assert "Unable to locate credentials" in str(outcome.error)
        assert "AWS_ACCESS_KEY_ID" in outcome.error.fix


def _overlapping(job: Any) -> list[list[float]]:
    def before(step: Any, checkpoints: Any) -> None:
        if step.number == 5 and job.rank == 0:
            checkpoints._store.write("released", [b""])

    return _train(job, URL, 5, every_steps=3, before=before)


def test_steps_go_on_while_a_checkpoint_is_uploaded(server: Server) -> None:
    released, waited = threading.Event(), []

    def fails(method: str, path: str) -> bool:
        if path.endswith("released"):
            released.set()
        elif method == "PUT" and "/step-3-" in path:
            waited.append(released.wait(10))
        return False

    server.fails = fails
    run_ranks(_overlapping, nproc=2)
    assert waited == [True, True]
    assert committed(open_store(URL)) == [3, 5]


_SCRIPT = """
import torch, paceline

with paceline.join() as job:
    checkpoints = paceline.Checkpoints("s3://bucket/run")
    checkpoints.resume(job)
    checkpoints.save(job, 1, {"w": torch.ones(100)})
"""


def test_the_report_of_a_failed_job_holds_no_credentials(server: Server, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    logs = tmp_path / "logs"
    command = ["run", "--nproc-per-node", "2", "--log-dir", str(logs), str(script)]
    env = os.environ | {"AWS_MAX_ATTEMPTS": "1"}
    server.fails = lambda method, path: method == "PUT" and "rank-1.bin" in path
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *command], capture_output=True, env=env, timeout=100
    )
    assert done.returncode == 74, done.stderr
    assert b"cannot write s3://bucket/run/parts/step-1-" in done.stderr
    files = [path for path in logs.rglob("*") if path.is_file()]
    assert len(files) > 3
    everything = b"".join(path.read_bytes() for path in files) + done.stdout + done.stderr
    assert SECRET.encode() not in everything
