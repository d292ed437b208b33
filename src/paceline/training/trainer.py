"""`Trainer`: training without writing a loop.

A test asserts that its result is bit-equal to the same loop in docs/howto/loop.md. Programs that need more
than callbacks write that loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from paceline import log
from paceline.checkpoint.manager import Checkpoints
from paceline.data.batches import Batches
from paceline.data.evaluation import num_rows
from paceline.errors import ConfigError
from paceline.job.arguments import require_integers
from paceline.job.job import Job, current, join
from paceline.job.mesh import Mesh
from paceline.metrics.logger import Logger
from paceline.parallel.ddp import ddp
from paceline.parallel.modules import unwrap
from paceline.parallel.syncbn import plain_batchnorms, sync_batchnorm
from paceline.training.callbacks import (
    Callback,
    Callbacks,
    numbers_of,
)
from paceline.training.evaluation import Evaluation, Score, evaluate
from paceline.training.schedules import Schedule
from paceline.training.step import Step, check_clip_norm
from paceline.training.training import Training
from paceline.training.weight import as_sum

Batch = Any
Wrap = Callable[[Job, nn.Module], nn.Module]


@dataclass(frozen=True, kw_only=True)
class Validation:
    """What `Trainer` evaluates, and when.

    Args:
        dataset: As for `evaluate`.
        score: As for `evaluate`; None computes only the loss.
        micro_batch: Samples in a forward. None is the batch size of a `DataLoader`, or 64.
        every_epochs: Number of epochs between evaluations; None is 1, or never with `every_steps`.
        every_steps: Number of steps between evaluations. The last epoch is evaluated in any case.

    Raises:
        ConfigError: an option is out of range, or both intervals are given.

    Collective: none.
    """

    dataset: Any
    score: Score | None = None
    micro_batch: int | None = None
    every_epochs: int | None = None
    every_steps: int | None = None

    def __post_init__(self) -> None:
        if self.every_epochs is not None and self.every_steps is not None:
            raise ConfigError(
                "every_epochs and every_steps cannot be combined.", fix="leave one of them out."
            )
        require_integers(
            1,
            or_none=True,
            micro_batch=self.micro_batch,
            every_epochs=self.every_epochs,
            every_steps=self.every_steps,
        )

    def is_due(self, step: Step, epochs: int) -> bool:
        """Whether to evaluate after `step` of a training of `epochs` epochs."""
        if step.ends_epoch and step.epoch + 1 == epochs:
            return True
        if self.every_steps is not None:
            return step.number % self.every_steps == 0
        return step.ends_epoch and (step.epoch + 1) % (self.every_epochs or 1) == 0


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What `Trainer.fit` returns.

    Attributes:
        model: The trained model, unwrapped. With `Mesh(pp=)` it has this rank's stages only.
        steps: Number of steps done, counted from the start of the training.
        epochs: Number of epochs done, counted in the same way.
        evaluation: The last one; None without `validation`.

    Collective: none.
    """

    model: nn.Module
    steps: int
    epochs: int
    evaluation: Evaluation | None


@dataclass(eq=False, repr=False)
class Trainer:
    """Trains a model without a loop in the script, on any number of ranks.

    Args:
        model: A module, or a function without arguments that builds it. The function is called after the
            generators are seeded, so its weights depend on the seed.
        loss: `loss(output, target)`: the mean over the samples of the batch; with `count="tokens"` a pair
            (mean over tokens, number of tokens). The target may have any form. If batches are dicts,
            the model gets their entries as keyword arguments, and the loss gets the output and the batch.
        optimizer: A function that returns an optimizer of the parameters it is given.
        data: Samples (input, ..., target), or dicts: map-style, a stream, or a `DataLoader`.
        global_batch: Samples of one optimizer step over all ranks; only for a `DataLoader` it may be None.
        micro_batch: Largest forward of one rank, in samples. None is a rank's whole share, "auto" the
            largest that fits; see `Batches`.
        workers: Loader processes of each rank. None is 0, or the number of a `DataLoader`.
        count: "samples", or "tokens" to give each token the same weight; see `Training`.
        precision: "fp32", "bf16" or "fp16".
        on_non_finite: "raise" or "skip", for gradients with NaN or infinity; see `Training`.
        validation: What to evaluate, and when. Forwards use `precision` there too.
        schedule: A function that returns the schedule of the optimizer it is given; see `Training`.
            One that counts epochs or takes a metric is a callback; see [Trainer](../howto/trainer.md).
        reproducible: Whether the result is bit for bit equal on any number of ranks.
        strategy: "ddp", "fsdp", or a `Mesh`, with which the job is joined: layers are split over `tp`,
            parameters are sharded over `dp_shard`, and each rank of `pp` has a stage of layers. For
            options, a function of the job and the module, such as
            `functools.partial(paceline.fsdp, blocks=Block)`.
        desync_every: Number of steps between comparisons of the replicas; see `Training`.
        recheck_every: Number of steps between two that are computed again; see `Training`.
        loggers: Where metrics go besides `folder`/metrics.jsonl; see `Training.report`.
        flops: Operations of one sample or token, to show the use of the devices; see `Training.report`.
        callbacks: Called on events, in this order; see `Callback`.

    Raises:
        ConfigError: an option is out of range or has no effect.

    Collective: none to create it.
    """

    model: nn.Module | Callable[[], nn.Module]
    loss: Callable[..., Any]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    data: Any
    _: KW_ONLY
    global_batch: int | None = None
    micro_batch: int | Literal["auto"] | None = None
    workers: int | None = None
    count: str = "samples"
    precision: str = "fp32"
    on_non_finite: Literal["raise", "skip"] | None = None
    validation: Validation | None = None
    schedule: Callable[[torch.optim.Optimizer], Schedule] | None = None
    reproducible: bool = False
    strategy: str | Mesh | Wrap = "ddp"
    desync_every: int = 1000
    recheck_every: int | None = None
    loggers: Sequence[Logger] = ()
    flops: float | None = None
    callbacks: Sequence[Callback] = ()

    def __post_init__(self) -> None:
        if not callable(self.optimizer):
            raise ConfigError(
                "optimizer must be a function from parameters to an optimizer.",
                fix="optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4)",
            )
        _refuse_strategy(self.strategy)
        self._callbacks = Callbacks(self.callbacks)
        _refuse_loss(self.loss)

    def fit(
        self,
        epochs: int,
        *,
        seed: int = 0,
        clip_norm: float | None = None,
        folder: str | Path | None = None,
        resume: str = "auto",
    ) -> Fit:
        """Train to the end of `epochs` epochs. Joins the job first, if none is joined.

        Args:
            seed: Seed of all generators; not used if a job is joined already.
            clip_norm: Bound of the gradient's 2-norm.
            folder: For metrics.jsonl, checkpoints (each epoch) and the final weights, model.pth.
            resume: "auto" or "must"; see `Checkpoints`.

        Collective: all ranks, same arguments.
        """
        check_clip_norm(clip_norm)
        joined = current()
        mesh = self.strategy if isinstance(self.strategy, Mesh) else None
        with contextlib.nullcontext(joined) if joined else join(seed=seed, mesh=mesh) as job:
            self._refuse_other_mesh(job)
            batches = Batches(
                job,
                self.data,
                global_batch=self.global_batch,
                micro_batch=self.micro_batch,
                workers=self.workers,
            )
            training = self._prepare(job, batches, folder, resume)
            evaluation = self._loop(training, epochs, clip_norm)
            if folder is not None:
                training.export(Path(folder) / "model.pth")
            batches.close()
            return Fit(
                model=unwrap(training.models[0]),
                steps=training.number,
                epochs=training.position.epoch,
                evaluation=evaluation,
            )

    def _refuse_other_mesh(self, job: Job) -> None:
        if isinstance(self.strategy, Mesh):
            wanted = self.strategy.resolve(job.world_size, job.local_world_size)
            if wanted != job.mesh:
                raise ConfigError(
                    f"the strategy is {wanted}, but the job was joined with {job.mesh or 'no mesh'}.",
                    fix="paceline.join(mesh=...) with the same mesh, or let `fit` join the job.",
                )

    def _prepare(
        self, job: Job, batches: Batches, folder: str | Path | None, resume: str
    ) -> Training:
        module = self.model if isinstance(self.model, nn.Module) else self.model()
        module = module.to(job.device)
        # A pipeline synchronises no statistics.
        has_stages = job.mesh is not None and job.mesh.pp > 1
        if job.data.size > 1 and plain_batchnorms(module) and not (self.reproducible or has_stages):
            module = sync_batchnorm(job, module)
        model = _wrap_for(self.strategy, job, module)
        optimizer = self.optimizer(model.parameters())
        checkpoints = None
        if folder is None and resume != "auto":
            raise ConfigError(
                f"resume={resume!r} has no effect without a folder for checkpoints.",
                fix="trainer.fit(..., folder=...), or leave resume out.",
            )
        if folder is not None:
            checkpoints = Checkpoints(Path(folder) / "checkpoints", every_epochs=1, resume=resume)
        schedule = None if self.schedule is None else self.schedule(optimizer)
        training = Training(
            job,
            model,
            optimizer,
            batches,
            schedule=schedule,
            precision=self.precision,
            on_non_finite=self.on_non_finite,
            count=self.count,
            checkpoints=checkpoints,
            reproducible=self.reproducible,
            desync_every=self.desync_every,
            recheck_every=self.recheck_every,
        )
        training.keep(callbacks=self._callbacks)
        training.report(
            None if folder is None else str(folder),
            progress=True,
            loggers=self.loggers,
            flops=self.flops,
        )
        return training

    def _loop(self, training: Training, epochs: int, clip_norm: float | None) -> Evaluation | None:
        call = self._callbacks.call
        model, validation = training.models[0], self.validation
        evaluation: Evaluation | None = None
        call("on_fit_start", training)
        training.resume()
        steps: Iterable[Step] = training.steps(epochs=epochs)
        if self._callbacks.has_ended:  # it stays ended when the program is started again
            log.logger.info(
                "finished: a callback, such as EarlyStopping, ended this training after step %d.",
                training.number,
            )
            steps = ()
        for step in steps:
            step.run(partial(self._forward, model))
            step.update(clip_norm=clip_norm)
            training.log(loss=step.loss)
            call("on_step_end", training, step)
            if step.ends_epoch:
                call("on_epoch_end", training, step)
            if validation is not None and validation.is_due(step, epochs):
                evaluation = self._evaluate(training, validation)
                numbers = numbers_of(evaluation.values).items()
                values: dict[str, Any] = {f"validation_{name}": value for name, value in numbers}
                training.log(**values)
                call("on_evaluation_end", training, step, evaluation)
        if evaluation is None and validation is not None:
            # An earlier run finished the training, or a callback stopped it before the first evaluation.
            evaluation = self._evaluate(training, validation)
        call("on_fit_end", training, evaluation)
        return evaluation

    def _forward(self, model: nn.Module, batch: Batch) -> Any:
        """The loss of a batch, or a pair of the loss and its count."""
        if isinstance(batch, Mapping):
            return self.loss(model(**batch), batch)
        *inputs, target = _parts(batch)
        return self.loss(model(*inputs), target)

    def _evaluate(self, training: Training, validation: Validation) -> Evaluation:
        return evaluate(
            training.job,
            training.models[0],
            validation.dataset,
            validation.score or self._loss_alone,
            micro_batch=validation.micro_batch,
            precision=training.precision,
        )

    def _loss_alone(self, model: nn.Module, batch: Batch) -> dict[str, Any]:
        """The score without `Validation.score`: `evaluate` divides a sum by the number of samples."""
        result = self._forward(model, batch)
        loss, count = result if isinstance(result, tuple) else (result, num_rows(batch))
        return {"loss": (as_sum(loss, count, "mean"), count)}


def _refuse_strategy(strategy: str | Mesh | Wrap) -> None:
    """Raise ConfigError unless `_wrap_for` knows this strategy."""
    if isinstance(strategy, Mesh):
        return
    if strategy not in ("ddp", "fsdp") and not callable(strategy):
        raise ConfigError(
            f'strategy must be "ddp", "fsdp", a Mesh or a function, got {strategy!r}.',
            fix="for example strategy=paceline.Mesh(dp_shard=-1, tp=2)",
        )


def _wrap_for(strategy: str | Mesh | Wrap, job: Job, module: nn.Module) -> nn.Module:
    """Wrap a module as the axes of the job's mesh need it, with `ddp` or `fsdp`, or by a function."""
    if not isinstance(strategy, str | Mesh):
        return strategy(job, module)
    mesh = job.mesh if isinstance(strategy, Mesh) and job.mesh is not None else Mesh()
    if mesh.pp > 1:
        from paceline.parallel.pipeline import pipeline

        module = pipeline(job, module)
    if mesh.tp > 1:
        from paceline.parallel.tensor import tensor_parallel

        module = tensor_parallel(job, module)
    if strategy == "fsdp" or mesh.dp_shard > 1 or (mesh.tp > 1 and mesh.pp == 1):
        from paceline.parallel.fsdp import fsdp

        return fsdp(job, module)
    return module if mesh.pp > 1 else ddp(job, module)


def _parts(batch: Batch) -> tuple[Any, ...]:
    if not isinstance(batch, tuple | list) or len(batch) < 2:
        raise ConfigError(
            f"Trainer needs samples (input, ..., target) or dicts, got {type(batch).__name__}.",
            fix="return tuples or dicts from the dataset, or write the loop (docs/howto/loop.md).",
        )
    return tuple(batch)


def _refuse_loss(loss: Any) -> None:
    if not callable(loss):
        raise ConfigError(
            f"loss must be a function of output and target, got {loss!r}.",
            fix="loss=torch.nn.functional.cross_entropy",
        )
    if isinstance(loss, nn.Module) and getattr(loss, "reduction", "mean") != "mean":
        raise ConfigError(
            f"{type(loss).__name__} has reduction={loss.reduction!r}.",
            fix=f"{type(loss).__name__}(), whose loss is the mean.",
        )
