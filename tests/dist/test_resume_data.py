"""A training that is resumed with other data or settings, and ranks whose datasets differ."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from small_trainings import record_log, refusals
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler

import paceline
from paceline.testing import run_ranks


class _Items(Dataset[torch.Tensor]):
    """Item n is n * scale, or random."""

    def __init__(self, size: int, scale: float = 1.0, *, is_random: bool = False) -> None:
        self.size, self.scale, self.is_random = size, scale, is_random
        self.read: list[int] = []  # in this process

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, n: int) -> torch.Tensor:
        self.read.append(n)
        value = torch.rand((), generator=torch.Generator().manual_seed(torch.seed())).item()
        return torch.tensor([value if self.is_random else n * self.scale])


def _train(job: Any, folder: str, items: Any, until: int | None, **options: Any) -> list[int]:
    """Train epoch 0 to `until`; returns the samples that this rank has used."""
    training_options = {name: options.pop(name) for name in ("precision",) if name in options}
    model = paceline.ddp(job, nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batches = paceline.Batches(job, items, **{"global_batch": 10, **options})
    saves = paceline.Checkpoints(folder, every_steps=5)
    training = paceline.Training(
        job, model, optimizer, batches, checkpoints=saves, **training_options
    )
    used: list[int] = []
    for step in training.steps(epochs=1, until=until):
        for x in step:
            values = x[0] if isinstance(x, list) else x
            used += values[:, 0].round().int().tolist()
            step.backward(model(values).sum(), count=len(values), reduction="sum")
        step.update()
    return used


CHANGED: dict[str, Any] = {
    "grew": lambda: {"items": _Items(110)},
    "shrank": lambda: {"items": _Items(90)},
    "not shuffled": lambda: {"items": _Items(100), "shuffle": False},
    "other sampler": lambda: {
        "items": DataLoader(
            _Items(100), batch_size=10, sampler=WeightedRandomSampler([1.0] * 100, 100)
        )
    },
}


def _first(job: Any, folder: str, until: int | None) -> list[int]:
    return _train(job, folder, _Items(100), until)


def _change_data(job: Any, folder: str) -> dict[str, Any]:
    def resume(job: Any, name: str) -> None:
        options = CHANGED[name]()
        _train(job, folder, options.pop("items"), None, **options)

    return refusals(job, resume, CHANGED)


@pytest.mark.parametrize("nproc", [1, 2, pytest.param(3, marks=pytest.mark.ci)])
def test_a_position_in_other_data_is_refused(tmp_path: Path, nproc: int) -> None:
    run_ranks(_first, str(tmp_path), 5, nproc=nproc)
    for found in run_ranks(_change_data, str(tmp_path), nproc=nproc):
        assert list(found) == list(CHANGED)
        for error, text in found.values():
            assert error == "CheckpointError"
            assert "inside epoch 0" in text


def _settings(job: Any, folder: str) -> str:
    texts = record_log()
    _train(job, folder, _Items(100, 2.0), 6, global_batch=20, precision="bf16")
    return "\n".join(texts)


def test_other_settings_and_other_samples_are_reported(tmp_path: Path) -> None:
    run_ranks(_first, str(tmp_path), 5, nproc=2)
    text = run_ranks(_settings, str(tmp_path), nproc=2)[0]
    assert "global_batch is 20, in the checkpoint 10; precision is bf16" in text
    assert "resumes with other samples" in text


def _scheduled(job: Any, folder: Path, how: str) -> str:
    model = paceline.ddp(job, nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    batches = paceline.Batches(job, TensorDataset(torch.zeros(40, 1)), global_batch=4)
    saves = paceline.Checkpoints(folder, every_steps=1)
    training = paceline.Training(
        job,
        model,
        optimizer,
        batches,
        checkpoints=saves,
        schedule=scheduler if how == "given" else None,
    )
    if how == "kept":
        training.keep(scheduler=scheduler)
    texts = record_log()
    training.resume()
    for step in training.steps(until=training.number + 3):
        for (x,) in step:
            step.backward(model(x).sum(), count=len(x), reduction="sum")
        step.update()
        if how != "given":
            scheduler.step()
    return "\n".join(texts)


@pytest.mark.parametrize("how", ["given", "kept", "forgotten"])
def test_a_scheduler_that_is_not_restored_is_reported(tmp_path: Path, how: str) -> None:
    for is_resumed in (False, True):
        with paceline.join() as job:
            text = _scheduled(job, tmp_path, how)
        assert ("scheduler was not restored" in text) is (is_resumed and how == "forgotten")
        assert how != "forgotten" or "goes on with the settings" not in text


class _Threaded(_Items):
    """Reads in a thread, which a forked process does not have."""

    def __init__(self) -> None:
        super().__init__(100)
        self.pool = ThreadPoolExecutor(1)
        self.pool.submit(int).result()

    def __getitem__(self, n: int) -> torch.Tensor:
        return self.pool.submit(super().__getitem__, n).result()


def _threaded(job: Any, folder: str) -> int:
    return len(_train(job, folder, _Threaded(), 2))


@pytest.mark.ci
def test_a_dataset_that_cannot_be_read_in_a_forked_process_is_trained_on(tmp_path: Path) -> None:
    assert sum(run_ranks(_threaded, str(tmp_path), nproc=2)) == 20


def _read_by_ranks(job: Any, folder: str, workers: int) -> tuple[dict[str, Any], int]:
    """The refusals of datasets, and how many samples of a dataset without a difference this rank has read."""
    same = _Items(100)
    last = job.rank == job.world_size - 1
    datasets: dict[str, Any] = {
        "other on the last rank": _Items(100, 1.0 + last),
        "tensors": TensorDataset(torch.arange(100.0)[:, None] + (job.rank > 0)),
        "random": _Items(100, is_random=True),
        "same": same,
    }

    def start(job: Any, kind: str) -> None:
        options = {"workers": workers, "sample_randomness": kind != "random"}
        _train(job, f"{folder}/{kind}", datasets[kind], 2, **options)

    return refusals(job, start, datasets), len(same.read)


@pytest.mark.parametrize(("nproc", "workers"), [(2, 0), (2, 2), (3, 0)])
def test_ranks_with_other_samples_are_refused(tmp_path: Path, nproc: int, workers: int) -> None:
    ranks = run_ranks(_read_by_ranks, str(tmp_path), workers, nproc=nproc)
    for found, _ in ranks:
        assert list(found) == ["other on the last rank", "tensors"]
        for error, text in found.values():
            assert error == "RankDisagreement"
            assert "other samples than rank 0" in text
    # The check reads in another process: the dataset may open files at its first sample.
    assert sum(read for _, read in ranks) == (20 if workers == 0 else 0)
