"""What the strategies for replicas share: the wrapper of a model, and checks of its parameters.

Each rank holds the whole model. `DDPStrategy` lets torch's DDP sum the gradients; `ExactStrategy`
(`reproducible=True`) sums them after the micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from paceline import torch_private
from paceline.data.batches import Batches
from paceline.data.plan import PlannedStep
from paceline.errors import StepError, listed
from paceline.job.job import Job
from paceline.parallel.compression import Compression
from paceline.parallel.modules import (
    find_wrapper,
    owned_parameters,
    unwrap,
    warn_untrained,
)
from paceline.parallel.strategy import Strategy

# Attribute of a wrapper: what `known_parameters` has found.
_KNOWN = "_paceline_known"


class Replica(DistributedDataParallel):
    """torch's DDP, with what `ddp` was asked for.

    Attributes:
        has_hook: Whether a communication hook is registered.
        compression: What `ddp(compress=...)` asked for; None without.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self.has_hook = False
        self.compression: Compression | None = None

    def register_comm_hook(self, state: object, hook: Any) -> None:
        super().register_comm_hook(state, hook)
        self.has_hook = True


def known_parameters(wrapper: DistributedDataParallel) -> tuple[tuple[str, nn.Parameter], ...]:
    """The parameters that the reducer waits for, whatever their `requires_grad` is now."""
    known: tuple[tuple[str, nn.Parameter], ...] | None = wrapper.__dict__.get(_KNOWN)
    if known is None:
        ids = None
        if not isinstance(wrapper, Replica):
            # The user wrapped the model. Only the buckets show which parameters were trainable then.
            # This call allocates the memory of all gradients for a moment.
            buckets_of = torch_private.find(
                "torch.distributed.Reducer._get_zeros_like_grad_buckets"
            )
            buckets = buckets_of(wrapper.reducer) if buckets_of else []
            ids = {id(p) for bucket in buckets for p in bucket.parameters()}
        known = tuple(
            (name, p)
            for name, p in wrapper.module.named_parameters()
            if (id(p) in ids if ids else p.requires_grad)
            and name not in wrapper.parameters_to_ignore
        )
        wrapper.__dict__[_KNOWN] = known
    return known


class ReplicaStrategy(Strategy):
    """The base of the strategies for replicas."""

    reduces_gradients = True

    def _prepare(self, batches: Batches) -> None:
        self._wrappers = [w for w in map(find_wrapper, self._models) if w is not None]
        # For each optimizer: how many parameters it had at the last check, and how many of them a gradient.
        self._numbers_checked: dict[int, tuple[int, int]] = {}

    @classmethod
    def fits(cls, job: Job, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> bool:
        return job.world_size > 1 and all(find_wrapper(model) is not None for model in models)

    def check(self) -> None:
        check_parameters(self._job, self._models, self._optimizers)

    def begin_step(self, step: PlannedStep) -> None:
        # A forward without a backward, for example to print an accuracy, makes the reducer expect a
        # backward. It would then reduce in the backward of the first micro-batch, which is too early.
        reset = torch_private.find("torch.distributed.Reducer._reset_state")
        for wrapper in self._wrappers:
            # A reset would delete the static graph.
            if reset is not None and not wrapper.static_graph:
                reset(wrapper.reducer)

    def leave_step(self) -> None:
        super().leave_step()
        self._set_sync(True)

    def _set_sync(self, on: bool) -> None:
        """Set whether the backward of the next forward reduces gradients, as `no_sync` does."""
        for wrapper in self._wrappers:
            # nn.Module.__setattr__ would take a microsecond.
            wrapper.__dict__["require_backward_grad_sync"] = on

    def finish(self, optimizer: Optimizer) -> None:
        """Check the parameters again if the optimizer has more or fewer of them or of their gradients."""
        parameters = owned_parameters(optimizer)
        numbers = (len(parameters), sum(p.grad is not None for p in parameters))
        if numbers != self._numbers_checked.get(id(optimizer)):
            self.check()
            self._numbers_checked[id(optimizer)] = numbers


def check_parameters(
    job: Job, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
) -> None:
    """Refuse parameters whose gradients are not summed over ranks; warn about untrained ones.

    Raises:
        StepError: DDP does not know some parameters, or some were frozen after wrapping (`parameters`).
    """
    if job.data.size > 1:
        wrappers = [w for w in map(find_wrapper, models) if w is not None]
        # An optimizer may own parameters of several models, each with a wrapper of its own.
        handled = {id(p) for wrapper in wrappers for p in _handled_parameters(wrapper)}
        for model in models:
            _refuse_unknown(job, model, owned_parameters(*optimizers), handled)
        for wrapper in wrappers:
            _refuse_frozen(job, wrapper)
    for model in models:
        warn_untrained(model, optimizers)


def _refuse_unknown(
    job: Job, model: nn.Module, owned: Sequence[torch.Tensor], handled: set[int]
) -> None:
    inner = unwrap(model)
    trainable = {id(p): p for p in [*inner.parameters(), *owned] if p.requires_grad}
    named = {id(p): name for name, p in inner.named_parameters()}
    unknown = [
        named.get(key, f"a parameter of shape {list(p.shape)} that is in the optimizer only")
        for key, p in trainable.items()
        if key not in handled
    ]
    if not unknown:
        return
    if find_wrapper(model) is None:
        why = "the model is not wrapped, so each rank would train its own copy."
        fix = "model = paceline.ddp(job, model)."
    else:
        why = "they were added or unfrozen after wrapping, or are in the optimizer but not in the model."
        fix = (
            "call paceline.ddp(...) when all parameters are in the model and unfrozen, and give the result "
            "to Training. To freeze and unfreeze during the training, use ddp(..., find_unused=True)."
        )
    raise StepError(
        f"DDP does not know {listed(unknown)}: the gradients would differ over ranks.",
        where=job.where(),
        why=why,
        fix=fix,
        parameters=unknown,
    )


def _refuse_frozen(job: Job, wrapper: DistributedDataParallel) -> None:
    frozen = [name for name, p in known_parameters(wrapper) if not p.requires_grad]
    if frozen and not wrapper.find_unused_parameters:
        raise StepError(
            f"parameters were frozen after DDP wrapped them: {listed(frozen)}.",
            where=job.where(),
            why="DDP waits for each parameter that was trainable when it wrapped the model.",
            fix="call requires_grad_(False) before paceline.ddp(...). To freeze and unfreeze during the "
            "training, use ddp(..., find_unused=True).",
            parameters=frozen,
        )


def _handled_parameters(wrapper: DistributedDataParallel) -> list[nn.Parameter]:
    ignored = wrapper.parameters_to_ignore
    ignored_parameters = [p for name, p in wrapper.module.named_parameters() if name in ignored]
    return [p for _, p in known_parameters(wrapper)] + ignored_parameters
