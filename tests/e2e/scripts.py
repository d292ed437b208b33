"""One small training as a script, to which a test adds what it needs."""

from __future__ import annotations

from textwrap import indent

_TRAINING = """
import hashlib, os, signal, sys, time, torch, paceline
from torch.utils.data import TensorDataset

{before}
with paceline.join(seed=3, device="cpu", timeout_s=40) as job:
    model = paceline.ddp(job, torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
    batches = paceline.Batches(job, TensorDataset(x, x.sum(1, keepdim=True)), global_batch=12)
    training = paceline.Training(job, model, optimizer, batches, {options})
    {report}
    for step in training.steps(epochs={epochs}):
        for x, y in step:
            step.backward((model(x) - y).square().sum(), count=len(x), reduction="sum")
{before_update}
        step.update()
{in_step}
    if job.rank == 0:
        values = [value for model in training.state_dict()["models"] for value in model.values()]
        print("weights", hashlib.sha256(b"".join(v.numpy().tobytes() for v in values)).hexdigest())
"""


def training_script(
    in_step: str = "",
    *,
    epochs: int = 5,
    before: str = "",
    before_update: str = "",
    checkpoints: str = "",
    options: str = "",
    report: str = "",
) -> str:
    """A script that trains `epochs` of 8 steps, and prints "weights" and their digest at its end.

    Args:
        in_step: Code that runs after each step; `job`, `step`, `model` and `training` are there.
        before: Code before `join`.
        before_update: Code before `step.update()`.
        checkpoints: Arguments of `Checkpoints`; without them there are none.
        options: Other arguments of `Training`.
        report: Arguments of `training.report`.
    """
    if checkpoints:
        options = f"checkpoints=paceline.Checkpoints({checkpoints}), {options}"
    return _TRAINING.format(
        before=before,
        options=options,
        report=f"training.report({report})" if report else "",
        epochs=epochs,
        before_update=indent(before_update, " " * 8),
        in_step=indent(in_step, " " * 8),
    )
