"""Models that are split into stages train as on one process; what cannot be split is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from small_gpt import GPT, make_tokens, token_loss, wrap
from small_trainings import (
    Trained,
    assert_close,
    check_messages,
    loss_sum,
    make_data,
    make_training,
    refusals,
    sgd,
    train,
)
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset, default_collate

import paceline
from paceline import Mesh
from paceline.checkpoint import layout
from paceline.errors import ConfigError, RankDisagreement, StepError
from paceline.parallel.modules import local
from paceline.testing import run_ranks

PP2 = (2, Mesh(pp=2))
PP4 = (4, Mesh(pp=4))
PP_DP = (4, Mesh(pp=2, dp_replicate=2))
PP_FSDP = Mesh(pp=2, dp_shard=2)
SCHEDULE_NAMES = ("gpipe", "1f1b", "interleaved", "zero_bubble")


def _wrap(job: Any, net: nn.Module, **options: Any) -> nn.Module:
    if job.mesh is not None and job.mesh.pp > 1:
        return paceline.pipeline(job, net, **options)
    return paceline.ddp(job, net)


def _assert_as_one_process(
    function: Any,
    cases: list[Any],
    *,
    layout: tuple[int, Mesh] = PP2,
    tolerance: Callable[[Any], float] = lambda case: 1e-12,
) -> None:
    """`function(job, cases)` returns a `Trained` for each case."""
    nproc, mesh = layout
    (wants,) = run_ranks(function, cases, nproc=1)
    for results in run_ranks(function, cases, nproc=nproc, mesh=mesh):
        for case, got, want in zip(cases, results, wants, strict=True):
            assert_close(got, want, tolerance(case))


def _masked_loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    """Tokens of class 0 are left out, so counts differ between sequences."""
    ids, targets = batch
    kept = targets.flatten().masked_fill(targets.flatten() == 0, -100)
    loss = F.cross_entropy(model(ids).flatten(0, 1), kept, reduction="sum")
    return loss, int((kept >= 0).sum())


SCHEDULES: list[dict[str, Any]] = [
    {"schedule": "gpipe", "count": "samples"},
    {"schedule": "1f1b", "micro_batch": 3},  # 3 and 1 samples
    {"schedule": "interleaved", "global_batch": 5},  # torch takes 4 of 5 micro-batches on 2 ranks
    {"schedule": "zero_bubble", "dtype": torch.float32},
    {"schedule": "zero_bubble", "micro_batch": 4},
]


def _schedule(
    job: Any, *, schedule: str, dtype: torch.dtype = torch.float64, **options: Any
) -> Trained:
    net = GPT(layers=6).to(dtype)
    with torch.no_grad():
        net.norm.bias.add_(job.rank)  # ranks begin with the weights of rank 0
    model = _wrap(job, net, schedule=schedule)
    options = {"count": "tokens", "micro_batch": 1, **options}

    def loss(model: nn.Module, batch: Any) -> Any:
        total, tokens = _masked_loss(model, batch)
        return (total, tokens) if options["count"] == "tokens" else total / 10

    # 9 samples in steps of 4: the last step has 1, so one of 2 data ranks has none.
    found = train(
        make_training(job, model, make_tokens(9), **options), loss, until=4, clip_norm=0.5
    )
    result = paceline.evaluate(
        job, model, make_tokens(5), lambda m, batch: {"loss": token_loss(m, batch)}, micro_batch=2
    )
    assert result.num_samples == 5
    found.losses.append(result.loss)
    return found


def _schedules(job: Any, cases: list[dict[str, Any]]) -> list[Trained]:
    return [_schedule(job, **case) for case in cases]


@pytest.mark.parametrize(
    "layout", [PP2, *(pytest.param(each, marks=pytest.mark.slow) for each in (PP4, PP_DP))]
)
def test_it_trains_as_one_process(layout: tuple[int, Mesh]) -> None:
    def tolerance(case: dict[str, Any]) -> float:
        return 1e-5 if "dtype" in case else 1e-12

    _assert_as_one_process(_schedules, SCHEDULES, layout=layout, tolerance=tolerance)


class Residual(nn.Module):
    def __init__(self, frozen: bool, reused: bool) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.last = self.norm if reused else nn.Identity()
        if frozen:
            self.first.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor) -> torch.Tensor:
        x = x + mask.unsqueeze(-1) * self.second(torch.tanh(self.first(self.norm(x))))
        out: torch.Tensor = self.last(x)
        return out


class Masked(nn.Module):
    """Computes masks from its arguments, and between its submodules; some of them have no parameters."""

    def __init__(
        self, *, checkpointed: bool = False, named: bool = False, reused: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.checkpointed, self.named = checkpointed, named
        self.embedding, self.drop, self.twice = nn.Embedding(12, 8), nn.Dropout(0.0), nn.Identity()
        self.blocks = nn.ModuleDict({f"b{i}": Residual(i == 1, reused) for i in range(4)})
        self.register_buffer("scale", torch.tensor(2.0))
        self.batchnorm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 12)

    def forward(self, ids: torch.Tensor, shift: float = 0.0) -> dict[str, torch.Tensor]:
        mask = (ids != 3) / self.scale
        x = self.drop(self.embedding(ids)) * 2
        for name, block in self.blocks.items():
            try:
                if self.named:  # the backward looks the block up again
                    call = lambda x, name=name: self.blocks[name](x, mask=mask)  # noqa: E731
                    x = checkpoint(call, x, use_reentrant=False)
                elif self.checkpointed:
                    x = checkpoint(block, x, mask=mask, use_reentrant=False)
                else:
                    x = block(x, mask=mask)
            except Exception as error:  # the end of a stage must not be caught here
                raise AssertionError("a block failed") from error
            x = self.twice(x + shift)
        x = self.batchnorm(x.flatten(0, 1)).unflatten(0, ids.shape)
        return {"logits": self.head(x)[:, :-1]}


NUMBER = "batchnorm.num_batches_tracked"
FORMS: list[tuple[str, dict[str, bool]]] = [
    (schedule, options)
    for schedule in SCHEDULE_NAMES
    for options in ({}, {"checkpointed": True}, {"named": True})
]
FORMS.append(("1f1b", {"reused": True}))


def _loss_of_logits(model: nn.Module, batch: Any) -> torch.Tensor:
    try:
        logits = model(ids=batch[0], shift=0.5)["logits"]
    except Exception as error:  # nor the call of the model that finds its arguments
        raise AssertionError("the model failed") from error
    return F.cross_entropy(logits.flatten(0, 1), batch[1][:, 1:].flatten(), reduction="sum")


def _forms(job: Any, forms: list[tuple[str, dict[str, bool]]]) -> list[Trained]:
    found = []
    for schedule, options in forms:
        model = _wrap(job, Masked(**options).double(), schedule=schedule)
        training = make_training(job, model, make_tokens(8), micro_batch=1)
        found.append(train(training, _loss_of_logits, until=3, clip_norm=1e6))
    return found


@pytest.mark.ci
def test_a_forward_may_compute_masks_and_values_between_its_submodules() -> None:
    _assert_as_one_process(_forms, FORMS, tolerance=lambda form: 1e-11)


def test_zero_bubble_with_a_layer_that_a_stage_uses_twice() -> None:
    forms = [("zero_bubble", {"reused": True})]
    if torch.__version__ < "2.13":  # whole backwards are used
        _assert_as_one_process(_forms, forms, tolerance=lambda form: 1e-11)
        return
    with pytest.raises(StepError, match="'zero_bubble' cannot compute the gradients of this model"):
        run_ranks(_forms, forms, nproc=2, mesh=Mesh(pp=2))


class RandomMask(nn.Module):
    """Draws one mask for both of its layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Scaling(4, 4), Scaling(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.rand(len(x), 1).round()
        out: torch.Tensor = self.second(self.first(x, mask), mask)
        return out


class Scaling(nn.Linear):
    def forward(self, x: torch.Tensor, scale: Any = 1.0) -> torch.Tensor:
        return super().forward(x) * scale


def _random_masks(job: Any, _: list[Any]) -> list[Trained]:
    training = make_training(
        job, _wrap(job, RandomMask().double()), torch.ones(8, 4).double(), micro_batch=2
    )
    return [train(training, lambda m, x: m(x).pow(2).mean(1).sum(), until=3)]


def test_what_a_forward_draws_before_its_layers_is_equal_in_all_stages() -> None:
    _assert_as_one_process(_random_masks, [None])


class Dropping(nn.Module):
    """Two layers that return their input at first, with dropout after each."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
        for layer in (self.first, self.last):
            nn.init.eye_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.last):
            drop = lambda x, layer=layer: F.dropout(layer(x))  # noqa: E731
            x = checkpoint(drop, x, use_reentrant=False) if self.checkpointed else drop(x)
        return x


def _dropped(job: Any, cases: list[tuple[str, bool]]) -> tuple[list[Trained], list[float]]:
    found, kept = [], []
    for schedule, checkpointed in cases:

        def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            out = model(x)
            kept.append(float((out != 0).double().mean()))
            return out.square().mean(1).sum()

        model = _wrap(job, Dropping(checkpointed).double(), schedule=schedule, split="last")
        training = make_training(job, model, torch.ones(32, 64).double(), micro_batch=1)
        found.append(train(training, loss, until=2))
    return found, kept[:4]


def test_stages_draw_dropout_masks_of_their_own_and_a_checkpoint_draws_them_again() -> None:
    cases = [("1f1b", False), ("1f1b", True), ("gpipe", False)]
    results = run_ranks(_dropped, cases, nproc=2, mesh=Mesh(pp=2))
    for (want, *others), _ in results:
        for got in others:
            assert_close(got, want, 1e-12)
    (_, none), (_, kept) = results
    assert none == []  # the first stage computes no loss
    assert sum(kept) / len(kept) == pytest.approx(0.25, abs=0.1)  # 0.5 if both masks were equal


def _read_own(job: Any, folder: str) -> tuple[set[str], set[str]]:
    """The tensors that a resume reads, and the names of this rank's parameters."""
    read: list[str] = []
    actual = layout.plan_reads

    def recorded(wanted: Any, saved: Any) -> Any:
        read.extend(wanted)
        return actual(wanted, saved)

    layout.plan_reads = recorded
    model = _wrap(job, GPT(layers=6).double())
    training = make_training(
        job, model, make_tokens(9), optimizer=torch.optim.AdamW, folder=folder, count="tokens"
    )
    train(training, token_loss, until=2)
    layout.plan_reads = actual
    states = {path.split(".", 4)[4].rpartition(".")[0] for path in read if "optim" in path}
    weights = {path.removeprefix("models.0.") for path in read if path.startswith("models.")}
    assert states == weights
    return weights, {name for name, _ in model.named_parameters()}


def test_a_rank_reads_the_tensors_of_its_stages_only(tmp_path: Path) -> None:
    run_ranks(_read_own, str(tmp_path), nproc=1)
    for read, names in run_ranks(_read_own, str(tmp_path), nproc=2, mesh=Mesh(pp=2)):
        assert read == names


class Simple(nn.Module):
    """`forward` is (model, x, output of second) -> output."""

    def __init__(self, forward: Callable[..., Any] = lambda m, x, h: m.last(m.third(h))) -> None:
        super().__init__()
        self.rest = forward
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.third, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.rest(self, x, self.second(self.first(x)))


class Counting(nn.Linear):
    def get_extra_state(self) -> int:
        return 1


class Listed(nn.Module):
    """Has lists of layers, some without parameters; reads attributes of a submodule; changes its argument."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.acts = nn.ModuleList([nn.ReLU(), nn.Tanh()])
        self.drop, self.last = nn.Dropout(0.9).eval(), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.div_(2)
        for layer, act in zip(self.layers, self.acts, strict=True):
            x = F.dropout(act(layer(x)), self.drop.p, self.drop.training)
        out: torch.Tensor = self.last(x)
        return out


def _split(job: Any, net: nn.Module | None = None, **options: Any) -> nn.Module:
    return paceline.pipeline(job, net or Simple(), **({"split": ["third"]} | options))


def _run_step(
    job: Any, model: nn.Module, loss: Any = loss_sum, *, optimizer: Any = sgd, **options: Any
) -> None:
    training = make_training(job, model, make_data(8), optimizer=optimizer, **options)
    train(training, loss, until=1)


def _with_two_models(job: Any) -> None:
    model = _split(job)
    batches = paceline.Batches(job, make_data(8), global_batch=8)
    paceline.Training(job, [model, nn.Linear(1, 1)], sgd(model.parameters()), batches)


def _in_a_loop(job: Any) -> None:
    for step in make_training(job, _split(job), make_data(8)).steps(until=1):
        list(step)


def _early(job: Any) -> None:
    net = Simple()
    optimizer = sgd(net.parameters())
    _run_step(job, _split(job, net), optimizer=lambda _: optimizer)


def _dropping(job: Any) -> None:
    model = _split(job)

    def collate(samples: list[Any]) -> Any:
        return default_collate(samples[1:])

    batches = paceline.Batches(job, make_data(8), global_batch=8, collate=collate)
    train(paceline.Training(job, model, sgd(model.parameters()), batches), until=1)


# What is wrong with a `Simple`.
CHANGES: dict[str, Callable[[Any], Any]] = {
    "tied": lambda net: setattr(net.last, "weight", net.first.weight),
    "shared": lambda net: setattr(net, "third", net.first),
    "unowned": lambda net: setattr(net, "token", nn.Parameter(torch.ones(4))),
    "extra state": lambda net: setattr(net, "third", Counting(4, 4)),
    "frozen": lambda net: (net.first.requires_grad_(False), net.second.requires_grad_(False)),
}
WRONG: dict[str, Callable[[Any], Any]] = {
    "name": lambda job: _split(job, split=["thrd"]),
    "twice named": lambda job: _split(job, split=["third", "third"]),
    "pattern": lambda job: _split(job, split=["t*"]),
    "list": lambda job: _split(job, Listed(), split=["layers"]),
    "number": lambda job: _split(job, split=["second", "third"]),
    "rounds": lambda job: _split(job, split=["second", "third"], schedule="interleaved"),
    "few": lambda job: paceline.pipeline(job, nn.Sequential(nn.Linear(4, 3))),
    "schedule": lambda job: _split(job, schedule="dualpipe"),
    "alone": lambda job: _run_step(job, Simple()),
    "exact": lambda job: _run_step(job, _split(job), reproducible=True),
    "early": _early,
    "models": _with_two_models,
    "loop": _in_a_loop,
    "called": lambda job: _split(job)(torch.ones(1, 4)),
    "no call": lambda job: _run_step(job, _split(job), lambda m, batch: batch[0].sum()),
    "drops": _dropping,
    "again": lambda job: _split(job, _split(job)),
    "fsdp": lambda job: paceline.fsdp(job, Simple()),
    "replica": lambda job: _split(job, nn.parallel.DistributedDataParallel(Simple())),
}


def _changed(job: Any, kind: str, **options: Any) -> None:
    net = Simple()
    CHANGES[kind](net)
    _split(job, net, **options)


def _wrong(job: Any, kind: str) -> None:
    if kind in WRONG:
        WRONG[kind](job)
    else:
        _changed(job, kind)


@pytest.mark.ci
def test_wrong_use_is_refused_on_all_ranks() -> None:
    kinds = [*WRONG, *CHANGES]
    check_messages("pipeline", run_ranks(refusals, _wrong, kinds, nproc=2, mesh=Mesh(pp=2)))


class Uneven(Simple):
    """Its last layer, which one stage has, has 3 outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.tp_plan = {"first": "colwise", "second": "rowwise", "last": "colwise"}


def _split_unevenly(job: Any, _: str) -> None:
    paceline.tensor_parallel(job, _split(job, Uneven()))


@pytest.mark.ci
def test_a_plan_that_does_not_fit_a_layer_of_one_stage_is_refused_on_all_ranks() -> None:
    found = run_ranks(refusals, _split_unevenly, ["last"], nproc=4, mesh=Mesh(pp=2, tp=2))
    text = "last has 3 output features, which do not divide by tp=2."
    for each in found:
        assert each["last"][1].startswith(text), each


def _without_gradients(m: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    with torch.no_grad():
        h = m.third(h)
    return m.last(h)


def _failing(m: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    m.last(m.third(h))
    try:
        return {}[0]
    except KeyError as error:
        raise RuntimeError("an error of the user") from error


def _distilled(model: nn.Module, batch: Any) -> torch.Tensor:
    out = model(batch[0])
    with torch.no_grad():
        teacher = model(batch[0])
    return F.mse_loss(out, teacher, reduction="sum")


def _penalised(model: nn.Module, batch: Any) -> torch.Tensor:
    return loss_sum(model, batch) + sum(p.square().sum() for p in model.parameters())


class KeepsLoss(nn.Linear):
    aux: Any = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        self.aux = out.square().mean()
        return out


def _with_kept_loss(job: Any) -> None:
    net = Simple(lambda m, x, h: m.last(m.third(h)) + m.first.aux)
    net.first = KeepsLoss(4, 4)
    _run_step(job, _split(job, net))


def _replaced(job: Any) -> None:
    model = _split(job)
    model.last = nn.Linear(4, 3)
    _run_step(job, model)


# What only a forward or backward shows, on one of the stages.
IN_A_STEP: dict[str, tuple[type[Exception], str, Callable[[Any], Any]]] = {
    "order": (
        ConfigError,
        "`forward` calls last where third was expected",
        lambda job: _run_step(job, _split(job, Simple(lambda m, x, h: m.third(m.last(h))))),
    ),
    "unused": (
        ConfigError,
        "`forward` does not call third",
        lambda job: _run_step(job, _split(job, Simple(lambda m, x, h: h[:, :3]))),
    ),
    "tuple": (
        ConfigError,
        "the first argument of third is a tuple, not a floating-point tensor",
        lambda job: _run_step(job, _split(job, Simple(lambda m, x, h: m.third((h, h))))),
    ),
    "no gradients": (
        ConfigError,
        "`forward` calls third without gradients",
        lambda job: _run_step(job, _split(job, Simple(_without_gradients))),
    ),
    "kept loss": (
        ConfigError,
        "the forward of first keeps a tensor with gradient",
        _with_kept_loss,
    ),
    "replaced": (ConfigError, "last was replaced after the model was split", _replaced),
    "mean": (
        StepError,
        "the loss is a mean",
        lambda job: _run_step(job, _split(job), lambda m, b: F.cross_entropy(m(b[0]), b[1])),
    ),
    "distilled": (
        StepError,
        "called the model twice for one micro-batch",
        lambda job: _run_step(job, _split(job), _distilled),
    ),
    "penalty": (
        StepError,
        "computes with third.weight, third.bias, last.weight, last.bias itself",
        lambda job: _run_step(job, _split(job), _penalised),
    ),
    "cause": (
        RuntimeError,
        "an error of the user",
        lambda job: _run_step(job, _split(job, Simple(_failing))),
    ),
}
# Of a forward without gradients, on the second stage.
UNFIT_LATER: dict[str, tuple[str, Callable[..., Any]]] = {
    "skip": (
        "`forward` needs `first.bias`, which this rank does not have",
        lambda m, x, h: m.last(m.third(h) + m.first.bias),
    ),
    "two values": (
        "last gets another value than its first argument from an earlier stage",
        lambda m, x, h: m.last(m.third(h) + h),
    ),
    "skip connection": (
        "third gets another value than its first argument from an earlier stage",
        lambda m, x, h: m.last(m.third(h, 2 * h)),
    ),
    "detached": (
        "the first argument of third is not computed by the stage before",
        lambda m, x, h: m.last(m.third(x)),
    ),
    "late value": (
        "`forward` returns a tensor that it computes from a value of an earlier stage",
        lambda m, x, h: m.last(m.third(h)) + h[:, :3],
    ),
    "value": (
        "`forward` needs a value of another stage for `__bool__`, which this rank does not have",
        lambda m, x, h: m.last(m.third(h if h.mean() > 0 else -h)),
    ),
    "written": (
        "`forward` needs a value of another stage for `__setitem__`",
        lambda m, x, h: (x.__setitem__(0, h[0]), m.last(m.third(h)))[1],
    ),
}


def _in_a_step(job: Any, kind: str) -> None:
    IN_A_STEP[kind][2](job)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in ("order", "cause") else pytest.mark.ci)
        for kind in IN_A_STEP
    ],
)
def test_an_error_of_any_stage_is_the_one_that_is_raised(kind: str) -> None:
    error, text, _ = IN_A_STEP[kind]
    with pytest.raises(error, match=text):
        run_ranks(_in_a_step, kind, nproc=2, mesh=Mesh(pp=2))


def _called_once(job: Any, kind: str) -> None:
    if kind in ("module", "unpacked"):
        model = _split(job, Folding(kind), split=["last"])
    else:
        model = _split(job, Simple(UNFIT_LATER[kind][1]))
    with torch.no_grad():
        model(torch.ones(2, 4))


def test_what_the_second_stage_cannot_compute_is_refused() -> None:
    skipped = "stage 1 cannot skip the computations between the layers of other stages: "
    texts = {kind: text for kind, (text, _) in UNFIT_LATER.items()}
    texts |= {"module": f"{skipped}ValueError: ", "unpacked": f"{skipped}ValueError: "}
    _, found = run_ranks(refusals, _called_once, list(texts), nproc=2, mesh=Mesh(pp=2))
    for kind, text in texts.items():
        assert text in found.get(kind, ("", ""))[1], (kind, found.get(kind))


class Fold(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] != 6:
            raise ValueError("not a shape of the first stage")
        return x.unflatten(1, (2, 3))


class Folding(nn.Module):
    """Its first stage computes with a shape that no other stage has."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.kind = kind
        self.first, self.fold = nn.Linear(4, 6), Fold()
        self.second, self.last = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        h = h.unflatten(1, (2, 3)) if self.kind == "code" else self.fold(h)
        if self.kind == "unpacked":
            _, _, _ = h.shape
        out: torch.Tensor = self.last(self.second(h.flatten(1)))
        return out


class Typed(nn.Module):
    """Its `forward` looks at the types of its layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList([Scaling(4, 4), nn.Linear(4, 4)])
        self.last = Scaling(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, self.last):
            x = layer(x, 3.0) if isinstance(layer, Scaling) else layer(x)
        return x


def _patched() -> nn.Module:
    """Its `forward` was replaced on the object."""
    net = Listed()
    forward = net.forward
    setattr(net, "forward", lambda x: forward(x * 2))  # noqa: B010
    return net


NETS: list[Callable[[], nn.Module]] = [lambda: Folding("code"), Listed, Typed, _patched]


def _nets(job: Any, numbers: list[int]) -> list[Trained]:
    found = []
    for number in numbers:
        model = _wrap(job, NETS[number]().double(), split=["last"])
        training = make_training(job, model, make_data(8, torch.float64), micro_batch=1)
        found.append(train(training, until=3))
    return found


def test_shapes_that_only_an_early_stage_has_and_lists_of_layers() -> None:
    _assert_as_one_process(_nets, list(range(len(NETS))))


class Numbered(nn.Module):
    """Its `forward` takes numbers, which may differ in each micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, scale: float, copies: int = 1) -> torch.Tensor:
        h = self.first(x) * scale
        out: torch.Tensor = self.last(h.repeat(copies, 1))
        return out.view(copies, -1, 3).mean(0)


def _numbers(job: Any, cases: list[bool]) -> list[Trained]:
    """Each micro-batch has another number; whether it decides a shape too is a case."""
    (shape_changes,) = cases

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        number = float(batch[0].sum())
        copies = 2 if shape_changes and number > 0 else 1
        logits = model(batch[0], scale=1 + number, copies=copies)
        return F.cross_entropy(logits, batch[1], reduction="sum")

    model = _wrap(job, Numbered().double(), split="last")
    return [
        train(make_training(job, model, make_data(16, torch.float64), micro_batch=1), loss, until=4)
    ]


def test_a_number_may_change_unless_it_decides_a_shape() -> None:
    _assert_as_one_process(_numbers, [False])
    with pytest.raises(StepError, match="A number among the arguments seems to decide the shape"):
        run_ranks(_numbers, [True], nproc=2, mesh=Mesh(pp=2))


class Box(dict[str, torch.Tensor]):
    pass


class Pair(NamedTuple):
    rows: torch.Tensor
    scale: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Frozen:
    rows: torch.Tensor


class Halving(nn.Module):
    """Its `forward` changes its argument in place, whatever that is in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.last = nn.Linear(4, 3)

    def forward(self, rows: Any) -> torch.Tensor:
        x = rows["rows"] if isinstance(rows, dict) else getattr(rows, "rows", rows)
        x.div_(2)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        out: torch.Tensor = self.last(x)
        return out


def _identity(rows: torch.Tensor) -> torch.Tensor:
    return rows


def _boxed(rows: torch.Tensor) -> Box:
    return Box(rows=rows)


def _paired(rows: torch.Tensor) -> Pair:
    return Pair(rows, torch.ones(1))


def _halved(job: Any, cases: list[tuple[Any, str]]) -> list[Trained]:
    """The loss and a later evaluation see the changed rows too."""
    found = []
    for pack, schedule in cases:

        def loss(model: nn.Module, batch: Any, pack: Any = pack) -> torch.Tensor:
            loss = F.cross_entropy(model(pack(batch[0])), batch[1], reduction="sum")
            return loss * batch[0].square().mean()

        def score(model: nn.Module, batch: Any, pack: Any = pack) -> dict[str, Any]:
            return {"out": (model(pack(batch[0])).sum(), len(batch[0]))}

        model = _wrap(job, Halving().double(), schedule=schedule)
        training = make_training(job, model, make_data(8, torch.float64), micro_batch=1)
        trained = train(training, loss, until=3)
        result = paceline.evaluate(job, model, make_data(4, torch.float64), score)
        trained.losses.append(float(result.out))
        found.append(trained)
    return found


IN_PLACE = [
    *((pack, "1f1b") for pack in (_boxed, _paired, Frozen)),
    *((pack, "interleaved") for pack in (_identity, _boxed, _paired, Frozen)),
]


def test_a_forward_may_change_its_arguments_in_place() -> None:
    _assert_as_one_process(_halved, IN_PLACE)


class Scored(nn.Module):
    """Computes its loss itself, as a mean over the samples that are kept."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.last = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor, kept: torch.Tensor) -> dict[str, Any]:
        logits = self.last(torch.tanh(self.third(self.second(self.first(x)))))
        losses = F.cross_entropy(logits, y, reduction="none")
        return {"logits": logits, "loss": (losses * kept).sum() / kept.sum()}


def _masked_out(job: Any, schedules: list[str]) -> list[Trained]:
    """Trains with micro-batches, and data ranks, of which no sample is kept."""
    found = []
    data = TensorDataset(*make_data(8, torch.float64).tensors, torch.arange(8) % 4 > 1)
    for number, schedule in enumerate(schedules):

        def loss(model: nn.Module, batch: Any, inside: bool = number % 2 == 0) -> Any:
            x, y, kept = batch
            out = model(x, y, kept)
            losses = F.cross_entropy(out["logits"], y, reduction="none")
            outside = (losses * kept).sum() / kept.sum()
            return out["loss"] if inside else outside, int(kept.sum())

        model = _wrap(job, Scored().double(), schedule=schedule)
        training = make_training(job, model, data, micro_batch=1, count="tokens")
        found.append(train(training, loss, until=4, reduction="mean", clip_norm=0.5))
    return found


@pytest.mark.parametrize("layout", [PP2, pytest.param(PP_DP, marks=pytest.mark.ci)])
def test_a_mean_over_no_tokens_has_no_gradient(layout: tuple[int, Mesh]) -> None:
    schedules = ["1f1b", "gpipe", "zero_bubble", "interleaved"]
    _assert_as_one_process(_masked_out, schedules, layout=layout)


@dataclasses.dataclass
class Padded:
    rows: torch.Tensor


class TakesDataclass(nn.Module):
    """Computes in torch's default dtype; micro-batches differ in a shape inside of a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 5)
        self.third, self.last = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, padded: Padded) -> torch.Tensor:
        h = torch.tanh(self.second(self.first(padded.rows)))
        out: torch.Tensor = self.last(self.third(h))
        return out


def _padded(job: Any, schedules: list[str]) -> list[Trained]:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        rows, targets = batch
        length = 2 if rows.sum() > 0 else 1
        return F.cross_entropy(model(Padded(rows.repeat(length, 1)))[:1], targets, reduction="sum")

    torch.set_default_dtype(torch.float64)
    data = make_data(16, torch.float64)
    models = [_wrap(job, TakesDataclass(), schedule=each) for each in schedules]
    return [
        train(make_training(job, model, data, micro_batch=1), loss, until=4) for model in models
    ]


def test_shapes_in_a_dataclass_and_another_default_dtype() -> None:
    _assert_as_one_process(_padded, list(SCHEDULE_NAMES))


def _drift(job: Any) -> None:
    model = _wrap(job, GPT())
    for step in make_training(job, model, make_tokens(8), desync_every=1).steps(until=4):
        step.run(lambda batch: token_loss(model, batch)[0], reduction="sum")
        step.update()
        if step.number == 3 and job.rank == 3:
            with torch.no_grad():
                model.head.weight[0, 0] += 1


def test_replicas_of_a_stage_are_compared() -> None:
    with pytest.raises(RankDisagreement) as caught:
        run_ranks(_drift, nproc=4, mesh=Mesh(pp=2, dp_replicate=2))
    assert (caught.value.parameter, caught.value.since) == ("head.weight", 2)


def _bf16(job: Any) -> list[float]:
    model = _wrap(job, GPT())
    training = make_training(
        job,
        model,
        make_tokens(9),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        micro_batch=1,
        precision="bf16",
    )
    losses = train(training, lambda m, batch: token_loss(m, batch)[0], until=9).losses

    def score(m: nn.Module, batch: Any) -> dict[str, Any]:
        logits = m(batch[0])
        return {"loss": token_loss(lambda _: logits, batch), "logits": logits.float()}

    result = paceline.evaluate(
        job,
        model,
        make_tokens(5),
        score,
        micro_batch=2,
        metrics={"logits": "rows"},
        precision="bf16",
    )
    return [*losses, result.loss, *result.logits.flatten().tolist()]


def test_bf16_and_rows_of_an_evaluation() -> None:
    want = run_ranks(_bf16, nproc=1)[0]
    for got in run_ranks(_bf16, nproc=2, mesh=Mesh(pp=2)):
        # The same operations in the same order.
        assert got == pytest.approx(want, rel=1e-4, abs=1e-4)


def _overflows(job: Any) -> list[tuple[bool, float]]:
    """A gradient of one rank is infinite in the second step."""
    model = wrap(job, GPT())
    training = make_training(job, model, make_tokens(8), micro_batch=1, precision="fp16")
    weight, seen = next(model.parameters()), []
    for step in training.steps(until=3):
        step.run(lambda batch: token_loss(model, batch)[0], reduction="sum")
        before = local(weight).detach().clone()
        if step.number == 2 and job.rank == job.world_size - 1:
            local(weight.grad).view(-1)[0] = torch.inf
        step.update(clip_norm=1.0)
        scale = training._context.precision.scaler.get_scale()
        seen.append((torch.equal(before, local(weight)), scale))
    return seen


@pytest.mark.parametrize(
    "mesh",
    [Mesh(pp=2, tp=2), *(pytest.param(m, marks=pytest.mark.slow) for m in (PP_FSDP, PP2[1]))],
    ids=str,
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(mesh: Mesh) -> None:
    expected = [(False, 65536.0), (True, 32768.0), (False, 32768.0)]
    nproc = mesh.pp * mesh.tp * mesh.data_size
    assert run_ranks(_overflows, nproc=nproc, mesh=mesh) == [expected] * nproc


def _on_meta(job: Any, schedules: list[str]) -> list[Trained]:
    """The stages are allocated by `fsdp`; each layer is filled with numbers of its own."""

    def init(layer: nn.Module) -> None:
        for number, p in enumerate(layer.parameters(recurse=False)):
            values = torch.linspace(-1, 1 + number, p.numel(), dtype=torch.float64)
            p.copy_(torch.sin(7 * values).view_as(p) / 3)

    found = []
    for schedule in schedules:
        with torch.device("meta"):
            net = GPT(layers=4).double()
        if job.mesh is not None:
            net = paceline.pipeline(job, net, schedule=schedule)
        model = paceline.fsdp(job, net, blocks="layers.*", init=init)
        assert not any(p.is_meta for p in model.parameters())
        training = make_training(job, model, make_tokens(7), micro_batch=1, count="tokens")
        found.append(train(training, _masked_loss, until=3, clip_norm=0.5))
        result = paceline.evaluate(
            job, model, make_tokens(5), lambda m, b: {"loss": token_loss(m, b)}, micro_batch=2
        )
        found[-1].losses.append(result.loss)
    return found


@pytest.mark.parametrize(
    "layout", [(4, PP_FSDP), *(pytest.param(each, marks=pytest.mark.slow) for each in (PP2,))]
)
def test_a_model_on_the_meta_device_and_fsdp_under_all_schedules(layout: tuple[int, Mesh]) -> None:
    _assert_as_one_process(_on_meta, list(SCHEDULE_NAMES), layout=layout)


def _all_axes(job: Any, schedules: list[str]) -> list[Trained]:
    found = []
    for schedule in schedules:
        model = _wrap(job, GPT(layers=4).double(), schedule=schedule)
        if job.world_size > 1:
            model = paceline.tensor_parallel(job, model)
            model = paceline.fsdp(job, model, blocks="layers.*")
        training = make_training(job, model, make_tokens(7), micro_batch=1, count="tokens")
        found.append(train(training, _masked_loss, until=3, clip_norm=0.5))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_all_schedules_beside_tensor_parallel_and_replicas(replicas: int) -> None:
    layout = (4 * replicas, Mesh(pp=2, tp=2, dp_replicate=replicas))
    _assert_as_one_process(_all_axes, list(SCHEDULE_NAMES), layout=layout)


def _batches_tracked(job: Any) -> int | None:
    """3 samples in micro-batches of one on 2 data ranks: one has a padding micro-batch."""
    net = Masked()
    model = paceline.fsdp(job, paceline.pipeline(job, net))
    train(make_training(job, model, make_tokens(3), micro_batch=1), _loss_of_logits, until=1)
    state = model.state_dict()
    return int(state[NUMBER]) if NUMBER in state else None


@pytest.mark.slow
def test_batchnorm_does_not_count_padding() -> None:
    found = run_ranks(_batches_tracked, nproc=4, mesh=PP_FSDP)
    assert found[:2] == [None, None]
    assert sorted(found[2:]) == [1, 2]


def _score_twice(job: Any) -> None:
    score = lambda m, batch: {"loss": token_loss(m, batch), "again": token_loss(m, batch)}  # noqa: E731
    paceline.evaluate(job, _wrap(job, GPT()), make_tokens(5), score, micro_batch=2)


def test_a_score_calls_a_pipeline_once() -> None:
    with pytest.raises(StepError, match="the score called the model twice for one batch"):
        run_ranks(_score_twice, nproc=2, mesh=Mesh(pp=2))


def _llama(job: Any, _: list[Any]) -> list[Trained]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "vocab_size": 12}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False)
    model = _wrap(job, LlamaForCausalLM(config).double(), split=["model.layers.2"])
    training = make_training(job, model, make_tokens(8), micro_batch=2, count="tokens")
    # A sequence of 8 tokens has 7 targets.
    loss = lambda m, batch: (m(input_ids=batch[0], labels=batch[0]).loss, 7 * len(batch[0]))  # noqa: E731
    return [train(training, loss, until=4, reduction="mean", clip_norm=1.0)]


@pytest.mark.ci
def test_a_hugging_face_model() -> None:
    pytest.importorskip("transformers")
    _assert_as_one_process(_llama, [None], tolerance=lambda case: 1e-10)
