"""A sharded model trains like one process, with ragged steps, empty ranks, clipping, saving and resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_trainings import loss_sum, make_data, refusals
from torch import nn
from torch.distributed.tensor import DTensor

import paceline
from paceline.testing import run_ranks

Result = tuple[list[float], list[float], dict[str, torch.Tensor]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(7, 9), nn.Linear(9, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.outer(torch.tanh(self.inner(x)))
        return x + hidden


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(4, 7)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.last = nn.Linear(7, 3)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        for block in self.blocks:
            hidden = block(hidden)
        out: torch.Tensor = self.last(hidden)
        return out


def _training(job: Any, folder: str | None, *, count: str = "samples") -> paceline.Training:
    net = Net()
    with torch.no_grad():
        net.last.bias.add_(job.rank)  # ranks begin with the weights of rank 0
    model = paceline.fsdp(job, net, blocks=Block)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # 26 samples in steps of 8 and micro-batches of at most 1: the last step has 2, so that some of 4 ranks
    # have none.
    batches = paceline.Batches(job, make_data(26, torch.float64), global_batch=8, micro_batch=1)
    checkpoints = paceline.Checkpoints(folder, every_steps=2) if folder else None
    return paceline.Training(job, model, optimizer, batches, count=count, checkpoints=checkpoints)


def _train(job: Any, folder: str | None, until: int, count: str, export: str | None) -> Result:
    training = _training(job, folder, count=count)
    model = training.models[0]
    sharded = all(isinstance(p, DTensor) for p in model.parameters())
    assert sharded == (job.world_size > 1)
    losses, norms = [], []
    for step in training.steps(until=until):
        step.run(lambda batch: (loss_sum(model, batch), len(batch[1])))
        step.update(clip_norm=0.5)
        losses.append(float(step.loss))
        norms.append(float(step.grad_norm))
    if export is not None:
        training.export(export)
    whole = training._context.strategy.whole_state(model)
    return losses, norms, {name: value.clone() for name, value in whole.items()}


def _assert_close(got: Result, want: Result) -> None:
    # float64: sums of at most 8 gradients in another order, over 8 steps of AdamW.
    assert got[0] == pytest.approx(want[0], rel=1e-9)
    assert got[1] == pytest.approx(want[1], rel=1e-9)
    for name, value in want[2].items():
        torch.testing.assert_close(got[2][name], value, rtol=1e-8, atol=1e-10)


def test_it_trains_as_one_process_and_resumes_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    want = run_ranks(_train, None, 8, "samples", None, nproc=1)[0]
    for nproc in (2, 4):
        for got in run_ranks(
            _train, None, 8, "samples", str(tmp_path / f"{nproc}.pth"), nproc=nproc
        ):
            _assert_close(got, want)
        saved = torch.load(tmp_path / f"{nproc}.pth")
        torch.testing.assert_close(saved, want[2], rtol=1e-8, atol=1e-10)
    folder = str(tmp_path / "run")
    run_ranks(_train, folder, 3, "samples", None, nproc=4)
    resumed = run_ranks(_train, folder, 5, "samples", None, nproc=2)[0]
    assert resumed[0] == pytest.approx(want[0][3:5], rel=1e-9)
    last = run_ranks(_train, folder, 8, "samples", None, nproc=1)[0]
    _assert_close((want[0][:5] + last[0], want[1][:5] + last[1], last[2]), want)


@pytest.mark.slow
def test_tokens_and_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    want = run_ranks(_train, None, 5, "tokens", None, nproc=1)[0]
    monkeypatch.setenv("PACELINE_BACKEND", "gloo")
    for got in run_ranks(_train, None, 5, "tokens", None, nproc=3):
        _assert_close(got, want)


def _resumed_bits(job: Any, folder: str, until: int) -> list[bytes]:
    _, _, whole = _train(job, folder, until, "samples", None)
    return [value.numpy().tobytes() for value in whole.values()]


def test_a_resumed_training_is_bit_equal_to_a_straight_one(tmp_path: Path) -> None:
    straight = run_ranks(_resumed_bits, str(tmp_path / "a"), 6, nproc=2)
    run_ranks(_resumed_bits, str(tmp_path / "b"), 3, nproc=2)
    assert run_ranks(_resumed_bits, str(tmp_path / "b"), 6, nproc=2) == straight


WRONG = {
    "blocks": "'layers.*' matches no submodule",
    "twice": "sharded already",
    "early": "make the optimizer after paceline.fsdp",
    "fp16": "fp16",
    "exact": "reproducible",
    "evaluate": "evaluate does not support",
    "unused": "no gradient reached extra.weight, extra.bias",
}


def _refused(job: Any, kind: str) -> None:
    net = Net()
    early = torch.optim.SGD(net.parameters(), lr=0.1)
    if kind == "unused":
        net.extra = nn.Linear(1, 1).double()
    model = paceline.fsdp(job, net, blocks="layers.*" if kind == "blocks" else ["blocks.*"])
    if kind == "twice":
        paceline.fsdp(job, model, blocks=Block)
    optimizer = early if kind == "early" else torch.optim.SGD(model.parameters(), lr=0.1)
    data = make_data(8, torch.float64)
    batches = paceline.Batches(job, data, global_batch=4)
    precision = "fp16" if kind == "fp16" else "fp32"
    training = paceline.Training(
        job, model, optimizer, batches, precision=precision, reproducible=kind == "exact"
    )
    if kind == "evaluate":
        paceline.evaluate(job, model, data, lambda model, batch: {})
    for step in training.steps(until=1):
        step.run(lambda batch: loss_sum(model, batch))
        step.update()


def test_wrong_use_is_refused_on_all_ranks() -> None:
    for found in run_ranks(refusals, _refused, list(WRONG), nproc=2):
        assert all(text in found[kind][1] for kind, text in WRONG.items()), found
