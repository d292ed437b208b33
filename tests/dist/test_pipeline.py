"""Models that are split into stages train as on one process; what cannot be split is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_gpt import GPT, make_tokens, token_loss
from small_trainings import Recording
from torch import nn

import paceline
from paceline import Mesh
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
    micro_batch: int = 1,
    count: str = "tokens",
    **options: Any,
) -> Result:
    net = GPT(layers=6).to(dtype)
    with torch.no_grad():
        net.norm.bias.add_(job.rank)  # ranks begin with the weights of rank 0
    model = _wrap(job, net, **options)
    optimizer = Recording(model.parameters())
    # 11 samples in steps of 4: the last step has 3. With 2 data ranks and micro-batches of 2 they have
    # micro-batches of 2 and 1 sample.
    batches = paceline.Batches(job, make_tokens(11), global_batch=4, micro_batch=micro_batch)
    checkpoints = paceline.Checkpoints(folder, every_steps=2) if folder else None
    training = paceline.Training(
        job, model, optimizer, batches, count=count, checkpoints=checkpoints
    )
    losses, norms = [], []

    def loss_fn(batch: Any) -> Any:
        loss, tokens = _masked_loss(model, batch)
        return (loss, tokens) if count == "tokens" else loss / 10

    for step in training.steps(until=until):
        step.run(loss_fn)
        step.update(clip_norm=0.5, grad_norms=True)
        losses.append(float(step.loss))
        norms += [float(step.grad_norm), *(float(norm) for norm in step.grad_norms.values())]
    result = paceline.evaluate(
        job, model, make_tokens(5), lambda m, batch: {"loss": token_loss(m, batch)}, micro_batch=2
    )
    losses.append(result.loss)
    names = [name for name, _ in model.named_parameters()]
    gradients = [dict(zip(names, seen, strict=True)) for seen in optimizer.seen]
    whole = training._context.strategy.whole_state(model)
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
    {"schedule": "1f1b", "micro_batch": 2},
    {"schedule": "interleaved"},
    {"schedule": "zero_bubble", "dtype": torch.float32},
    {"schedule": "zero_bubble", "micro_batch": 4},
]


def _each(job: Any, cases: list[dict[str, Any]]) -> list[Result]:
    return [_train(job, 6, **case) for case in cases]


@pytest.mark.parametrize(("nproc", "mesh"), [PP2, PP4, PP_DP])
def test_it_trains_as_one_process(nproc: int, mesh: Mesh) -> None:
    plain = [{k: v for k, v in case.items() if k != "schedule"} for case in SCHEDULES]
    wants = run_ranks(_each, plain, nproc=1)[0]
    results = run_ranks(_each, SCHEDULES, nproc=nproc, mesh=mesh)
    for case, want, got in zip(SCHEDULES, wants, zip(*results, strict=True), strict=True):
        tolerance = 1e-5 if case.get("dtype") == torch.float32 else 1e-12
        _assert_equal(list(got), want, tolerance)
