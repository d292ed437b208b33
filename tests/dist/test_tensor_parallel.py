"""Layers that are split over ranks, alone and with FSDP, train as on one process; wrong plans are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_gpt import GPT, HEADS, TP_PLAN, WIDTH, Attention, Block, make_tokens, token_loss
from small_trainings import refusals
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel

import paceline
from paceline import Mesh
from paceline.testing import run_ranks

Result = tuple[list[float], list[float], dict[str, torch.Tensor]]

PAIR = {"fc1": "colwise", "fc2": "rowwise"}
VOCABULARY = {"tokens": "embedding_rowwise", "head": "colwise_gather_output"}
# torch's own objects: logits stay split over the vocabulary, for `loss_parallel`.
SPLIT_LOGITS = {"head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}


class _Scale(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full(shape, 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class _Normed(Attention):
    """Has parameters between its split layers: norms of the heads, as in Qwen3, and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = nn.RMSNorm(WIDTH // HEADS), nn.RMSNorm(WIDTH // HEADS)
        self.scale = _Scale(1)
        # The same for all keys, so softmax takes it away: its gradient is 0 up to rounding on each rank.
        self.shift = nn.Parameter(torch.zeros(WIDTH // HEADS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (w(x).unflatten(-1, (self.n_heads, -1)) for w in (self.wq, self.wk, self.wv))
        heads = [y.transpose(1, 2) for y in (self.q_norm(q), self.k_norm(k) + self.shift, v)]
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        out: torch.Tensor = self.wo(self.scale(y.transpose(1, 2).flatten(2)))
        return out


def _with_parameters_between() -> GPT:
    net = GPT()
    for layer in net.layers:
        layer.attention = _Normed()
        layer.ffn_norm = _Scale(WIDTH)
    net.layers[1].attention_norm.requires_grad_(False)
    return net


def _train(job: Any, folder: str | None, until: int, **options: Any) -> Result:
    net = options.pop("net", GPT)().double()
    with torch.no_grad():
        net.norm.bias.add_(job.rank)  # ranks begin with the weights of rank 0
        if options.pop("tied", False):
            net.head.weight = net.tokens.weight
    model = paceline.tensor_parallel(job, net, **options)
    model = paceline.fsdp(job, model, blocks=Block)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # 11 samples in steps of 4: the last step has 3, and some ranks of the data axis have none.
    batches = paceline.Batches(job, make_tokens(11), global_batch=4, micro_batch=1)
    checkpoints = paceline.Checkpoints(folder, every_steps=2) if folder else None
    training = paceline.Training(
        job, model, optimizer, batches, count="tokens", checkpoints=checkpoints
    )
    losses, norms = [], []
    for step in training.steps(until=until):
        step.run(lambda batch: token_loss(model, batch), reduction="sum")
        step.update(clip_norm=0.5)
        losses.append(float(step.loss))
        norms.append(float(step.grad_norm))
    result = paceline.evaluate(
        job, model, make_tokens(5), lambda m, batch: {"loss": token_loss(m, batch)}, micro_batch=2
    )
    losses.append(result.loss)
    whole = dict(training._context.strategy.whole_state(model))
    return losses, norms, {name: value.detach().clone() for name, value in whole.items()}


def _assert_close(got: Result, want: Result) -> None:
    # float64; AdamW divides by roots of squared gradients, which makes differences of 1e-16 larger.
    assert got[0] == pytest.approx(want[0], rel=1e-8)
    assert got[1] == pytest.approx(want[1], rel=1e-8)
    for name, value in want[2].items():
        torch.testing.assert_close(got[2][name], value, rtol=1e-6, atol=1e-8)


LAYOUTS = [
    (2, Mesh(tp=2)),
    pytest.param(4, Mesh(tp=2, dp_shard=2), marks=pytest.mark.ci),
    pytest.param(4, Mesh(tp=2, dp_replicate=2), marks=pytest.mark.slow),
    pytest.param(4, Mesh(tp=4), marks=pytest.mark.slow),
]


def _each(job: Any) -> list[Result]:
    results = [_train(job, None, 5, plan=plan) for plan in (None, {**TP_PLAN, **VOCABULARY})]
    with loss_parallel():
        results.append(_train(job, None, 5, plan={**TP_PLAN, **SPLIT_LOGITS}))
    return results


@pytest.mark.parametrize(("nproc", "mesh"), LAYOUTS)
def test_it_trains_as_one_process(nproc: int, mesh: Mesh) -> None:
    want = run_ranks(_train, None, 5, nproc=1)[0]
    for results in run_ranks(_each, nproc=nproc, mesh=mesh):
        for got in results:
            _assert_close(got, want)


ADDED_UP = "replicated_with_grad_allreduce"
NORMS = {f"layers.*.attention.{name}_norm": ADDED_UP for name in "qk"}
BETWEEN = {**TP_PLAN, **NORMS, "layers.*.attention.scale": ADDED_UP}


def _between(job: Any) -> Result:
    return _train(job, None, 5, net=_with_parameters_between, plan=BETWEEN)


@pytest.mark.ci
@pytest.mark.parametrize(("nproc", "mesh"), LAYOUTS[:2])
def test_parameters_between_split_layers_train_as_on_one_process(nproc: int, mesh: Mesh) -> None:
    want = run_ranks(_between, nproc=1)[0]
    for got in run_ranks(_between, nproc=nproc, mesh=mesh):
        _assert_close(got, want)


def _tied(job: Any) -> Result:
    return _train(job, None, 3, plan={**TP_PLAN, **VOCABULARY}, tied=True)


def test_tied_weights_stay_tied() -> None:
    want = run_ranks(_tied, nproc=1)[0]
    for got in run_ranks(_tied, nproc=2, mesh=Mesh(tp=2)):
        _assert_close(got, want)
        torch.testing.assert_close(got[2]["head.weight"], got[2]["tokens.weight"], rtol=0, atol=0)


@pytest.mark.ci
def test_a_checkpoint_is_resumed_on_other_layouts(tmp_path: Path) -> None:
    want = run_ranks(_train, None, 8, nproc=1)[0]
    folder = str(tmp_path / "run")
    run_ranks(_train, folder, 2, nproc=4, mesh=Mesh(tp=2, dp_shard=2))
    run_ranks(_train, folder, 4, nproc=2, mesh=Mesh(tp=2))
    run_ranks(_train, folder, 6, nproc=3, mesh=Mesh(dp_shard=3))
    got = run_ranks(_train, folder, 8, nproc=1)[0]
    _assert_close((want[0][:6] + got[0], want[1][:6] + got[1], got[2]), want)


def _qwen(job: Any) -> tuple[list[float], int]:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 12}
    config = Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=4)
    model = paceline.tensor_parallel(job, Qwen3ForCausalLM(config).double())
    held = sum(paceline.parallel.modules.local(p).numel() for p in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = paceline.Batches(job, make_tokens(8), global_batch=4)
    training = paceline.Training(job, model, optimizer, batches, count="tokens")
    losses = []
    for step in training.steps(until=4):
        for ids, _ in step:
            out = model(input_ids=ids, labels=ids)
            step.backward(
                out.loss, count=paceline.count_labels(ids, shifted=True), reduction="mean"
            )
        step.update()
        losses.append(float(step.loss))
    return losses, held


@pytest.mark.ci
def test_the_plan_of_a_hugging_face_model() -> None:
    pytest.importorskip("transformers", minversion="4.51")
    (want, whole), *_ = run_ranks(_qwen, nproc=1)
    for got, held in run_ranks(_qwen, nproc=2, mesh=Mesh(tp=2)):
        assert got == pytest.approx(want, rel=1e-10)
        assert held < 0.55 * whole


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 7), nn.Linear(7, 4)


class Halves(nn.Module):
    """A GLU between its layers needs all features of the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 16), nn.Linear(8, 4)


WRONG = {
    "compiled": "layer.compile() before paceline.tensor_parallel",
    "names": "'layers.*.attention.w_q' matches no submodule of GPT",
    "near": "did you mean 'layers.*.attention.wq'?",
    "style": "the style 'columns' of 'head' is not known",
    "kind": "plan: norm is a LayerNorm, which 'colwise' cannot split",
    "features": "fc1 has 7 output features, which do not divide by tp=2",
    "heads": "layers.0.attention has n_heads=3, which does not divide by tp=2",
    "whole heads": "layers.0.attention.wq has 3 heads, which do not divide by tp=2",
    "unknown": '"layers.*.feed_forward.fc2": "rowwise"',
    "between": "different gradients of layers.0.attention.scale.weight, layers.1.attention.scale.weight.",
    "fused": "plan: fc1 has 16 output features; the layer after it takes 8",
    "twice": "wrapped by paceline.tensor_parallel already.\n  why:   a model is wrapped once; only "
    "paceline.fsdp may follow paceline.tensor_parallel.",
    "fp16": "precision='fp16' is not supported with tensor_parallel",
    "exact": "reproducible",
    "ddp": "ddp keeps the whole model on each rank, but the mesh is tp=2",
    "alone": "the mesh is tp=2, but the model is not split over it",
    "early": "the optimizer holds 24 parameters that are in no model",
}


def _sums_of_samples(job: Any) -> dict[str, Any]:
    from torchmetrics import SumMetric

    model = paceline.tensor_parallel(
        job, nn.Sequential(nn.Linear(1, 4)), plan={"0": "colwise_gather_output"}
    )
    return paceline.evaluate(
        job,
        model,
        torch.arange(40.0).unsqueeze(1),
        lambda _, batch: {"plain": (batch,), "held": (batch,)},
        metrics={"plain": SumMetric(), "held": SumMetric() * 1.0},
    ).values


def test_ranks_with_the_same_samples_count_them_once_in_a_metric_that_holds_another() -> None:
    for values in run_ranks(_sums_of_samples, nproc=2, mesh=Mesh(tp=2)):
        assert (float(values["plain"]), float(values["held"])) == (780.0, 780.0)


def _refused(job: Any, kind: str) -> None:
    net: Any = GPT()
    plans: dict[str, dict[str, Any]] = {
        "names": {"layers.*.attention.w_q": "colwise"},
        "near": {"layers.*.attention.w_q": "colwise"},
        "style": {"head": "columns"},
        "kind": {"norm": "colwise"},
        "features": PAIR,
        "fused": PAIR,
        "between": {**TP_PLAN, **NORMS},
    }
    options = {"plan": plans[kind]} if kind in plans else {}
    if kind == "features":
        net = Odd()
    if kind == "heads":
        net.layers[0].attention.n_heads = 3
    if kind == "whole heads":
        attention = net.layers[0].attention
        attention.head_dim, attention.wq = 2, nn.Linear(WIDTH, 6)
    if kind == "unknown":
        net.tp_plan = None
    if kind == "fused":
        net = Halves()
    if kind == "between":
        net = _with_parameters_between()
    if kind == "ddp":
        paceline.ddp(job, net)
    if kind == "compiled":
        net = torch.compile(net)
    early = torch.optim.SGD(net.parameters(), lr=0.1)
    if kind != "alone":
        net = paceline.tensor_parallel(job, net, **options)
    if kind == "twice":
        paceline.tensor_parallel(job, net)
    optimizer = early if kind == "early" else torch.optim.SGD(net.parameters(), lr=0.1)
    batches = paceline.Batches(job, make_tokens(8), global_batch=4)
    training = paceline.Training(
        job,
        net,
        optimizer,
        batches,
        count="tokens",
        precision="fp16" if kind == "fp16" else "fp32",
        reproducible=kind == "exact",
    )
    for step in training.steps(until=1):
        step.run(lambda batch: token_loss(net, batch), reduction="sum")
        step.update()


def test_data_ranks_need_fsdp() -> None:
    for found in run_ranks(refusals, _refused, [""], nproc=4, mesh=Mesh(tp=2, dp_shard=2)):
        assert "would not be summed over the 2 data ranks" in found[""][1]


@pytest.mark.ci
def test_wrong_use_is_refused_on_all_ranks() -> None:
    for found in run_ranks(refusals, _refused, list(WRONG), nproc=2, mesh=Mesh(tp=2)):
        for kind, text in WRONG.items():
            assert text in found.get(kind, ("", ""))[1], (kind, found.get(kind))
