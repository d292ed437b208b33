"""Pipeline parallel: each rank holds some consecutive layers.

A wrapper around `torch.distributed.pipelining`. It cuts a model at names or by parameters, checks what stages
pass to each other, weighs the losses, and sums gradients over data ranks unless FSDP does. torch's schedules
run forward, backward and communication.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from paceline.data.batches import Batches
from paceline.data.plan import MicroBatch, PlannedStep
from paceline.errors import ConfigError, StepError
from paceline.job import collectives
from paceline.job.job import Job
from paceline.parallel.fsdp import FSDPStrategy
from paceline.parallel.modules import (
    PIPELINE,
    SPLIT_BY,
    agree_on_parameters,
    broadcast_state,
    local,
    refuse_compiled,
    refuse_module,
    refuse_wrapped,
    unwrap,
)
from paceline.parallel.pipeline_stages import choose_stages, log_stages
from paceline.parallel.stage_runner import SCHEDULES, StageRunner
from paceline.parallel.strategy import LossRun

_BUCKET_BYTES = 25 << 20  # gradients that are summed together: the size of DDP's buckets


def pipeline(
    job: Job,
    module: nn.Module,
    *,
    split: str | Sequence[str] = "auto",
    schedule: str = "1f1b",
) -> nn.Module:
    """Cut the layers of `module` into stages over the axis `pp` of the job's mesh, in place.

    Each rank keeps the layers of its stages; the others become modules without parameters, under the same
    names. Weights become those of rank 0. With an axis of one rank the module is returned as it is. Call
    `tensor_parallel`, then `fsdp`, on what is returned, if the mesh has these axes. Gradients are summed over
    replicas without `ddp`. Train it with `step.run`.

    Every stage calls the module's `forward` with the arguments that the loss function gives the module.
    `forward` must call the submodules that have parameters once each, in the order in which they were
    registered. One tensor passes from a stage to the next: the first argument of its first submodule. Other
    arguments may be computed from the arguments of `forward`, such as masks. Random numbers that `forward`
    draws before its first submodule are equal in all stages; later ones are not. Layers of earlier stages
    return placeholders, with the shape and dtype of the tensor that the stage receives and without values:
    `forward` must not use another shape of an earlier stage later. It ends, by an exception, where it calls
    the first submodule of the next stage.

    The loss function is called once for each micro-batch on each rank up to its call of the module, to find
    the arguments, and on the last stage once more with the output. What it does before that call must give
    the same each time.

    Args:
        split: Names of the submodules that begin a new stage, such as `["layers.4"]`, or one name. "auto"
            makes stages of nearly equal numbers of parameters. Rank 0 logs them.
        schedule: "gpipe", "1f1b", "interleaved" (two stages on each rank, or as many as `split` makes), or
            "zero_bubble" (gradients of weights are computed while a rank would wait; with `fsdp` all
            gradients of a backward are computed at once).

    Returns:
        The module. Make the optimizer afterwards. A module on the meta device stays there: `fsdp(init=)` or
        `load_weights` allocates the layers of this rank only.

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
    refuse_module(job, module, wrap="paceline.pipeline", may_be_meta=True)
    stages = choose_stages(job, module, split, schedule)
    if ranks == 1:
        return module
    agree_on_parameters(job, module, f"{stages=}, {schedule=}")
    broadcast_state(job, module, job.group)
    if job.rank == 0:
        log_stages(module, stages, schedule)
    module.__dict__[PIPELINE] = StageRunner(job, module, stages, schedule)
    module.__dict__[SPLIT_BY] = "paceline.pipeline"
    return module


class PipelineStrategy(FSDPStrategy):
    """torch's schedules run a step's micro-batches.

    FSDP sums the gradients over data ranks in the last backward; without FSDP they are summed after it.
    """

    def prepare(self, batches: Batches) -> None:
        if len(self._models) > 1:
            raise ConfigError(
                f"training a pipeline supports one model, got {len(self._models)}.",
                fix="make a Training for each model.",
            )
        super().prepare(batches)
        self._runner: StageRunner = unwrap(self._models[0]).__dict__[PIPELINE]

    def micro_batches(self, step: PlannedStep) -> Iterator[MicroBatch]:
        raise StepError(
            "the model is a pipeline, whose micro-batches cannot be run in a loop.",
            where=self._job.where(),
            why="its schedule runs the forwards and backwards of all micro-batches together.",
            fix="step.run(lambda batch: (loss of model(x) and y, count)).",
        )

    def run(self, loss: LossRun) -> None:
        number = loss.begin()
        self._has_run = number > 0
        if self._has_padding:
            self._runner.set_padding = self._padding_mode.set
        self._runner.run(loss, number)
        self._padding_mode.set(False)
        loss.end(self._count_of_last_stage(loss.count))

    def _count_of_last_stage(self, count: float | torch.Tensor) -> torch.Tensor:
        """The count of the last stage, on all stages."""
        own = torch.as_tensor(count, dtype=torch.float64, device=self._job.device)
        if self._job.is_dry_run:  # other stages do not receive it, and 0 would be an error
            return own.clamp(min=1)
        total = own.clone().reshape(1)  # 0 on other stages
        try:
            dist.all_reduce(total, group=self._runner.group)
        except RuntimeError as error:
            self._job.reraise(error)
        return total[0]

    def finish(self, optimizer: Optimizer) -> None:
        parameters = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
        if self._job.data.group is not None and not self._roots:
            self._sum_over_data_ranks(parameters)
        super().finish(optimizer)

    def _sum_over_data_ranks(self, parameters: Sequence[torch.Tensor]) -> None:
        if not self._has_run:  # a data rank without samples
            for p in parameters:
                p.grad = torch.zeros_like(p)
        self._refuse_unreached(parameters)
        gradients = [local(p.grad) for p in parameters if p.grad is not None]
        gradients.sort(key=lambda g: str(g.dtype))
        for bucket in _buckets(gradients):
            packed = torch.cat([g.reshape(-1) for g in bucket])
            collectives.all_reduce(self._job, packed)
            pieces = packed.split([g.numel() for g in bucket])  # type: ignore[no-untyped-call]
            torch._foreach_copy_(
                bucket, [x.view_as(g) for x, g in zip(pieces, bucket, strict=True)]
            )

    def whole_state(self, model: nn.Module) -> Iterator[tuple[str, Any]]:
        return self._runner.whole_state()

    def wants(self, path: str) -> bool:
        # A path is "models.0.NAME" or "optimizers.N.state.0.NAME.KEY", where NAME is that of a parameter.
        kind, _, rest = path.partition(".")
        _, _, name = rest.partition(".")
        others = self._runner.elsewhere
        if kind == "models":
            return name not in others
        name = name.removeprefix("state.0.").rpartition(".")[0]
        return kind != "optimizers" or name not in others

    def own_part(self, saved: dict[str, Any]) -> dict[str, Any]:
        others = self._runner.elsewhere
        optimizers = [
            {
                **each,
                "state": {
                    k: v for k, v in each["state"].items() if _parameter_name(k) not in others
                },
                "param_groups": [
                    {**g, "params": [p for p in g["params"] if _parameter_name(p) not in others]}
                    for g in each["param_groups"]
                ],
            }
            for each in saved["optimizers"]
        ]
        models = [{n: v for n, v in m.items() if n not in others} for m in saved["models"]]
        return {**saved, "models": models, "optimizers": optimizers}


def _parameter_name(path: Any) -> str:
    """The name of a parameter from `NUMBER.NAME`, as optimizers' states have it."""
    return str(path).partition(".")[2]


def _buckets(gradients: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Neighbouring gradients of one dtype, of about `_BUCKET_BYTES` together."""
    bucket: list[torch.Tensor] = []
    for g in gradients:
        is_full = sum(each.nbytes for each in bucket) + g.nbytes > _BUCKET_BYTES
        if bucket and (is_full or g.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(g)
    if bucket:
        yield bucket
