"""`ddp(compress=...)`: gradients are sent smaller, with a measured error and a state that resumes."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from small_trainings import backwards, make_data, refusals, weights_of
from torch import nn

import paceline
from paceline.parallel import compression
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


def _train(
    job: Any, kind: str, folder: str | None = None, until: int = 8, count: str = "samples"
) -> list[float]:
    compression.MEASURE_EVERY = 4
    model = paceline.ddp(job, _model(), bucket_mb=_BUCKET_MB, compress=KINDS[kind])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    batches = paceline.Batches(job, make_data(48), global_batch=12, micro_batch=2)
    checkpoints = None if folder is None else paceline.Checkpoints(f"{folder}/checkpoints")
    training = paceline.Training(
        job, model, optimizer, batches, checkpoints=checkpoints, count=count
    )
    training.report(folder)
    for step in training.steps(until=until):
        backwards(training, step)
        step.update()
        training.log(loss=step.loss)
    return weights_of(model)


def _train_each(job: Any, folder: str) -> dict[str, list[float]]:
    """The weights after 8 steps: of each kind, and resumed after the fifth step."""
    results = {}
    for kind in KINDS:
        results[kind] = _train(job, kind, f"{folder}/{kind}/whole")
        _train(job, kind, f"{folder}/{kind}/resumed", until=5)
        results[f"{kind} resumed"] = _train(job, kind, f"{folder}/{kind}/resumed")
    results["tokens"] = _train(job, "powersgd", count="tokens")
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
    assert got["powersgd"] == pytest.approx(got["none"], abs=0.1)
    assert got["powersgd"] != pytest.approx(got["none"], abs=1e-4)
    for kind in ("fp16", "bf16"):
        assert got[f"{kind} resumed"] == got[kind]
    # The mean of what was left out is saved, so a sum is rounded once more.
    assert got["powersgd resumed"] == pytest.approx(got["powersgd"], abs=1e-5)
    assert got["tokens"] == pytest.approx(got["powersgd"], abs=1e-5)
    for kind in KINDS:
        text = (tmp_path / f"{kind}/whole/metrics.jsonl").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        measured = {x["step"]: x for x in lines if "compression_error" in x}
        assert list(measured) == ([] if kind == "none" else [1, 5])
        if kind == "none":
            continue
        elements = sum(p.numel() for p in _model().parameters())
        saved = {step: x["compression_saved_bytes"] for step, x in measured.items()}
        if kind == "powersgd":
            # Two matrices of 64 x 64 and one of 64 x 4 become 2 columns and 2 rows each; 3 x 64 does not.
            matrices = 2 * (_WIDTH * _WIDTH - 2 * (_WIDTH + _WIDTH))
            assert saved == {1: 0, 5: 4 * matrices}
            assert measured[1]["compression_error"] < 1e-6
            assert 0.01 < measured[5]["compression_error"] < 0.9
        else:
            assert saved == {1: 2 * elements, 5: 2 * elements}
            low, high = (1e-5, 1e-3) if kind == "fp16" else (1e-4, 1e-2)
            assert all(low < x["compression_error"] < high for x in measured.values())


def test_the_state_of_powersgd_fits_other_numbers_of_ranks(tmp_path: Path) -> None:
    whole = run_ranks(_train, "powersgd", None, nproc=3)[0]
    run_ranks(_train, "powersgd", str(tmp_path), 5, nproc=3)
    for got in run_ranks(_train, "powersgd", str(tmp_path), nproc=2):
        assert got == pytest.approx(whole, abs=1e-4)


def _wrong(job: Any, kind: str) -> None:
    options: dict[str, Any] = {
        "name": {"compress": "int8"},
        "static graph": {"compress": "powersgd", "static_graph": True},
        "find unused": {"compress": "powersgd", "find_unused": True},
        "differs": {"compress": ["fp16", "bf16"][job.rank]},
    }.get(kind, {"compress": "powersgd"})
    module = _model()
    if kind == "16 bits":
        module, options = module.bfloat16(), {"compress": "fp16"}
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
    "static graph": "cannot be combined with static_graph",
    "find unused": "cannot be combined with static_graph or find_unused",
    "sparse": "compression cannot be combined with sparse gradients",
    "differs": "ranks wrap different models",
    "16 bits": "has no effect: all gradients have 16 bits",
    "rank": "rank must be an integer of at least 1",
    "start": "start_step must be an integer of at least 2",
    "loss scale": "cannot be combined with PowerSGD",
    "reproducible": "cannot compress gradients",
}


def _wrong_uses(job: Any) -> dict[str, Any]:
    return refusals(job, _wrong, WRONG)


def test_wrong_uses_are_refused_on_all_ranks() -> None:
    for found in run_ranks(_wrong_uses, nproc=2):
        for kind, text in WRONG.items():
            name, message = found[kind]
            assert name == ("RankDisagreement" if kind == "differs" else "ConfigError")
            assert text in message


def _resume_with_other_buckets(job: Any, folder: str) -> Any:
    global _BUCKET_MB
    _train(job, "powersgd", folder, until=5)
    _BUCKET_MB = 0.01
    try:
        _train(job, "powersgd", folder)
    except paceline.CheckpointError as error:
        return str(error)
    finally:
        _BUCKET_MB = 0.02
    return None


def _load_elsewhere(job: Any) -> tuple[bool, bool]:
    """Whether a refused state left the weights as they were, and whether an uncompressed model takes it."""

    def make(**options: Any) -> paceline.Training:
        model = paceline.ddp(job, _model(), **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        return paceline.Training(
            job, model, optimizer, paceline.Batches(job, make_data(48), global_batch=12)
        )

    saved = make(bucket_mb=0.02, compress="powersgd").state_dict()
    saved["models"] = [{name: value + 1 for name, value in saved["models"][0].items()}]
    refusing, plain = make(bucket_mb=0.01, compress="powersgd"), make()
    before = weights_of(*refusing.models)
    with pytest.raises(paceline.CheckpointError):
        refusing.load_state_dict(saved)
    plain.load_state_dict(saved)
    expected = [value + 1 for value in before]
    return weights_of(*refusing.models) == before, weights_of(*plain.models) == pytest.approx(
        expected
    )


def test_a_refused_state_changes_nothing() -> None:
    assert run_ranks(_load_elsewhere, nproc=2) == [(True, True)] * 2


def test_the_state_of_other_buckets_is_refused(tmp_path: Path) -> None:
    for message in run_ranks(_resume_with_other_buckets, str(tmp_path), nproc=2):
        assert "saved with bucket_mb=0.02" in message


def _load_with_other_rank(job: Any) -> str:
    def compression(rank: int) -> Any:
        options = paceline.PowerSGD(rank=rank, start_step=2)
        model: Any = paceline.ddp(job, torch.nn.Linear(64, 64), compress=options)
        for _ in range(4):
            model(torch.randn(4, 64)).sum().backward()
        return model.compression

    saved = compression(2).state_dict()
    with pytest.raises(paceline.CheckpointError) as refused:
        compression(4).load_state_dict(saved)
    return str(refused.value)


def test_the_state_of_another_rank_of_powersgd_is_refused() -> None:
    for message in run_ranks(_load_with_other_rank, nproc=2):
        assert "saved with rank 2" in message
        assert "PowerSGD(rank=2)" in message
