"""How the ranks of a pipeline run a step together: with torch's schedules, then a sum over data ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from paceline.data.batches import Batches
from paceline.errors import ConfigError, GradientError, listed
from paceline.job import collectives
from paceline.job.job import Job
from paceline.parallel.modules import (
    PIPELINE,
    is_pipeline,
    owned_parameters,
    unwrap,
    warn_untrained,
)
from paceline.parallel.pipe import Pipe
from paceline.parallel.strategy import ScheduledStep, Strategy

_BUCKET_BYTES = 25 << 20  # gradients that are summed together: the size of DDP's buckets


class PipelineStrategy(Strategy):
    """torch's schedules run a step's micro-batches; gradients are summed over data ranks after them."""

    runs_micro_batches = True

    def _prepare(self, batches: Batches) -> None:
        if len(self._models) > 1 or len(self._optimizers) > 1:
            raise ConfigError(
                f"training a pipeline supports one model and one optimizer, got {len(self._models)} and "
                f"{len(self._optimizers)}.",
                fix="put all parameters into one optimizer, with parameter groups if they differ.",
            )
        self._pipe: Pipe = unwrap(self._models[0]).__dict__[PIPELINE]
        self._times = (0.0, 0.0)
        self._bubble: torch.Tensor | None = None
        self._has_run = False

    @classmethod
    def fits(cls, job: Job, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> bool:
        return any(map(is_pipeline, models))

    def check(self) -> None:
        (model,) = self._models
        foreign = {id(p) for p in owned_parameters(*self._optimizers)}
        foreign -= {id(p) for p in model.parameters()}
        if foreign:
            raise GradientError(
                f"the optimizer holds {len(foreign)} parameters that are not in this stage.",
                where=self._job.where(),
                why="an optimizer made before the split holds the parameters of all stages.",
                fix="make the optimizer after paceline.pipeline(...).",
                parameters=[],
            )
        warn_untrained(model, self._optimizers)

    def check_precision(self, precision: str) -> None:
        if precision == "fp16":
            raise ConfigError(
                "precision='fp16' is not supported with a pipeline.",
                why="torch's loss scaler looks for overflows in the gradients of one stage only.",
                fix="use 'bf16'.",
            )

    def run_micro_batches(self, step: ScheduledStep) -> None:
        self._has_run = step.size > 0
        self._times = self._pipe.run(step)

    def step_count(self, count: float | torch.Tensor) -> torch.Tensor:
        """The count of the last stage, on all stages. The same all-reduce sums the times."""
        device = self._job.device
        own = torch.as_tensor(count, dtype=torch.float64, device=device)  # 0 on other stages
        times = torch.tensor(self._times, dtype=torch.float64, device=device)
        total = torch.cat([own.reshape(1), times])
        try:
            dist.all_reduce(total, group=self._pipe.group)
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
            raise GradientError(
                f"no gradient reached {listed(names)}.",
                where=self._job.where(),
                why="data ranks sum the gradients of all trainable parameters together.",
                fix="freeze unused parameters with requires_grad_(False).",
                parameters=names,
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

    def grad_norm(self, gradients: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
        own = torch.zeros((), device=self._job.device)
        if gradients:
            own = super().grad_norm(gradients, norm_type)
        norms = self._norms_over_ranks(own.double().reshape(1), norm_type, self._pipe.group)
        return norms[0].to(own.dtype)

    def grad_norms(
        self, gradients: Mapping[str, torch.Tensor], norm_type: float
    ) -> dict[str, torch.Tensor]:
        own = {
            n: float(super(PipelineStrategy, self).grad_norm([g], norm_type))
            for n, g in gradients.items()
        }
        parts = collectives.gather(self._job, own)
        merged = {name: value for part in reversed(parts) for name, value in part.items()}
        return {
            name: torch.tensor(merged[name], dtype=owned.dtype, device=self._job.device)
            for name, owned in self._pipe.owners.items()
            if name in merged
        }

    def whole_state(self, model: nn.Module) -> Iterator[tuple[str, Any]]:
        return self._pipe.whole_state()

    def wants(self, path: str) -> bool:
        # A path is "models.0.NAME" or "optimizers.0.state.0.NAME.KEY", where NAME is that of a parameter.
        kind, _, rest = path.partition(".0.")
        others = self._pipe.others()
        if kind == "models":
            return rest not in others
        _, _, name = rest.partition("state.0.")
        return kind != "optimizers" or name.rpartition(".")[0] not in others

    def own_part(self, saved: dict[str, Any]) -> dict[str, Any]:
        others = self._pipe.others()
        optimizers = [
            {
                **each,
                "state": {k: v for k, v in each["state"].items() if _name(k) not in others},
                "param_groups": [
                    {**g, "params": [p for p in g["params"] if _name(p) not in others]}
                    for g in each["param_groups"]
                ],
            }
            for each in saved["optimizers"]
        ]
        models = [{n: v for n, v in m.items() if n not in others} for m in saved["models"]]
        return {**saved, "models": models, "optimizers": optimizers}


def _name(path: Any) -> str:
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
