"""Data, losses and checks that the tests of trainings share."""

from __future__ import annotations

import gc
import logging
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import PacelineError

MESSAGES = Path(__file__).parents[1] / "data/messages"


def record_log() -> list[str]:
    """What Paceline logs in this process from now on."""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("paceline").addHandler(handler)
    return texts


def make_data(n: int = 22, dtype: torch.dtype = torch.float32) -> TensorDataset:
    """`n` samples of 4 features and one of 3 classes."""
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(3)).to(dtype)
    return TensorDataset(x, x[:, :3].argmax(1))


def loss_sum(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


class Trained(NamedTuple):
    """What `train` returns: values of each step, and the whole state of the model at the end."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def make_training(
    job: Any,
    model: nn.Module,
    data: Any,
    *,
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    folder: Path | str | None = None,
    global_batch: int = 4,
    micro_batch: int | None = None,
    **options: Any,
) -> paceline.Training:
    """A training of a wrapped model. With `folder` it resumes there, and saves every second step."""
    batches = paceline.Batches(job, data, global_batch=global_batch, micro_batch=micro_batch)
    if folder is not None:
        options["checkpoints"] = paceline.Checkpoints(folder, every_steps=2)
    return paceline.Training(job, model, optimizer(model.parameters()), batches, **options)


def train(
    training: Any,
    loss: Callable[[nn.Module, Any], Any] = loss_sum,
    *,
    until: int,
    reduction: str = "sum",
    clip_norm: float | None = None,
) -> Trained:
    """Run the loop. `loss(model, batch)` is what `step.run` takes; `norms` needs `clip_norm`."""
    model = training.models[0]
    losses, norms = [], []
    for step in training.steps(until=until):
        step.run(lambda batch: loss(model, batch), reduction=reduction)
        step.update(clip_norm=clip_norm)
        losses.append(float(step.loss))
        if clip_norm is not None:
            norms.append(float(step.grad_norm))
    whole = training._context.strategy.whole_state(model)
    return Trained(losses, norms, {name: value.detach().clone() for name, value in whole})


def assert_close(got: Trained, want: Trained, tolerance: float) -> None:
    """Relative differences. What should be 0, such as the gradient of a key's bias, may be rounding alone."""
    assert got.losses == pytest.approx(want.losses, rel=tolerance)
    assert got.norms == pytest.approx(want.norms, rel=tolerance, abs=1e-3 * tolerance)
    assert list(got.weights) == list(want.weights)
    for name, value in want.weights.items():
        difference = (got.weights[name].double() - value.double()).norm()
        assert difference <= tolerance * value.double().norm().clamp(min=1e-3), name


def small_net(*, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))


def small_training(
    job: Any,
    net: nn.Module | None = None,
    *,
    samples: int = 22,
    global_batch: int = 6,
    micro_batch: int = 2,
    dropout: float = 0.0,
    **options: Any,
) -> paceline.Training:
    """A training of `small_net`, in steps of 3 micro-batches; the last step of an epoch has 4 samples."""
    net = net or small_net(dropout=dropout)
    data = make_data(samples, next(net.parameters()).dtype)
    return make_training(
        job,
        paceline.ddp(job, net),
        data,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        global_batch=global_batch,
        micro_batch=micro_batch,
        **options,
    )


def run_loop(training: paceline.Training, **how: Any) -> list[float]:
    """Run the loop over `training.steps(**how)`; the losses."""
    losses = []
    for step in training.steps(**how):
        backwards(training, step)
        step.update(clip_norm=1.0)
        losses.append(float(step.loss))
    return losses


def backwards(training: Any, step: Any) -> None:
    for batch in step:
        step.backward(loss_sum(training.models[0], batch), count=len(batch[1]), reduction="sum")


def weights_of(*models: nn.Module) -> list[float]:
    parameters = [p.detach().reshape(-1).double() for m in models for p in m.parameters()]
    return torch.cat(parameters).tolist()


class Recording(torch.optim.SGD):
    """Keeps the gradients of every step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.seen: list[list[torch.Tensor | None]] = []

    def step(self, closure: Any = None) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        self.seen.append([None if g is None else g.clone() for g in gradients])
        super().step(closure)


def refusals(
    job: Any, function: Callable[[Any, str], Any], kinds: Iterable[str]
) -> dict[str, tuple[str, str]]:
    """The name and the text of the error of `function(job, kind)`, for each kind that raises one."""
    found = {}
    for kind in kinds:
        try:
            function(job, kind)
        except PacelineError as error:
            found[kind] = type(error).__name__, str(error)
        gc.collect()  # closes the loop that the error has left
        job.check_loop_exit()
    return found


def check_messages(name: str, ranks: list[dict[str, tuple[str, str]]]) -> None:
    """All ranks, of which `ranks` holds the `refusals`, raised the errors of `messages/<name>.txt`.

    `RENEW_MESSAGES=1 pytest ...` writes the file anew.
    """
    texts = []
    for found in ranks:
        blocks = [f"[{kind}] {error}: {text}\n" for kind, (error, text) in found.items()]
        texts.append(re.sub(r"(\n  where: ).*", r"\1this rank", "\n".join(blocks)))
    path = MESSAGES / f"{name}.txt"
    if os.environ.get("RENEW_MESSAGES"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(texts[0])
    for text in texts:
        assert text == path.read_text()
