"""Each layout of the ranks gives the gradients, losses and checkpoints of one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_gpt import GPT, make_tokens, token_loss, wrap
from small_trainings import make_training, train

import paceline
from paceline import Mesh
from paceline.checkpoint import reader
from paceline.checkpoint.store import Store, open_store, read_manifest
from paceline.testing import digest, run_ranks

LAYOUTS = {
    "ddp on 2": Mesh(dp_replicate=2),
    "fsdp on 2": Mesh(dp_shard=2),
    "tp on 2": Mesh(tp=2),
    "ddp on 4": Mesh(dp_replicate=4),
    "fsdp on 4": Mesh(dp_shard=4),
    "hsdp on 4": Mesh(dp_replicate=2, dp_shard=2),
    "tp x fsdp on 4": Mesh(tp=2, dp_shard=2),
    "tp x replicas on 4": Mesh(tp=2, dp_replicate=2),
    "hsdp x tp on 8": Mesh(dp_replicate=2, dp_shard=2, tp=2),
    "pp on 2": Mesh(pp=2),
    "pp on 4": Mesh(pp=4),
    "pp x replicas on 4": Mesh(pp=2, dp_replicate=2),
    "pp x fsdp on 4": Mesh(pp=2, dp_shard=2),
    "pp x tp on 4": Mesh(pp=2, tp=2),
    "pp x tp x fsdp on 8": Mesh(pp=2, tp=2, dp_shard=2),
    "pp x tp x replicas on 8": Mesh(pp=2, tp=2, dp_replicate=2),
    "pp x hsdp on 8": Mesh(pp=2, dp_replicate=2, dp_shard=2),
}
BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-12}
STORED = [
    *(
        "1 rank",
        "ddp on 2",
        "fsdp on 4",
        "hsdp on 4",
        "tp x fsdp on 4",
        "pp on 2",
        "pp x fsdp on 4",
    ),
    "pp x tp x fsdp on 8",
]
FAST = ["ddp on 2", "fsdp on 2", "tp on 2", "pp on 2"]
REST = [name for name in LAYOUTS if name not in ("fsdp on 2", "pp on 2")]
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS if name not in FAST]


def _mesh(name: str) -> Mesh:
    return LAYOUTS.get(name, Mesh())


def _ranks(mesh: Mesh) -> int:
    return mesh.data_size * mesh.tp * mesh.pp


def _training(job: Any, dtype: torch.dtype, folder: Path | None = None) -> paceline.Training:
    # 11 samples in steps of 4: the last step of an epoch has 3, so a data rank of 4 has none.
    return make_training(
        job,
        wrap(job, GPT().to(dtype)),
        make_tokens(11),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        folder=folder,
        micro_batch=1,
        count="tokens",
    )


def _first_step(job: Any, dtype: torch.dtype, folder: Path) -> None:
    """A ragged step; the momentum of SGD, which is the gradient then, is saved."""
    training = make_training(
        job,
        wrap(job, GPT().to(dtype)),
        make_tokens(3),  # in micro-batches of 1: one data rank of 4 has none
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        micro_batch=1,
        count="tokens",
        checkpoints=paceline.Checkpoints(folder, every_steps=1),
    )
    train(training, token_loss, until=1)


def _stored(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Weights and state of the optimizer in a checkpoint, by name, read without a training."""
    store = open_store(folder)
    tree, tensors = reader.read(store, read_manifest(store, step))
    assert tree["step"] == step
    return {path: value for path, value in tensors.items() if value.is_floating_point()}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first step of one process, in a folder for each dtype."""
    folder = tmp_path_factory.mktemp("one")
    for dtype in BOUNDS:
        run_ranks(_first_step, dtype, folder / str(dtype), nproc=1)
    return folder


@pytest.mark.parametrize("name", FAST + SLOW)
def test_gradients_and_weights_are_those_of_one_process(
    tmp_path: Path, one_process: Path, name: str
) -> None:
    mesh = LAYOUTS[name]
    for dtype, bound in BOUNDS.items():
        one, many = one_process / str(dtype), tmp_path / str(dtype)
        run_ranks(_first_step, dtype, many, nproc=_ranks(mesh), mesh=mesh)
        want, got = _stored(one, 1), _stored(many, 1)
        assert got.keys() == want.keys()
        gradients = [path for path in want if path.endswith("momentum_buffer")]
        assert len(gradients) == len(list(GPT().parameters()))
        largest = max(float(want[path].norm()) for path in gradients)
        for path in want:
            # The gradient of a key's bias is zero but for rounding: softmax does not depend on it.
            size = max(float(want[path].norm()), 1e-2 * largest)
            difference = float((got[path] - want[path]).norm()) / size
            assert difference <= bound, f"{path} differs by {difference:.1e} in {dtype}"


def _losses(job: Any) -> list[float]:
    return train(_training(job, torch.float32), token_loss, until=50, clip_norm=0.5).losses


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) for n in FAST if n != "fsdp on 2"]
    + ["fsdp on 2", *SLOW],
)
@pytest.mark.ci
def test_fifty_steps_have_the_losses_of_one_process(name: str) -> None:
    want = run_ranks(_losses, nproc=1)[0]
    assert want[-1] < 0.5 * want[0]
    mesh = LAYOUTS[name]
    for got in run_ranks(_losses, nproc=_ranks(mesh), mesh=mesh):
        assert got == pytest.approx(want, rel=1e-5)


def _write(job: Any, folder: Path) -> None:
    train(_training(job, torch.float32, folder), token_loss, until=2)


def _copy(job: Any, sources: list[Path], targets: list[Path]) -> None:
    """Load each checkpoint, and save it again in this job's layout."""
    for source, target in zip(sources, targets, strict=True):
        loaded = _training(job, torch.float32, source)
        assert list(loaded.steps(until=2)) == []
        assert loaded.number == 2
        paceline.Checkpoints(target).save(job, 2, loaded.state_dict())


def _save_while_training(job: Any, folder: Path, is_slow: bool) -> int:
    """Train 4 steps, and save after 2 and 4. Returns the step that was last saved when step 3 ended.

    Either the storage is slow, or the training waits for each save.
    """
    with pytest.MonkeyPatch.context() as patch:
        if is_slow:
            patch.setattr(Store, "write", _later(0.3, Store.write))
        training = _training(job, torch.float32, folder)
        assert training.checkpoints is not None
        saved = 0
        for step in training.steps(until=4):
            if not is_slow:
                training.checkpoints.finish(job)
            step.run(lambda batch: token_loss(training.models[0], batch), reduction="sum")
            step.update()
            if step.number == 3:
                saved = training.checkpoints.last_saved
        training.checkpoints.finish(job)
        return saved


def _later(seconds: float, call: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        time.sleep(seconds)
        return call(*args)

    return run


@pytest.mark.parametrize(
    "name", ["fsdp on 2", "pp on 2", *(pytest.param(n, marks=pytest.mark.slow) for n in REST)]
)
@pytest.mark.ci
def test_a_save_in_the_background_holds_the_weights_of_its_step(tmp_path: Path, name: str) -> None:
    mesh = LAYOUTS[name]
    waited, late = tmp_path / "waited", tmp_path / "late"
    ranks = _ranks(mesh)
    assert run_ranks(_save_while_training, waited, False, nproc=ranks, mesh=mesh)[0] == 2
    assert run_ranks(_save_while_training, late, True, nproc=ranks, mesh=mesh)[0] == 0
    for step in (2, 4):
        assert digest(_stored(late, step)) == digest(_stored(waited, step))
    assert digest(_stored(late, 2)) != digest(_stored(late, 4))


@pytest.mark.parametrize(
    "stored",
    [
        pytest.param(["1 rank", "tp x fsdp on 4", "pp on 2"], marks=pytest.mark.ci),
        pytest.param(STORED, marks=pytest.mark.slow),
    ],
    ids=["three layouts", "all layouts"],
)
def test_a_checkpoint_of_each_layout_is_loaded_in_each_other_bit_by_bit(
    tmp_path: Path, stored: list[str]
) -> None:
    for name in stored:
        mesh = _mesh(name)
        run_ranks(_write, tmp_path / name, nproc=_ranks(mesh), mesh=mesh)
    for reader_name in stored:
        mesh = _mesh(reader_name)
        sources = [tmp_path / name for name in stored]
        targets = [tmp_path / f"{name} in {reader_name}" for name in stored]
        run_ranks(_copy, sources, targets, nproc=_ranks(mesh), mesh=mesh)
        for source, target in zip(sources, targets, strict=True):
            want, got = _stored(source, 2), _stored(target, 2)
            assert got.keys() == want.keys()
            assert digest(got) == digest(want), f"{source.name}, loaded in {reader_name}"
