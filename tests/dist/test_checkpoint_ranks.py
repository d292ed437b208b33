"""Checkpoints of several ranks: numbers of ranks, shardings, background saves, faults of one rank."""

from __future__ import annotations

import copy
import os
import re
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_trainings import record_log
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import paceline
from paceline.checkpoint import codec, manager
from paceline.checkpoint.manifest import Damaged
from paceline.checkpoint.owner import RECORD
from paceline.checkpoint.store import Store, committed, open_store, read_manifest
from paceline.errors import (
    CheckpointError,
    NonFinite,
    PeerFailed,
    RankDisagreement,
    SaveFailed,
    StepError,
)
from paceline.job.preemption import GRACE_VARIABLE
from paceline.machine import format_bytes
from paceline.testing import run_failing_ranks, run_ranks
from paceline.training import state


def _net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 37), nn.BatchNorm1d(37), nn.Linear(37, 7), nn.Linear(7, 1))


def _digest(tensors: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    full = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in tensors.items()}
    return {name: full[name].double().reshape(-1).tolist() for name in sorted(full)}


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[float]]:
    return _digest(codec.encode(state.save([model], [optimizer]))[1])


def _make(job: Any, kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer, replicated or sharded."""
    model = _net()
    if kind == "fsdp":
        if job.group is None:  # FSDP needs a group; one rank alone has nothing to shard
            kind = "ddp"
        else:
            for layer in model:
                fully_shard(layer)
            fully_shard(model)
    model = paceline.ddp(job, model) if kind == "ddp" else model
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _saves(job: Any, folder: str, kind: str) -> Any:
    model, optimizer = _make(job, kind)
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(2))
    model(x).square().sum().backward()
    optimizer.step()
    paceline.Checkpoints(folder).save(job, 1, state.save([model], [optimizer]))
    return _tensors(model, optimizer)


def _loads(job: Any, folder: str, kind: str) -> Any:
    model, optimizer = _make(job, kind)
    like = state.templates([model], [optimizer])
    found = paceline.Checkpoints(folder, resume="must").resume(job, like=like)
    state.check([model], [optimizer], found)
    state.load([model], [optimizer], found)
    if kind == "fsdp" and job.world_size > 1:
        # Every rank holds its shard alone; what it has read is no more.
        loaded = optimizer.state[next(iter(model.parameters()))]["exp_avg"]
        assert loaded.to_local().numel() < loaded.numel()
    return _tensors(model, optimizer)


@pytest.mark.parametrize(
    ("saver", "loaders"),
    [(2, (1, 3)), *[pytest.param(n, (1, 2, 3, 4), marks=pytest.mark.ci) for n in (1, 3, 4)]],
)
def test_saved_on_n_loaded_on_m(saver: int, loaders: tuple[int, ...], tmp_path: Path) -> None:
    want = run_ranks(_saves, str(tmp_path), "ddp", nproc=saver)[0]
    assert len(want) == 8 + 3 + 8 * 3  # parameters, buffers, and AdamW's for each parameter
    for loader in loaders:
        assert run_ranks(_loads, str(tmp_path), "ddp", nproc=loader) == [want] * loader


@pytest.mark.parametrize(
    ("saver", "loader", "kinds"),
    [
        (3, 2, "fsdp ddp"),
        (2, 3, "ddp fsdp"),
        (4, 3, "fsdp fsdp"),
        (2, 1, "fsdp ddp"),
        (1, 4, "ddp fsdp"),
    ],
)
@pytest.mark.ci
def test_from_ddp_to_fsdp_and_back(saver: int, loader: int, kinds: str, tmp_path: Path) -> None:
    source, target = kinds.split()
    want = run_ranks(_saves, str(tmp_path), source, nproc=saver)[0]
    assert run_ranks(_loads, str(tmp_path), target, nproc=loader) == [want] * loader


def _wide(job: Any, folder: str) -> None:
    tensors = {"big": torch.ones(3000, 4096), "small": torch.ones(500), "odd": torch.ones(7, 1000)}
    paceline.Checkpoints(folder).save(job, 1, tensors)


@pytest.mark.parametrize("nproc", [2, 3, 4])
def test_each_rank_writes_a_part_of_replicated_tensors(nproc: int, tmp_path: Path) -> None:
    run_ranks(_wide, str(tmp_path), nproc=nproc)
    sizes = [os.stat(tmp_path / f"step-1/rank-{r}.bin").st_size for r in range(nproc)]
    # One tensor has nearly all of it: 49 MB in pieces of 16 MiB, the last one smaller.
    assert max(sizes) <= (17 << 20) + sum(sizes) / nproc
    assert min(sizes) > 4_000_000 * (nproc < 4)
    manifest = read_manifest(open_store(tmp_path), 1)
    assert manifest.world_size == nproc
    assert set(manifest.tensors) == {"big", "small", "odd", *(f"$rng.{r}" for r in range(nproc))}


def _unlike(job: Any, folder: str, kind: str) -> None:
    tensors: dict[str, Any] = {"a": torch.ones(4 if kind == "shape" and job.rank == 1 else 3)}
    if kind == "value":
        tensors["b"] = object()
    if kind == "part":  # as of an optimizer that divides its state over the ranks
        tensors[f"b{job.rank}"] = torch.ones(2)
    paceline.Checkpoints(folder).save(job, 1, {"inner": tensors})


@pytest.mark.parametrize(
    ("kind", "name"), [("shape", "inner.a"), ("value", "inner.b"), ("part", "inner.b1")]
)
def test_a_state_that_cannot_be_saved_is_refused_on_all_ranks(
    kind: str, name: str, tmp_path: Path
) -> None:
    for outcome in run_failing_ranks(_unlike, str(tmp_path), kind, nproc=3):
        assert isinstance(outcome.error, CheckpointError), outcome.text
        assert name in str(outcome.error)
    assert committed(open_store(tmp_path)) == []


# In a training.


def _training(job: Any, folder: str, checkpoints: Any = None, **options: Any) -> paceline.Training:
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(48, 5, generator=generator), torch.ones(48, 1))
    model = paceline.ddp(job, _net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batches = paceline.Batches(job, data, global_batch=8)
    checkpoints = checkpoints or paceline.Checkpoints(folder, **options)
    return paceline.Training(job, model, optimizer, batches, checkpoints=checkpoints)


def _train(training: paceline.Training, before: Any = lambda step: None, **how: Any) -> list[Any]:
    """The tensors after each step."""
    optimizer = training.optimizers[0]
    found = []
    for step in training.steps(**how):
        before(step)
        for x, y in step:
            loss = F.mse_loss(training.models[0](x), y, reduction="sum")
            step.backward(loss, count=len(y), reduction="sum")
        step.update()
        found.append(_tensors(training.models[0], optimizer))
    return found


def _each_step(job: Any, folder: str) -> list[Any]:
    return _train(_training(job, folder, every_steps=1, keep=100), until=9)


def _read_all(job: Any, folder: str) -> list[Any]:
    found = []
    for step in reversed(committed(open_store(folder))):
        training = _training(job, folder)
        assert _train(training, until=1) == []  # it resumes, and has nothing to do
        assert training.number == step
        optimizer = training.optimizers[0]
        found.append(_tensors(training.models[0], optimizer))
        if job.rank == 0:
            open_store(folder).remove(f"step-{step}")
        paceline.gather(job, 0)
    return found[::-1]


_SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "nproc", [pytest.param(1, marks=_SLOW), 2, 3, pytest.param(4, marks=_SLOW)]
)
def test_each_save_is_the_state_of_exactly_its_step(nproc: int, tmp_path: Path) -> None:
    # BatchNorm's buffers change in a forward.
    trained = run_ranks(_each_step, str(tmp_path), nproc=nproc)[0]
    read = run_ranks(_read_all, str(tmp_path), nproc=1)[0]
    assert [d.keys() for d in read] == [d.keys() for d in trained]
    for n, (mine, theirs) in enumerate(zip(read, trained, strict=True)):
        for name in mine:
            if "running" not in name:  # of rank 0 alone until it is saved
                assert mine[name] == theirs[name], (n + 1, name)


def _fails_to_save(job: Any, folder: str) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        _limited(job, folder, 6)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)  # the error itself is sent in a file


def _limited(job: Any, folder: str, until: int) -> int:
    checkpoints = paceline.Checkpoints(folder, every_steps=2)
    training = _training(job, folder, checkpoints)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def before(step: Any) -> None:
        if step.number in (3, 7):  # the saves of steps 4 and 6 fail on rank 1
            checkpoints.finish(job)
            soft = 100 if step.number == 3 and job.rank == 1 else limits[0]
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, limits[1]))

    _train(training, before, until=until)
    return training.number


def test_training_continues_if_a_disk_is_full_for_a_while(tmp_path: Path) -> None:
    assert run_ranks(_limited, str(tmp_path), 10, nproc=2) == [10, 10]
    assert committed(open_store(tmp_path)) == [2, 8, 10]


def _on_slow_storage(job: Any, folder: str) -> int:
    write = Store.write

    def write_late(store: Any, path: str, parts: Any) -> None:
        if path.endswith(".bin") and job.rank == job.world_size - 1:
            time.sleep(2.5)
        write(store, path, parts)

    Store.write = write_late  # type: ignore[method-assign]
    training = _training(job, folder, every_steps=1)
    _train(training, until=3)
    return training.number


@pytest.mark.parametrize("nproc", [2, *[pytest.param(n, marks=pytest.mark.ci) for n in (1, 3)]])
def test_a_late_save_ends_no_training_and_leaves_out_the_next(nproc: int, tmp_path: Path) -> None:
    assert run_ranks(_on_slow_storage, str(tmp_path), nproc=nproc, timeout_s=1) == [3] * nproc
    assert committed(open_store(tmp_path)) == [1, 3]


def test_a_failed_last_save_is_an_error_with_its_exit_code(tmp_path: Path) -> None:
    for outcome in run_failing_ranks(_fails_to_save, str(tmp_path), nproc=2):
        assert isinstance(outcome.error, SaveFailed), outcome.text
        assert outcome.error.exit_code == 74
        assert outcome.error.where.startswith("rank 1")
        sizes = [f.stat().st_size for f in (tmp_path / "step-2").glob("rank-*.bin")]
        assert f"write {format_bytes(sum(sizes))} together" in outcome.error.why
    assert committed(open_store(tmp_path)) == [2]


def _poisoned(job: Any, folder: str) -> None:
    model = paceline.ddp(job, nn.Linear(5, 1))
    training = paceline.Training(
        job,
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        paceline.Batches(job, TensorDataset(torch.randn(48, 5)), global_batch=8),
        on_non_finite="skip",  # so that the loss is no error
        checkpoints=paceline.Checkpoints(folder),
    )
    for step in training.steps():  # without end, so that nothing but the control word can tell
        for (x,) in step:
            step.backward(model(x).square().mean())
        step.update()
        if step.number == 6:
            paceline.unwrap(model).bias.data.fill_(float("nan"))
            training.save()


def test_an_error_in_the_background_is_raised_on_all_ranks_soon(tmp_path: Path) -> None:
    for outcome in run_failing_ranks(_poisoned, str(tmp_path), nproc=3):
        assert isinstance(outcome.error, NonFinite), outcome.text
        assert outcome.error.parameters == ["bias"]
        assert outcome.error.step == 6
    assert committed(open_store(tmp_path)) == []


def test_a_save_outside_of_the_loop_is_refused(tmp_path: Path) -> None:
    def save(job: Any) -> None:
        training = _training(job, str(tmp_path))
        training.save()

    for outcome in run_failing_ranks(save, nproc=1):
        assert isinstance(outcome.error, StepError)
        assert "outside the loop" in outcome.text


def _returns(job: Any, folder: str, elsewhere: str) -> list[str]:
    training = _training(job, folder, every_steps=2)
    _train(training, until=4)
    snapshot = copy.deepcopy(training.state_dict())
    _train(training, until=8)
    try:
        training.load_state_dict(snapshot)
    except CheckpointError as error:
        text = str(error)
    assert training.number == 8
    again = _training(job, elsewhere, every_steps=2)
    again.load_state_dict(snapshot)
    _train(again, until=8)
    left, right = ([p.tolist() for p in t.models[0].parameters()] for t in (training, again))
    return [text, "equal" if left == right else "other"]


def test_a_return_to_an_earlier_step_needs_another_folder(tmp_path: Path) -> None:
    for text, weights in run_ranks(_returns, str(tmp_path / "a"), str(tmp_path / "b"), nproc=2):
        assert "step 5 cannot be saved" in text
        assert "which holds step 8" in text
        assert weights == "equal"
    assert committed(open_store(tmp_path / "a")) == [4, 6, 8]
    assert committed(open_store(tmp_path / "b")) == [6, 8]


def _timed(job: Any, folder: str, every_s: Any) -> int:
    training = _training(job, folder, every_s=every_s, keep=1000)
    _train(training, until=400)
    return training.number


@pytest.mark.ci
def test_saving_by_the_clock_is_at_the_same_step_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(_timed, str(tmp_path), 0.1, nproc=2)
    steps = committed(open_store(tmp_path))
    assert steps[-1] == 400
    assert len(steps) > 2


def _best(job: Any, folder: str) -> None:
    training = _training(job, folder, every_epochs=1, keep=1)

    def before(step: Any) -> None:
        if step.number == 2:
            training.save(best=True)

    _train(training, before, epochs=3)


def test_the_best_checkpoint_is_kept(tmp_path: Path) -> None:
    run_ranks(_best, str(tmp_path), nproc=2)
    assert committed(open_store(tmp_path)) == [2, 18]


def _other(job: Any, folder: str) -> None:
    model = paceline.ddp(job, nn.Sequential(nn.Linear(5, 38)))
    optimizer = torch.optim.AdamW(model.parameters())
    batches = paceline.Batches(job, TensorDataset(torch.ones(8, 5)), global_batch=8)
    checkpoints = paceline.Checkpoints(folder)
    before = [p.clone() for p in model.parameters()]
    try:
        _train(paceline.Training(job, model, optimizer, batches, checkpoints=checkpoints), until=9)
    finally:
        assert all(map(torch.equal, before, model.parameters()))


def test_a_checkpoint_of_another_model_is_refused_unchanged(tmp_path: Path) -> None:
    run_ranks(_saves_once, str(tmp_path), nproc=1)
    for outcome in run_failing_ranks(_other, str(tmp_path), nproc=2):
        assert isinstance(outcome.error, CheckpointError), outcome.text
        text = "0.bias: the model has shape [38], the checkpoint has shape [37]."
        assert outcome.error.what == text


def _saves_once(job: Any, folder: str) -> None:
    _train(_training(job, folder), until=1)


def _two_folders(job: Any, folder: str) -> list[str]:
    """The same number of saves by two objects; the second fails in another way."""
    paceline.Checkpoints(f"{folder}/a").save(job, 1, {"w": torch.ones(3)})
    bad = {"w": torch.tensor([float("nan")])}
    try:
        paceline.Checkpoints(f"{folder}/b").save(job, 1, bad, finite=["w"])
    except NonFinite as error:
        return error.parameters
    return []


def test_a_job_may_have_several_checkpoints(tmp_path: Path) -> None:
    assert run_ranks(_two_folders, str(tmp_path), nproc=3) == [["w"]] * 3
    assert committed(open_store(tmp_path / "a")) == [1]
    assert committed(open_store(tmp_path / "b")) == []


def _elsewhere(job: Any, folder: str) -> None:
    paceline.Checkpoints(f"{folder}/{job.rank}").save(
        job, 1, {"a": torch.ones(3), "b": torch.ones(3)}
    )


def test_a_save_into_different_folders_fails(tmp_path: Path) -> None:
    for outcome in run_failing_ranks(_elsewhere, str(tmp_path), nproc=2):
        assert isinstance(outcome.error, SaveFailed | PeerFailed), outcome.text
        assert "rank-1.bin" in str(outcome.error)


def _apart(job: Any, folder: str, named: bool) -> None:
    own = Path(folder) / ("a" if job.rank == 0 else "b")
    own.mkdir(exist_ok=True)
    os.chdir(own)
    training = _training(job, folder, paceline.Checkpoints(own / "runs" if named else "runs"))
    _train(training, until=1)


@pytest.mark.parametrize(
    ("nproc", "named"), [pytest.param(2, True, marks=pytest.mark.slow), (3, False)]
)
def test_different_folders_are_refused_at_the_start(
    nproc: int, named: bool, tmp_path: Path
) -> None:
    for outcome in run_failing_ranks(_apart, str(tmp_path), named, nproc=nproc):
        assert isinstance(outcome.error, RankDisagreement), outcome.text
        expected = r"/a/runs\" on rank 0" if named else "rank 0 does not see what rank 1"
        assert re.search(expected, str(outcome.error)), outcome.text
    assert not list(tmp_path.glob("**/*probe*"))


def test_ranks_save_to_storage_without_rename_and_resume_from_it(tmp_path: Path) -> None:
    url = f"local://{tmp_path}/a"  # by fsspec
    run_ranks(_saves_once, url, nproc=2)
    assert run_ranks(_remote, url, 3, nproc=2) == [[2, 3]] * 2
    damaged = tmp_path / "a" / read_manifest(open_store(url), 3).parts / "rank-1.bin"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert run_ranks(_remote, url, 4, nproc=3) == [[3, 4]] * 3
    names = [RECORD, "damaged-3", "parts", "step-2", "step-3", "step-4"]
    assert sorted(os.listdir(tmp_path / "a")) == names
    assert len(os.listdir(tmp_path / "a/parts")) == 4


def _read_on_a_bad_host(job: Any, folder: str) -> None:
    if job.rank == 1:
        manager.read = lambda *_: (_ for _ in ()).throw(Damaged("rank-0.bin differs"))
    _training(job, folder).resume()


def test_a_checkpoint_that_only_one_host_reads_as_damaged_stays(tmp_path: Path) -> None:
    run_ranks(_saves_once, str(tmp_path), nproc=2)
    first, *others = run_failing_ranks(_read_on_a_bad_host, str(tmp_path), nproc=2)
    assert isinstance(first.error, CheckpointError), first.text
    assert "rank 1 reads step 1" in str(first.error)
    assert all(isinstance(each.error, PeerFailed) for each in others)
    assert (tmp_path / "step-1").is_dir()


def _remote(job: Any, folder: str, until: int) -> list[int]:
    numbers: list[int] = []
    _train(_training(job, folder, every_steps=1), lambda s: numbers.append(s.number), until=until)
    return numbers


def test_a_save_that_takes_longer_than_a_preemption_leaves_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = record_log()
    with paceline.join() as job:
        checkpoints = paceline.Checkpoints(tmp_path)
        monkeypatch.setenv(GRACE_VARIABLE, "30")
        checkpoints.save(job, 1, {})
        assert not texts
        monkeypatch.setenv(GRACE_VARIABLE, "0")
        checkpoints.save(job, 2, {})
    assert "a preemption leaves 0 s for it" in texts[0]
