"""Models that are split into stages train as on one process; what cannot be split is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from small_gpt import GPT, make_tokens, token_loss
from small_trainings import Recording, loss_sum, make_data, refusals
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset, default_collate

import paceline
from paceline import Mesh
from paceline.checkpoint import layout
from paceline.errors import ConfigError, RankDisagreement, StepError
from paceline.parallel.modules import PIPELINE
from paceline.parallel.pipeline_stages import _partition
from paceline.testing import run_ranks

Gradients = list[dict[str, torch.Tensor]]
Result = tuple[list[float], list[float], Gradients, dict[str, torch.Tensor]]

PP2 = (2, Mesh(pp=2))
PP4 = (4, Mesh(pp=4))
PP_DP = (4, Mesh(pp=2, dp_replicate=2))


def _masked_loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    """Tokens of class 0 are left out, so counts differ between sequences."""
    ids, targets = batch
    kept = targets.flatten().masked_fill(targets.flatten() == 0, -100)
    loss = F.cross_entropy(model(ids).flatten(0, 1), kept, reduction="sum")
    return loss, int((kept >= 0).sum())


def _wrap(job: Any, net: nn.Module, **options: Any) -> nn.Module:
    if job.mesh is not None and job.mesh.pp > 1:
        return paceline.pipeline(job, net, **options)
    return net if job.world_size == 1 else paceline.ddp(job, net)


def _train(
    job: Any,
    until: int,
    *,
    folder: str | None = None,
    dtype: torch.dtype = torch.float64,
    global_batch: int = 4,
    micro_batch: int = 1,
    count: str = "tokens",
    **options: Any,
) -> Result:
    net = GPT(layers=6).to(dtype)
    with torch.no_grad():
        net.norm.bias.add_(job.rank)  # ranks begin with the weights of rank 0
    model = _wrap(job, net, **options)
    optimizer = Recording(model.parameters())
    # 9 samples in steps of 4: the last step has 1, so one of 2 data ranks has none.
    batches = paceline.Batches(
        job, make_tokens(9), global_batch=global_batch, micro_batch=micro_batch
    )
    checkpoints = paceline.Checkpoints(folder, every_steps=2) if folder else None
    training = paceline.Training(
        job, model, optimizer, batches, count=count, checkpoints=checkpoints
    )
    losses, norms = [], []

    def loss_fn(batch: Any) -> Any:
        loss, tokens = _masked_loss(model, batch)
        return (loss, tokens) if count == "tokens" else loss / 10

    for step in training.steps(until=until):
        step.run(loss_fn, reduction="sum")
        step.update(clip_norm=0.5)
        losses.append(float(step.loss))
        norms.append(float(step.grad_norm))
    result = paceline.evaluate(
        job, model, make_tokens(5), lambda m, batch: {"loss": token_loss(m, batch)}, micro_batch=2
    )
    losses.append(result.loss)
    names = [name for name, _ in model.named_parameters()]
    assert result.num_samples == 5
    gradients = [dict(zip(names, seen, strict=True)) for seen in optimizer.seen]
    whole = dict(training._context.strategy.whole_state(model))
    whole = {name: value.detach().clone() for name, value in whole.items()}
    return losses, norms, gradients, whole  # type: ignore[return-value]


def _assert_equal(results: list[Result], want: Result, tolerance: float = 1e-12) -> None:
    """Relative differences of what each rank has seen; the ranks hold all gradients together."""
    for losses, norms, gradients, whole in results:
        assert losses == pytest.approx(want[0], rel=tolerance)
        # A gradient may be 0 but for rounding, as that of the bias of an attention's key.
        assert norms == pytest.approx(want[1], rel=tolerance, abs=1e-3 * tolerance)
        assert list(whole) == list(want[3])
        for name, value in want[3].items():
            assert _difference(whole[name], value) < tolerance
        for own, all_of_step in zip(gradients, want[2], strict=True):
            for name, gradient in own.items():
                assert _difference(gradient, all_of_step[name]) < tolerance
    assert {name for result in results for name in result[2][0]} == set(want[2][0])


def _difference(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm().clamp(min=1e-3))


SCHEDULES: list[dict[str, Any]] = [
    {"schedule": "gpipe", "count": "samples"},
    {"schedule": "1f1b", "micro_batch": 3},  # 3 and 1 samples
    {"schedule": "interleaved", "global_batch": 5},  # torch takes 4 of 5 micro-batches on 2 ranks
    {"schedule": "zero_bubble", "dtype": torch.float32},
    {"schedule": "zero_bubble", "micro_batch": 4},
]


def _each(job: Any, cases: list[dict[str, Any]]) -> list[Result]:
    return [_train(job, 6, **case) for case in cases]


@pytest.mark.parametrize(
    ("nproc", "mesh"),
    [PP2, *(pytest.param(*each, marks=pytest.mark.slow) for each in (PP4, PP_DP))],
)
def test_it_trains_as_one_process(nproc: int, mesh: Mesh) -> None:
    plain = [{k: v for k, v in case.items() if k != "schedule"} for case in SCHEDULES]
    wants = run_ranks(_each, plain, nproc=1)[0]
    results = run_ranks(_each, SCHEDULES, nproc=nproc, mesh=mesh)
    for case, want, got in zip(SCHEDULES, wants, zip(*results, strict=True), strict=True):
        tolerance = 1e-5 if case.get("dtype") == torch.float32 else 1e-12
        _assert_equal(list(got), want, tolerance)


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


FORMS: list[tuple[str, dict[str, bool]]] = [
    (schedule, options)
    for schedule in ("gpipe", "1f1b", "interleaved", "zero_bubble")
    for options in ({}, {"checkpointed": True}, {"named": True})
]
FORMS.append(("1f1b", {"reused": True}))


def _train_masked(job: Any, schedule: str, options: dict[str, bool]) -> list[Any]:
    model: nn.Module = Masked(**options).double()
    if job.world_size > 1:
        model = paceline.pipeline(job, model, schedule=schedule)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = paceline.Batches(job, make_tokens(8), global_batch=4, micro_batch=1)
    training = paceline.Training(job, model, optimizer, batches)

    def loss_fn(batch: Any) -> torch.Tensor:
        try:
            logits = model(ids=batch[0], shift=0.5)["logits"]
        except Exception as error:  # nor the call of the model that finds its arguments
            raise AssertionError("the model failed") from error
        return F.cross_entropy(logits.flatten(0, 1), batch[1][:, 1:].flatten(), reduction="sum")

    seen: list[Any] = []
    for step in training.steps(until=3):
        step.run(loss_fn, reduction="sum")
        step.update(clip_norm=1e6)
        seen += [float(step.loss), float(step.grad_norm)]
    whole = dict(training._context.strategy.whole_state(model))
    return [
        *seen,
        whole["batchnorm.running_mean"].tolist(),
        int(whole["batchnorm.num_batches_tracked"]),
    ]


def _train_forms(job: Any) -> list[list[Any]]:
    return [_train_masked(job, *form) for form in FORMS]


@pytest.mark.ci
def test_a_forward_may_compute_masks_and_values_between_its_submodules() -> None:
    wants = run_ranks(_train_forms, nproc=1)[0]
    for results in run_ranks(_train_forms, nproc=2, mesh=Mesh(pp=2)):
        for form, got, want in zip(FORMS, results, wants, strict=True):
            for value, wanted in zip(got, want, strict=True):
                assert value == pytest.approx(wanted, rel=1e-11), form


class RandomMask(nn.Module):
    """Draws one mask for both of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Seen(), Seen()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.rand(len(x), 1).round()
        out: torch.Tensor = self.second(self.first(x, mask), mask)
        return out


class Seen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.masks = nn.Linear(4, 4), []  # type: ignore[var-annotated]

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.masks.append(mask.flatten().tolist())
        out: torch.Tensor = self.linear(x) * mask
        return out


def _masks(job: Any) -> tuple[list[Any], list[Any], list[float]]:
    torch.manual_seed(0)
    model = RandomMask()
    first, second = model.first, model.second
    if job.world_size > 1:
        paceline.pipeline(job, model)
    x = torch.ones(8, 4)
    batches = paceline.Batches(job, x, global_batch=8, micro_batch=4)
    training = paceline.Training(job, model, torch.optim.SGD(model.parameters(), lr=0.1), batches)
    losses = []
    for step in training.steps(until=2):
        step.run(lambda batch: model(batch).pow(2).mean(1).sum(), reduction="sum")
        step.update()
        losses.append(float(step.loss))
    return first.masks, second.masks, losses


def test_what_a_forward_draws_before_its_layers_is_equal_in_all_stages() -> None:
    first, second, losses = run_ranks(_masks, nproc=1)[0]
    assert first == second
    (own, _, _), (_, others, got) = run_ranks(_masks, nproc=2, mesh=Mesh(pp=2))
    assert first[:2] == own[-len(first) :][:2]
    assert others[-2:] == second[-2:]
    assert got == pytest.approx(losses)


def _reuse(job: Any) -> list[Any]:
    return _train_masked(job, "zero_bubble", {"reused": True})


def test_zero_bubble_with_a_layer_that_a_stage_uses_twice() -> None:
    if torch.__version__ < "2.13":  # whole backwards are used
        (want,) = run_ranks(_reuse, nproc=1)
        for got in run_ranks(_reuse, nproc=2, mesh=Mesh(pp=2)):
            for value, wanted in zip(got, want, strict=True):
                assert value == pytest.approx(wanted, rel=1e-11)
        return
    with pytest.raises(StepError, match="'zero_bubble' cannot compute the gradients of this model"):
        run_ranks(_reuse, nproc=2, mesh=Mesh(pp=2))


def _layout_run(job: Any, folder: str, until: int, schedule: str = "interleaved") -> Any:
    model = _wrap(job, GPT(layers=6).double(), schedule=schedule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule_of = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    batches = paceline.Batches(job, make_tokens(9), global_batch=4, micro_batch=1)
    training = paceline.Training(
        job,
        model,
        optimizer,
        batches,
        schedule=schedule_of,
        checkpoints=paceline.Checkpoints(f"{folder}/checkpoints", every_steps=2),
    )
    training.report(folder)
    losses = []
    for step in training.steps(until=until):
        step.run(lambda batch: token_loss(model, batch)[0], reduction="sum")
        step.update(clip_norm=0.5)
        training.log(loss=step.loss)
        losses.append(float(step.loss))
    training.export(f"{folder}/model.pth")
    return losses


@pytest.mark.slow
def test_a_training_goes_on_in_other_layouts(tmp_path: Path) -> None:
    want = run_ranks(_layout_run, str(tmp_path / "want"), 10, nproc=1)[0]
    got: list[float] = []
    folder = str(tmp_path / "got")
    layouts = [PP2, (2, Mesh(dp_replicate=2)), PP_DP, (1, None), PP2]
    for until, (nproc, mesh) in zip((2, 4, 6, 8, 10), layouts, strict=True):
        got += run_ranks(_layout_run, folder, until, nproc=nproc, mesh=mesh)[0]
    # AdamW divides by roots of squared gradients, which makes differences of 1e-16 larger.
    assert got == pytest.approx(want, rel=1e-9)
    whole, other = (torch.load(tmp_path / run / "model.pth") for run in ("want", "got"))
    assert list(other) == list(whole)
    for name, value in whole.items():
        torch.testing.assert_close(other[name], value, rtol=1e-7, atol=1e-9)
    # The file of a pipeline is read by a plain model, and before a model is split.
    GPT(layers=6).load_state_dict(other)
    lines = (tmp_path / "got" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    bubbles = {row["step"]: row["pipeline_bubble"] for row in rows if "pipeline_bubble" in row}
    assert list(bubbles) == [1, 2, 5, 9, 10]  # rank 0 has no sample in step 6
    assert all(0 < bubble < 1 for bubble in bubbles.values())


def _read_own(job: Any, folder: str) -> tuple[list[str], list[str]]:
    read: list[str] = []
    actual = layout.plan_reads

    def recorded(wanted: Any, saved: Any) -> Any:
        read.extend(wanted)
        return actual(wanted, saved)

    layout.plan_reads = recorded
    model = paceline.pipeline(job, GPT(layers=6).double())
    optimizer = torch.optim.AdamW(model.parameters())
    batches = paceline.Batches(job, make_tokens(9), global_batch=4, micro_batch=1)
    checkpoints = paceline.Checkpoints(f"{folder}/checkpoints", resume="must")
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    training = paceline.Training(
        job, model, optimizer, batches, schedule=schedule, checkpoints=checkpoints
    )
    assert list(training.steps(until=2)) == []
    layout.plan_reads = actual
    return read, [name for name, _ in model.named_parameters()]


def test_a_rank_reads_the_tensors_of_its_stages_only(tmp_path: Path) -> None:
    run_ranks(_layout_run, str(tmp_path), 2, nproc=1)
    results = run_ranks(_read_own, str(tmp_path), nproc=2, mesh=Mesh(pp=2))
    for read, names in results:
        weights = {path.removeprefix("models.0.") for path in read if path.startswith("models.")}
        states = {path.split(".", 4)[4] for path in read if path.startswith("optimizers.")}
        assert weights == set(names)
        assert {state.rpartition(".")[0] for state in states} == set(names)


class Counting(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)

    def get_extra_state(self) -> int:
        return 1


class Simple(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.third, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        if kind == "tied":
            self.last.weight = self.first.weight = nn.Parameter(torch.ones(3, 4))
        if kind == "shared":
            self.third = self.first
        if kind == "unowned":
            self.token = nn.Parameter(torch.ones(4))
        if kind.startswith("frozen"):
            self.first.requires_grad_(False)
            self.second.requires_grad_(False)
        if kind == "extra state":
            self.third = Counting()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.second(self.first(x))
        if self.kind == "order":
            h = self.third(self.last(h))
        elif self.kind in ("unused", "unused measured"):
            h = h[:, :3]
        elif self.kind == "skip":
            h = self.last(self.third(h) + self.first.bias)
        elif self.kind == "two values":
            h = self.last(self.third(h) + h)
        elif self.kind == "tuple":
            h = self.third((h, h))
        elif self.kind == "detached":
            h = self.last(self.third(x))
        elif self.kind == "late value":
            h = self.last(self.third(h)) + h[:, :3]
        elif self.kind == "parameters":
            h = self.last(self.third(h)).to(next(self.parameters()).dtype)
        elif self.kind == "no gradients":
            with torch.no_grad():
                h = self.third(h)
            h = self.last(h)
        elif self.kind == "recomputed":
            h = self.last(checkpoint(lambda h: self.third(2 * h), h, use_reentrant=False))
        else:
            h = self.last(self.third(h))
        if self.kind == "cause":
            try:
                h = {}[0]
            except KeyError as error:
                raise RuntimeError("an error of the user") from error
        return h


class Listed(nn.Module):
    """Has a list of layers, and reads attributes of a submodule."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.drop, self.last = nn.Dropout(0.9).eval(), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.dropout(layer(x), self.drop.p, self.drop.training)
        out: torch.Tensor = self.last(x)
        return out


# Raised before the model is split.
WRONG = {
    "name": "split: 'thrd' matches no submodule of Simple.\n  fix:   did you mean 'third'?",
    "twice named": "split: ['third', 'third'] must name different submodules with parameters",
    "pattern": "split: 't*' is not the name of a submodule that can begin a stage.",
    "list": "begins with one submodule, which has parameters or buffers and which `forward` calls.\n"
    "  fix:   choose from layers.0, layers.1.",
    "number": "split makes 3 stages; pp=2 with schedule='1f1b' needs 2.\n"
    "  fix:   give 1 name, or change pp.",
    "rounds": "split makes 3 stages; pp=2 with schedule='interleaved' needs a multiple of 2",
    "few": "Sequential has 1 layer with parameters, too few for 2 stages",
    "schedule": "schedule must be one of gpipe, 1f1b, interleaved, zero_bubble; got 'dualpipe'",
    "example": "example has no effect: `split` names the stages",
    "tied": "first.weight and last.weight are one parameter (tied weights), but belong to stages 0 and 1",
    "shared": "first and third are one module, but belong to stages 0 and 1",
    "unowned": "token is held by the model itself, not by a layer, so it belongs to no stage",
    "extra state": "state_dict() of Simple holds other values than tensors: third._extra_state",
    "frozen": "stage 0 (first, second) has no trainable parameter.\n  fix:   choose other names for split",
    "frozen without split": "no trainable parameter.\n  fix:   give split= with names of submodules",
    "unused measured": "the forward of Simple does not call third, last",
    "alone": "the mesh is pp=2, but the model is not split into stages",
    "fp16": "torch's loss scaler looks for overflows in the gradients of one stage only",
    "exact": "why:   the exact sum needs all gradients of a model on each rank",
    "early": "the optimizer holds 4 parameters that are not in this stage",
    "models": "training a pipeline supports one model and one optimizer, got 2 and 1",
    "loop": "the model is a pipeline, whose micro-batches cannot be run in a loop",
    "called": "a pipeline's model was called outside of `step.run`",
    "no call": "the function given to `step.run` did not call the model",
    "drops": "a micro-batch of 8 samples has tensors of 7 rows",
}

WRAPPED = {
    "again": "this module is wrapped by paceline.pipeline already",
    "fsdp": "the mesh is pp=2; fsdp works without an axis pp",
    "replica": "this module is wrapped by paceline.ddp already",
}


def _drop_one(samples: list[Any]) -> Any:
    return default_collate(samples[1:])


def _squares(model: nn.Module) -> torch.Tensor:
    return torch.stack([p.square().sum() for p in model.parameters()]).sum()


def _distilled(model: nn.Module, batch: Any) -> torch.Tensor:
    out = model(batch[0])
    with torch.no_grad():
        teacher = model(batch[0])
    return F.mse_loss(out, teacher, reduction="sum")


def _refused(job: Any, kind: str) -> None:
    net: nn.Module = Simple(kind)
    options: dict[str, Any] = {"split": ["third"]}
    if kind == "name":
        options = {"split": ["thrd"]}
    elif kind == "twice named":
        options = {"split": ["third", "third"]}
    elif kind == "pattern":
        options = {"split": ["t*"]}
    elif kind == "list":
        options, net = {"split": ["layers"]}, Listed()
    elif kind == "frozen without split":
        options = {}
    elif kind in ("number", "rounds"):
        options = {"split": ["second", "third"]}
        options["schedule"] = "interleaved" if kind == "rounds" else "1f1b"
    elif kind == "few":
        options = {}
        net = nn.Sequential(nn.Linear(4, 3))
    elif kind == "schedule":
        options["schedule"] = "dualpipe"
    elif kind == "example":
        options["example"] = torch.ones(1, 4)
    elif kind == "unused measured":
        options = {"example": torch.ones(1, 4)}
    early = torch.optim.SGD(net.parameters(), lr=0.1)
    model = net if kind == "alone" else paceline.pipeline(job, net, **options)
    if kind == "again":
        paceline.pipeline(job, model)
    if kind == "fsdp":
        paceline.fsdp(job, Simple(""))
    if kind == "replica":
        paceline.pipeline(job, nn.parallel.DistributedDataParallel(Simple("")))
    if kind == "replaced":
        model.last = nn.Linear(4, 3)
    if kind == "called":
        model(torch.ones(1, 4))
    optimizer = early if kind == "early" else torch.optim.SGD(model.parameters(), lr=0.1)
    training = paceline.Training(
        job,
        [model, nn.Linear(1, 1)] if kind == "models" else model,
        optimizer,
        paceline.Batches(
            job, make_data(8), global_batch=8, collate=_drop_one if kind == "drops" else None
        ),
        precision="fp16" if kind == "fp16" else "fp32",
        reproducible=kind == "exact",
    )
    for step in training.steps(until=1):
        if kind == "loop":
            list(step)
        elif kind == "no call":
            step.run(lambda batch: batch[0].sum(), reduction="sum")
        elif kind == "mean":
            step.run(lambda batch: F.cross_entropy(model(batch[0]), batch[1]), reduction="sum")
        elif kind == "penalty":
            step.run(lambda batch: loss_sum(model, batch) + _squares(model), reduction="sum")
        elif kind == "distilled":
            step.run(lambda batch: _distilled(model, batch), reduction="sum")
        else:
            step.run(lambda batch: loss_sum(model, batch), reduction="sum")
        step.update()


@pytest.mark.ci
def test_wrong_use_is_refused_on_all_ranks() -> None:
    for rank, found in enumerate(
        run_ranks(refusals, _refused, list(WRONG), nproc=2, mesh=Mesh(pp=2))
    ):
        for kind, text in WRONG.items():
            if kind == "unused measured" and rank > 0:
                text = "rank 0 failed first: ConfigError: " + text
            assert text in found.get(kind, ("", ""))[1], (kind, found.get(kind))


def test_a_module_that_is_wrapped_already_is_refused_on_all_ranks() -> None:
    for found in run_ranks(refusals, _refused, list(WRAPPED), nproc=2, mesh=Mesh(pp=2)):
        assert all(text in found[kind][1] for kind, text in WRAPPED.items()), found


# Found in the first forward, by the first stage.
UNFIT = {
    "order": "`forward` calls last where third was expected",
    "unused": "`forward` does not call third",
    "tuple": "the first argument of third is a tuple, not a floating-point tensor",
}


@pytest.mark.parametrize("kind", list(UNFIT))
def test_a_forward_that_cannot_be_split_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run_ranks(_refused, kind, nproc=2, mesh=Mesh(pp=2))
    assert UNFIT[kind] in str(caught.value)


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


def _train_small(job: Any, net: nn.Module) -> list[float]:
    model = _wrap(job, net.double(), split=["last"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = paceline.Batches(job, make_data(8, torch.float64), global_batch=4, micro_batch=1)
    training = paceline.Training(job, model, optimizer, batches)
    losses = []
    for step in training.steps(until=3):
        step.run(lambda batch: loss_sum(model, batch), reduction="sum")
        step.update()
        losses.append(float(step.loss))
    return losses


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x) * scale


class Typed(nn.Module):
    """Its `forward` looks at the types of its layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList([Scaled(4, 4), nn.Linear(4, 4)])
        self.last = Scaled(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, self.last):
            x = layer(x, 3.0) if isinstance(layer, Scaled) else layer(x)
        return x


class InPlace(nn.Module):
    """Its `forward` changes its argument, and its layers without parameters are in a list."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.acts = nn.ModuleList([nn.ReLU(), nn.Tanh()])
        self.last = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.div_(2)
        for layer, act in zip(self.layers, self.acts, strict=True):
            x = act(layer(x))
        out: torch.Tensor = self.last(x)
        return out


def _train_both(job: Any) -> list[list[float]]:
    return [_train_small(job, net) for net in (Folding("module"), Listed(), Typed(), InPlace())]


def test_shapes_that_only_an_early_stage_has_and_lists_of_layers() -> None:
    wants = run_ranks(_train_both, nproc=1)[0]
    for results in run_ranks(_train_both, nproc=2, mesh=Mesh(pp=2)):
        for got, want in zip(results, wants, strict=True):
            assert got == pytest.approx(want, rel=1e-12)


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


def _train_numbered(job: Any, shape_changes: bool) -> tuple[list[float], int]:
    model: nn.Module = Numbered().double()
    if job.world_size > 1:
        model = paceline.pipeline(job, model, split="last")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = paceline.Batches(job, make_data(16, torch.float64), global_batch=4, micro_batch=1)
    training = paceline.Training(job, model, optimizer, batches)

    def loss_fn(batch: Any) -> torch.Tensor:
        number = float(batch[0].sum())
        copies = 2 if shape_changes and number > 0 else 1
        logits = model(batch[0], scale=1 + number, copies=copies)
        return F.cross_entropy(logits, batch[1], reduction="sum")

    losses = []
    for step in training.steps(until=4):
        step.run(loss_fn, reduction="sum")
        step.update()
        losses.append(float(step.loss))
    runner = model.__dict__.get(PIPELINE)
    return losses, len(runner._schedules) if runner is not None else 0


def test_a_number_that_changes_needs_no_schedule_of_its_own() -> None:
    ((want, _),) = run_ranks(_train_numbered, False, nproc=1)
    for got, schedules in run_ranks(_train_numbered, False, nproc=2, mesh=Mesh(pp=2)):
        assert got == pytest.approx(want, rel=1e-12)
        assert schedules == 1


def test_a_number_that_decides_a_shape_is_refused() -> None:
    with pytest.raises(StepError, match="A number among the arguments seems to decide the shape"):
        run_ranks(_train_numbered, True, nproc=2, mesh=Mesh(pp=2))


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


def _train_halving(job: Any, cases: list[tuple[Any, str]]) -> list[list[float]]:
    """The losses, which see the changed rows too, and the mean output of a later evaluation."""
    found = []
    for pack, schedule in cases:
        model: nn.Module = Halving().double()
        if job.world_size > 1:
            model = paceline.pipeline(job, model, schedule=schedule)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = paceline.Batches(job, make_data(8, torch.float64), global_batch=4, micro_batch=1)
        training = paceline.Training(job, model, optimizer, batches)

        def loss_fn(batch: Any, model: nn.Module = model, pack: Any = pack) -> torch.Tensor:
            loss = F.cross_entropy(model(pack(batch[0])), batch[1], reduction="sum")
            return loss * batch[0].square().mean()

        losses = []
        for step in training.steps(until=3):
            step.run(loss_fn, reduction="sum")
            step.update()
            losses.append(float(step.loss))
        score = paceline.evaluate(
            job,
            model,
            make_data(4, torch.float64),
            lambda m, batch, pack=pack: {"out": m(pack(batch[0])).sum()},
        )
        found.append([*losses, float(score.out)])
    return found


IN_PLACE = [
    *((pack, "1f1b") for pack in (_boxed, _paired, Frozen)),
    *((pack, "interleaved") for pack in (_identity, _boxed, _paired, Frozen)),
]


def test_a_forward_may_change_its_arguments_in_place() -> None:
    (wants,) = run_ranks(_train_halving, IN_PLACE, nproc=1)
    for results in run_ranks(_train_halving, IN_PLACE, nproc=2, mesh=Mesh(pp=2)):
        for case, got, want in zip(IN_PLACE, results, wants, strict=True):
            assert got == pytest.approx(want, rel=1e-12), case


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


def _train_masked_out(job: Any, schedules: list[str]) -> list[list[float]]:
    """Trains with micro-batches, and data ranks, of which no sample is kept."""
    found = []
    x, y = make_data(8, torch.float64).tensors
    data = TensorDataset(x, y, torch.arange(8) % 4 > 1)
    for number, schedule in enumerate(schedules):
        model: nn.Module = Scored().double()
        if job.world_size > 1:
            model = paceline.pipeline(job, model, schedule=schedule)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = paceline.Batches(job, data, global_batch=4, micro_batch=1, shuffle=False)
        training = paceline.Training(job, model, optimizer, batches, count="tokens")

        def loss_fn(batch: Any, model: nn.Module = model, inside: bool = number % 2 == 0) -> Any:
            x, y, kept = batch
            out = model(x, y, kept)
            losses = F.cross_entropy(out["logits"], y, reduction="none")
            outside = (losses * kept).sum() / kept.sum()
            return out["loss"] if inside else outside, int(kept.sum())

        losses = []
        for step in training.steps(until=4):
            step.run(loss_fn, reduction="mean")
            step.update(clip_norm=0.5)
            losses += [float(step.loss), float(step.grad_norm)]
        found.append(losses)
    return found


@pytest.mark.parametrize(("nproc", "mesh"), [PP2, PP_DP])
def test_a_mean_over_no_tokens_has_no_gradient(nproc: int, mesh: Mesh) -> None:
    schedules = ["1f1b", "gpipe", "zero_bubble", "interleaved"]
    (wants,) = run_ranks(_train_masked_out, schedules, nproc=1)
    for results in run_ranks(_train_masked_out, schedules, nproc=nproc, mesh=mesh):
        for got, want in zip(results, wants, strict=True):
            assert got == pytest.approx(want, rel=1e-12)


@dataclasses.dataclass
class Padded:
    rows: torch.Tensor


class TakesDataclass(nn.Module):
    """Computes in torch's default dtype; micro-batches differ in a shape inside of a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, padded: Padded) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.tanh(self.first(padded.rows)))
        return out


def _train_padded(job: Any) -> tuple[list[float], set[torch.dtype]]:
    """The losses, and the dtypes of the losses for which the last stage has buffers."""
    torch.set_default_dtype(torch.float64)
    model = _wrap(job, TakesDataclass())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = paceline.Batches(job, make_data(16, torch.float64), global_batch=4, micro_batch=1)
    training = paceline.Training(job, model, optimizer, batches)

    def loss_fn(batch: Any) -> torch.Tensor:
        rows, targets = batch
        length = 2 if rows.sum() > 0 else 1
        return F.cross_entropy(model(Padded(rows.repeat(length, 1)))[:1], targets, reduction="sum")

    losses = []
    for step in training.steps(until=4):
        step.run(loss_fn, reduction="sum")
        step.update()
        losses.append(float(step.loss))
    runner = model.__dict__.get(PIPELINE)
    schedules = runner._schedules.values() if runner is not None else []
    return losses, {each.templates[1][1].dtype for each in schedules if 1 in each.templates}


def test_shapes_in_a_dataclass_and_another_default_dtype() -> None:
    ((want, _),) = run_ranks(_train_padded, nproc=1)
    results = run_ranks(_train_padded, nproc=2, mesh=Mesh(pp=2))
    for got, _ in results:
        assert got == pytest.approx(want, rel=1e-12)
    assert results[1][1] == {torch.float32}  # torch 2.11 refuses another dtype


# Found by the second stage, after it has received a tensor.
UNFIT_LATER = {
    "skip": "`first` is on another stage, so `first.bias` cannot be read on this rank",
    "two values": "last gets another value than its first argument from an earlier stage",
    "detached": "the first argument of third is not computed by the stage before",
    "late value": "`forward` returns a tensor that it computes from a value of an earlier stage",
    "parameters": "the `forward` of Simple raised StopIteration",
    "code": "stage 1 cannot skip the computations between the submodules before it: RuntimeError: ",
    "unpacked": "stage 1 cannot skip the computations between the submodules before it: ValueError: ",
}


def _called_once(job: Any, kind: str) -> None:
    if kind in ("code", "unpacked"):
        model = paceline.pipeline(job, Folding(kind), split=["last"])
    else:
        model = paceline.pipeline(job, Simple(kind), split=["third"])
    with torch.no_grad():
        model(torch.ones(2, 4))


def test_what_the_second_stage_cannot_compute_is_refused() -> None:
    _, found = run_ranks(refusals, _called_once, list(UNFIT_LATER), nproc=2, mesh=Mesh(pp=2))
    for kind, text in UNFIT_LATER.items():
        assert text in found.get(kind, ("", ""))[1], (kind, found.get(kind))


LAST = {
    "recomputed": (
        ConfigError,
        "third is computed again in the backward with a value of an earlier stage",
    ),
    "no gradients": (ConfigError, "`forward` calls third without gradients"),
    "replaced": (ConfigError, "last was replaced after paceline.pipeline"),
    "mean": (StepError, "the loss is a mean"),
    "distilled": (StepError, "called the model twice for one micro-batch"),
    "penalty": (StepError, "computes with third.weight, third.bias, last.weight, last.bias itself"),
    "cause": (RuntimeError, "an error of the user"),
}


@pytest.mark.parametrize("kind", list(LAST))
def test_an_error_of_the_last_stage_is_the_one_that_is_raised(kind: str) -> None:
    kind_of_error, text = LAST[kind]
    with pytest.raises(kind_of_error, match=text):
        run_ranks(_refused, kind, nproc=2, mesh=Mesh(pp=2))


def _drift(job: Any) -> None:
    model = paceline.pipeline(job, GPT())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = paceline.Batches(job, make_tokens(8), global_batch=4)
    training = paceline.Training(job, model, optimizer, batches, desync_every=1)
    for step in training.steps(until=4):
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = paceline.Batches(job, make_tokens(9), global_batch=4, micro_batch=1)
    training = paceline.Training(job, model, optimizer, batches, precision="bf16")
    losses = []
    for step in training.steps(until=9):
        step.run(lambda batch: token_loss(model, batch)[0], reduction="sum")
        step.update()
        losses.append(float(step.loss))

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


def _score_twice(job: Any) -> None:
    model = paceline.pipeline(job, GPT())
    score = lambda m, batch: {"loss": token_loss(m, batch), "again": token_loss(m, batch)}  # noqa: E731
    paceline.evaluate(job, model, make_tokens(5), score, micro_batch=2)


def test_a_score_calls_a_pipeline_once() -> None:
    with pytest.raises(StepError, match="the score called the model twice for one batch"):
        run_ranks(_score_twice, nproc=2, mesh=Mesh(pp=2))


class Uneven(nn.Module):
    """The first of five layers takes longer than the others together, and has fewest parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Slow(), *(nn.Linear(64, 64) for _ in range(4)))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x + y)
        return out


class Slow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(200):
            x = x @ self.weight
        return x


def _split_uneven(job: Any) -> list[list[str]]:
    found = []
    for example in (None, (torch.ones(64, 64), torch.ones(64, 64))):
        net = Uneven()
        assert net.training
        paceline.pipeline(job, net, example=example)
        assert net.training
        found.append(sorted({name.rpartition(".")[0] for name, _ in net.named_parameters()}))
    return found


def test_an_example_makes_stages_of_nearly_equal_time() -> None:
    (by_size, by_time), _ = run_ranks(_split_uneven, nproc=2, mesh=Mesh(pp=2))
    assert by_size == ["layers.0", "layers.1", "layers.2"]
    assert by_time == ["layers.0"]


def test_stages_have_the_smallest_largest_cost() -> None:
    units = list("abcde")
    assert _partition(units, [1, 1, 1, 1, 4], 2) == [list("abcd"), ["e"]]
    assert _partition(units, [9, 1, 1, 1, 1], 3) == [["a"], ["b", "c"], ["d", "e"]]
    assert _partition(units, [0, 0, 0, 0, 1], 5) == [[unit] for unit in units]


def _llama(job: Any) -> list[float]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "vocab_size": 12}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False)
    model: nn.Module = LlamaForCausalLM(config).double()
    if job.world_size > 1:
        model = paceline.pipeline(job, model, split=["model.layers.2"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = paceline.Batches(job, make_tokens(8), global_batch=4, micro_batch=2)
    training = paceline.Training(job, model, optimizer, batches, count="tokens")

    def loss_fn(batch: Any) -> Any:
        ids, _ = batch
        count = paceline.count_labels(ids, shifted=True)
        return model(input_ids=ids, labels=ids).loss, count

    losses = []
    for step in training.steps(until=4):
        step.run(loss_fn, reduction="mean")
        step.update(clip_norm=1.0)
        losses += [float(step.loss), float(step.grad_norm)]
    return losses


@pytest.mark.ci
def test_a_hugging_face_model() -> None:
    pytest.importorskip("transformers")
    want = run_ranks(_llama, nproc=1)[0]
    for got in run_ranks(_llama, nproc=2, mesh=Mesh(pp=2)):
        assert got == pytest.approx(want, rel=1e-10)
