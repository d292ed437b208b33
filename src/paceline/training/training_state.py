"""`TrainingState`: all that a checkpoint of a training holds, and how it is loaded.

`state.py` saves models and optimizers. This file adds the position in the data, schedules, the loss scale,
the state of the strategy, and the objects given to `Training.keep`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from paceline.checkpoint import codec
from paceline.data.plan import Position
from paceline.errors import CheckpointError, ConfigError
from paceline.training import state
from paceline.training.step import StepContext


class TrainingState:
    """The state of one training.

    Args:
        context: Has the optimizers, schedules, precision and strategy.
        reproducible: Whether the training is reproducible; a checkpoint must agree.
    """

    def __init__(
        self, context: StepContext, models: Sequence[nn.Module], *, reproducible: bool
    ) -> None:
        self._context = context
        self._models = models
        self._optimizers = [trained.optimizer for trained in context.optimizers]
        self._reproducible = reproducible
        self._kept: dict[str, Any] = {}

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
        return state.save(self._models, self._optimizers) | {
            "step": number,
            "position": [position.seed, position.epoch, position.offset],
            "schedules": [trained.schedule.state_dict() for trained in context.optimizers],
            "schedule_types": [trained.schedule.type for trained in context.optimizers],
            "divisors": [context.token_divisor] * len(context.optimizers),
            "scaler": context.precision.scaler.state_dict(),
            "strategy": context.strategy.state_dict(),
            "kept": self._states_kept(is_optional=False),
            "optional": self._states_kept(is_optional=True),
        }

    def _states_kept(self, *, is_optional: bool) -> dict[str, Any]:
        return {
            name: thing.state_dict()
            for name, thing in self._kept.items()
            if _is_optional(thing) == is_optional
        }

    def load(self, saved: dict[str, Any]) -> tuple[int, Position]:
        """Load what `save` returned, in this or an earlier release. Returns its step and position.

        Raises:
            CheckpointError: the state does not fit this training; nothing was changed.
        """
        context = self._context
        saved = context.strategy.own_part(saved)
        state.check(self._models, self._optimizers, saved)
        self._refuse_other(saved)
        context.before_update()
        context.strategy.load_state_dict(_strategy_state(saved))  # before weights: it may refuse
        state.load(self._models, self._optimizers, saved)
        context.token_divisor = saved["divisors"][0]
        for trained, schedule in zip(context.optimizers, saved["schedules"], strict=True):
            trained.schedule.load_state_dict(schedule)
        context.precision.load_state_dict(saved["scaler"])
        states = saved["kept"] | saved.get("optional", {})
        for name, thing in self._kept.items():
            if name in states:
                thing.load_state_dict(states[name])
        return saved["step"], Position(*saved["position"])

    def _refuse_other(self, saved: dict[str, Any]) -> None:
        """Raise CheckpointError if a state is that of a training with other settings."""
        seed, own_seed = saved["position"][0], self._context.job.seed
        if seed != own_seed:
            raise CheckpointError(
                f"the checkpoint was trained with seed {seed}, this job has {own_seed}.",
                fix="join with the same seed, or start a new training with resume='never'.",
            )
        schedules = [trained.schedule for trained in self._context.optimizers]
        # Checkpoints of older releases do not name the types.
        theirs = saved.get("schedule_types") or [
            own.type if values else ""
            for own, values in zip(schedules, saved["schedules"], strict=True)
        ]
        for own, other in zip(schedules, theirs, strict=True):
            if own.type != other:
                raise CheckpointError(
                    f"the checkpoint was trained with {other or 'no schedule'}, this training has "
                    f"{own.type or 'none'}.",
                    why="a schedule continues from its own state, so the learning rates would be others.",
                    fix="give the schedule of the run that saved it; for another training start with "
                    "paceline.load_weights and resume='never'.",
                )
        optional = {name for name, thing in self._kept.items() if _is_optional(thing)}
        differing = sorted((set(self._kept) ^ set(saved["kept"])) - optional)
        if differing:
            raise CheckpointError(
                f"the checkpoint and this training keep different objects: {', '.join(differing)}.",
                fix="call training.keep(...) with the same objects as the run that saved it; if this is"
                " another training, give it another folder.",
            )
        if ("exponents" in (_strategy_state(saved) or {})) != self._reproducible:
            raise CheckpointError(
                "the checkpoint and this training differ in `reproducible`.",
                why="the setting changes the bits of every step.",
                fix="use the setting of the run that saved it, or resume='never'.",
            )

    def settings(self) -> list[list[dict[str, Any]]]:
        """For each optimizer and parameter group, the options that only the program sets."""
        return [
            state.settings(trained.optimizer, has_schedule=bool(trained.schedule.type))
            for trained in self._context.optimizers
        ]

    def changes_of_settings(self, before: list[list[dict[str, Any]]]) -> list[str]:
        """What `load` has changed of `settings`: for each optimizer that changed, a text."""
        pairs = zip(before, self.settings(), strict=True)
        changes = [state.differing(own, loaded) for own, loaded in pairs]
        return ["; ".join(names) for names in changes if names]

    def templates(self) -> Callable[[str], torch.Tensor | None]:
        """A function from a path in a saved state to a tensor that is sharded as the loaded one must be."""
        return state.templates(self._models, self._optimizers)

    def size_bytes(self) -> int:
        """The size of models and optimizers in a checkpoint."""
        _, tensors = codec.encode(state.save(self._models, self._optimizers))
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _is_optional(thing: Any) -> bool:
    return getattr(thing, "is_optional", False) is True


def _strategy_state(saved: dict[str, Any]) -> Any:
    """The state of the strategy; checkpoints of version 1 have its parts at the top."""
    if "strategy" in saved or saved.get("exact") is None:
        return saved.get("strategy")
    exponents = [exponent for each in saved["exact"] for exponent in each or []]
    return {"exponents": exponents or None, "threads": saved["threads"]}
