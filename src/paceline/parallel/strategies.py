"""The list of all strategies, and which one trains models that are wrapped in a certain way."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from paceline.errors import ConfigError, listed
from paceline.job.job import Job
from paceline.parallel.ddp import DDPStrategy
from paceline.parallel.diloco import DiLoCoStrategy
from paceline.parallel.exact import ExactStrategy
from paceline.parallel.modules import is_pipeline, wrapped_by
from paceline.parallel.strategy import Strategy


def strategy_for(job: Job, models: Sequence[nn.Module], *, reproducible: bool) -> type[Strategy]:
    """The strategy that trains these models.

    Raises:
        ConfigError: the models are not wrapped as the job needs it, or not alike.
    """
    for model in models:
        if meta := [name for name, p in model.named_parameters() if p.is_meta]:
            raise ConfigError(
                f"{listed(meta)}: on the meta device, so without values.",
                fix="paceline.load_weights(model, path), and make the optimizer after it.",
            )
    wraps = {wrapped_by(model) for model in models}
    if wraps == {"paceline.diloco"}:
        if reproducible:
            raise ConfigError(
                "reproducible training does not support diloco.",
                why="each host trains with weights of its own, so the result depends on their number.",
                fix="wrap the model with paceline.ddp, or leave reproducible=True out.",
            )
        return DiLoCoStrategy
    pp = 1 if job.mesh is None else job.mesh.pp
    has_stages = any(map(is_pipeline, models))
    if pp > 1 and not has_stages:
        raise ConfigError(
            f"the mesh is {job.mesh}, but the model is not split into stages.",
            fix="model = paceline.pipeline(job, model)",
        )
    is_split = not wraps <= {"", "paceline.ddp"}
    if reproducible and is_split:
        raise ConfigError(
            "reproducible training does not support models that are split over ranks.",
            why="the exact sum needs all gradients of a model on each rank.",
            fix="wrap the model with paceline.ddp, or leave reproducible=True out.",
        )
    if job.data.size < job.world_size and not is_split:
        raise ConfigError(
            f"the mesh is {job.mesh}, but the model is not split over it.",
            fix="model = paceline.tensor_parallel(job, model)",
        )
    if job.world_size == 1 and not is_split:
        return ExactStrategy if reproducible else Strategy
    if has_stages:
        from paceline.parallel.pipeline import PipelineStrategy

        return PipelineStrategy
    if wraps <= {"paceline.fsdp", "paceline.tensor_parallel"}:
        from paceline.parallel.fsdp import FSDPStrategy  # importing FSDP2 takes 0.5 s

        return FSDPStrategy
    if "" in wraps:
        raise ConfigError(
            "the model is not wrapped, so its gradients would not be summed over ranks.",
            fix="model = paceline.ddp(job, model)",
        )
    if len(wraps) > 1:
        raise ConfigError(
            f"the models are wrapped by different functions: {', '.join(sorted(wraps))}.",
            fix="wrap all of them by the same one.",
        )
    return ExactStrategy if reproducible else DDPStrategy
