"""Parameters, gradients and optimizer state split over the ranks: a front to torch's `fully_shard` (FSDP2).

It adds checks before training that name parameters, equal weights at the start, and the same steps as one
process: ranks with fewer samples run ghost micro-batches. torch shards, gathers and reduces.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from paceline.data.batches import Batches
from paceline.data.plan import MicroBatch
from paceline.errors import ConfigError, GradientError, listed
from paceline.job.job import Job
from paceline.parallel.modules import (
    SHARDED,
    agree_on_parameters,
    equalize_buffers,
    is_sharded,
    owned_parameters,
    refuse_module,
    warn_untrained,
)
from paceline.parallel.strategy import STRATEGIES, Strategy

Blocks = type[nn.Module] | str | Iterable[type[nn.Module] | str]


def fsdp(job: Job, module: nn.Module, *, blocks: Blocks) -> nn.Module:
    """Split the parameters of `module` over the ranks, in place; weights become those of rank 0.

    Each rank holds an equal part of every parameter, of its gradient and of its optimizer state. The
    parameters of a block are gathered before its forward and its backward and freed after them; those
    outside of all blocks stay gathered from forward to backward. In a job of one process the module is
    returned as it is.

    Args:
        blocks: The submodules whose parameters are gathered together: classes of submodules (`Block`),
            patterns of their names (`"layers.*"`), or several of both. Usually the repeated layer of the
            model.

    Returns:
        The module, whose parameters are `DTensor`s. Make the optimizer afterwards.

    Raises:
        ConfigError: the module has no trainable parameter, a parameter on another device than the job's, or
            one that is not initialised; an entry of `blocks` matches no submodule; the module is sharded
            already.
        RankDisagreement: the ranks' parameters or blocks differ; the error names the first difference.

    Collective: all ranks, once for each model, in the same order.
    """
    if isinstance(module, FSDPModule):
        raise ConfigError("this module is sharded already.", fix="call paceline.fsdp once.")
    refuse_module(job, module, wrap="paceline.fsdp")
    names = _block_names(module, blocks)
    if job.data.group is None:
        return module
    agree_on_parameters(job, module, f"blocks={names}")
    mesh = DeviceMesh.from_group(job.data.group, job.device.type, mesh_dim_names=("data",))
    try:
        for p in module.parameters():
            dist.broadcast(p.detach(), group=job.data.group, group_src=0)
        # Inner blocks first: `fully_shard` leaves out parameters that an inner module has sharded already.
        for name in sorted(names, key=lambda name: -name.count(".")):
            fully_shard(module.get_submodule(name), mesh=mesh)
        fully_shard(module, mesh=mesh)
    except RuntimeError as error:
        job.reraise(error)
    for layer in module.modules():
        if isinstance(layer, FSDPModule):
            layer.set_gradient_divide_factor(1.0)
            layer.set_force_sum_reduction_for_comms(True)  # not every backend has an average
    equalize_buffers(job, module)
    module.__dict__[SHARDED] = True
    return module


def _block_names(module: nn.Module, blocks: Blocks) -> list[str]:
    wanted = [blocks] if isinstance(blocks, (type, str)) else list(blocks)
    found: dict[str, None] = {}
    for each in wanted:
        matches = [
            name
            for name, layer in module.named_modules()
            if name
            and (fnmatchcase(name, each) if isinstance(each, str) else isinstance(layer, each))
            and any(True for _ in layer.parameters())
        ]
        if not matches:
            shown = repr(each) if isinstance(each, str) else each.__name__
            raise ConfigError(
                f"blocks: {shown} matches no submodule with parameters in {type(module).__name__}.",
                fix='give a class of its submodules, or a pattern of their names such as "layers.*".',
            )
        found |= dict.fromkeys(matches)
    return list(found)


class FSDPStrategy(Strategy):
    """Gradients are summed and split over ranks by FSDP2 in the last backward of a step."""

    def _prepare(self, batches: Batches) -> None:
        self.needs_equal_micro_batches = True  # each forward gathers parameters
        self._roots = [model for model in self._models if isinstance(model, FSDPModule)]
        if len(self._optimizers) > 1:
            raise ConfigError(
                f"training sharded models supports one optimizer, got {len(self._optimizers)}.",
                fix="put all parameters into one optimizer, with parameter groups if they differ.",
            )

    @classmethod
    def fits(cls, job: Job, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> bool:
        return all(map(is_sharded, models))

    def check(self) -> None:
        owned = {id(p) for p in owned_parameters(*self._optimizers)}
        for model in self._models:
            named = dict(model.named_parameters())
            unknown = [
                n for n, p in named.items() if p.requires_grad and not isinstance(p, DTensor)
            ]
            owned -= {id(p) for p in named.values()}
            if unknown:
                raise self._error(
                    f"fsdp does not know {listed(unknown)}: the gradients would differ over ranks.",
                    why="they were added after the model was sharded.",
                    fix="call paceline.fsdp(...) when all parameters are in the model.",
                    names=unknown,
                )
            warn_untrained(model, self._optimizers)
        if owned:
            raise self._error(
                f"the optimizer holds {len(owned)} parameters that are in no model.",
                why="fsdp replaces the parameters, so an optimizer made before it holds the old ones.",
                fix="make the optimizer after paceline.fsdp(...).",
                names=[],
            )

    def check_precision(self, precision: str) -> None:
        if precision == "fp16":
            raise ConfigError(
                "precision='fp16' is not supported for sharded models.",
                why="torch's loss scaler looks for infinity in this rank's part of the gradients only.",
                fix="use 'bf16'.",
            )

    def before_forward(self, micro: MicroBatch) -> None:
        super().before_forward(micro)
        for root in self._roots:
            root.set_requires_gradient_sync(micro.is_last)
            root.set_is_last_backward(micro.is_last)

    def finish(self, optimizer: Optimizer) -> None:
        names = [
            name
            for model in self._models
            for name, p in model.named_parameters()
            if p.requires_grad and p.grad is None
        ]
        if names:
            raise self._error(
                f"no gradient reached {listed(names)}.",
                why="FSDP sums the gradients of a block together, so each rank must have all of them.",
                fix="freeze unused parameters with requires_grad_(False) before paceline.fsdp(...).",
                names=names,
            )

    def grad_norm(self, gradients: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
        if norm_type == math.inf:
            return self._largest(gradients)
        norm = get_total_norm(gradients, norm_type, foreach=True)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _largest(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        # torch has no infinity norm of an empty shard, which a rank may hold of a small parameter.
        parts = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
        own = torch.stack([g.abs().max() for g in parts if g.numel()] or [parts[0].new_zeros(())])
        # Gathered, because a maximum over ranks does not keep NaN on every backend.
        each = [torch.empty_like(own[0]) for _ in range(self._job.data.size)]
        dist.all_gather(each, own.max(), group=self._job.data.group)
        return torch.stack(each).max()

    def whole_state(self, model: nn.Module) -> dict[str, torch.Tensor]:
        return {
            name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in model.state_dict().items()
        }

    def _error(self, what: str, *, why: str, fix: str, names: list[str]) -> GradientError:
        return GradientError(what, where=self._job.where(), why=why, fix=fix, parameters=names)


STRATEGIES.append(FSDPStrategy)
