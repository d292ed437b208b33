"""Stores behind fsspec: interrupted operations, what stays and what goes, addresses, and errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import paceline
from paceline.checkpoint import owner
from paceline.checkpoint.cloud_errors import ObjectMissing, as_storage_error
from paceline.checkpoint.store import RemoteStore, committed, open_store, read_manifest, verify
from paceline.credentials import redact
from paceline.errors import CheckpointError, ConfigError
from paceline.job.job import Job

SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYplanted"


@pytest.fixture
def url() -> Iterator[str]:
    _clear()
    yield "memory://remote"
    _clear()


def _clear() -> None:
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


def _state(fill: float) -> dict[str, Any]:
    return {"w": torch.full((40, 5), fill), "empty": torch.empty(0, 4)}


def _fill(job: Job, url: str) -> float:
    """What the newest checkpoint holds."""
    return float(paceline.Checkpoints(url, resume="must").resume(job)["w"][0, 0])


class _Dead(Exception):
    pass


def _dying(monkeypatch: pytest.MonkeyPatch, after: int) -> list[str]:
    """All operations on remote storage fail from one on. Returns those that were done."""
    real, done = RemoteStore._call, []

    @contextlib.contextmanager
    def call(self: RemoteStore, operation: str, path: str) -> Iterator[Any]:
        name = f"{operation} {path}"
        if operation != "write" or done[-1:] != [name]:  # a PUT is one operation
            if len(done) == after:
                raise _Dead
            done.append(name)
        with real(self, operation, path) as found:
            yield found

    monkeypatch.setattr(RemoteStore, "_call", call)
    return done


def _interrupted(job: Job, url: str, after: int, patch: pytest.MonkeyPatch) -> list[str]:
    """Save 4, 6, 8, and then 9 with an end after some operations. Returns the operations."""
    _clear()
    checkpoints = paceline.Checkpoints(url, keep=3)
    for n in (4, 6, 8):
        checkpoints.save(job, n, _state(float(n)))
    with patch.context() as dying:
        done = _dying(dying, after)
        with contextlib.suppress(CheckpointError, _Dead):
            checkpoints.save(job, 9, _state(90.0))
    owner._owned.clear()  # as if the process had ended
    return done


def test_a_save_may_end_after_any_operation(
    job: Job, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for after in range(len(_interrupted(job, url, -1, monkeypatch)) + 1):
        _interrupted(job, url, after, monkeypatch)
        store = open_store(url)
        steps = committed(store)
        found.append(steps)
        assert _fill(job, url) == (8 if steps[-1] == 8 else 90)
        assert steps[-3:] == ([4, 6, 8] if steps[-1] == 8 else [6, 8, 9])
        manifests = [read_manifest(store, step) for step in steps]
        for manifest in manifests:
            verify(store, manifest)
        left = {f"parts/{name}" for name in store.names("parts")}
        assert left == {manifest.parts for manifest in manifests}
        paceline.Checkpoints(url, keep=3).save(job, 10, _state(100.0))
        assert _fill(job, url) == 100
    assert found[0] == [4, 6, 8]
    assert found[-1] == [6, 8, 9]
    assert sum(steps == [4, 6, 8] for steps in found) > 3
    assert sum(steps[-1] == 9 for steps in found) > 3


def test_removing_one_of_two_manifests_of_the_same_files_keeps_them(job: Job, url: str) -> None:
    store = open_store(url)
    paceline.Checkpoints(url).save(job, 1, _state(1.0))
    paceline.Checkpoints(url).save(job, 2, _state(2.0))
    text = store.read("step-1/manifest.json")
    store.write("damaged-1/manifest.json", [text])  # of an interrupted move
    paceline.Checkpoints(url, keep=1).save(job, 3, _state(3.0))
    assert committed(store) == [3]
    assert len(store.names("parts")) == 2


@pytest.mark.parametrize(
    ("url", "text"),
    [
        (f"s3://AKIAIOSFODNN7EXAMPLE:{SECRET}@bucket/run", "holds credentials"),
        (f"sftp://user:{SECRET}@host/run", "holds credentials"),
        (f"abfs://container/run?sig={SECRET}", "holds credentials or a query"),
        ("nothing://bucket/run", "does not know nothing://"),
        (Path("s3://bucket/run"), "Path drops a slash"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_when_it_is_given(
    url: str | Path, text: str
) -> None:
    def load(url: str | Path) -> None:
        paceline.load_weights(torch.nn.Linear(1, 1), url)

    for use in (paceline.Checkpoints, load) if isinstance(url, str) else (paceline.Checkpoints,):
        with pytest.raises(ConfigError, match=text) as caught:
            use(url)
        assert SECRET not in str(caught.value)
        assert "AKIA" not in str(caught.value)


@pytest.mark.parametrize(
    ("scheme", "extra"), [("s3", "s3"), ("gs", "gcs"), ("gcs", "gcs"), ("abfs", "azure")]
)
def test_a_missing_package_is_named_with_its_extra(
    scheme: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(protocol: str) -> None:
        raise ImportError(f"Install a package to access {protocol}")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    with pytest.raises(ConfigError, match=f"{scheme}:// needs a package") as caught:
        paceline.Checkpoints(f"{scheme}://bucket/run")
    assert f"pip install 'paceline[{extra}]'" in caught.value.fix


@pytest.mark.parametrize(
    "text",
    [
        f"https://account.blob.core.windows.net/c/run?sv=2024&sig={SECRET}&se=1",
        f"connect to s3://key:{SECRET}@bucket/a failed",
        f"headers {{'Authorization': 'Bearer {SECRET}'}}",
        f"storage_options={{'account_key': '{SECRET}'}}",
        f"password={SECRET}",
        f"the session {SECRET} has ended",  # a value of the environment
        f"aws_secret_access_key = {SECRET}",
        f"secret: {SECRET}",
        f"Authorization: SharedKey account:{SECRET}",
        f'{{"private_key": "-----BEGIN PRIVATE KEY-----\\n{SECRET}\\n-----END PRIVATE KEY-----"}}',
        f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n",
        f"{{'Password': 'first {SECRET}'}}",
    ],
)
def test_errors_hold_no_credentials(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", SECRET)
    assert SECRET not in redact(text)
    error = as_storage_error(RuntimeError(text), "write", "s3://bucket/run/a")
    assert SECRET not in str(error)
    assert str(error).startswith("cannot write s3://bucket/run/a: RuntimeError: ")


@pytest.mark.parametrize("error", [FileNotFoundError("no such bucket"), PermissionError("denied")])
def test_a_missing_object_is_told_from_other_errors(error: OSError) -> None:
    found = as_storage_error(error, "read", "s3://bucket/run/a")
    assert isinstance(found, ObjectMissing) == isinstance(error, FileNotFoundError)


def test_no_traceback_shows_the_cause(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise RuntimeError(f"token={SECRET}")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "ls", refuse)
    with pytest.raises(OSError, match="cannot list memory://remote/") as caught:
        open_store(url).names()
    assert caught.value.__suppress_context__
    assert SECRET not in str(caught.getrepr(style="native"))
