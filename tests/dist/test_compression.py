"""`ddp(compress=...)`: gradients are sent smaller."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from small_trainings import backwards, make_data, refusals, weights_of
from torch import nn

import paceline
from paceline.testing import run_ranks

KINDS: dict[str, Any] = {
    "none": None,
    "fp16": "fp16",
    "bf16": "bf16",
    "powersgd": paceline.PowerSGD(rank=2, start_step=3),
}
_WIDTH = 64
_BUCKET_MB = 0.02  # several buckets


def _model() -> nn.Module:
    torch.manual_seed(7)
    sizes = [4, _WIDTH, _WIDTH, _WIDTH]
    layers = [nn.Linear(*pair) for pair in pairwise(sizes)]
    return nn.Sequential(
        *(part for layer in layers for part in (layer, nn.Tanh())), nn.Linear(_WIDTH, 3)
    )


def _train(job: Any, kind: str, folder: str | None = None, until: int = 8) -> list[float]:
    model = paceline.ddp(job, _model(), bucket_mb=_BUCKET_MB, compress=KINDS[kind])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    batches = paceline.Batches(job, make_data(48), global_batch=12, micro_batch=2)
    checkpoints = None if folder is None else paceline.Checkpoints(folder)
    training = paceline.Training(job, model, optimizer, batches, checkpoints=checkpoints)
    for step in training.steps(until=until):
        backwards(training, step)
        step.update()
    return weights_of(model)


def _train_each(job: Any, folder: str) -> dict[str, list[float]]:
    """The weights after 8 steps of each kind, and of PowerSGD resumed after the fifth step."""
    results = {kind: _train(job, kind) for kind in KINDS}
    _train(job, "powersgd", folder, until=5)
    results["resumed"] = _train(job, "powersgd", folder)
    return results


@pytest.mark.parametrize(
    ("nproc", "backend"),
    [(2, "gloo"), (3, "gloo"), (2, "shm"), pytest.param(4, "shm", marks=pytest.mark.slow)],
)
@pytest.mark.ci
def test_compressed_trainings(
    nproc: int, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_BACKEND", backend)
    results = run_ranks(_train_each, str(tmp_path), nproc=nproc)
    assert all(result == results[0] for result in results)
    got = results[0]
    # 11 and 8 bits of the mantissa; the weights are up to 0.6
    assert got["fp16"] == pytest.approx(got["none"], abs=2e-4)
    assert got["bf16"] == pytest.approx(got["none"], abs=2e-3)
    assert got["fp16"] != got["none"] != got["bf16"]
    for kind in ("powersgd", "resumed"):
        assert got[kind] == pytest.approx(got["none"], abs=0.1)
        assert got[kind] != pytest.approx(got["none"], abs=1e-4)


def _wrong(job: Any, kind: str) -> None:
    options: dict[str, Any] = {
        "name": {"compress": "int8"},
        "differs": {"compress": ["fp16", "bf16"][job.rank]},
    }.get(kind, {"compress": "powersgd"})
    module = _model()
    if kind == "sparse":
        module, options = nn.Embedding(4, 2, sparse=True), {"compress": "bf16"}
    if kind == "rank":
        options = {"compress": paceline.PowerSGD(rank=0)}
    if kind == "start":
        options = {"compress": paceline.PowerSGD(start_step=1)}
    model = paceline.ddp(job, module, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    batches = paceline.Batches(job, make_data(48), global_batch=12, micro_batch=2)
    paceline.Training(
        job,
        model,
        optimizer,
        batches,
        precision="fp16" if kind == "loss scale" else "fp32",
        reproducible=kind == "reproducible",
    )


WRONG = {
    "name": "unknown compression: 'int8'",
    "sparse": "compression cannot be combined with sparse gradients",
    "differs": "ranks wrap different models",
    "rank": "rank must be an integer of at least 1",
    "start": "start_step must be an integer of at least 2",
    "loss scale": "cannot be combined with PowerSGD",
    "reproducible": "cannot compress gradients",
}


def test_wrong_uses_are_refused_on_all_ranks() -> None:
    for found in run_ranks(refusals, _wrong, WRONG, nproc=2):
        for kind, text in WRONG.items():
            name, message = found[kind]
            assert name == ("RankDisagreement" if kind == "differs" else "ConfigError")
            assert text in message
