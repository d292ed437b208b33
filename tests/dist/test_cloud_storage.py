"""Checkpoints on an S3 server: resume, throttling, other numbers of ranks, credentials, commands."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from small_trainings import backwards, small_net, small_training

import paceline
from paceline.checkpoint.manifest import NAME
from paceline.checkpoint.owner import RECORD
from paceline.checkpoint.store import committed, open_store, read_manifest
from paceline.cli.main import main
from paceline.errors import SaveFailed
from paceline.testing import run_failing_ranks, run_ranks

pytest.importorskip("s3fs", reason="s3fs is not installed: pip install -e '.[dev]'")
pytest.importorskip("moto", reason="moto is not installed: pip install -e '.[dev]'")
pytest.importorskip("flask_cors", reason="flask-cors is not installed: pip install -e '.[dev]'")

import fsspec.asyn
from s3_server import SECRET, Server

# Its threads stay for the whole session, so they start before the first test.
_RESOLVER = ThreadPoolExecutor(1)
_RESOLVER.submit(int).result()
fsspec.asyn.get_loop().call_soon_threadsafe(fsspec.asyn.get_loop().set_default_executor, _RESOLVER)
URL = "s3://bucket/run"
pytestmark = pytest.mark.ci


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
    job: Any, folder: str, until: int, before: Any = lambda checkpoints: None
) -> list[list[float]]:
    """The numbers of the steps, and the weights after the last one."""
    training = small_training(job, folder=folder)
    numbers = []
    for step in training.steps(until=until):
        numbers.append(step.number)
        before(training.checkpoints)
        backwards(training, step)
        step.update()
    return [numbers, *(p.detach().reshape(-1).tolist() for p in training.models[0].parameters())]


def test_a_training_on_s3_resumes_like_one_on_disk(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nproc = 2
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
    found = server.all_keys()
    assert sorted(found) == sorted(
        [*files, *manifests, f"run/{RECORD}"]
    )  # retention removed the rest
    bodies = [store.read(key.removeprefix("run/"), 0, 10**6) for key in found]
    assert SECRET.encode() not in b"".join(bodies)
    model = small_net()
    paceline.load_weights(model, f"{URL}/step-8")
    assert [p.detach().reshape(-1).tolist() for p in model.parameters()] == whole[0][1:]
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    store.write("weights.pth", [(tmp_path / "weights.pth").read_bytes()])
    paceline.load_weights(small_net(), f"{URL}/weights.pth")

    assert [main(["ckpt", action, URL]) for action in ("ls", "show", "check")] == [0, 0, 0]
    assert "step 8: whole" in capsys.readouterr().out
    other = 3
    assert [found[0] for found in run_ranks(_train, URL, 10, nproc=other)] == [[9, 10]] * other

    assert main(["ckpt", "export", URL, str(tmp_path / "m.pth")]) == 0
    assert main(["ckpt", "rm", URL, "--step", "8"]) == 0
    assert 8 not in committed(store)
    assert not any("step-8-" in key for key in server.all_keys())
    assert main(["ckpt", "ls", "s3://nobucket/run"]) == 65
    assert main(["ckpt", "ls", f"s3://AKIAIOSFODNN7EXAMPLE:{SECRET}@bucket/run"]) == 65
    assert SECRET not in "".join(capsys.readouterr())


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
    # Each save has its own outcome.
    return _train(job, URL, until, before=lambda checkpoints: checkpoints.finish(job))


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
        assert SECRET not in outcome.text
    assert committed(store) == [2, 6, 8]
    assert [numbers for numbers, *_ in run_ranks(_train, URL, 8, nproc=2)] == [[], []]


def test_wrong_buckets_and_credentials_are_errors_on_all_ranks_at_the_start(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for outcome in run_failing_ranks(_train, "s3://nobucket/run", 4, nproc=3):
        assert isinstance(outcome.error, SaveFailed), outcome.text
        assert "s3://nobucket/run/.paceline-probe-" in str(outcome.error)
        assert "bucket does not exist" in str(outcome.error)
    assert len(server.all_keys()) == 0
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("HOME", "/nonexistent")  # no profile either
    for outcome in run_failing_ranks(_train, URL, 4, nproc=2):
        assert isinstance(outcome.error, SaveFailed), outcome.text
        assert "Unable to locate credentials" in str(outcome.error)
        assert "the credentials of all ranks" in outcome.error.fix


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
