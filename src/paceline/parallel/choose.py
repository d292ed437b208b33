"""How a model is wrapped for a strategy that is given by name or as a `Mesh`, as `Trainer` takes it."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from paceline.errors import ConfigError
from paceline.job.job import Job
from paceline.job.mesh import Mesh
from paceline.parallel.ddp import ddp

Wrap = Callable[[Job, nn.Module], nn.Module]


def refuse_strategy(strategy: str | Mesh | Wrap) -> None:
    """Raise ConfigError unless `wrap_for` knows this strategy."""
    if isinstance(strategy, Mesh):
        return
    if strategy not in ("ddp", "fsdp") and not callable(strategy):
        raise ConfigError(
            f'strategy must be "ddp", "fsdp", a Mesh or a function, got {strategy!r}.',
            fix="for example strategy=paceline.Mesh(dp_shard=-1, tp=2)",
        )


def wrap_for(strategy: str | Mesh | Wrap, job: Job, module: nn.Module) -> nn.Module:
    """Wrap a module as the axes of the job's mesh need it, with `ddp` or `fsdp`, or by a function."""
    if not isinstance(strategy, str | Mesh):
        return strategy(job, module)
    if isinstance(strategy, Mesh) and job.mesh is not None and job.mesh.pp > 1:
        from paceline.parallel.pipeline import pipeline

        return pipeline(job, module)
    if isinstance(strategy, Mesh):
        is_split = strategy.tp != 1 or strategy.dp_shard != 1
    else:
        is_split = strategy == "fsdp"
    if not is_split:
        return ddp(job, module)
    from paceline.parallel.fsdp import fsdp
    from paceline.parallel.tensor import tensor_parallel

    if job.mesh is not None and job.mesh.tp > 1:
        module = tensor_parallel(job, module)
    return fsdp(job, module)
