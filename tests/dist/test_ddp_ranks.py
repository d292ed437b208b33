"""DDP on 2 to 4 ranks: ranks without samples, unused and unknown parameters, buffers, compression."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_trainings import (
    Recording,
    check_messages,
    make_data,
    make_training,
    refusals,
    train,
    weights_of,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import PeerFailed, StepError
from paceline.job.job import Job
from paceline.parallel.modules import broadcast_state, equalize_buffers
from paceline.testing import digest, run_failing_ranks, run_ranks


def _deep(width: int = 37) -> nn.Module:
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(width, 1))


class Watched(nn.Module):
    """Counts what reaches it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(3, 2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("flags", torch.tensor([seed > 0, True, False]))
        self.register_buffer("scale", torch.tensor(float(seed), dtype=torch.float16))
        self.register_buffer("table", torch.full((3, 2), float(seed), dtype=torch.float64).t())
        self.register_buffer("nothing", torch.empty(0))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x))


def _construct(job: Job) -> dict[str, Any]:
    net = Watched(seed=job.rank)
    net.frozen.eval()

    def called(*_: Any) -> None:
        net.calls += 1

    net.register_forward_hook(called)
    net.layer.weight.register_hook(called)
    net.layer.weight.register_post_accumulate_grad_hook(called)
    before = torch.get_rng_state()
    net.layer.bias.grad = torch.ones(2)
    model = paceline.ddp(job, net)
    assert paceline.unwrap(model) is net
    assert torch.equal(before, torch.get_rng_state())
    assert net.calls == 0
    assert net.training
    assert not net.frozen.training
    assert net.layer.weight.grad is None
    assert net.layer.bias.grad.tolist() == [1, 1]  # torch makes it a view into a bucket
    state = {name: value.clone() for name, value in net.state_dict().items()}
    net.norm.running_mean.fill_(job.rank + 1)
    net.norm.num_batches_tracked.fill_(job.rank + 2**40)
    net.flags.fill_(job.rank > 0)
    net.table.fill_(job.rank)
    equalize_buffers(job, model)
    return {"state": state, "buffers": dict(net.named_buffers())}


def test_construction_gives_rank_0s_values_and_leaves_the_rest() -> None:
    want = Watched(seed=0).state_dict()
    for facts in run_ranks(_construct, nproc=2):
        assert all(torch.equal(facts["state"][name], want[name]) for name in want)
        assert facts["buffers"]["norm.running_mean"].tolist() == [1, 1]
        assert facts["buffers"]["norm.num_batches_tracked"] == 2**40
        assert not facts["buffers"]["flags"].any()
        assert not facts["buffers"]["table"].any()


class _Strided(nn.Module):
    """Holds a parameter and a buffer whose elements do not lie side by side."""

    def __init__(self, value: float) -> None:
        super().__init__()
        rows = torch.arange(12.0).reshape(3, 4) + value
        self.weight = nn.Parameter(rows[:, :2])
        self.register_buffer("table", rows[:, 2:])


def _broadcast(job: Job) -> list[list[list[float]]]:
    net = _Strided(100.0 * job.rank)
    broadcast_state(job, net, job.group)
    return [tensor.tolist() for tensor in (net.weight, net.table)]


def test_strided_values_become_those_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_BACKEND", "gloo")
    want = [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 11]]]
    assert run_ranks(_broadcast, nproc=2) == [want] * 2


class Heads(nn.Module):
    """A trunk and three heads, of which the input chooses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(2, 3)
        self.heads = nn.ModuleList([nn.Linear(3, 1) for _ in range(3)])

    def forward(self, x: torch.Tensor, heads: tuple[int, ...] = (0, 1, 2)) -> torch.Tensor:
        hidden = torch.tanh(self.trunk(x))
        return torch.cat([self.heads[i](hidden) for i in heads])


Gradients = list[torch.Tensor | None]


def _one_sample_a_step(job: Job) -> list[list[Gradients]]:
    """The gradients of three steps, in which all ranks but one have no sample."""
    data = TensorDataset(torch.randn(3, 2, generator=torch.Generator().manual_seed(4)))
    found = []
    for find_unused in (False, True):
        heads = (0, 2) if find_unused else (0, 1, 2)
        model = paceline.ddp(job, Heads(), bucket_mb=1.0, find_unused=find_unused)
        training = make_training(job, model, data, optimizer=Recording, global_batch=1)
        train(training, lambda m, batch, heads=heads: m(batch[0], heads).sum(), until=3)
        found.append(training.optimizers[0].seen)
    return found


def test_ranks_without_samples_take_part() -> None:
    (want,) = run_ranks(_one_sample_a_step, nproc=1)
    for rank in run_ranks(_one_sample_a_step, nproc=3):
        torch.testing.assert_close(rank, want)


def _looks(job: Job, looks: bool) -> list[float]:
    """The weights after steps of 2 micro-batches; rank 0 may run forwards of its own between them."""
    torch.manual_seed(0)
    model = paceline.ddp(job, nn.Linear(4, 3))
    for step in make_training(job, model, make_data(24), micro_batch=1).steps(epochs=1):
        step.run(lambda batch: nn.functional.cross_entropy(model(batch[0]), batch[1]))
        if looks and job.rank == 0 and step.number > 1:
            model(torch.ones(1, 4))  # with gradients, and without a backward
        step.update()
    return weights_of(model)


def test_a_forward_of_one_rank_between_steps_changes_nothing() -> None:
    plain, looked = (run_ranks(_looks, looks, nproc=2) for looks in (False, True))
    assert looked == plain


def _unused(job: Job, on: tuple[int, ...], *, earlier: bool = False, **options: bool) -> None:
    """Steps of 2 micro-batches on each rank; these ranks use two of three heads, of the last one at least."""
    model = paceline.ddp(job, Heads(), **options)
    data = TensorDataset(torch.ones(16, 2))
    training = make_training(job, model, data, global_batch=2 * job.world_size, micro_batch=1)
    for step in training.steps(until=2):
        for number, (x,) in enumerate(step):
            unused = job.rank in on and not (earlier and number == 0)
            step.backward(model(x, (0, 2) if unused else (0, 1, 2)).sum(), reduction="sum")
        step.update()


def _unused_in_the_last(job: Job) -> None:
    _unused(job, (0, 1), earlier=True)


def test_an_unused_parameter_is_named() -> None:
    for outcome in run_failing_ranks(_unused, (0, 1), nproc=2):
        assert isinstance(outcome.error, StepError)
        assert outcome.error.parameters == ["heads.1.weight", "heads.1.bias"]
        assert "find_unused=True" in str(outcome.error)
    # On one rank: the ranks that wait for its gradients end too.
    outcomes = run_failing_ranks(_unused, (1,), nproc=3)
    assert isinstance(outcomes[1].error, StepError)
    for rank in (0, 2):
        error = outcomes[rank].error
        assert isinstance(error, PeerFailed)
        assert error.rank == 1
        assert "no gradient reached heads.1.weight, heads.1.bias" in str(error)
    # Unused in the last micro-batch only: all parameters have a gradient.
    for outcome in run_failing_ranks(_unused_in_the_last, nproc=2):
        assert isinstance(outcome.error, StepError)
        assert outcome.error.parameters == []
        assert "direct cause" in outcome.text


def _compiled_or_not(job: Job, compiled: bool) -> tuple[str, list[str]]:
    net = _deep()
    inner: Any = torch.compile(net, backend="aot_eager") if compiled else net
    data = TensorDataset(torch.randn(24, 37, generator=torch.Generator().manual_seed(1)))
    model = paceline.ddp(job, inner)
    training = make_training(job, model, data, global_batch=8, micro_batch=2, precision="bf16")
    train(training, lambda m, batch: m(batch[0]).square().sum(), until=3, clip_norm=1.0)
    return digest(net.state_dict()), list(training.state_dict()["models"][0])


def test_what_is_compiled_inside_of_ddp_trains_and_is_saved_as_the_plain_model() -> None:
    plain, compiled = (run_ranks(_compiled_or_not, each, nproc=2) for each in (False, True))
    assert compiled == plain
    assert plain[0] == plain[1]


def _compressed(job: Any) -> list[list[float]]:
    found = []
    for compress in (None, "fp16", "bf16", paceline.PowerSGD(rank=2, start_step=3)):
        torch.manual_seed(7)
        layers = [nn.Linear(4, 64), nn.Linear(64, 64), nn.Linear(64, 64)]
        net = nn.Sequential(*(m for each in layers for m in (each, nn.Tanh())), nn.Linear(64, 3))
        model = paceline.ddp(job, net, bucket_mb=0.01, compress=compress)  # several buckets
        train(make_training(job, model, make_data(48), global_batch=12, micro_batch=2), until=8)
        found.append(weights_of(model))
    return found


@pytest.mark.ci
@pytest.mark.parametrize(("nproc", "backend"), [(2, "gloo"), (3, "shm")])
def test_compressed_gradients(nproc: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_BACKEND", backend)
    results = run_ranks(_compressed, nproc=nproc)
    assert all(result == results[0] for result in results)
    none, fp16, bf16, power_sgd = results[0]
    # 11 and 8 bits of the mantissa; the weights are up to 0.6
    assert fp16 == pytest.approx(none, abs=2e-4)
    assert bf16 == pytest.approx(none, abs=2e-3)
    assert power_sgd == pytest.approx(none, abs=0.1)
    assert fp16 != none != bf16
    assert power_sgd != pytest.approx(none, abs=1e-4)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(5, 4), nn.LayerNorm(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.table(ids)))
        return out


def _differs(job: Job, change: Callable[[nn.Module], Any]) -> None:
    """Rank 1 has another model."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    if job.rank == 1:
        change(net)
    paceline.ddp(job, net)


def _on_meta(job: Job) -> None:
    with torch.device("meta"):
        net = Tied()
    paceline.ddp(job, net)


def _trained(job: Job, model: nn.Module, **options: Any) -> None:
    training = make_training(job, model, TensorDataset(torch.ones(8, 2)), **options)
    train(training, lambda m, batch: m(batch[0]).sum(), until=2)


def _unfrozen(job: Job) -> None:
    net = Heads()
    net.trunk.bias.requires_grad_(False)
    model = DistributedDataParallel(net, process_group=job.group)
    training = make_training(job, model, TensorDataset(torch.ones(8, 2)))
    net.trunk.bias.requires_grad_(True)
    train(training, lambda m, batch: m(batch[0]).sum(), until=1)


def _unreached(job: Job) -> None:
    model = paceline.ddp(job, Heads())
    parameter = torch.ones((), requires_grad=True)
    training = make_training(job, model, TensorDataset(torch.ones(8, 2)))
    train(training, lambda m, batch: parameter * batch[0].sum(), until=1)


WRONG: dict[str, Callable[[Any], Any]] = {
    "shape": lambda job: _differs(job, lambda net: net.append(nn.Linear(2, 3 + job.rank))),
    "fewer": lambda job: _differs(job, lambda net: net.pop(1)),
    "frozen": lambda job: _differs(job, lambda net: net[0].requires_grad_(False)),
    "option": lambda job: paceline.ddp(job, Heads(), find_unused=job.rank == 1),
    "compression differs": lambda job: paceline.ddp(
        job, Heads(), compress=["fp16", "bf16"][job.rank]
    ),
    "compression": lambda job: paceline.ddp(job, Heads(), compress="int8"),
    "sparse": lambda job: paceline.ddp(job, nn.Embedding(4, 2, sparse=True), compress="bf16"),
    "complex": lambda job: paceline.ddp(
        job, nn.Linear(2, 2, dtype=torch.complex64), compress="fp16"
    ),
    "rank of PowerSGD": lambda job: paceline.PowerSGD(rank=0),
    "start of PowerSGD": lambda job: paceline.PowerSGD(start_step=1),
    "PowerSGD, loss scale": lambda job: _trained(
        job, paceline.ddp(job, Heads(), compress=paceline.PowerSGD()), precision="fp16"
    ),
    "compressed exact": lambda job: _trained(
        job, paceline.ddp(job, Heads(), compress="bf16"), reproducible=True
    ),
    "syncbn": lambda job: paceline.ddp(job, nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))),
    "twice": lambda job: paceline.ddp(job, paceline.ddp(job, Heads())),
    "meta": _on_meta,
    "not wrapped": lambda job: _trained(job, Heads()),
    "static graph": lambda job: _trained(
        job, DistributedDataParallel(Heads(), process_group=job.group, static_graph=True)
    ),
    "unfrozen in torch's DDP": _unfrozen,
    "unreached": _unreached,
}


def _wrong(job: Job, kind: str) -> None:
    WRONG[kind](job)


def test_wrong_use_is_refused_on_all_ranks() -> None:
    check_messages("ddp", run_ranks(refusals, _wrong, list(WRONG), nproc=2))
