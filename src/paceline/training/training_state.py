"""`TrainingState`: all that a checkpoint of a training holds, and how it is loaded.

`state.py` saves models and optimizers. This file adds the position in the data, schedules, the loss scale,
the state of the strategy, and the objects given to `Training.keep`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from paceline import log
from paceline.checkpoint import codec
from paceline.data.batches import Batches
from paceline.data.plan import Position
from paceline.errors import CheckpointError, ConfigError
from paceline.training import state
from paceline.training.optimizers import TrainedOptimizer
from paceline.training.step import StepContext

_ORDER = ("samples", "shuffle", "sampler")  # settings that decide which samples a position means


class TrainingState:
    """The state of one training.

    Args:
        context: Has the optimizers, schedules, precision and strategy.
        batches: The data of the training.
        reproducible: Whether the training is reproducible; a checkpoint must agree.
    """

    def __init__(
        self,
        context: StepContext,
        models: Sequence[nn.Module],
        batches: Batches,
        *,
        reproducible: bool,
    ) -> None:
        self._context = context
        self._models = models
        self._batches = batches
        self._optimizers = [trained.optimizer for trained in context.optimizers]
        self._reproducible = reproducible
        self._kept: dict[str, Any] = {}
        self._content: list[int] | None = None

    def read_content(self) -> None:
        """Read the digests of a few samples, and compare them over the ranks; see `Batches.content`.

        Collective: all ranks.
        """
        self._content = self._batches.content()

    @property
    def keeps(self) -> bool:
        """Whether objects with a state are kept."""
        return any(thing.state_dict() for thing in self._kept.values())

    def keep(self, objects: Mapping[str, Any]) -> None:
        """Add objects to the state; see `Training.keep`."""
        for name, thing in objects.items():
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                raise ConfigError(
                    f"keep({name}=...): the object has no state_dict and load_state_dict methods.",
                    fix="give it both methods, or leave it out.",
                )
            if self._kept.setdefault(name, thing) is not thing:
                raise ConfigError(
                    f"keep({name}=...): another object is kept under this name.",
                    fix="give each object a name of its own.",
                )

    def save(self, number: int, position: Position) -> dict[str, Any]:
        """The state after step `number`; the next step starts at `position`.

        Its tensors share memory with the models and optimizers.
        """
        context = self._context
        saved = state.save(self._models, self._optimizers) | {
            "step": number,
            "position": [position.seed, position.epoch, position.offset],
            "data": self._batches.identity() | {"precision": context.precision.name},
            "content": self._content,
            "schedules": [
                {} if each.scheduler is None else dict(each.scheduler.state_dict())
                for each in context.optimizers
            ],
            "schedule_types": [_schedule_type(each) for each in context.optimizers],
            "scaler": context.precision.scaler.state_dict(),
            "strategy": context.strategy.state_dict(),
            "kept": self._states_kept(is_optional=False),
            "optional": self._states_kept(is_optional=True),
        }
        return context.strategy.to_save(saved)

    def _states_kept(self, *, is_optional: bool) -> dict[str, Any]:
        return {
            name: thing.state_dict()
            for name, thing in self._kept.items()
            if _is_optional(thing) == is_optional
        }

    def load(self, saved: dict[str, Any]) -> tuple[int, Position]:
        """Load what `save` returned. Returns its step and position.

        Raises:
            CheckpointError: the state does not fit this training; nothing was changed.
        """
        context = self._context
        has_hosts = "hosts" in (saved["strategy"] or {})
        if has_hosts != (context.strategy.hosts is not None):
            raise CheckpointError(
                f"the checkpoint was trained with{'' if has_hosts else 'out'} diloco, this training is "
                f"with{'out' if has_hosts else ''} it.",
                why="the checkpoint holds an optimizer for each host."
                if has_hosts
                else "the checkpoint has no state of the outer optimizer.",
                fix="give this training a folder of its own, and load the weights with "
                "paceline.load_weights.",
            )
        saved = context.strategy.own_part(saved)
        state.check(self._models, self._optimizers, saved)
        self._refuse_other(saved)
        position = self._position(saved)
        context.strategy.load_state_dict(saved["strategy"])  # before weights: it may refuse
        state.load(self._models, self._optimizers, saved)
        for trained, schedule in zip(context.optimizers, saved["schedules"], strict=True):
            if trained.scheduler is not None:
                trained.scheduler.load_state_dict(schedule)
        context.precision.load_state_dict(saved["scaler"])
        states = saved["kept"] | saved["optional"]
        for name, thing in self._kept.items():
            if name in states:
                thing.load_state_dict(state.fitted(thing.state_dict(), states[name]))
        return saved["step"], position

    def _position(self, saved: dict[str, Any]) -> Position:
        """The position of a state in the data of this training.

        Raises:
            CheckpointError: the state was saved inside an epoch of other data.
        """
        position = Position(*saved["position"])
        before = saved["data"]
        own = self._batches.identity() | {"precision": self._context.precision.name}
        changes = [
            f"{name} is {own[name]}, in the checkpoint {before[name]}"
            for name in own
            if own[name] != before[name]
        ]
        is_other_order = any(own[name] != before[name] for name in _ORDER)
        is_between_epochs = position.offset in (0, before["samples"])
        if is_other_order and not is_between_epochs:
            raise CheckpointError(
                f"the checkpoint was saved inside epoch {position.epoch}, with other data: "
                f"{'; '.join(changes)}.",
                why="its position is a number of samples in another order, so that some samples would be "
                "used twice in this epoch and others never.",
                fix="give the training the data of the checkpoint. Or start a training with a folder of its "
                "own, and load the weights with paceline.load_weights.",
            )
        contents = (self._content, saved["content"])
        if None not in contents and contents[0] != contents[1]:
            log.logger.warning(
                "resumes with other samples: the first, middle and last sample are not all those of the "
                "checkpoint. If the order of the dataset has changed, this epoch uses some samples twice."
            )
        if is_other_order:
            is_over = position.offset == before["samples"]
            position = Position(position.seed, position.epoch + is_over, 0)
            changes.append(f"epoch {position.epoch} starts from its beginning")
        if changes:
            log.logger.info("resumes with other settings: %s.", "; ".join(changes))
        return position

    def _refuse_other(self, saved: dict[str, Any]) -> None:
        """Raise CheckpointError if a state is that of a training with other settings."""
        seed, own_seed = saved["position"][0], self._context.job.seed
        if seed != own_seed:
            raise CheckpointError(
                f"the checkpoint was trained with seed {seed}, this job has {own_seed}.",
                fix="join with the same seed, or give this training a folder of its own.",
            )
        schedules = [_schedule_type(each) for each in self._context.optimizers]
        for own, other in zip(schedules, saved["schedule_types"], strict=True):
            if own != other:
                raise CheckpointError(
                    f"the checkpoint was trained with {other or 'no schedule'}, this training has "
                    f"{own or 'none'}.",
                    why="a schedule continues from its own state, so the learning rates would be others.",
                    fix="give the schedule of the run that saved it; for another training use "
                    "paceline.load_weights and a folder of its own.",
                )
        optional = {name for name, thing in self._kept.items() if _is_optional(thing)}
        differing = sorted((set(self._kept) ^ set(saved["kept"])) - optional)
        if differing:
            raise CheckpointError(
                f"the checkpoint and this training keep different objects: {', '.join(differing)}.",
                fix="call training.keep(...) with the same objects as the run that saved it; if this is"
                " another training, give it another folder.",
            )
        if ("exponents" in (saved["strategy"] or {})) != self._reproducible:
            raise CheckpointError(
                "the checkpoint and this training differ in `reproducible`.",
                why="the setting changes the bits of every step.",
                fix="use the setting of the run that saved it, or a folder of its own.",
            )

    def has_unknown_schedule(self) -> bool:
        """Whether a scheduler is neither the schedule of the training nor kept."""
        kept = [getattr(thing, "optimizer", None) for thing in self._kept.values()]
        return any(
            trained.scheduler is None
            # Every scheduler of torch writes this when it is created.
            and any("initial_lr" in group for group in trained.optimizer.param_groups)
            and not any(optimizer is trained.optimizer for optimizer in kept)
            for trained in self._context.optimizers
        )

    def templates(self) -> Callable[[str], torch.Tensor | None]:
        """A function from a path in a saved state to a tensor that is sharded as the loaded one must be."""
        kept = {name: thing.state_dict() for name, thing in self._kept.items()}
        _, tensors = codec.encode({"kept": kept, "optional": kept})
        tensors |= self._context.strategy.templates()
        return state.templates(self._models, self._optimizers, tensors)

    def trained_paths(self) -> list[str]:
        """The paths in the state of what is trained."""
        return [*state.trained_paths(self._models), *self._context.strategy.trained_paths()]

    def size_bytes(self) -> int:
        """The size of models and optimizers in a checkpoint."""
        _, tensors = codec.encode(state.save(self._models, self._optimizers))
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _schedule_type(trained: TrainedOptimizer) -> str:
    return "" if trained.scheduler is None else type(trained.scheduler).__name__


def _is_optional(thing: Any) -> bool:
    return getattr(thing, "is_optional", False) is True
