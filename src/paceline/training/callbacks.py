"""Callbacks of `Trainer`: methods that are called on events, on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from paceline import log
from paceline.errors import CallbackError, ConfigError, PacelineError, PeerFailed
from paceline.job.arguments import require_integers
from paceline.job.job import Job
from paceline.training.evaluation import Evaluation
from paceline.training.step import Step
from paceline.training.training import Training

Mode = Literal["min", "max"]


@dataclass(frozen=True, kw_only=True)
class Event:
    """What every event holds.

    Attributes:
        job: The job.
        training: The training: its models, optimizers, `log` and `save`.

    Collective: none.
    """

    job: Job
    training: Training


@dataclass(frozen=True, kw_only=True)
class FitStart(Event):
    """`Trainer.fit` begins; nothing is loaded yet.

    Attributes:
        epochs: The number of epochs after which the training ends.

    Collective: none.
    """

    epochs: int


@dataclass(frozen=True, kw_only=True)
class StepEnd(Event):
    """A step was updated and logged.

    Attributes:
        step: The step.

    Collective: none.
    """

    step: Step


@dataclass(frozen=True, kw_only=True)
class EpochEnd(StepEnd):
    """The last step of an epoch was updated. It comes before the evaluation.

    Collective: none.
    """


@dataclass(frozen=True, kw_only=True)
class EvaluationEnd(StepEnd):
    """The validation data was evaluated.

    Attributes:
        evaluation: The result, equal on all ranks.

    Collective: none.
    """

    evaluation: Evaluation


@dataclass(frozen=True, kw_only=True)
class FitEnd(Event):
    """The training has ended, and its last step is saved.

    Attributes:
        evaluation: The last one; None without validation data.

    Collective: none.
    """

    evaluation: Evaluation | None


class Callback:
    """The base of callbacks. Override what you need.

    Every method runs on every rank, in the order in which the callbacks were given. What `state_dict` returns
    is saved in the checkpoints, from rank 0, and loaded on resume.

    Attributes:
        name: The name of its state in the checkpoints; if it is empty, that of the class. A number is added
            if several callbacks have the same name.
        has_ended: Whether it has ended the training. `fit` then trains no step after a resume.

    Collective: none by itself; a method that runs a collective must do so on all ranks.
    """

    name = ""
    has_ended = False

    def on_fit_start(self, event: FitStart) -> None:
        """Before the first step. Parameters may be frozen here."""

    def on_step_end(self, event: StepEnd) -> None:
        """After each update."""

    def on_epoch_end(self, event: EpochEnd) -> None:
        """After the last update of an epoch, before the evaluation."""

    def on_evaluation_end(self, event: EvaluationEnd) -> None:
        """After each evaluation in the loop."""

    def on_fit_end(self, event: FitEnd) -> None:
        """After the last step."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed training needs: numbers, strings, lists, dictionaries and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""


_METHODS = {
    FitStart: "on_fit_start",
    StepEnd: "on_step_end",
    EpochEnd: "on_epoch_end",
    EvaluationEnd: "on_evaluation_end",
    FitEnd: "on_fit_end",
}


class Callbacks:
    """All callbacks of a training, as one object with a state.

    Raises:
        ConfigError: one of them is not a `Callback`, or there are two `BestCheckpoint`s.
    """

    is_optional = True  # callbacks may be added to a training, and removed

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise ConfigError(
                    f"{callback!r} is not a callback.",
                    fix="pass objects of subclasses of paceline.Callback.",
                )
        self._named: dict[str, Callback] = {}
        for callback in callbacks:
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
                fix="give one, or save yourself with `event.training.save()` in a callback.",
            )

    @property
    def has_ended(self) -> bool:
        """Whether a callback has ended the training."""
        return any(callback.has_ended for callback in self._named.values())

    def call(self, event: Event) -> None:
        """Call the method of the event on each callback.

        Raises:
            CallbackError: a callback raised.
            ConfigError: a callback does not fit the training.
        """
        method = _METHODS[type(event)]
        for name, callback in self._named.items():
            try:
                getattr(callback, method)(event)
            except (PeerFailed, ConfigError):
                raise
            except Exception as error:
                step = event.step.number if isinstance(event, StepEnd) else None
                what, fix = str(error), "fix the callback, or remove it."
                if isinstance(error, PacelineError):
                    what, fix = error.what, error.fix or fix
                raise CallbackError(
                    f"the callback {name} raised {type(error).__name__} in {method}: {what}",
                    where=event.job.where(step=step),
                    fix=f"{fix} Checkpoints are not affected.",
                    callback=name,
                    method=method,
                ) from error

    def state_dict(self) -> dict[str, Any]:
        return {name: callback.state_dict() for name, callback in self._named.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the states by name."""
        for name, callback in self._named.items():
            if name in state:
                callback.load_state_dict(state[name])
            else:
                log.logger.info("the callback %s is not in the checkpoint; it starts anew.", name)


class _Best:
    """The best value of a metric so far."""

    def __init__(self, metric: str, mode: Mode, min_delta: float) -> None:
        if mode not in ("min", "max"):
            raise ConfigError(f'mode must be "min" or "max", got {mode!r}.')
        if not min_delta >= 0:
            raise ConfigError(f"min_delta must be 0 or more, got {min_delta}.")
        self.metric = metric
        self.value: float | None = None
        self._sign = 1 if mode == "max" else -1
        self._min_delta = min_delta

    def update(self, evaluation: Evaluation) -> bool:
        """Take the metric of this evaluation if it is better by more than `min_delta`; whether it is."""
        value = number_of(evaluation, self.metric)
        if math.isnan(value):
            return False
        better = self.value is None or self._sign * (value - self.value) > self._min_delta
        if better:
            self.value = value
        return better


class EarlyStopping(Callback):
    """Ends the training when a metric of the evaluation has not improved for some evaluations.

    All ranks evaluate the same metric, so the training ends after the same step on any number of ranks.

    Args:
        metric: Its name in the evaluation.
        patience: Number of evaluations without an improvement after which the training ends.
        mode: Whether a smaller ("min") or larger ("max") value is better.
        min_delta: A smaller difference is no improvement.

    Attributes:
        num_bad: Evaluations since the last improvement.

    Raises:
        ConfigError: an option is out of range.

    Collective: none.
    """

    def __init__(
        self, metric: str = "loss", *, patience: int = 3, mode: Mode = "min", min_delta: float = 0.0
    ) -> None:
        require_integers(1, patience=patience)
        self.patience = patience
        self.num_bad = 0
        self.name = f"EarlyStopping({metric})"
        self._best = _Best(metric, mode, min_delta)

    def on_fit_start(self, event: FitStart) -> None:
        self._best.value, self.num_bad, self.has_ended = None, 0, False  # of an earlier `fit`

    def on_evaluation_end(self, event: EvaluationEnd) -> None:
        self.num_bad = 0 if self._best.update(event.evaluation) else self.num_bad + 1
        self.has_ended = self.num_bad >= self.patience
        if self.has_ended:
            log.logger.info(
                "stopping after step %d: %s has not improved in %d evaluation%s; the best was %s.",
                *(event.step.number, self._best.metric, self.num_bad, "s" * (self.num_bad != 1)),
                "no number" if self._best.value is None else f"{self._best.value:g}",
            )
            event.step.stop(now=True)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best.value, "num_bad": self.num_bad}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._best.value, self.num_bad = state["best"], state["num_bad"]
        self.has_ended = self.num_bad >= self.patience


class BestCheckpoint(Callback):
    """Saves a checkpoint when a metric of the evaluation is the best so far.

    It is kept until the next best one is saved, in addition to the newest ones that `Checkpoints` keeps. A
    training can have one such callback.

    Args:
        metric: See `EarlyStopping`.
        mode: See `EarlyStopping`.
        min_delta: See `EarlyStopping`.

    Raises:
        ConfigError: an option is out of range; at the start, if `fit` has no `folder`.

    Collective: none to create it.
    """

    def __init__(self, metric: str = "loss", *, mode: Mode = "min", min_delta: float = 0.0) -> None:
        self.name = f"BestCheckpoint({metric})"
        self._best = _Best(metric, mode, min_delta)

    def on_fit_start(self, event: FitStart) -> None:
        if event.training.checkpoints is None:
            raise ConfigError(
                "BestCheckpoint needs a folder for checkpoints.",
                fix="trainer.fit(..., folder=...).",
            )
        self._best.value = None  # of an earlier `fit`

    def on_evaluation_end(self, event: EvaluationEnd) -> None:
        if self._best.update(event.evaluation):
            event.training.save(best=True)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._best.value = state["best"]


class LearningRateMonitor(Callback):
    """Logs the learning rate of each parameter group: `lr`, or `lr/0`, `lr/1`, ... for several.

    The value after the update, which the next step uses unless an evaluation changes it
    (`ReduceLROnPlateau`).

    Args:
        every_n: Only in steps whose number is a multiple of this.

    Collective: none.
    """

    def __init__(self, *, every_n: int = 1) -> None:
        require_integers(1, every_n=every_n)
        self._every_n = every_n

    def on_step_end(self, event: StepEnd) -> None:
        groups = [group for each in event.training.optimizers for group in each.param_groups]
        rates: dict[str, Any] = {f"lr/{i}": float(each["lr"]) for i, each in enumerate(groups)}
        if len(rates) == 1:
            rates = {"lr": rates["lr/0"]}
        event.training.log(every_n=self._every_n, **rates)


def number_of(evaluation: Evaluation, metric: str) -> float:
    """A result of an evaluation as a number.

    Raises:
        ConfigError: there is no such result, or it is not one number.
    """
    numbers = numbers_of(evaluation)
    if metric in numbers:
        return numbers[metric]
    raise ConfigError(
        f"the evaluation has no number {metric!r}.",
        why=f"its results are {', '.join(evaluation.values) or 'none'}.",
        fix=f"name one of {', '.join(numbers)}." if numbers else "return one from the score.",
    )


def numbers_of(evaluation: Evaluation) -> dict[str, float]:
    """The results of an evaluation that are one number."""
    return {
        name: float(value)
        for name, value in evaluation.values.items()
        if isinstance(value, int | float)
        or (isinstance(value, torch.Tensor) and value.numel() == 1)
    }
