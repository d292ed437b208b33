"""Pipeline parallel: each rank holds some consecutive layers.

A wrapper around `torch.distributed.pipelining`. It splits a model by names, by parameters or by measured
time, checks what stages pass to each other, weighs the losses, and sums gradients over data ranks. torch's
schedules run forward, backward and communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from paceline.errors import ConfigError
from paceline.job.arguments import checks_arguments
from paceline.job.job import Job
from paceline.parallel.modules import (
    PIPELINE,
    SPLIT_BY,
    agree_on_parameters,
    broadcast_state,
    refuse_compiled,
    refuse_module,
    refuse_wrapped,
)
from paceline.parallel.pipe import SCHEDULES, Pipe
from paceline.parallel.pipeline_stages import choose_stages, log_stages
from paceline.parallel.pipeline_strategy import PipelineStrategy
from paceline.parallel.strategy import STRATEGIES

STRATEGIES.append(PipelineStrategy)


@checks_arguments
def pipeline(
    job: Job,
    module: nn.Module,
    *,
    split: str | Sequence[str] | None = None,
    schedule: str = "1f1b",
    example: Any = None,
) -> nn.Module:
    """Split the layers of `module` into stages over the axis `pp` of the job's mesh, in place.

    Each rank keeps the parameters of its stage; weights become those of rank 0. With an axis of one rank the
    module is returned as it is. Train it with `step.run`.

    Every stage calls the module's `forward` with the arguments that the loss function gives the module.
    `forward` must call the submodules that have parameters once each, in the order in which they were
    registered. One tensor passes from a stage to the next: the first argument of its first submodule. Other
    arguments may be computed from the arguments of `forward`, such as masks. Submodules of earlier stages
    return tensors without values that have the shape and dtype of the received tensor: `forward` must not use
    another shape of an earlier stage later.

    The loss function is called once for each micro-batch on each rank up to its call of the module, to find
    the arguments, and on the last stage once more with the output. What it does before that call must give
    the same each time.

    Args:
        split: Names of the submodules that begin a new stage, such as `["layers.4"]`, or one name. None
            makes stages of nearly equal numbers of parameters, or of nearly equal time with `example`. Rank 0
            logs them.
        schedule: "gpipe", "1f1b", "interleaved" (two stages on each rank, or as many as `split` makes), or
            "zero_bubble" (gradients of weights are computed while a rank would wait).
        example: A tensor, or a tuple of the arguments of one forward, on the job's device: rank 0 measures
            the time of each submodule with it.

    Returns:
        The module. Make the optimizer afterwards.

    Raises:
        ConfigError: a name is unknown; the number of stages does not fit the mesh; a stage would have no
            trainable parameter; two stages share a parameter or a submodule; a parameter belongs to no
            submodule; an option has no effect.
        RankDisagreement: the ranks' parameters differ.

    Collective: all ranks, once for each model, in the same order.
    """
    ranks = 1 if job.mesh is None else job.mesh.pp
    if schedule not in SCHEDULES:
        raise ConfigError(
            f"schedule must be one of {', '.join(SCHEDULES)}; got {schedule!r}.",
        )
    refuse_wrapped(module, wrap="paceline.pipeline")
    refuse_compiled(module, wrap="paceline.pipeline")
    if split is not None and example is not None:
        raise ConfigError("example has no effect: `split` names the stages.", fix="leave one out.")
    if job.mesh is not None and ranks > 1 and (job.mesh.dp_shard > 1 or job.mesh.tp > 1):
        raise ConfigError(
            f"the mesh is {job.mesh}; pipeline works with dp_replicate only.",
            fix="use Mesh(pp=, dp_replicate=).",
        )
    refuse_module(job, module, wrap="paceline.pipeline")
    names = [split] if isinstance(split, str) else split
    stages = choose_stages(job, module, names, schedule, example)
    if ranks == 1:
        return module
    agree_on_parameters(job, module, f"{stages=}, {schedule=}")
    broadcast_state(job, module, job.group)
    if job.rank == 0:
        log_stages(module, stages, schedule)
    module.__dict__[PIPELINE] = Pipe(job, module, stages, schedule)
    module.__dict__[SPLIT_BY] = "paceline.pipeline"
    return module
