"""`TrainedOptimizer`: an optimizer with its models and its schedule; what `Training` checks of them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.errors import ConfigError
from paceline.parallel.modules import owned_parameters, unwrap
from paceline.training.schedules import Schedule, schedulers_of


@dataclass(slots=True, eq=False)
class TrainedOptimizer:
    """An optimizer of a training.

    Attributes:
        models: The models that hold parameters of the optimizer, by their number in the training.
        has_others: Whether the training has further models, so that names begin with the number.
        scheduler: None if the learning rate is constant.
    """

    optimizer: Optimizer
    models: dict[int, torch.nn.Module]
    has_others: bool
    scheduler: Any
    _num_parameters: int = field(init=False)

    def __post_init__(self) -> None:
        self._num_parameters = len(self.parameters)

    @property
    def parameters(self) -> list[torch.Tensor]:
        return owned_parameters(self.optimizer)

    def named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        owned = {id(p) for p in self.parameters}
        return [
            (f"{number}.{name}" if self.has_others else name, p)
            for number, model in self.models.items()
            for name, p in unwrap(model).named_parameters()
            if id(p) in owned
        ]

    def clear_gradients_if_extended(self) -> None:
        """Clear the gradients that new parameters got from backwards before the optimizer owned them."""
        number = sum(len(group["params"]) for group in self.optimizer.param_groups)
        if number != self._num_parameters:
            self._num_parameters = number
            self.clear_gradients()

    def clear_gradients(self) -> None:
        if type(self.optimizer).zero_grad is not Optimizer.zero_grad:
            self.optimizer.zero_grad()
            return
        # As torch's, without its profiler record, which takes up to 20 us a step.
        for p in self.parameters:
            p.grad = None


def trained_optimizers(
    models: list[torch.nn.Module],
    optimizers: list[Optimizer],
    schedule: Schedule | Sequence[Schedule | None] | None,
) -> list[TrainedOptimizer]:
    """Combine each optimizer with its models and its schedule.

    Raises:
        ConfigError: nothing to train; no model or optimizer, or one twice; an optimizer that needs a closure;
            the schedules do not fit the optimizers.
    """
    for what, given in (("model", models), ("optimizer", optimizers)):
        if not given:
            raise ConfigError(
                f"a training needs {'an' if what == 'optimizer' else 'a'} {what}.",
                fix="Training(job, model, optimizer, batches).",
            )
        if len({id(each) for each in given}) < len(given):
            raise ConfigError(f"a training got the same {what} twice.", fix="give each one once.")
    for model in models:
        if not any(p.requires_grad for p in model.parameters()):
            raise ConfigError(
                "the model has no trainable parameter.",
                fix="unfreeze some with requires_grad_(True).",
            )
    trained = []
    for optimizer, each in zip(optimizers, schedulers_of(schedule, optimizers), strict=True):
        _refuse_closure(optimizer)
        owned = {id(p) for p in owned_parameters(optimizer)}
        own_models = {
            number: model
            for number, model in enumerate(models)
            if any(id(p) in owned for p in model.parameters())
        }
        trained.append(TrainedOptimizer(optimizer, own_models, len(models) > 1, each))
    return trained


def _refuse_closure(optimizer: Optimizer) -> None:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        name = type(optimizer).__name__
        raise ConfigError(
            f"{name} is not supported: its `step` needs a closure.",
            why="it evaluates the loss several times in one step, but a step reads its micro-batches once.",
            fix="use an optimizer whose `step` needs no closure, such as torch.optim.AdamW.",
        )
