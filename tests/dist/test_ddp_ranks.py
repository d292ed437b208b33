"""DDP on 2 to 4 ranks: ranks without samples, unused and unknown parameters, buffers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from small_trainings import Recording, make_data, weights_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import ConfigError, PeerFailed, RankDisagreement, StepError
from paceline.job.job import Job
from paceline.parallel.ddp import _refuse_unused, check_parameters
from paceline.parallel.modules import broadcast_state, equalize_buffers, find_wrapper
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
    facts = {
        "untouched": torch.equal(before, torch.get_rng_state())
        and net.calls == 0
        and net.training
        and not net.frozen.training
        and net.layer.weight.grad is None
        # torch makes it a view into a bucket, of equal value.
        and net.layer.bias.grad.tolist() == [1, 1],
        "state": {name: value.clone() for name, value in net.state_dict().items()},
        "kinds": [
            find_wrapper(model) is not None,
            find_wrapper(net) is not None,
            paceline.unwrap(model) is net,
        ],
    }
    net.norm.running_mean.fill_(job.rank + 1)
    net.norm.num_batches_tracked.fill_(job.rank + 2**40)
    net.flags.fill_(job.rank > 0)
    net.table.fill_(job.rank)
    equalize_buffers(job, model)
    facts["buffers"] = dict(net.named_buffers())
    with pytest.raises(ConfigError, match=r"wrapped by paceline\.ddp already"):
        paceline.ddp(job, model)
    return facts


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


def test_construction_gives_rank_0s_values_and_leaves_the_rest() -> None:
    want = Watched(seed=0).state_dict()
    for facts in run_ranks(_construct, nproc=2):
        assert facts["untouched"]
        assert facts["kinds"] == [True, False, True]
        assert all(torch.equal(facts["state"][name], want[name]) for name in want)
        assert facts["buffers"]["norm.running_mean"].tolist() == [1, 1]
        assert facts["buffers"]["norm.num_batches_tracked"] == 2**40
        assert not facts["buffers"]["flags"].any()
        assert not facts["buffers"]["table"].any()


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


def _few_samples(job: Job, options: dict[str, Any], heads: tuple[int, ...]) -> list[Gradients]:
    """The gradients of three steps of one sample each, so that all ranks but one have none."""
    model = paceline.ddp(job, Heads(), **options)
    optimizer = Recording(model.parameters())
    data = TensorDataset(torch.randn(3, 2, generator=torch.Generator().manual_seed(4)))
    batches = paceline.Batches(job, data, global_batch=1)
    training = paceline.Training(job, model, optimizer, batches)
    for step in training.steps(epochs=1):
        for (x,) in step:
            step.backward(model(x, heads).sum(), count=len(x), reduction="sum")
        step.update()
    return optimizer.seen


OPTIONS: list[dict[str, Any]] = [{}, {"find_unused": True}, {"static_graph": True}]


def _few_samples_each(job: Job) -> list[list[Gradients]]:
    found = []
    for options in OPTIONS:
        heads = (0, 2) if "find_unused" in options else (0, 1, 2)
        found.append(_few_samples(job, {"bucket_mb": 1.0, **options}, heads))
    return found


def test_ranks_without_samples_take_part() -> None:
    want = run_ranks(_few_samples_each, nproc=1)[0]
    for rank in run_ranks(_few_samples_each, nproc=3):
        torch.testing.assert_close(rank, want)


def _looks(job: Job, looks: bool) -> list[float]:
    """The weights after steps of 2 micro-batches; rank 0 may run forwards of its own between them."""
    torch.manual_seed(0)
    model = paceline.ddp(job, nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = paceline.Batches(job, make_data(24), global_batch=8, micro_batch=2)
    training = paceline.Training(job, model, optimizer, batches)
    for step in training.steps(epochs=1):
        step.run(lambda batch: nn.functional.cross_entropy(model(batch[0]), batch[1]))
        if looks and job.rank == 0 and step.number > 1:
            model(torch.ones(1, 4))  # with gradients, and without a backward
        step.update()
    return weights_of(model)


def test_a_forward_of_one_rank_between_steps_changes_nothing() -> None:
    plain, looked = (run_ranks(_looks, looks, nproc=2) for looks in (False, True))
    assert looked == plain


def _unused(job: Job, on: tuple[int, ...], earlier: bool, options: dict[str, bool]) -> str:
    model = paceline.ddp(job, Heads(), **options)
    for _ in range(2):
        heads = (0, 2) if job.rank in on else (0, 1, 2)
        if earlier:
            with model.no_sync():  # type: ignore[operator]
                model(torch.ones(1, 2)).sum().backward()
        try:
            model(torch.ones(1, 2), heads).sum().backward()
        except RuntimeError as error:
            job.reraise(error)
        _refuse_unused(job, find_wrapper(model), ())
        model.zero_grad(set_to_none=True)
    return "both steps were done"


def test_an_unused_parameter_is_named() -> None:
    for outcome in run_failing_ranks(_unused, (0, 1), False, {}, nproc=2):
        assert isinstance(outcome.error, StepError)
        assert outcome.error.parameters == ["heads.1.weight", "heads.1.bias"]
        assert "find_unused=True" in str(outcome.error)
    # On one rank: the ranks that wait for its gradients end too.
    outcomes = run_failing_ranks(_unused, (1,), False, {}, nproc=3)
    assert isinstance(outcomes[1].error, StepError)
    for rank in (0, 2):
        error = outcomes[rank].error
        assert isinstance(error, PeerFailed)
        assert error.rank == 1
        assert "no gradient reached heads.1.weight, heads.1.bias" in str(error)
    # Unused in the last micro-batch only: all parameters have a gradient.
    for outcome in run_failing_ranks(_unused, (0, 1), True, {}, nproc=2):
        assert isinstance(outcome.error, StepError)
        assert outcome.error.parameters == []
        assert "direct cause" in outcome.text


def _unreached(job: Job) -> None:
    model = paceline.ddp(job, Heads())
    parameter = torch.ones((), requires_grad=True)
    model(torch.ones(1, 2))
    parameter.sum().backward()
    _refuse_unused(job, find_wrapper(model), ())


def _check(job: Job) -> dict[str, Any]:
    def refused(
        model: nn.Module, *optimizers: torch.optim.Optimizer, other: Sequence[nn.Module] = ()
    ) -> list[str] | None:
        try:
            check_parameters(job, [model, *other], optimizers)
        except StepError as error:
            return list(error.parameters) if error.fix else None
        return None

    def over(*modules: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.1)

    net = Heads()
    net.heads[2].requires_grad_(False)
    model = paceline.ddp(job, net)
    facts: dict[str, Any] = {"sound": refused(model, over(net))}
    net.heads[2].bias.requires_grad_(True)
    facts["unfrozen"] = refused(model, over(net))
    net.heads[2].bias.requires_grad_(False)
    net.heads[1].weight.requires_grad_(False)
    facts["frozen"] = refused(model, over(net))
    net.heads[1].weight.requires_grad_(True)
    net.extra = nn.Linear(1, 1, bias=False)
    facts["added"] = refused(model, over(net))
    del net.extra
    facts["optimizer only"] = refused(model, over(net, nn.Linear(2, 1, bias=False)))
    facts["not wrapped"] = refused(nn.Linear(2, 1))

    generator, critic = nn.Linear(1, 1), nn.Linear(1, 1)
    first, second = paceline.ddp(job, generator), paceline.ddp(job, critic)
    facts["two models"] = refused(first, over(generator), over(critic), other=[second])
    facts["wrapper of no training"] = refused(first, over(generator), over(critic))

    own = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1).requires_grad_(False))
    wrapped = DistributedDataParallel(own, process_group=job.group)
    facts["torch's DDP, sound"] = refused(wrapped, over(own))
    own[1].bias.requires_grad_(True)
    facts["torch's DDP"] = refused(wrapped, over(own))
    return facts


def _idle(job: Job) -> list[str]:
    net = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))
    model = paceline.ddp(job, net)
    optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("paceline").addHandler(handler)
    for _ in range(2):
        check_parameters(job, [model], [optimizer])
    return said


def _compiled(job: Job) -> list[Any]:
    net = nn.Linear(2, 1)
    plain = torch.compile(nn.Linear(2, 1), backend="eager")
    model = torch.compile(paceline.ddp(job, net), backend="eager")
    return [
        find_wrapper(model) is not None,
        paceline.unwrap(model) is net,
        find_wrapper(plain) is not None,
        paceline.unwrap(plain) is plain._orig_mod,
    ]


def _trained(job: Job, compiled: bool) -> tuple[str, list[str]]:
    net = _deep()
    inner: Any = torch.compile(net, backend="aot_eager") if compiled else net
    model = paceline.ddp(job, inner)
    data = TensorDataset(torch.randn(24, 37, generator=torch.Generator().manual_seed(1)))
    batches = paceline.Batches(job, data, global_batch=8, micro_batch=2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    training = paceline.Training(job, model, optimizer, batches, precision="bf16")
    for step in training.steps(until=3):
        for (x,) in step:
            step.backward(model(x).square().sum(), count=len(x), reduction="sum")
        step.update(clip_norm=1.0)
    return digest(net.state_dict()), list(training.state_dict()["models"][0])


def test_what_is_compiled_inside_of_ddp_trains_and_is_saved_as_the_plain_model() -> None:
    plain, compiled = (run_ranks(_trained, compiled, nproc=2) for compiled in (False, True))
    assert compiled == plain
    assert plain[0] == plain[1]


def _different(job: Job, what: str) -> None:
    wide = what == "shape" and job.rank == 1
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3 if wide else 2))
    if what == "fewer" and job.rank == 1:
        del net[1]
    if what == "frozen" and job.rank == 1:
        net[0].bias.requires_grad_(False)
    paceline.ddp(job, net, find_unused=what == "option" and job.rank == 1)


DIFFERENT = {
    "shape": ["1.weight: [2, 2]", "1.weight: [3, 2]"],
    "fewer": ["1.weight: [2, 2]", "nothing more"],
    "frozen": ["0.bias: [2]", "frozen"],
    "option": ["find_unused=False", "find_unused=True"],
}


def _facts(job: Job) -> dict[str, Any]:
    facts: dict[str, Any] = {"known": _check(job), "idle": _idle(job)}
    facts["compiled"] = _compiled(job)
    for what in DIFFERENT:
        with pytest.raises(RankDisagreement) as raised:
            _different(job, what)
        assert len(raised.value.values) == 2
        facts[what] = str(raised.value)
    with pytest.raises(ConfigError, match="sync_batchnorm"):
        paceline.ddp(job, nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)))
    with pytest.raises(StepError) as unreached:
        _unreached(job)
    assert len(unreached.value.parameters) == 8
    assert _unused(job, (1,), False, {"find_unused": True}) == "both steps were done"
    return facts


def test_wrong_models_are_named() -> None:
    for found in run_ranks(_facts, nproc=2):
        facts = found["known"]
        assert facts["sound"] is None
        assert facts["unfrozen"] == ["heads.2.bias"]
        assert facts["frozen"] == ["heads.1.weight"]
        assert facts["added"] == ["extra.weight"]
        only = "a parameter of shape [1, 2] that is in the optimizer only"
        assert facts["optimizer only"] == [only]
        assert facts["not wrapped"] == ["weight", "bias"]
        assert facts["two models"] is None
        assert [p[:20] for p in facts["wrapper of no training"]] == ["a parameter of shape"] * 2
        assert facts["torch's DDP"] == ["1.bias"]
        assert facts["torch's DDP, sound"] is None
        (line,) = found["idle"]
        assert line.startswith("no optimizer owns 1.weight, 1.bias")
        assert found["compiled"] == [True, True, False, True]
        for what, texts in DIFFERENT.items():
            assert all(text in found[what] for text in texts), found[what]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(5, 4), nn.LayerNorm(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.table(ids)))
        return out


def _tied_on_meta(job: Any) -> tuple[bool, list[float], str]:
    def fill(layer: nn.Module) -> None:
        for p in layer.parameters(recurse=False):
            nn.init.normal_(p, std=0.02)

    with torch.device("meta"):
        net, other, split = Tied(), Tied(), Tied()
    model = paceline.ddp(job, net, init=fill)
    model(torch.arange(5)).sum().backward()
    paceline.ddp(job, other)  # by reset_parameters
    are_tied = all(each.head.weight is each.table.weight for each in (net, other))
    with pytest.raises(ConfigError) as raised:
        paceline.tensor_parallel(job, split)
    with pytest.raises(ConfigError, match="init has no effect"):
        paceline.ddp(job, Tied(), init=fill)
    return are_tied, net.head.weight.detach().reshape(-1).tolist(), str(raised.value)


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_tied_parameters_on_the_meta_device_stay_tied(nproc: int) -> None:
    (_, weights, _), *_ = run_ranks(_tied_on_meta, nproc=1)
    assert 0 < max(map(abs, weights)) < 0.2
    for are_tied, own, refused in run_ranks(_tied_on_meta, nproc=nproc):
        assert are_tied
        assert own == weights
        assert "table.weight, head.weight" in refused
