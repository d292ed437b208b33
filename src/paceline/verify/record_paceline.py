"""Records the steps of a script that uses paceline: samples, losses, gradients, weights, scores.

Its checkpoints, reports and exports are written to the folder of the run: a verification must neither resume
from the user's checkpoints nor overwrite them.

Dropout masks depend on the micro-batches, and these on the number of processes. So dropout is turned off. It
stays on with `--bitwise`, where the micro-batches are the same on any number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from paceline.audit import dropout
from paceline.audit.digests import digest, reals_of
from paceline.audit.events import (
    Evaluated,
    Summary,
    TrainingBuilt,
    TrainingContinues,
    TrainingStarted,
    TrainingStep,
    full_name,
)
from paceline.audit.progress import Progress
from paceline.audit.record import intercept, user_line
from paceline.checkpoint import manager
from paceline.data.digest import plain
from paceline.data.loader import Loader
from paceline.job import collectives
from paceline.job.mesh import Mesh
from paceline.parallel.modules import owned_parameters, unwrap
from paceline.parallel.syncbn import SyncBatchNorm
from paceline.training import evaluation, trainer
from paceline.training.step import Step
from paceline.training.training import Training

_BATCHNORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)


def install(progress: Progress) -> None:
    """Record every `Training` and every evaluation."""
    hooks = PacelineHooks(progress)
    register_optimizer_step_pre_hook(hooks.before_update)
    intercept("resolve", hooks.resolve, Mesh)
    intercept("record_delivered", hooks.record_delivered, Loader)
    intercept("__init__", hooks.build_training, Training)
    intercept("steps", hooks.steps, Training)
    intercept("_start_and_logged", hooks.weigh, Step)
    intercept("_commit", hooks.commit, Training)
    intercept("stop", hooks.stop, Step)
    intercept("report", hooks.report, Training)
    intercept("export", hooks.export, Training)
    intercept("__init__", hooks.build_checkpoints, manager.Checkpoints)
    intercept("evaluate", hooks.evaluate, evaluation, trainer)


class PacelineHooks:
    """What the `Training` of a rank does, and its evaluations."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._recorder = progress.recorder
        self._ids: list[int] = []
        self._numbers: WeakKeyDictionary[Training, int] = WeakKeyDictionary()
        self._num_trainings = 0
        self._gradients: dict[int, Summary] = {}
        self._loss_size = 0.0  # of this step; see `TrainingStep.loss_size`
        self._num_redirected = 0
        self._is_stopped = False  # whether a step of the current loop was the last by `Step.stop`

    def resolve(
        self, resolve: Callable[..., Mesh], mesh: Mesh, world_size: int, local_world_size: int
    ) -> Mesh:
        """The run of one process has no axes: what it computes is what each layout must compute."""
        if world_size == 1:
            return Mesh()
        return resolve(mesh, world_size, local_world_size)

    def record_delivered(
        self, record_delivered: Callable[..., None], loader: Loader, ids: torch.Tensor
    ) -> None:
        self._ids += ids.tolist()
        record_delivered(loader, ids)

    def build_training(
        self, init: Callable[..., None], training: Training, *args: Any, **kwargs: Any
    ) -> None:
        self._progress.uses_paceline = True
        # `verify` compares the ranks itself; the check of the training would stop the run.
        kwargs["desync_every"] = 0
        if self._progress.plan.bitwise:
            kwargs["reproducible"] = True
        elif not self._num_trainings:
            dropout.turn_off()
        init(training, *args, **kwargs)
        self._numbers[training] = self._num_trainings
        self._num_trainings += 1
        layers = [layer for model in training.models for layer in model.modules()]
        self._recorder.write(
            TrainingBuilt(
                training=self._numbers[training],
                at=user_line(),
                precision=kwargs.get("precision", "fp32"),
                batchnorm=_batchnorm(layers),
            )
        )

    def steps(
        self,
        steps: Callable[..., Iterator[Any]],
        training: Training,
        epochs: int | None = None,
        *,
        until: int | None = None,
    ) -> Iterator[Any]:
        most = self._progress.plan.steps
        self._ids.clear()
        self._is_stopped = False
        for step in steps(training, epochs, until=most if until is None else min(until, most)):
            if training.number == 0:
                number = self._numbers[training]
                params = _of_all_stages(training, _parameters(training))
                self._recorder.write(TrainingStarted(training=number, params=params))
            self._gradients.clear()
            yield step
        ends = (epochs is not None and training.position.epoch >= epochs) or (
            until is not None and training.number >= until
        )
        if training.number >= most and not (ends or self._is_stopped):
            self._recorder.write(TrainingContinues())

    def stop(self, stop: Callable[..., None], step: Step, **options: Any) -> None:
        self._is_stopped = True
        stop(step, **options)

    def weigh(self, weigh: Callable[..., Any], step: Step, *args: Any) -> Any:
        start, own = weigh(step, *args)
        self._loss_size += abs(float(own))
        return start, own

    def commit(
        self, commit: Callable[..., None], training: Training, step: Any, *args: Any, **kwargs: Any
    ) -> None:
        loss, count = step._local_loss()
        reports = training.job.data.reports  # other ranks of its mesh have the same samples
        grads = {
            name: self._gradients[id(parameter)]
            for name, parameter in _named(training, torch.nn.Module.named_parameters)
            if id(parameter) in self._gradients
        }
        self._recorder.write(
            TrainingStep(
                training=self._numbers[training],
                step=step.number,
                ids=list(self._ids) if reports else [],
                loss=float(loss) if reports and loss is not None else 0.0,
                loss_size=self._loss_size if reports else 0.0,
                count=float(count) if reports else 0.0,
                params=_of_all_stages(training, _parameters(training)),
                buffers=_of_all_stages(training, _buffers(training)),
                grads=_of_all_stages(training, grads),
            )
        )
        self._ids.clear()
        self._loss_size = 0.0
        commit(training, step, *args, **kwargs)

    def before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Record the gradients that the optimizer gets: reduced over ranks, unscaled and clipped."""
        for parameter in owned_parameters(optimizer):
            if parameter.grad is not None:
                self._gradients[id(parameter)] = _summary(parameter.grad)

    def report(
        self, report: Callable[..., None], training: Training, folder: Any = None, **options: Any
    ) -> None:
        report(training, None if folder is None else self._redirect(folder), **options)

    def export(
        self, export: Callable[..., None], training: Training, path: Any, **options: Any
    ) -> None:
        export(training, self._redirect(path), **options)

    def build_checkpoints(
        self, init: Callable[..., None], checkpoints: Any, folder: Any, **options: Any
    ) -> None:
        init(checkpoints, self._redirect(folder), **options | {"resume": "auto"})

    def _redirect(self, path: Any) -> Path:
        """A path of the same name in a new folder of the run."""
        self._num_redirected += 1
        folder = self._progress.plan.folder / f"redirected-{self._num_redirected}"
        folder.mkdir(exist_ok=True)
        return folder / Path(path).name

    def evaluate(self, evaluate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = evaluate(*args, **kwargs)
        numbers = {k: float(v) for k, v in result.values.items() if isinstance(v, float | int)}
        self._recorder.write(Evaluated(at=user_line(), values=numbers, samples=result.num_samples))
        return result


def _named(training: Training, tensors: Callable[..., Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of all models that `tensors`, a method of modules, gives for each."""
    for number, model in enumerate(training.models):
        for name, tensor in tensors(unwrap(model)):
            yield full_name(number, name), tensor


def _of_all_stages(training: Training, own: dict[str, Summary]) -> dict[str, Summary]:
    """Summaries of what the ranks of a pipeline hold together. All ranks call it."""
    job = training.job
    if job.mesh is None or job.mesh.pp == 1:
        return own
    rows = collectives.gather(job, own)
    return {
        name: row
        for rank in job.mesh.axis_ranks(job.rank, "pp")
        for name, row in rows[rank].items()
    }


def _parameters(training: Training) -> dict[str, Summary]:
    return {name: _summary(p) for name, p in _named(training, torch.nn.Module.named_parameters)}


def _buffers(training: Training) -> dict[str, Summary]:
    buffers = _named(training, torch.nn.Module.named_buffers)
    return {name: _summary(buffer) for name, buffer in buffers if buffer.is_floating_point()}


def _batchnorm(layers: list[torch.nn.Module]) -> str:
    """ "local" if BatchNorm normalises over one rank, "synchronised" if over all, "" without BatchNorm."""
    if any(isinstance(layer, SyncBatchNorm) for layer in layers):
        return "synchronised"
    return "local" if any(isinstance(layer, _BATCHNORMS) for layer in layers) else ""


def _summary(tensor: torch.Tensor) -> Summary:
    """Collective for a DTensor: all ranks that hold it."""
    whole = tensor.detach()
    whole = plain(whole.full_tensor() if hasattr(whole, "full_tensor") else whole)
    reals = reals_of(whole)
    return Summary(digest(whole), float(reals.norm()), float(reals.sum()))
