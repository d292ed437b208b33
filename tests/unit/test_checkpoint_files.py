"""Checkpoints on storage: encoding, manifests, digests, damage, remote stores, `paceline ckpt`."""

from __future__ import annotations

import contextlib
import errno
import gc
import hashlib
import json
import math
import os
import random
import resource
import shutil
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import paceline
from paceline.checkpoint import codec
from paceline.checkpoint.export import write_file
from paceline.checkpoint.manifest import Damaged, Manifest
from paceline.checkpoint.owner import RECORD
from paceline.checkpoint.store import Store, committed, open_store, read_manifest, verify
from paceline.checkpoint.weights import open_weights
from paceline.cli import ckpt
from paceline.cli.main import main
from paceline.errors import CheckpointError, ConfigError, NonFinite, SaveFailed
from paceline.job.job import Job
from paceline.testing import digest


def _state(fill: float = 1.0) -> dict[str, Any]:
    return {
        "models": [
            {"weight": torch.full((40, 5), fill), "short": torch.ones(7, dtype=torch.bfloat16)}
        ],
        "step": 3,
        "nothing": torch.empty(0, 4),
        "number": torch.tensor(5),
    }


def _save(job: Job, folder: Path | str, *steps: int, **options: Any) -> paceline.Checkpoints:
    checkpoints = paceline.Checkpoints(folder, **options)
    for step in steps:
        checkpoints.save(job, step, _state(float(step)))
    return checkpoints


def _resume(job: Job, folder: Path | str, **options: Any) -> Any:
    return paceline.Checkpoints(folder, **options).resume(job)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != RECORD)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return type(a) is type(b) and a.dtype == b.dtype and np.array_equal(a, b)
    return type(a) is type(b) and (a == b or (a != a and b != b))


def test_values_are_decoded_as_they_were_encoded() -> None:
    state = {
        "plain": [None, True, 1, 2.5, "x", math.inf, math.nan, 2**70],
        "keys": {0: {"a": 1}, (1, 2): "pair", "$tensor": "no tensor"},
        "kinds": (Counter({3: 2}), {1, 2}, frozenset({3}), b"\x00\xff"),
        "odd keys": {frozenset({1}): 1, np.int64(2): 2, b"3": 3, None: 4, (1, (2, 3)): 5},
        "odd counts": Counter({(1, (2, 3)): 1, np.int64(4): 2, None: 3}),
        "arrays": [np.arange(3, dtype=np.int16), torch.ones(2, dtype=torch.complex64)],
        "scalars": [np.float64(0.5), np.uint16(3), np.bool_(True)],
        "a.b": torch.zeros(1),
        "a": {"b": torch.ones(1)},
    }
    tree, tensors = codec.encode(state)
    assert _equal(codec.decode(json.loads(json.dumps(tree)), tensors), state)


def test_an_array_of_another_byte_order_is_saved() -> None:
    tree, tensors = codec.encode(np.arange(3, dtype=">i4"))
    assert codec.decode(tree, tensors).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "value",
    [
        object(),
        print,
        torch.ones(2).to_sparse(),
        torch.ones(1, device="meta"),
        pytest.param(
            np.longdouble(1.5),
            marks=pytest.mark.skipif(
                np.longdouble is np.float64 or np.dtype(np.longdouble).itemsize == 8,
                reason="long double is a double on this machine",
            ),
        ),
    ],
)
def test_a_value_that_needs_a_pickle_is_refused_with_its_path(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"ema\.inner\.1 is an? ") as caught:
        codec.encode({"ema": {"inner": [1, value]}})
    assert caught.value.parameter == "ema.inner.1"


def test_resume_loads_the_state_and_the_random_generators(job: Job, tmp_path: Path) -> None:
    _save(job, tmp_path, 3)
    drawn = (torch.rand(3), np.random.rand(3), random.random())
    assert _equal(_resume(job, tmp_path), _state(3.0))
    assert _equal((torch.rand(3), np.random.rand(3), random.random()), drawn)
    assert _names(tmp_path) == ["step-3"]


def test_retention_is_by_step_and_keeps_the_best(job: Job, tmp_path: Path) -> None:
    checkpoints = _save(job, tmp_path, 8, 9, keep=2)
    checkpoints.save(job, 10, _state(), best=True)
    for step in (11, 12, 100):
        checkpoints.save(job, step, _state())
    assert committed(open_store(tmp_path)) == [10, 12, 100]
    checkpoints.save(job, 101, _state(), best=True)
    assert committed(open_store(tmp_path)) == [100, 101]


@pytest.mark.parametrize("url", ["disk", "memory://earlier"])
def test_a_save_that_would_not_be_the_newest_is_refused(job: Job, tmp_path: Path, url: str) -> None:
    url = str(tmp_path) if url == "disk" else url
    checkpoints = _save(job, url, 4, 8)
    for own in (checkpoints, paceline.Checkpoints(url)):  # also of a process that has not resumed
        for step in (5, 8):
            with pytest.raises(CheckpointError, match=f"step {step} cannot be saved in .* step 8"):
                own.save(job, step, _state())
    assert committed(open_store(url)) == [4, 8]
    assert _equal(_resume(job, url), _state(8.0))
    open_store(url).remove("")


def _flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def test_of_1000_flipped_bits_none_is_accepted(job: Job, tmp_path: Path) -> None:
    _save(job, tmp_path, 1, 2)
    good = {path: path.read_bytes() for path in (tmp_path / "step-2").iterdir()}
    assert len(good) == 2
    rng, store = random.Random(7), open_store(tmp_path)
    for number in range(1000):
        path = list(good)[number % 2]
        _flip(path, rng)
        with pytest.raises(Damaged):
            verify(store, read_manifest(store, 2))
        if number % 20 == 0:
            copy = tmp_path / "copy"
            shutil.copytree(tmp_path, copy, ignore=lambda *_: ["copy"])
            assert _equal(_resume(job, copy), _state(1.0))  # the one before
            assert _names(copy) == ["damaged-2", "step-1"]
            shutil.rmtree(copy)
        path.write_bytes(good[path])
    assert _equal(_resume(job, tmp_path), _state(2.0))


@pytest.mark.parametrize("name", ["manifest.json", "rank-0.bin"])
@pytest.mark.parametrize("size", [0, 10, -1])
def test_a_truncated_or_missing_file_is_skipped_with_a_warning(
    job: Job, tmp_path: Path, name: str, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    _save(job, tmp_path, 1, 2)
    path = tmp_path / "step-2" / name
    path.write_bytes(path.read_bytes()[:size])
    with caplog.at_level("WARNING", logger="paceline"):
        assert _equal(_resume(job, tmp_path), _state(1.0))
    assert "damaged-2" in caplog.text
    (tmp_path / "step-1/rank-0.bin").unlink()
    with pytest.raises(CheckpointError, match="every checkpoint is damaged"):
        _resume(job, tmp_path)


def _change(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest and its digest."""
    path = folder / "manifest.json"
    fields = json.loads(path.read_text())
    del fields["sha256"]
    change(fields)
    body = json.dumps({"": "", **fields})[len('{"": "') :]
    path.write_text('{"sha256": "' + hashlib.sha256(body.encode()).hexdigest() + body + "\n")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda fields: fields.update(format=4), "format 4, and this release reads 3"),
        (lambda fields: fields.update(parts="../step-1"), "names the folder"),
        (lambda f: f["tensors"]["number"].__setitem__(0, "object"), "dtype 'object'"),
        (lambda fields: fields.pop("tree"), "fields are wrong"),
    ],
)
def test_an_invalid_manifest_is_refused(
    job: Job, tmp_path: Path, change: Callable[[dict[str, Any]], None], text: str
) -> None:
    _save(job, tmp_path, 1)
    _change(tmp_path / "step-1", lambda fields: None)
    assert _equal(_resume(job, tmp_path), _state(1.0))  # the rewriting itself is right
    _change(tmp_path / "step-1", change)
    with pytest.raises(CheckpointError, match=text):
        _resume(job, tmp_path)
    assert committed(open_store(tmp_path)) == [1]  # refused, not set aside


def test_a_manifest_of_another_program_is_refused(job: Job, tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1/manifest.json").write_text('{"format": 1, "step": 1}')
    with pytest.raises(CheckpointError, match="not a manifest of Paceline"):
        _resume(job, tmp_path)


class _Bomb:
    def __reduce__(self) -> Any:
        return (os.mkdir, ("exploded",))


def test_a_pickle_in_place_of_tensors_is_not_loaded(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _save(job, tmp_path / "a", 1)
    torch.save(_Bomb(), tmp_path / "bomb.pth")
    shutil.copy(tmp_path / "bomb.pth", tmp_path / "a/step-1/rank-0.bin")
    with pytest.raises(CheckpointError, match="damaged"):
        _resume(job, tmp_path / "a")
    model = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match="cannot be read"):
        paceline.load_weights(model, tmp_path / "bomb.pth")
    assert not (tmp_path / "exploded").exists()


def test_checkpoints_do_not_keep_a_model_alive(job: Job, tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    gone = weakref.ref(model)
    checkpoints = paceline.Checkpoints(tmp_path)
    values = [*model.parameters()]
    checkpoints.save(job, 1, model.state_dict(), wait=False)
    tensor = weakref.ref(values[0])
    checkpoints.finish(job)
    del model, values
    gc.collect()
    assert gone() is None
    assert tensor() is None


# Storage that fails.


@contextlib.contextmanager
def _small_files() -> Iterator[None]:
    """As on a full disk: no file may have more than 300 bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_does_not_change_older_checkpoints(job: Job, tmp_path: Path) -> None:
    checkpoints = _save(job, tmp_path, 1)
    with _small_files(), pytest.raises(SaveFailed, match="File too large") as caught:
        checkpoints.save(job, 2, _state())
    assert caught.value.exit_code == 74
    assert "KiB" in caught.value.why or "MiB" in caught.value.why
    assert "ulimit -f" in caught.value.fix  # the disk has space
    assert _equal(_resume(job, tmp_path), _state(1.0))
    assert _names(tmp_path) == ["step-1"]


@pytest.mark.parametrize("best", [False, True])
def test_a_full_disk_is_a_warning_in_the_background(
    job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture, best: bool
) -> None:
    checkpoints = _save(job, tmp_path, 1)
    with _small_files(), caplog.at_level("WARNING", logger="paceline"):
        checkpoints.save(job, 2, _state(), best=best, wait=False)
        checkpoints.finish(job)
    assert "training continues without this checkpoint" in caplog.text
    assert "step 2 cannot be saved" in caplog.text
    assert ("an earlier one stays marked as the best" in caplog.text) == best
    assert checkpoints.last_saved == 1


def test_files_of_other_programs_in_the_folder_stay(
    job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = [
        "unfinished-business/thesis.txt",
        "unfinished-notes.md",
        "probe-0",
        "step-5/mine.txt",
        "step-900/mine.txt",
        "step-901",
        "step-1/manifest.json",
    ]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"name": "of another program"}')
    checkpoints = paceline.Checkpoints(tmp_path, keep=1)
    with caplog.at_level("WARNING", logger="paceline"):
        _save(job, tmp_path, 10, 20, keep=1)
    checkpoints.resume(job)
    (tmp_path / "step-20/manifest.json").unlink()
    for step in (20, 900, 901):
        checkpoints.save(job, step, _state())
    names[names.index("step-900/mine.txt")] = "incomplete-step-900-1/mine.txt"
    names[names.index("step-901")] = "incomplete-step-901-1"
    for name in names:
        assert "of another program" in (tmp_path / name).read_text()
    assert "older ones stay: " in caplog.text
    assert "step-1 cannot be read: it is not a manifest of Paceline" in caplog.text
    assert not (tmp_path / "step-10").exists()


def test_an_unexpected_error_of_the_commit_or_of_retention_is_reported(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any) -> None:
        raise LookupError("unexpected")

    checkpoints = _save(job, tmp_path, 1)
    with monkeypatch.context() as patch, caplog.at_level("WARNING", logger="paceline"):
        patch.setattr(paceline.Checkpoints, "_prune", fail)
        checkpoints.save(job, 2, _state())
    assert "step 2 is saved, but older ones stay: unexpected" in caplog.text
    with monkeypatch.context() as patch:
        patch.setattr("paceline.checkpoint.writer.commit", fail)
        with pytest.raises(
            CheckpointError, match=r"step 3 was not saved: LookupError: unexpected\."
        ):
            checkpoints.save(job, 3, _state())
    assert committed(open_store(tmp_path)) == [1, 2]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("keep", None), ("keep", 0), ("every_steps", 2.5), ("every_epochs", True)),
        *(("every_s", True), ("every_s", math.nan), ("every_s", 0), ("every_s", "often")),
        *(("resume", "never"), ("folder", "")),
    ],
)
def test_a_wrong_argument_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        paceline.Checkpoints(**{"folder": "folder", name: value})


@pytest.mark.parametrize("folder", ["/proc/nowhere", "/dev/null/a"])
def test_a_folder_that_cannot_be_written_is_refused_at_the_start(job: Job, folder: str) -> None:
    with pytest.raises(SaveFailed, match="cannot be saved in"):
        _resume(job, folder)


@pytest.mark.parametrize("step", [-1, 1.5, True, None])
def test_a_step_that_is_not_a_number_of_steps_is_refused(
    job: Job, tmp_path: Path, step: Any
) -> None:
    with pytest.raises(ConfigError, match="step must be an integer of at least 0"):
        paceline.Checkpoints(tmp_path).save(job, step, _state())


def test_checkpoints_stay_where_they_are_if_the_program_changes_its_folder(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoints = _save(job, "runs", 0)  # step 0: the weights before training
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    checkpoints.save(job, 1, _state())
    assert committed(open_store(tmp_path / "runs")) == [0, 1]


def test_a_folder_that_cannot_be_tidied_is_an_error_of_storage(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(self: Store, path: str) -> None:
        if path.startswith("unfinished-"):
            raise PermissionError(13, "Permission denied", path)

    (tmp_path / "unfinished-step-3-ab12-1").mkdir()
    monkeypatch.setattr(Store, "remove", forbidden)
    with pytest.raises(SaveFailed, match=r"cannot be changed: .*unfinished-step-3-ab12-1"):
        _resume(job, tmp_path)


def test_a_restart_without_a_checkpoint_is_reported(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="paceline"):
        assert _resume(job, tmp_path) is None
        assert "found no checkpoint" not in caplog.text
        monkeypatch.setattr(job, "restarts", 1)
        assert _resume(job, tmp_path) is None
    assert "the restarted job found no checkpoint, and starts from step 0." in caplog.text


def test_too_little_space_is_refused_at_the_start(job: Job, tmp_path: Path) -> None:
    with pytest.raises(SaveFailed, match="B are free"):
        paceline.Checkpoints(tmp_path).resume(job, size_bytes=10**18)


# Background saves, and values that must not be saved.


def test_a_background_save_holds_the_values_of_its_call(job: Job, tmp_path: Path) -> None:
    weight = torch.zeros(1000)
    checkpoints = paceline.Checkpoints(tmp_path)
    checkpoints.save(job, 1, {"w": weight}, wait=False)
    weight.add_(1)
    checkpoints.finish(job)
    assert float(_resume(job, tmp_path)["w"].sum()) == 0


def test_the_sum_of_large_weights_may_overflow_and_complex_ones_are_examined(
    job: Job, tmp_path: Path
) -> None:
    checkpoints = paceline.Checkpoints(tmp_path)
    large = {"models": [{"w": torch.full((4,), 1e308, dtype=torch.float64)}]}
    checkpoints.save(job, 1, large, finite=["models.0.w"])
    bad = {"models": [{"w": torch.tensor([complex(1, math.nan)])}]}
    with pytest.raises(NonFinite, match="w holds NaN"):
        checkpoints.save(job, 2, bad, finite=["models.0.w"])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_not_saved(job: Job, tmp_path: Path, value: float) -> None:
    state = {"models": [{"ok": torch.full((9,), 3e38), "bad": torch.tensor([1.0, value])}]}
    with pytest.raises(NonFinite, match=r"^bad holds NaN or infinity; step 4 was not saved"):
        paceline.Checkpoints(tmp_path).save(job, 4, state, finite=["models.0.ok", "models.0.bad"])
    assert committed(open_store(tmp_path)) == []


# Remote storage.


def test_a_store_without_rename(job: Job) -> None:
    url = "memory://checkpoints/a"
    _save(job, url, 1, 2, 3, keep=2)
    gc.collect()  # this process owns the folder as long as that object is there
    store = open_store(url)
    assert committed(store) == [2, 3]
    parts = {step: read_manifest(store, step).parts for step in (2, 3)}
    assert {f"parts/{name}" for name in store.names("parts")} == set(parts.values())
    store.write("parts/step-9-00ff-1/rank-0.bin", [b"killed before the manifest"])
    store.write("parts/of-others/file", [b"kept"])
    assert _equal(_resume(job, url), _state(3.0))
    store.remove("parts/of-others")
    assert {f"parts/{name}" for name in store.names("parts")} == set(parts.values())
    data = store.read(f"{parts[3]}/rank-0.bin", 0, 10**6)
    data[5] ^= 1
    store.write(f"{parts[3]}/rank-0.bin", [data])
    assert _equal(_resume(job, url), _state(2.0))
    assert store.names("damaged-3") == ["manifest.json"]
    assert parts[3].removeprefix("parts/") in store.names(
        "parts"
    )  # what is set aside keeps its files
    store.remove("")


# `paceline ckpt`.


def _run(*words: object) -> int:
    return main(["ckpt", *map(str, words)])


def test_the_command_lists_shows_checks_and_removes(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (("ls", tmp_path), ("show", tmp_path, "--step", 3)):
        assert _run(*words) == 65
        printed = capsys.readouterr()
        assert printed.out == ""
        assert "no checkpoint of Paceline" in printed.err
    _save(job, tmp_path, 1, 20)
    assert _run("ls", tmp_path) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["step", "1", "20"]
    assert _run("show", tmp_path) == 0
    assert "models.0.weight: float32 [40, 5]" in capsys.readouterr().out
    assert _run("check", tmp_path) == 0
    _flip(tmp_path / "step-20/rank-0.bin", random.Random(1))
    assert _run("check", tmp_path) == 65
    assert "step 20: damaged: rank-0.bin does not match its digest" in capsys.readouterr().out
    assert _run("rm", tmp_path, "--step", 20) == 0
    assert committed(open_store(tmp_path)) == [1]
    assert _run("show", tmp_path, "--step", 20) == 65
    _flip(tmp_path / "step-1/manifest.json", random.Random(1))
    capsys.readouterr()
    assert _run("show", tmp_path) == 65
    assert "manifest.json does not match its digest" in capsys.readouterr().err


def test_the_command_takes_the_folder_of_a_run(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _save(job, tmp_path / "checkpoints", 3)
    assert _run("ls", tmp_path) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[0] == "3"
    assert _run("export", f"{tmp_path}/", tmp_path / "w.xyz") == 0
    assert "(format of torch.save)" in capsys.readouterr().out


@pytest.mark.parametrize("error", [CheckpointError("version 9"), OSError(errno.EIO, "I/O error")])
def test_a_check_goes_on_after_a_checkpoint_that_cannot_be_read(
    job: Job,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    _save(job, tmp_path, 1, 20)
    read = ckpt.read_manifest

    def read_manifest(store: Store, step: int) -> Manifest:
        if step == 1:
            raise error
        return read(store, step)

    monkeypatch.setattr(ckpt, "read_manifest", read_manifest)
    assert _run("check", tmp_path) == 65
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == [
        f"step 1: cannot be read: {error}",
        "step 20: whole",
    ]


def test_the_names_of_a_checkpoint_are_those_of_the_model(job: Job, tmp_path: Path) -> None:
    model = torch.nn.Module()
    model.module = torch.nn.Linear(2, 2)  # not a wrapper of torch
    state = {"models": [dict(model.state_dict())]}
    paceline.Checkpoints(tmp_path).save(job, 1, state)
    assert list(open_weights(tmp_path).read()) == ["module.weight", "module.bias"]


def test_the_best_checkpoint_is_exported(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = paceline.Checkpoints(tmp_path / "a", keep=3)
    for step, best in ((1, False), (2, True), (3, False)):
        checkpoints.save(job, step, _state(float(step)), best=best)
    assert _run("export", "--best", tmp_path / "a", tmp_path / "w.pth") == 0
    assert capsys.readouterr().out.startswith("step 2: ")
    (tmp_path / "a/step-3/manifest.json").write_text("{")
    assert _run("export", "--best", tmp_path / "a", tmp_path / "w.pth") == 0
    assert capsys.readouterr().out.startswith("step 2: ")
    _save(job, tmp_path / "b", 1, 20)
    assert _run("export", "--best", tmp_path / "b", tmp_path / "none.pth") == 65
    error = capsys.readouterr().err
    assert "is marked as the best; there are [1, 20]" in error
    assert "--step" in error
    assert not (tmp_path / "none.pth").exists()


@pytest.mark.parametrize("name", ["w.pth", "w.safetensors"])
def test_exported_weights_load_again(job: Job, tmp_path: Path, name: str) -> None:
    _save(job, tmp_path / "a", 1, 2)
    assert _run("export", tmp_path / "a", tmp_path / name, "--step", 1) == 0
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(40, 5))
    model.short = torch.nn.Parameter(torch.zeros(7, dtype=torch.bfloat16))
    for path, value in ((tmp_path / name, 1), (tmp_path / "a", 2), (tmp_path / "a/step-1", 1)):
        paceline.load_weights(model, path)
        assert bool((model.weight == value).all())
    if name == "w.pth":
        found = torch.load(tmp_path / name, weights_only=True)
        torch.save({f"module.{key}": value for key, value in found.items()}, tmp_path / name)
        paceline.load_weights(model, tmp_path / name)


def test_weights_are_exported_as_shards_and_for_dcp_and_back(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {f"model.layer.{n}": torch.full((100, 5), float(n)) for n in range(3)}
    state["step"] = torch.tensor(7)
    paceline.Checkpoints(tmp_path / "a").save(job, 1, {"models": [state]})
    assert _run("export", "--safetensors", "--shards", "4KB", tmp_path / "a", tmp_path / "hub") == 0
    assert capsys.readouterr().out.startswith("step 1: 4 tensors written to ")
    assert sorted(os.listdir(tmp_path / "hub")) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    assert _run("export", "--safetensors", tmp_path / "hub", tmp_path / "one") == 0
    assert os.listdir(tmp_path / "one") == ["model.safetensors"]
    assert _run("export", "--dcp", tmp_path / "one", tmp_path / "dcp") == 0
    found = {name: torch.zeros_like(value) for name, value in state.items()}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(found, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert _run("export", tmp_path / "dcp", tmp_path / "w.pth") == 0
    for each in (found, torch.load(tmp_path / "w.pth", weights_only=True)):
        assert digest(each) == digest(state)
    assert _run("export", "--dcp", tmp_path / "one", tmp_path / "hub") == 65
    assert "hub exists" in capsys.readouterr().err
    for wrong in (
        ["--shards", "5GB"],
        ["--safetensors", "--shards", "0"],
        ["--safetensors", "--dcp"],
    ):
        with pytest.raises(SystemExit, match="2"):
            _run("export", *wrong, tmp_path / "one", tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("option", ["--safetensors", "--dcp"])
def test_a_folder_that_cannot_be_written_leaves_nothing(
    job: Job, tmp_path: Path, option: str
) -> None:
    _save(job, tmp_path / "a", 1)
    with _small_files():
        assert _run("export", option, tmp_path / "a", tmp_path / "new") == 65
    assert os.listdir(tmp_path) == ["a"]


class _Extra(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.calls = 0

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def test_extra_state_of_modules_is_exported_or_named(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = _Extra()
    model.calls = 5
    paceline.Checkpoints(tmp_path / "a").save(job, 1, {"models": [model.state_dict()]})
    for to in (["w.pth"], ["dcp", "--dcp"], ["w.safetensors"], ["hub", "--safetensors"]):
        assert _run("export", tmp_path / "a", tmp_path / to[0], *to[1:]) == 0
        is_named = "holds tensors only: _extra_state" in capsys.readouterr().out
        assert is_named == ("safetensors" in "".join(to))
    found = {"weight": torch.zeros(3), "_extra_state": {"calls": 0}}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(found, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert found["_extra_state"] == {"calls": 5}
    for path in ("a", "w.pth"):
        model.calls = 0
        paceline.load_weights(model, tmp_path / path)
        assert model.calls == 5


def test_every_form_of_weights_is_exported_and_only_steps_are_chosen(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(job, tmp_path / "a", 1, 2)
    write_file(tmp_path / "w.safetensors", {"weight": torch.ones(2)})
    assert _run("export", tmp_path / "a/step-1", tmp_path / "1.pth") == 0
    assert capsys.readouterr().out.startswith("step 1: ")
    assert torch.load(tmp_path / "1.pth", weights_only=True)["weight"].unique() == 1
    for source in (f"file://{tmp_path}/w.safetensors", f"{tmp_path}/w.safetensors"):
        assert _run("export", source, tmp_path / "2.pth") == 0
        for option in (["--step", 1], ["--best"]):
            assert _run("export", source, tmp_path / "3.pth", *option) == 65
            assert "not a folder of checkpoints" in capsys.readouterr().err
    assert not (tmp_path / "3.pth").exists()
    monkeypatch.chdir(tmp_path)
    assert _run("export", "--dcp", "a", ".") == 65
    assert f"{tmp_path} exists" in capsys.readouterr().err


def test_two_names_that_become_one_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = {"a._orig_mod.weight": torch.ones(2), "a.weight": torch.zeros(2)}
    torch.save(weights, tmp_path / "w.pth")
    for option in ([], ["--safetensors"], ["--dcp"]):
        assert _run("export", tmp_path / "w.pth", tmp_path / "new", *option) == 65
        error = capsys.readouterr().err
        assert "a._orig_mod.weight and a.weight of " in error
        assert "both become a.weight" in error
    assert os.listdir(tmp_path) == ["w.pth"]


def test_complex_values_are_not_loaded_into_real_ones(job: Job, tmp_path: Path) -> None:
    weights = {"weight": torch.ones(2, 2) * 1j, "bias": torch.ones(2)}
    torch.save(weights, tmp_path / "w.pth")
    model = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"weight: .* shape \[2, 2\] of complex values"):
        paceline.load_weights(model, tmp_path / "w.pth")
    model.weight = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))
    paceline.load_weights(model, tmp_path / "w.pth")
    assert torch.equal(model.weight, weights["weight"])


def test_a_folder_of_the_hub_with_a_pickle_names_its_cure(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*\n(.*\n)*.*save_pretrained"):
        paceline.load_weights(torch.nn.Linear(2, 2), tmp_path)


def test_a_step_is_read_with_a_slash_and_of_a_model_that_exists(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(job, tmp_path / "a", 1)
    monkeypatch.chdir(tmp_path / "a")
    assert (
        set(open_weights("step-1/").read())
        == set(open_weights("step-1").read())
        == {"weight", "short"}
    )
    for number in (-1, 1):
        with pytest.raises(CheckpointError, match=f"holds 1 models, so there is no model {number}"):
            open_weights("step-1", number)


def test_all_prefixes_of_wrappers_are_removed(tmp_path: Path) -> None:
    weights = {f"_orig_mod.module.{name}": torch.ones(2) for name in "ab"}
    torch.save(weights, tmp_path / "w.pth")
    assert set(open_weights(tmp_path / "w.pth").read()) == {"a", "b"}
    torch.save({1: torch.ones(2)}, tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match="holds no plain state_dict"):
        open_weights(tmp_path / "w.pth")


@pytest.mark.parametrize("name", ["w.pth", "w.safetensors"])
def test_tied_weights_are_written(tmp_path: Path, name: str) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(6, 4), torch.nn.Linear(4, 6, bias=False))
    model[1].weight = model[0].weight
    write_file(tmp_path / name, model.state_dict())
    wanted = model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight.zero_()
    paceline.load_weights(model, tmp_path / name)
    assert model[1].weight is model[0].weight
    assert torch.equal(model[0].weight, wanted)


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("empty.pth", b"", "cannot be read"),
        ("text.pth", b"hello", "cannot be read"),
        ("bad.safetensors", b"hello", "cannot be read"),
        ("missing.pth", None, "does not exist"),
    ],
)
def test_a_file_without_weights_is_named(
    tmp_path: Path, name: str, content: bytes | None, text: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{name} {text}"):
        paceline.load_weights(torch.nn.Linear(3, 2), tmp_path / name)


@pytest.mark.parametrize("name", ["w.pth", "w.safetensors"])
def test_weights_that_cannot_be_written_leave_the_old_file_and_no_scratch(
    tmp_path: Path, name: str
) -> None:
    write_file(tmp_path / name, {"w": torch.ones(1)})
    before = (tmp_path / name).read_bytes()
    with _small_files(), pytest.raises(CheckpointError, match=f"{name} cannot be written"):
        write_file(tmp_path / name, {"w": torch.ones(1000)})
    assert (tmp_path / name).read_bytes() == before
    assert os.listdir(tmp_path) == [name]


def test_a_missing_safetensors_is_named_with_its_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ConfigError, match=r"pip install 'paceline\[safetensors\]'"):
        paceline.load_weights(torch.nn.Linear(3, 2), tmp_path / "w.safetensors")


def test_tensors_come_from_the_file_that_the_index_names(tmp_path: Path) -> None:
    """A folder may hold an older copy of a tensor in another file."""
    pytest.importorskip("safetensors")
    write_file(tmp_path / "a.safetensors", {"weight": torch.ones(2)})
    write_file(tmp_path / "b.safetensors", {"weight": torch.zeros(2), "bias": torch.zeros(2)})
    names = {"weight": "a.safetensors", "bias": "b.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert open_weights(tmp_path).read()["weight"].tolist() == [1.0, 1.0]
