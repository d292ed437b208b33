"""After the last micro-batch `p.grad` is the gradient of the global mean, whatever sums it over ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from small_gpt import GPT, make_tokens, token_loss, wrap
from small_trainings import check_messages, make_data, refusals, train
from torch import nn

import paceline
from paceline import Mesh
from paceline.testing import run_ranks

SAMPLES = 7  # ragged on 2 and 3 ranks: one has a padding micro-batch
LAYOUTS: dict[str, tuple[int, Mesh | None]] = {
    "one process": (1, None),
    "ddp on 2": (2, None),
    "ddp on 3": (3, None),
    "fsdp on 3": (3, Mesh(dp_shard=3)),
    "tp on 2": (2, Mesh(tp=2)),
    "pp on 2": (2, Mesh(pp=2)),
    "pp x replicas on 4": (4, Mesh(pp=2, dp_replicate=2)),
    "pp x fsdp on 4": (4, Mesh(pp=2, dp_shard=2)),
    "pp x tp on 4": (4, Mesh(pp=2, tp=2)),
}
SLOW = ["pp x replicas on 4", "pp x tp on 4"]
BOUNDS = {"fp32": 1e-9, "fp16": 2e-2}  # relative; weights are float64 in "fp32"

State = dict[str, torch.Tensor]


def _whole(tensor: Any) -> torch.Tensor:
    whole: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()


def _plain_gradient(count: str) -> State:
    model = GPT().double()
    loss, tokens = token_loss(model, list(make_tokens(SAMPLES).tensors))
    (loss / (tokens if count == "tokens" else SAMPLES)).backward()
    return {name: _whole(p.grad) for name, p in model.named_parameters()}


def _before_update(job: Any, parts: int, precision: str, count: str, exact: bool) -> list[State]:
    """Gradients before `update`, and weights before and after an update whose gradients were set to 0."""
    net = GPT() if precision == "fp16" else GPT().double()
    model = wrap(job, net)
    parameters = list(model.parameters())
    optimizers = [torch.optim.SGD(parameters[i::parts], lr=0.1) for i in range(parts)]
    batches = paceline.Batches(job, make_tokens(SAMPLES), global_batch=SAMPLES, micro_batch=2)
    training = paceline.Training(
        job, model, optimizers, batches, count=count, precision=precision, reproducible=exact
    )

    def loss_sum(batch: Any) -> tuple[torch.Tensor, int]:
        loss, tokens = token_loss(model, batch)
        return loss, tokens if count == "tokens" else len(batch[0])

    for step in training.steps(until=1):
        step.run(loss_sum, reduction="sum")
        scale = training._context.precision.scaler.get_scale()
        gradients = {name: _whole(p.grad) / scale for name, p in net.named_parameters()}
        before = {name: _whole(p) for name, p in net.named_parameters()}
        for p in net.parameters():
            p.grad.zero_()
        step.update()
    return [gradients, before, {name: _whole(p) for name, p in net.named_parameters()}]


def _each_case(job: Any, cases: list[Any]) -> list[list[State]]:
    return [_before_update(job, *case) for case in cases]


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in LAYOUTS],
)
def test_the_gradient_is_the_global_mean_and_a_change_of_it_takes_effect(layout: str) -> None:
    nproc, mesh = LAYOUTS[layout]
    exact = [False] if mesh else [False, True]
    cases = [
        (parts, precision, count, is_exact)
        for parts in (1, 2)  # optimizers that one loss serves
        for precision in ("fp32", "fp16")
        for count in ("samples", "tokens")
        for is_exact in exact
    ]
    ranks = run_ranks(_each_case, cases, nproc=nproc, mesh=mesh)
    for case, found in zip(cases, zip(*ranks, strict=True), strict=True):
        want = _plain_gradient(case[2])
        size = float(torch.cat([g.reshape(-1) for g in want.values()]).norm())
        assert {name for gradients, _, _ in found for name in gradients} == set(want)
        for gradients, before, after in found:
            for name, gradient in gradients.items():
                difference = float((gradient - want[name]).norm())
                assert difference <= BOUNDS[case[1]] * size, (case, name)
                assert torch.equal(before[name], after[name]), (case, name)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.tanh(self.first(x)))
        return out


def _optimizers(net: Net) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.SGD(net.first.parameters(), lr=0.1, momentum=0.9),
        torch.optim.AdamW(net.last.parameters(), lr=0.01),
    ]


def _trained_by_two(job: Any, folder: Path, until: int) -> dict[str, list[float]]:
    """The weights after a training by two optimizers, for each way to sum gradients."""
    found = {}
    for how in ("ddp", "fsdp", "exact"):
        net = Net().double()
        model = (paceline.fsdp if how == "fsdp" else paceline.ddp)(job, net)
        data = make_data(18, torch.float64)
        training = paceline.Training(
            job,
            model,
            _optimizers(net),
            paceline.Batches(job, data, global_batch=6, micro_batch=1, shuffle=False),
            reproducible=how == "exact",
            checkpoints=paceline.Checkpoints(folder / how, every_steps=1),
        )
        train(training, until=until, clip_norm=0.05)
        found[how] = torch.cat([_whole(p).reshape(-1) for p in net.parameters()]).tolist()
    return found


def _trained_by_torch() -> list[float]:
    net = Net().double()
    optimizers = _optimizers(net)
    x, y = make_data(18, torch.float64).tensors
    for i in range(0, 18, 6):
        F.cross_entropy(net(x[i : i + 6]), y[i : i + 6]).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()]).tolist()


@pytest.mark.parametrize("nproc", [1, 2, pytest.param(3, marks=pytest.mark.ci)])
def test_one_update_clips_together_and_steps_all_optimizers(tmp_path: Path, nproc: int) -> None:
    want = _trained_by_torch()
    run_ranks(_trained_by_two, tmp_path, 2, nproc=nproc)
    for found in run_ranks(_trained_by_two, tmp_path, 3, nproc=nproc):  # resumes
        for how, got in found.items():
            assert got == pytest.approx(want, rel=1e-9), how


def _muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    torch.Tensor.bfloat16 = torch.Tensor.double  # type: ignore[assignment] # Newton-Schulz, without rounding
    named = list(model.named_parameters())
    matrices = {name for name, p in named if p.ndim == 2 and "layers" in name}
    return [
        torch.optim.Muon([p for name, p in named if name in matrices], lr=0.02),
        torch.optim.AdamW([p for name, p in named if name not in matrices], lr=0.01),
    ]


def _trained_by_muon(job: Any) -> list[State]:
    found = []
    for exact in (False, True) if job.mesh is None else (False,):
        net = GPT().double()
        model = wrap(job, net)
        batches = paceline.Batches(
            job, make_tokens(12), global_batch=4, micro_batch=1, shuffle=False
        )
        training = paceline.Training(
            job, model, _muon_and_adamw(model), batches, count="tokens", reproducible=exact
        )
        found.append(train(training, token_loss, until=3).weights)
    return found


MUON = {
    "ddp on 3": (3, None),
    "fsdp on 3": (3, Mesh(dp_shard=3)),
    "hybrid on 4": (4, Mesh(dp_replicate=2, dp_shard=2)),
    "fsdp x tp on 4": (4, Mesh(dp_shard=2, tp=2)),
}


@pytest.mark.parametrize(
    "layout",
    ["fsdp on 3", *(pytest.param(x, marks=pytest.mark.slow) for x in MUON if x != "fsdp on 3")],
)
def test_muon_beside_adamw_orthogonalises_whole_matrices(layout: str, monkeypatch: Any) -> None:
    """Newton-Schulz of the rows of one rank would give other weights."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.bfloat16)  # restores it
    model = GPT().double()
    optimizers = _muon_and_adamw(model)
    tokens = make_tokens(12).tensors
    for i in range(0, 12, 4):
        loss, count = token_loss(model, [each[i : i + 4] for each in tokens])
        (loss / count).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    nproc, mesh = MUON[layout]
    for found in run_ranks(_trained_by_muon, nproc=nproc, mesh=mesh):
        for weights in found:
            for (name, got), want in zip(weights.items(), model.parameters(), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10, msg=name)


class AveragingSGD(torch.optim.SGD):
    """Averages the gradients of the ranks, as an optimizer does that is made for a loop without DDP."""

    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        return super().step(closure)


def _trained_by_averaging(job: Any) -> list[list[float]]:
    """With the gradients that DDP has averaged, and with those of each rank."""
    found = []
    for is_local in (False, True):
        net = Net().double()
        model: Any = paceline.ddp(job, net)
        if is_local:
            model.register_comm_hook(None, lambda _, bucket: _kept(bucket.buffer()))
        optimizer = AveragingSGD(net.parameters(), lr=0.1, momentum=0.9)
        data = make_data(18, torch.float64)
        batches = paceline.Batches(job, data, global_batch=7, micro_batch=1, shuffle=False)
        train(paceline.Training(job, model, optimizer, batches, desync_every=0), until=3)
        found.append(torch.cat([p.detach().reshape(-1) for p in net.parameters()]).tolist())
    return found


def _kept(gradients: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(gradients)
    return future


@pytest.mark.ci
def test_an_optimizer_may_average_summed_or_local_gradients() -> None:
    net = Net().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    x, y = make_data(18, torch.float64).tensors
    for begin, end in ((0, 7), (7, 14), (14, 18)):
        F.cross_entropy(net(x[begin:end]), y[begin:end]).backward()
        optimizer.step()
        optimizer.zero_grad()
    want = torch.cat([p.detach().reshape(-1) for p in net.parameters()]).tolist()
    for found in run_ranks(_trained_by_averaging, nproc=3):
        for got in found:
            assert got == pytest.approx(want, rel=1e-9)


def _gan(job: Any, precision: str, count: str) -> list[float]:
    """Critic and generator with a loss each; each is clipped and updated before the next backward."""
    torch.manual_seed(0)
    nets = [nn.Linear(4, 1), nn.Linear(4, 4)]
    critic, generator = (paceline.ddp(job, net) for net in nets)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    batches = paceline.Batches(job, make_data(14), global_batch=7)
    training = paceline.Training(
        job, [critic, generator], optimizers, batches, count=count, precision=precision
    )
    norms = []
    for step in training.steps(epochs=2):
        for x, _ in step:
            losses = (
                lambda x=x: (critic(x) - critic(generator(x).detach())).float().tanh().sum(),
                lambda x=x: critic(generator(x)).float().tanh().sum(),
            )
            for net, optimizer, loss in zip(nets, optimizers, losses, strict=True):
                step.backward(loss(), count=len(x), optimizer=optimizer, reduction="sum")
                scale = training._context.precision.scaler.get_scale()
                norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), scale)) / scale)
                step.update(optimizer)
    return norms


def _gans(job: Any) -> list[list[float]]:
    return [_gan(job, each, count) for each in BOUNDS for count in ("samples", "tokens")]


def test_the_losses_of_a_gan_have_their_gradients_before_each_update() -> None:
    one = run_ranks(_gans, nproc=1)[0]
    for each in one:  # a sample counts as one token
        assert each == pytest.approx(one[0], rel=BOUNDS["fp16"])
    for nproc in (2, 3):
        for got in run_ranks(_gans, nproc=nproc):
            for each in got:
                assert each == pytest.approx(one[0], rel=BOUNDS["fp16"])


def _wrong(job: Any, kind: str) -> None:
    """One loss that is given for each of two optimizers, or a call of the optimizer in the loop."""
    net = Net()
    model = (paceline.fsdp if kind == "twice, fsdp" else paceline.ddp)(job, net)
    batches = paceline.Batches(job, make_data(), global_batch=12, micro_batch=2)
    training = paceline.Training(
        job, model, _optimizers(net), batches, reproducible=kind == "twice, exact"
    )
    first, _ = training.optimizers
    for step in training.steps(until=2):
        for x, y in step:
            loss = F.cross_entropy(model(x), y)
            if kind == "zero_grad":
                first.zero_grad()
            if kind.startswith("twice"):
                for optimizer in training.optimizers:
                    step.backward(loss, optimizer=optimizer)
            else:
                step.backward(loss)
        if kind == "step":
            first.step()
        if kind == "zero_grad after the loop":
            first.zero_grad()
        step.update()


@pytest.mark.parametrize("nproc", [1, 2])
def test_what_would_spoil_the_gradient_is_refused(nproc: int) -> None:
    kinds = [
        "twice, ddp",
        "twice, exact",
        "twice, fsdp",
        "zero_grad",
        "zero_grad after the loop",
        "step",
    ]
    name = "gradient" if nproc > 1 else "gradient_of_one_process"
    check_messages(name, run_ranks(refusals, _wrong, kinds, nproc=nproc))
