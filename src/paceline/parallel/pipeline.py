"""Pipeline parallel: each rank holds some consecutive layers.

A wrapper around `torch.distributed.pipelining`. It splits a model by names, by parameters or by measured
time, checks what stages pass to each other, weighs the losses, and sums gradients over data ranks. torch's
schedules run forward, backward and communication.
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
from paceline.parallel.modules import (
    PIPELINE,
    SPLIT_BY,
    agree_on_parameters,
    broadcast_state,
    owned_parameters,
    refuse_compiled,
    refuse_module,
    refuse_wrapped,
    unreached_error,
    unwrap,
    warn_untrained,
)
from paceline.parallel.pipeline_stages import choose_stages, log_stages
from paceline.parallel.stage_runner import SCHEDULES, StageRunner
from paceline.parallel.strategy import LossRun, Strategy, norms_over_ranks

_BUCKET_BYTES = 25 << 20  # gradients that are summed together: the size of DDP's buckets


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
    arguments may be computed from the arguments of `forward`, such as masks. Random numbers that `forward`
    draws before its first submodule are equal in all stages; later ones are not. Submodules of earlier stages
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
    module.__dict__[PIPELINE] = StageRunner(job, module, stages, schedule)
    module.__dict__[SPLIT_BY] = "paceline.pipeline"
    return module


class PipelineStrategy(Strategy):
    """torch's schedules run a step's micro-batches; gradients are summed over data ranks after them."""

    def prepare(self, batches: Batches) -> None:
        if len(self._models) > 1 or len(self._optimizers) > 1:
            raise ConfigError(
                f"training a pipeline supports one model and one optimizer, got {len(self._models)} and "
                f"{len(self._optimizers)}.",
                fix="put all parameters into one optimizer, with parameter groups if they differ.",
            )
        self._runner: StageRunner = unwrap(self._models[0]).__dict__[PIPELINE]
        self._times = (0.0, 0.0)
        self._bubble: torch.Tensor | None = None
        self._has_run = False

    def check(self) -> None:
        (model,) = self._models
        foreign = {id(p) for p in owned_parameters(*self._optimizers)}
        foreign -= {id(p) for p in model.parameters()}
        if foreign:
            raise StepError(
                f"the optimizer holds {len(foreign)} parameters that are not in this stage.",
                where=self._job.where(),
                why="an optimizer made before the split holds the parameters of all stages.",
                fix="make the optimizer after paceline.pipeline(...).",
                parameters=[],
            )
        warn_untrained(model, self._optimizers)

    def check_precision(self, precision: str, *, skips_non_finite: bool) -> None:
        if precision == "fp16":
            raise ConfigError(
                "precision='fp16' is not supported with a pipeline.",
                why="torch's loss scaler looks for overflows in the gradients of one stage only.",
                fix="use 'bf16'.",
            )

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
        self._times = self._runner.run(loss, number)
        loss.end(self._sum_over_stages(loss.count))

    def _sum_over_stages(self, count: float | torch.Tensor) -> torch.Tensor:
        """The count of the last stage, on all stages. The same all-reduce sums the times."""
        device = self._job.device
        own = torch.as_tensor(count, dtype=torch.float64, device=device)  # 0 on other stages
        times = torch.tensor(self._times, dtype=torch.float64, device=device)
        total = torch.cat([own.reshape(1), times])
        try:
            dist.all_reduce(total, group=self._runner.group)
        except RuntimeError as error:
            self._job.reraise(error)
        self._bubble = 1 - total[1] / total[2].clamp(min=1e-9)
        return total[0]

    def measurements(self) -> dict[str, Any]:
        if self._bubble is None or self._job.device.type != "cpu" or not self._has_run:
            return {}  # computations on a device are not finished when torch's calls return
        return {"pipeline_bubble": float(self._bubble)}

    def finish(self, optimizer: Optimizer) -> None:
        if self._job.data.group is None:
            return
        named = [(n, p) for n, p in self._models[0].named_parameters() if p.requires_grad]
        names = [name for name, p in named if p.grad is None]
        if names and self._has_run:
            raise unreached_error(
                self._job,
                names,
                why="data ranks sum the gradients of all trainable parameters together.",
                fix="freeze unused parameters with requires_grad_(False).",
            )
        for _, p in named:
            if p.grad is None:  # a data rank without samples
                p.grad = torch.zeros_like(p)
        gradients = [p.grad for _, p in named if p.grad is not None]
        gradients.sort(key=lambda g: str(g.dtype))
        for bucket in _buckets(gradients):
            packed = torch.cat([g.reshape(-1) for g in bucket])
            collectives.all_reduce(self._job, packed)
            pieces = packed.split([g.numel() for g in bucket])  # type: ignore[no-untyped-call]
            torch._foreach_copy_(
                bucket, [x.view_as(g) for x, g in zip(pieces, bucket, strict=True)]
            )

    def grad_norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        own = torch.zeros((), device=self._job.device)
        if gradients:
            own = super().grad_norm(gradients)
        return norms_over_ranks(self._job, own, self._runner.group)

    def whole_state(self, model: nn.Module) -> Iterator[tuple[str, Any]]:
        return self._runner.whole_state()

    def wants(self, path: str) -> bool:
        # A path is "models.0.NAME" or "optimizers.0.state.0.NAME.KEY", where NAME is that of a parameter.
        kind, _, rest = path.partition(".0.")
        others = self._runner.names_on_other_stages()
        if kind == "models":
            return rest not in others
        _, _, name = rest.partition("state.0.")
        return kind != "optimizers" or name.rpartition(".")[0] not in others

    def own_part(self, saved: dict[str, Any]) -> dict[str, Any]:
        others = self._runner.names_on_other_stages()
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
