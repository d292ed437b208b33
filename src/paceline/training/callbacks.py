"""Callbacks of `Trainer`: methods that are called on events, on every rank.

`EarlyStopping`, `BestCheckpoint` and `LearningRateMonitor` also serve a loop without a `Trainer`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from paceline import log
from paceline.errors import ConfigError
from paceline.job.arguments import require_integers
from paceline.training.evaluation import Evaluation
from paceline.training.step import Step
from paceline.training.training import Training

Mode = Literal["min", "max"]


class Callback:
    """The base of callbacks. Override what you need.

    Every method runs on every rank, in the order in which the callbacks were given. `training` has the job,
    the models and the optimizers. What `state_dict` returns is saved in the checkpoints, from rank 0, and
    loaded on resume.

    Attributes:
        name: The name of its state in the checkpoints; if it is empty, that of the class. A number is added
            if several callbacks have the same name.
        has_ended: Whether it has ended the training. `fit` then trains no step after a resume.

    Collective: none by itself; a method that runs a collective must do so on all ranks.
    """

    name = ""
    has_ended = False

    def on_fit_start(self, training: Training) -> None:
        """Before the first step; nothing is loaded yet. Parameters may be frozen here."""

    def on_step_end(self, training: Training, step: Step) -> None:
        """After each update."""

    def on_epoch_end(self, training: Training, step: Step) -> None:
        """After the last update of an epoch, before the evaluation."""

    def on_evaluation_end(self, training: Training, step: Step, evaluation: Evaluation) -> None:
        """After each evaluation in the loop; the evaluation is equal on all ranks."""

    def on_fit_end(self, training: Training, evaluation: Evaluation | None) -> None:
        """After the last step, which is saved. The last evaluation is None without validation data."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed training needs: numbers, strings, lists, dictionaries and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""


class Callbacks:
    """All callbacks of a training, as one object with a state.

    Raises:
        ConfigError: one of them is not a `Callback`, or there are two `BestCheckpoint`s.
    """

    is_optional = True  # callbacks may be added to a training, and removed

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._named: dict[str, Callback] = {}
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise ConfigError(
                    f"{callback!r} is not a callback.",
                    fix="pass objects of subclasses of paceline.Callback.",
                )
            name = unique = callback.name or type(callback).__name__
            number = 1
            while unique in self._named:
                number += 1
                unique = f"{name}-{number}"
            self._named[unique] = callback
        if sum(isinstance(callback, BestCheckpoint) for callback in callbacks) > 1:
            raise ConfigError(
                "two BestCheckpoints were given.",
                why="one checkpoint is kept as the best, so each would replace that of the other.",
                fix="give one, or save yourself with `training.save()` in a callback.",
            )

    @property
    def has_ended(self) -> bool:
        """Whether a callback has ended the training."""
        return any(callback.has_ended for callback in self._named.values())

    def call(self, method: str, training: Training, *arguments: Any) -> None:
        """Call a method of each callback."""
        for callback in self._named.values():
            getattr(callback, method)(training, *arguments)

    def state_dict(self) -> dict[str, Any]:
        return {name: callback.state_dict() for name, callback in self._named.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the states by name."""
        for name, callback in self._named.items():
            if name in state:
                callback.load_state_dict(state[name])
            else:
                log.logger.info(
                    "the callback %s is not in the checkpoint; its state starts from the beginning.",
                    name,
                )


class _Best(Callback):
    """The best value of a metric so far."""

    def __init__(self, metric: str = "loss", *, mode: Mode = "min", min_delta: float = 0.0) -> None:
        if mode not in ("min", "max"):
            raise ConfigError(f'mode must be "min" or "max", got {mode!r}.')
        if not min_delta >= 0:
            raise ConfigError(f"min_delta must be 0 or more, got {min_delta}.")
        self.name = f"{type(self).__name__}({metric})"
        self.metric = metric
        self.best: float | None = None
        self._sign = 1 if mode == "max" else -1
        self._min_delta = min_delta

    def on_fit_start(self, training: Training) -> None:
        self.best = None  # of an earlier `fit`

    def is_best(self, evaluation: Evaluation | Mapping[str, float]) -> bool:
        """Keep the metric of this evaluation if it is better by more than `min_delta`; whether it is.

        Args:
            evaluation: The result of `evaluate`, or values of your own by name, equal on all ranks.
        """
        value = number_of(evaluation, self.metric)
        better = not math.isnan(value) and (
            self.best is None or self._sign * (value - self.best) > self._min_delta
        )
        if better:
            self.best = value
        return better

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = state["best"]


class EarlyStopping(_Best):
    """Ends the training when a metric of the evaluation has not improved for some evaluations.

    All ranks evaluate the same metric, so the training ends after the same step on any number of ranks. In
    a loop of your own, call `update` after each evaluation, and keep its state:
    `training.keep(stopping=stopping)`.

    Args:
        metric: Its name in the evaluation.
        patience: Number of evaluations without an improvement after which the training ends.
        mode: Whether a smaller ("min") or larger ("max") value is better.
        min_delta: A smaller difference is no improvement.

    Attributes:
        num_bad: Evaluations since the last improvement.

    Raises:
        ConfigError: an option is out of range.

    Collective: none to create it.
    """

    def __init__(
        self, metric: str = "loss", *, patience: int = 3, mode: Mode = "min", min_delta: float = 0.0
    ) -> None:
        require_integers(1, patience=patience)
        super().__init__(metric, mode=mode, min_delta=min_delta)
        self.patience = patience
        self.num_bad = 0

    def update(self, step: Step, evaluation: Evaluation | Mapping[str, float]) -> bool:
        """Take an evaluation, and end the training after this step if it is time; whether it is.

        Args:
            evaluation: See `is_best`.

        Collective: all ranks, in the same step.
        """
        self.num_bad = 0 if self.is_best(evaluation) else self.num_bad + 1
        self.has_ended = self.num_bad >= self.patience
        if self.has_ended:
            log.logger.info(
                "stopping after step %d: %s has not improved in %d evaluation%s; the best was %s.",
                *(step.number, self.metric, self.num_bad, "s" * (self.num_bad != 1)),
                "no number" if self.best is None else f"{self.best:g}",
            )
            step.stop_on_all_ranks()
        return self.has_ended

    def on_fit_start(self, training: Training) -> None:
        super().on_fit_start(training)
        self.num_bad, self.has_ended = 0, False

    def on_evaluation_end(self, training: Training, step: Step, evaluation: Evaluation) -> None:
        self.update(step, evaluation)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "num_bad": self.num_bad}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.num_bad = state["best"], state["num_bad"]
        self.has_ended = self.num_bad >= self.patience


class BestCheckpoint(_Best):
    """Saves a checkpoint when a metric of the evaluation is the best so far.

    It is kept until the next best one is saved, in addition to the newest ones that `Checkpoints` keeps. A
    training can have one such callback. In a loop of your own: `if best.is_best(evaluation):
    training.save(best=True)`.

    Args:
        metric: See `EarlyStopping`.
        mode: See `EarlyStopping`.
        min_delta: See `EarlyStopping`.

    Raises:
        ConfigError: an option is out of range; at the start, if `fit` has no `folder`.

    Collective: none to create it.
    """

    def on_fit_start(self, training: Training) -> None:
        if training.checkpoints is None:
            raise ConfigError(
                "BestCheckpoint needs a folder for checkpoints.",
                fix="trainer.fit(..., folder=...).",
            )
        super().on_fit_start(training)

    def on_evaluation_end(self, training: Training, step: Step, evaluation: Evaluation) -> None:
        if self.is_best(evaluation):
            training.save(best=True)


class LearningRateMonitor(Callback):
    """Logs the learning rate of each parameter group: `lr`, or `lr/0`, `lr/1`, ... for several.

    The value after the update, which the next step uses unless an evaluation changes it
    (`ReduceLROnPlateau`). In a loop of your own, call `on_step_end(training, step)` after `step.update`.

    Collective: none.
    """

    def on_step_end(self, training: Training, step: Step) -> None:
        groups = [group for each in training.optimizers for group in each.param_groups]
        rates: dict[str, Any] = {f"lr/{i}": float(each["lr"]) for i, each in enumerate(groups)}
        training.log(**({"lr": rates["lr/0"]} if len(rates) == 1 else rates))


def numbers_of(values: Mapping[str, Any]) -> dict[str, float]:
    """The results of an evaluation that are one number."""
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float)
        or (isinstance(value, torch.Tensor) and value.numel() == 1)
    }


def number_of(evaluation: Evaluation | Mapping[str, float], metric: str) -> float:
    """A result of an evaluation as a number.

    Raises:
        ConfigError: there is no such result, or it is not one number.
    """
    values = evaluation.values if isinstance(evaluation, Evaluation) else evaluation
    numbers = numbers_of(values)
    if metric not in numbers:
        raise ConfigError(
            f"the evaluation has no number {metric!r}.",
            why=f"its results are {', '.join(values) or 'none'}.",
            fix="name one of them that is a number, or return one from the score.",
        )
    return numbers[metric]
