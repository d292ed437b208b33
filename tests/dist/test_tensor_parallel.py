"""Layers that are split over ranks, alone and with FSDP, train as on one process; wrong plans are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_gpt import GPT, HEADS, TP_PLAN, WIDTH, Attention, Block, make_tokens, token_loss
from small_trainings import (
    Trained,
    assert_close,
    check_messages,
    make_training,
    refusals,
    sgd,
    train,
)
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel

import paceline
from paceline import Mesh
from paceline.testing import run_ranks

TOLERANCE = 1e-8  # float64; AdamW divides by roots of squared gradients
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


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def _train(
    job: Any,
    *,
    net: Callable[[], Any] = GPT,
    tied: bool = False,
    plan: Any = None,
) -> Trained:
    gpt = net().double()
    with torch.no_grad():
        gpt.norm.bias.add_(job.rank)  # ranks begin with the weights of rank 0
        if tied:
            gpt.head.weight = gpt.tokens.weight
    model = paceline.fsdp(job, paceline.tensor_parallel(job, gpt, plan=plan), blocks=Block)
    # 11 samples in steps of 4: the last step has 3, and some ranks of the data axis have none.
    training = make_training(
        job, model, make_tokens(11), optimizer=_adamw, micro_batch=1, count="tokens"
    )
    found = train(training, token_loss, until=5, clip_norm=0.5)
    result = paceline.evaluate(
        job, model, make_tokens(5), lambda m, batch: {"loss": token_loss(m, batch)}, micro_batch=2
    )
    found.losses.append(result.loss)
    return found


LAYOUTS = [
    (2, Mesh(tp=2)),
    pytest.param(4, Mesh(tp=2, dp_shard=2), marks=pytest.mark.ci),
    pytest.param(4, Mesh(tp=2, dp_replicate=2), marks=pytest.mark.slow),
    pytest.param(4, Mesh(tp=4), marks=pytest.mark.slow),
]


def _each(job: Any) -> list[Trained]:
    results = [_train(job, plan=plan) for plan in (None, {**TP_PLAN, **VOCABULARY})]
    with loss_parallel():
        results.append(_train(job, plan={**TP_PLAN, **SPLIT_LOGITS}))
    return results


@pytest.mark.parametrize(("nproc", "mesh"), LAYOUTS)
def test_it_trains_as_one_process(nproc: int, mesh: Mesh) -> None:
    (want,) = run_ranks(_train, nproc=1)
    for results in run_ranks(_each, nproc=nproc, mesh=mesh):
        for got in results:
            assert_close(got, want, TOLERANCE)


ADDED_UP = "replicated_with_grad_allreduce"
NORMS = {f"layers.*.attention.{name}_norm": ADDED_UP for name in "qk"}
BETWEEN = {**TP_PLAN, **NORMS, "layers.*.attention.scale": ADDED_UP}


def _between(job: Any) -> Trained:
    return _train(job, net=_with_parameters_between, plan=BETWEEN)


@pytest.mark.ci
@pytest.mark.parametrize(("nproc", "mesh"), LAYOUTS[:2])
def test_parameters_between_split_layers_train_as_on_one_process(nproc: int, mesh: Mesh) -> None:
    (want,) = run_ranks(_between, nproc=1)
    for got in run_ranks(_between, nproc=nproc, mesh=mesh):
        assert_close(got, want, TOLERANCE)


def _tied(job: Any) -> Trained:
    return _train(job, plan={**TP_PLAN, **VOCABULARY}, tied=True)


def test_tied_weights_stay_tied() -> None:
    (want,) = run_ranks(_tied, nproc=1)
    for got in run_ranks(_tied, nproc=2, mesh=Mesh(tp=2)):
        assert_close(got, want, TOLERANCE)
        assert torch.equal(got.weights["head.weight"], got.weights["tokens.weight"])


def _qwen(job: Any) -> tuple[list[float], int]:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 12}
    config = Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=4)
    model = paceline.tensor_parallel(job, Qwen3ForCausalLM(config).double())
    held = sum(paceline.parallel.modules.local(p).numel() for p in model.parameters())
    training = make_training(job, model, make_tokens(8), count="tokens")
    # A sequence of 8 tokens has 7 targets.
    loss = lambda m, batch: (m(input_ids=batch[0], labels=batch[0]).loss, 7 * len(batch[0]))  # noqa: E731
    return train(training, loss, until=4, reduction="mean").losses, held


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


def _split(job: Any, net: Any = None, plan: Any = None) -> Any:
    return paceline.tensor_parallel(job, GPT() if net is None else net, plan=plan)


def _run_step(job: Any, model: nn.Module, *, optimizer: Any = sgd, **options: Any) -> None:
    training = make_training(
        job, model, make_tokens(8), optimizer=optimizer, count="tokens", **options
    )
    train(training, token_loss, until=1)


def _early(job: Any) -> None:
    net = GPT()
    optimizer = sgd(net.parameters())
    _run_step(job, _split(job, net), optimizer=lambda _: optimizer)


def _with_heads(attribute: str, value: int) -> GPT:
    net = GPT()
    setattr(net.layers[0].attention, attribute, value)
    net.layers[0].attention.wq = nn.Linear(WIDTH, 6)
    return net


def _without_plan() -> GPT:
    net = GPT()
    net.tp_plan = None
    return net


WRONG: dict[str, Callable[[Any], Any]] = {
    "compiled": lambda job: _split(job, torch.compile(GPT())),
    "names": lambda job: _split(job, plan={"layers.*.attention.w_q": "colwise"}),
    "style": lambda job: _split(job, plan={"head": "columns"}),
    "kind": lambda job: _split(job, plan={"norm": "colwise"}),
    "features": lambda job: _split(job, Odd(), PAIR),
    "heads": lambda job: _split(job, _with_heads("n_heads", 3)),
    "whole heads": lambda job: _split(job, _with_heads("head_dim", 2)),
    "no plan": lambda job: _split(job, _without_plan()),
    "between": lambda job: _run_step(
        job, _split(job, _with_parameters_between(), {**TP_PLAN, **NORMS})
    ),
    "fused": lambda job: _split(job, Halves(), PAIR),
    "twice": lambda job: _split(job, _split(job)),
    "exact": lambda job: _run_step(job, _split(job), reproducible=True),
    "ddp": lambda job: paceline.ddp(job, GPT()),
    "alone": lambda job: _run_step(job, GPT()),
    "early": _early,
}


def _wrong(job: Any, kind: str) -> None:
    WRONG[kind](job)


def _without_fsdp(job: Any, _: str) -> None:
    _run_step(job, _split(job))


@pytest.mark.ci
def test_wrong_use_is_refused_on_all_ranks() -> None:
    check_messages(
        "tensor_parallel", run_ranks(refusals, _wrong, list(WRONG), nproc=2, mesh=Mesh(tp=2))
    )
    for found in run_ranks(refusals, _without_fsdp, [""], nproc=4, mesh=Mesh(tp=2, dp_shard=2)):
        assert "would not be summed over the 2 data ranks" in found[""][1]
