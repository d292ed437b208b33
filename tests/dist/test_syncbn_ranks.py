"""Synchronised BatchNorm on 1 to 4 ranks against torch's plain layer on the whole batch."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from small_trainings import make_data, make_training, refusals
from torch import nn

import paceline
from paceline import Mesh
from paceline.errors import ConfigError, StepError
from paceline.job.job import Job
from paceline.parallel import ddp, syncbn
from paceline.testing import run_failing_ranks, run_ranks

Facts = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """Samples of each rank; 0 is padding. `layer` makes torch's layer, `sample` is a sample's shape."""

    name: str
    counts: tuple[int, ...]
    layer: Any = nn.BatchNorm1d
    sample: tuple[int, ...] = (3,)
    options: tuple[tuple[str, Any], ...] = ()
    dtype: torch.dtype = torch.float64
    mean: float = 0.3
    std: float = 1.0
    channels_last: bool = False
    steps: int = 2

    def make(self, dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(5)
        shape = (self.steps, sum(self.counts), *self.sample)
        x = self.mean + self.std * torch.randn(shape, generator=generator, dtype=torch.float64)
        x = x.to(self.dtype).to(dtype)
        target = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        layer = self.layer(self.sample[0], **dict(self.options)).double()
        if layer.weight is not None:
            with torch.no_grad():
                layer.weight.uniform_(0.5, 1.5, generator=generator)
                layer.bias.normal_(generator=generator)
        return layer.to(self.dtype).to(dtype), x, target


def _run(case: Case, layer: nn.Module, x: torch.Tensor, target: torch.Tensor) -> Facts:
    outputs, gradients = [], []
    for step in range(case.steps):
        here = x[step].clone()
        if case.channels_last:
            here = here.to(memory_format=torch.channels_last)
        here.requires_grad_()
        y = layer(here)
        if case.channels_last:
            assert y.is_contiguous(memory_format=torch.channels_last)
        (torch.tanh(y) * target[step]).sum().backward()
        assert here.grad is not None
        outputs.append(y.detach())
        gradients.append(here.grad)
    facts = {"y": torch.stack(outputs), "dx": torch.stack(gradients)}
    facts |= {f"d{name}": p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return facts | {name: b.clone() for name, b in layer.named_buffers()}


def _on_rank(job: Job, cases: list[Case]) -> list[Facts]:
    results = []
    for case in cases:
        layer, x, target = case.make(case.dtype)
        names = list(layer.state_dict())
        layer = syncbn.sync_batchnorm(job, layer)
        assert list(layer.state_dict()) == names
        begin, count = sum(case.counts[: job.rank]), case.counts[job.rank]
        mine = slice(begin, begin + count)
        if count == 0:
            syncbn.PaddingMode([layer]).set(True)
            mine = slice(0, 1)
            target = target * float("nan")  # the loss of a padding micro-batch may be anything
        results.append(_run(case, layer, x[:, mine], target[:, mine]))
    return results


def _whole(case: Case, dtype: torch.dtype) -> Facts:
    layer, x, target = case.make(dtype)
    return _run(case, layer, x, target)


def _merged(case: Case, ranks: list[Facts]) -> Facts:
    """What one process would hold; asserts that buffers are equal and that padding gave nothing."""
    real = [facts for facts, count in zip(ranks, case.counts, strict=True) if count]
    for facts, count in zip(ranks, case.counts, strict=True):
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            if name in facts:
                assert torch.equal(facts[name], ranks[0][name])
        if count == 0:
            assert all(not facts[name].any() for name in facts if name.startswith("d"))
    merged = {name: torch.cat([facts[name] for facts in real], dim=1) for name in ("y", "dx")}
    for name in ranks[0]:
        if name in ("dweight", "dbias"):
            merged[name] = sum(facts[name] for facts in ranks)
        elif name not in merged:
            merged[name] = ranks[0][name]
    return merged


def _assert_close(case: Case, got: Facts, want: Facts, tolerance: float) -> None:
    assert got.keys() == want.keys()
    for name in want:
        error = (got[name].double() - want[name].double()).norm()
        assert error <= tolerance * (1 + want[name].double().norm()), (
            case.name,
            name,
            float(error),
        )


OPTIONS = {
    "average": (("momentum", None),),
    "no affine": (("affine", False),),
    "no tracking": (("track_running_stats", False),),
}
CASES_BY_SIZE = {
    1: [Case("one process", (7,)), Case("one process, 2d", (3,), nn.BatchNorm2d, (2, 4, 3))],
    2: [
        Case("uneven", (3, 4)),
        Case("one sample", (1, 6)),
        Case("one sample each", (1, 1)),
        Case("padding", (0, 5)),
        Case("3d of 1d", (2, 3), nn.BatchNorm1d, (2, 5)),
        Case("2d", (2, 3), nn.BatchNorm2d, (3, 4, 5)),
        Case("channels last", (2, 3), nn.BatchNorm2d, (3, 4, 5), channels_last=True),
        Case("3d", (2, 1), nn.BatchNorm3d, (2, 3, 2, 2)),
        Case("torch's own", (3, 2), nn.SyncBatchNorm, (2, 3)),
        *[Case(name, (3, 2), options=options) for name, options in OPTIONS.items()],
    ],
    3: [
        Case("uneven", (5, 1, 2)),
        Case("two padding micro-batches", (0, 4, 0)),
        Case("2d", (1, 0, 1), nn.BatchNorm2d, (2, 3, 3)),
    ],
    4: [Case("mixed", (2, 0, 4, 1)), Case("all one", (1, 1, 1, 1), nn.BatchNorm3d, (2, 2, 2, 2))],
}


@pytest.mark.parametrize("nproc", [1, 2, 3, 4])
def test_equals_one_process_with_the_whole_batch(nproc: int) -> None:
    cases = CASES_BY_SIZE[nproc]
    single = [Case(**{**c.__dict__, "dtype": torch.float32}) for c in cases]
    ranks = run_ranks(_on_rank, cases + single, nproc=nproc)
    for index, case in enumerate(cases + single):
        got = _merged(case, [facts[index] for facts in ranks])
        # float64: a few roundings; float32: one process with plain BatchNorm rounds as much.
        tolerance = 1e-12 if case.dtype == torch.float64 else 2e-6
        _assert_close(case, got, _whole(case, case.dtype), tolerance)


def test_large_mean_in_float32_is_as_exact_as_torchs_plain_layer() -> None:
    case = Case(
        "large mean",
        (20, 30, 14),
        nn.BatchNorm2d,
        (2, 8, 8),
        dtype=torch.float32,
        mean=1e3,
        std=0.1,
    )
    ranks = run_ranks(_on_rank, [case], nproc=3)
    got = _merged(case, [facts[0] for facts in ranks])
    exact, plain = _whole(case, torch.float64), _whole(case, torch.float32)
    for name in ("y", "dx", "dweight", "running_var", "running_mean"):
        error = float((got[name] - exact[name]).norm() / exact[name].norm())
        theirs = float((plain[name] - exact[name]).norm() / exact[name].norm())
        # Numbers near 1000 are 6e-5 apart in float32, which is 6e-4 of this deviation.
        assert error < max(2 * theirs, 1e-6), name
        assert error < 1e-3, name


def _half(job: Job) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    case = Case("bf16", (5, 3), nn.BatchNorm2d, (3, 4, 4), steps=1)
    layer, x, target = case.make(torch.float32)
    layer = syncbn.sync_batchnorm(job, layer)
    mine = slice(0, 5) if job.rank == 0 else slice(5, 8)
    here = x[0, mine].bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(here)
        (torch.tanh(y.float()) * target[0, mine]).sum().backward()
    assert y.dtype == torch.bfloat16
    assert here.grad is not None
    assert here.grad.dtype == torch.bfloat16
    return y.detach(), here.grad, layer.running_mean, layer.running_var


def test_bf16_autocast_keeps_statistics_in_float32() -> None:
    case = Case("bf16", (5, 3), nn.BatchNorm2d, (3, 4, 4), steps=1)
    layer, x, target = case.make(torch.float32)
    want = _run(case, layer, x.bfloat16().float(), target)
    ranks = run_ranks(_half, nproc=2)
    for index, name in ((2, "running_mean"), (3, "running_var")):
        assert ranks[0][index].dtype == torch.float32
        torch.testing.assert_close(ranks[0][index], want[name], rtol=1e-6, atol=1e-6)
    y, dx = (torch.cat([rank[i] for rank in ranks]).float() for i in (0, 1))
    # bf16 has 8 bits of mantissa.
    torch.testing.assert_close(y, want["y"][0], rtol=8e-3, atol=8e-3)
    torch.testing.assert_close(dx, want["dx"][0], rtol=8e-3, atol=8e-3)


def _single_value(job: Job, padding: bool) -> None:
    layer = syncbn.sync_batchnorm(job, nn.BatchNorm1d(2))
    syncbn.PaddingMode([layer]).set(padding and job.rank > 0)
    layer(torch.ones(1, 2))


def test_one_value_in_all_is_an_error_on_all_ranks() -> None:
    for outcome in run_failing_ranks(_single_value, True, nproc=3):
        assert isinstance(outcome.error, ConfigError)
        assert outcome.error.count == 1
    run_ranks(_single_value, False, nproc=2)


def _in_a_model(job: Job) -> dict[str, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2)).double()
    net.eval()
    net[3].train()
    layer, weight = net[1], net[1].weight
    calls: list[int] = []
    net[1].register_forward_hook(lambda *_: calls.append(1))
    assert syncbn.sync_batchnorm(job, net) is net
    same = net[1] is layer and net[1].weight is weight and not net[1].training and net[3].training
    net.train()
    average = copy.deepcopy(net)  # an EMA copy; process groups cannot be copied
    model = ddp.ddp(job, net)
    torch.manual_seed(1)
    x = torch.randn(7, 4).double()
    mine = [slice(0, 5), slice(5, 7)][job.rank] if job.world_size == 2 else slice(0, 7)
    (model(x[mine]).pow(2).sum() * job.world_size / 7).backward()
    same = same and calls == [1]
    average(x[mine])
    average.eval()
    average[1]._forward_hooks.clear()  # a lambda cannot be pickled
    unpickled = pickle.loads(pickle.dumps(average))
    unpickled(x)
    with pytest.raises(StepError, match="belongs to no job"):
        unpickled.train()(x)
    return {
        "same": same,
        "gradients": torch.cat([p.grad.flatten() for p in net.parameters()]),
        "var": net[1].running_var,
        "copy": average[1].running_var,
        "eval": average(x).detach(),
    }


def test_in_a_wrapped_model_with_copies_and_hooks() -> None:
    (one,) = run_ranks(_in_a_model, nproc=1)
    for facts in run_ranks(_in_a_model, nproc=2):
        assert facts["same"]
        assert one["same"]
        for name in ("gradients", "var", "copy", "eval"):
            torch.testing.assert_close(facts[name], one[name], rtol=1e-12, atol=1e-12)
        assert torch.equal(facts["var"], facts["copy"])


def _wrong(job: Job, kind: str) -> None:
    """Some ranks have converted a layer, or all have in a pipeline."""
    inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model: nn.Module = nn.Sequential(nn.Linear(4, 4), inner)
    converts = job.rank == 0 or kind == "pipeline"
    if converts and kind != "after":
        syncbn.sync_batchnorm(job, model)
    if kind == "pipeline":
        model = paceline.pipeline(job, model, split="1")
    else:
        model = paceline.ddp(job, model)
    if converts and kind == "after":
        syncbn.sync_batchnorm(job, model)
    make_training(job, model, make_data(8))


def test_a_layer_that_some_ranks_have_converted_is_refused_on_all() -> None:
    text = 'ranks hold different values of "names of synchronised BatchNorm layers": '
    for found in run_ranks(refusals, _wrong, ["before", "after"], nproc=2):
        for kind in ("before", "after"):
            assert found[kind][1].startswith(text + '["1.1"] on rank 0, [] on rank 1.')


def test_a_pipeline_refuses_synchronised_layers_on_all_ranks() -> None:
    mesh = Mesh(pp=2, dp_replicate=2)
    for found in run_ranks(refusals, _wrong, ["pipeline"], nproc=4, mesh=mesh):
        assert found["pipeline"][1].startswith("SyncBatchNorm is not supported in a pipeline.")
