"""Records the steps of a script that uses paceline: samples, losses, gradients, weights, scores.

Its checkpoints, reports and exports are written to the folder of the run: a verification must neither resume
from the user's checkpoints nor overwrite them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from paceline.audit.progress import Progress
from paceline.audit.record import digest, plain, user_line
from paceline.checkpoint import manager
from paceline.data.loader import Loader
from paceline.parallel.modules import unwrap
from paceline.parallel.syncbn import SyncBatchNorm
from paceline.training import evaluation, trainer
from paceline.training.training import Training

_BATCHNORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)

_Summary = list[Any]


def install(progress: Progress) -> None:
    """Record every `Training` and every evaluation."""
    hooks = _Hooks(progress)
    register_optimizer_step_pre_hook(hooks.before_update)
    loader: Any = Loader
    loader.record_delivered = hooks.wrap_record_delivered(Loader.record_delivered)
    kind: Any = Training
    kind.__init__ = hooks.wrap_init(Training.__init__)
    kind.steps = hooks.wrap_steps(Training.steps)
    kind._commit = hooks.wrap_commit(Training._commit)
    kind.report = hooks.redirect("report", Training.report)
    kind.export = hooks.redirect("export", Training.export)
    store: Any = manager.Checkpoints
    store.__init__ = hooks.redirect("checkpoints", store.__init__, resume="auto")
    modules: list[Any] = [evaluation, trainer]
    evaluated = hooks.wrap_evaluate(evaluation.evaluate)
    for module in modules:
        module.evaluate = evaluated


class _Hooks:
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._recorder = progress.recorder
        self._ids: list[int] = []
        self._numbers: dict[int, int] = {}
        self._gradients: dict[int, _Summary] = {}
        self._num_redirected = 0

    def wrap_record_delivered(self, record_delivered: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(record_delivered)
        def watched(loader: Loader, ids: torch.Tensor) -> None:
            self._ids += ids.tolist()
            record_delivered(loader, ids)

        return watched

    def wrap_init(self, init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def watched(training: Training, *args: Any, **kwargs: Any) -> None:
            self._progress.ends_by_itself = True
            # `verify` compares the ranks itself; the check of the training would stop the run.
            kwargs.pop("desync_also", None)
            kwargs["desync_every"] = 0
            if self._progress.plan.bitwise:
                kwargs["reproducible"] = True
            init(training, *args, **kwargs)
            self._numbers[id(training)] = len(self._numbers)
            layers = [layer for model in training.models for layer in model.modules()]
            self._recorder.write(
                "training",
                t=self._numbers[id(training)],
                at=user_line(),
                precision=kwargs.get("precision", "fp32"),
                batchnorm=_batchnorm(layers),
            )

        return watched

    def wrap_steps(self, steps: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        @functools.wraps(steps)
        def watched(
            training: Training, epochs: int | None = None, *, until: int | None = None
        ) -> Iterator[Any]:
            most = self._progress.plan.steps
            self._ids.clear()
            until = most if until is None else min(until, most)
            for step in steps(training, epochs, until=until):
                if training.number == 0:
                    self._recorder.write(
                        "paceline-start",
                        t=self._numbers[id(training)],
                        params=self._parameters(training),
                    )
                self._gradients.clear()
                yield step

        return watched

    def wrap_commit(self, commit: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(commit)
        def watched(training: Training, step: Any, *args: Any, **kwargs: Any) -> None:
            loss, count = step._local_loss()
            self._recorder.write(
                "paceline-step",
                t=self._numbers[id(training)],
                s=step.number,
                epoch=step.epoch,
                ids=list(self._ids),
                loss=0.0 if loss is None else float(loss),
                count=float(count),
                params=self._parameters(training),
                buffers=_buffers(training),
                grads=self._gradients_by_name(training),
            )
            self._ids.clear()
            commit(training, step, *args, **kwargs)

        return watched

    def before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Record the gradients that the optimizer gets: reduced over ranks, unscaled and clipped."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._gradients[id(parameter)] = _summary(parameter.grad)

    def _gradients_by_name(self, training: Training) -> dict[str, Any]:
        return {
            name: self._gradients[id(parameter)]
            for name, parameter in _named(training)
            if id(parameter) in self._gradients
        }

    def _parameters(self, training: Training) -> dict[str, _Summary]:
        return {name: _summary(parameter) for name, parameter in _named(training)}

    def redirect(self, what: str, call: Callable[..., Any], **forced: Any) -> Callable[..., Any]:
        """Replace the path that a function or constructor takes by one in the folder of the run."""

        @functools.wraps(call)
        def watched(target: Any, path: Any = None, *args: Any, **kwargs: Any) -> Any:
            path = kwargs.pop("folder", kwargs.pop("path", path))
            if path is not None:
                self._num_redirected += 1
                path = (
                    self._progress.plan.folder / f"{what}-{self._num_redirected}" / Path(path).name
                )
                if what != "checkpoints":
                    path.parent.mkdir(parents=True, exist_ok=True)
            return call(target, path, *args, **kwargs | forced)

        return watched

    def wrap_evaluate(self, evaluate: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(evaluate)
        def watched(*args: Any, **kwargs: Any) -> Any:
            result = evaluate(*args, **kwargs)
            numbers = {k: float(v) for k, v in result.values.items() if isinstance(v, float | int)}
            self._recorder.write(
                "evaluated", at=user_line(), values=numbers, samples=result.num_samples
            )
            return result

        return watched


def _named(training: Training) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for number, model in enumerate(training.models):
        for name, parameter in unwrap(model).named_parameters():
            yield (f"model {number}: {name}" if number else name), parameter


def _buffers(training: Training) -> dict[str, _Summary]:
    return {
        f"model {number}: {name}" if number else name: _summary(buffer)
        for number, model in enumerate(training.models)
        for name, buffer in unwrap(model).named_buffers()
        if buffer.is_floating_point()
    }


def _batchnorm(layers: list[torch.nn.Module]) -> str:
    """ "local" if BatchNorm normalises over one rank, "synchronised" if over all, "" without BatchNorm."""
    if any(isinstance(layer, SyncBatchNorm) for layer in layers):
        return "synchronised"
    return "local" if any(isinstance(layer, _BATCHNORMS) for layer in layers) else ""


def _summary(tensor: torch.Tensor) -> _Summary:
    """The digest, the norm and the sum of a tensor. Collective for a DTensor: all ranks that hold it."""
    whole = tensor.detach()
    whole = plain(whole.full_tensor() if hasattr(whole, "full_tensor") else whole)
    return [digest(whole), float(whole.double().norm()), float(whole.double().sum())]
