"""`Trainer`: training without writing a loop. It uses public names only.

A test asserts that its result is bit-equal to the same loop in docs/howto/loop.md. Programs that need more
than the events below write that loop.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from paceline.checkpoint.manager import Checkpoints
from paceline.data.batches import Batches
from paceline.errors import ConfigError
from paceline.job.job import Job, current, join
from paceline.metrics.logger import Logger
from paceline.parallel.ddp import DEFAULT_BUCKET_MB, ddp
from paceline.parallel.modules import unwrap
from paceline.parallel.syncbn import plain_batchnorms, sync_batchnorm
from paceline.training.evaluation import Evaluation, Score, evaluate
from paceline.training.step import Step
from paceline.training.training import Training
from paceline.training.weight import Reduction

EVENTS = ("start", "step", "epoch", "validated", "end")
Batch = Any


@dataclass(frozen=True, kw_only=True)
class Validation:
    """What `Trainer` evaluates at the end of epochs.

    Args:
        dataset: Map-style, or a `DataLoader`.
        score: As for `evaluate`; None computes only the loss.
        micro_batch: Samples in a forward. None is the batch size of a `DataLoader`, or 64.
        every_epochs: Number of epochs between evaluations. The last epoch is always evaluated.

    Collective: none.
    """

    dataset: Any
    score: Score | None = None
    micro_batch: int | None = None
    every_epochs: int = 1

    def __post_init__(self) -> None:
        for name in ("micro_batch", "every_epochs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}.")


@dataclass(frozen=True)
class PerToken:
    """A loss function that returns a pair (sum over tokens, number of tokens); tokens have equal weight.

    Collective: none.
    """

    loss: Callable[..., tuple[torch.Tensor, int | torch.Tensor]]

    def __call__(self, output: Any, target: Any) -> tuple[torch.Tensor, int | torch.Tensor]:
        return self.loss(output, target)


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What `Trainer.fit` passes to a function on an event.

    Attributes:
        event: Name of the event.
        step: The step of the event; None for "start" and "end".
        evaluation: The result of "validated", and the last one for "end".

    Collective: none.
    """

    event: str
    job: Job
    training: Training
    step: Step | None = None
    evaluation: Evaluation | None = None


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What `Trainer.fit` returns.

    Attributes:
        model: The trained model, unwrapped.
        steps, epochs: Numbers done, counted from the start of the training.
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
        loss: `loss(output, target)`: the sum over the samples, or `PerToken(...)` of a function that returns
            a pair (sum, number of tokens). A torch function with a `reduction` argument gets "sum"; a
            module may have `reduction="mean"`. If batches are dicts, the model gets their entries as keyword
            arguments, and the loss gets the output and the batch.
        optimizer: A function that returns an optimizer of the parameters it is given.
        data: Samples (input, ..., target), or dicts: map-style, a stream, or a `DataLoader`.
        global_batch: Samples of one optimizer step over all ranks; only for a `DataLoader` it may be None.
        precision: "fp32", "bf16", "fp16" or "auto".
        validation: What to evaluate at the end of epochs.
        schedule: A function that returns a scheduler of torch for the optimizer it is given.
        reproducible: Whether the result is bit for bit equal on any number of ranks.
        bucket_mb: Size of a gradient bucket in MiB; see `ddp`.
        desync_every: Number of steps between comparisons of the replicas; see `Training`.
        desync_also: Compared besides weights and optimizer state; see `Training`.
        loggers: Where metrics go besides `folder`/metrics.jsonl; see `Training.report`.

    Collective: none to create it.
    """

    model: nn.Module | Callable[[], nn.Module]
    loss: Callable[..., Any]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    data: Any
    _: KW_ONLY
    global_batch: int | None = None
    precision: str = "fp32"
    validation: Validation | None = None
    schedule: Callable[[torch.optim.Optimizer], LRScheduler] | None = None
    reproducible: bool = False
    bucket_mb: float = DEFAULT_BUCKET_MB
    desync_every: int | None = None
    desync_also: Collection[str] = ()
    loggers: Sequence[Logger] = ()

    def __post_init__(self) -> None:
        if not callable(self.optimizer):
            raise ConfigError(
                "optimizer must be a function from parameters to an optimizer.",
                fix="optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4)",
            )
        self.loss = _summing(self.loss)
        self._reduction: Reduction = "mean" if _is_mean(self.loss) else "sum"

    def fit(
        self,
        epochs: int,
        *,
        seed: int = 0,
        micro_batch: int | None = None,
        workers: int | None = None,
        clip_norm: float | None = None,
        folder: str | Path | None = None,
        resume: str = "auto",
        on: Mapping[str, Callable[[Moment], None]] | None = None,
    ) -> Fit:
        """Train to the end of `epochs` epochs. Joins the job first, if none is joined.

        Args:
            seed: Seed of all generators; not used if a job is joined already.
            micro_batch: Largest forward of one rank, in samples. None is a rank's whole share, or the batch
                size of a `DataLoader`.
            workers: Loader processes of each rank. None is 0, or the number of a `DataLoader`.
            clip_norm: Bound of the gradient's 2-norm.
            folder: For metrics.jsonl, checkpoints (each epoch) and the final weights, model.pth.
            resume: "auto", "never" or "must"; see `Checkpoints`.
            on: Functions to call, by event: "start", "step", "epoch", "validated", "end".

        Collective: all ranks, same arguments.
        """
        unknown = sorted(set(on or {}) - set(EVENTS))
        if unknown:
            raise ConfigError(
                f"unknown event: {', '.join(unknown)}.", fix=f"use one of {', '.join(EVENTS)}."
            )
        joined = current()
        with contextlib.nullcontext(joined) if joined else join(seed=seed) as job:
            batches = Batches(
                job,
                self.data,
                global_batch=self.global_batch,
                micro_batch=micro_batch,
                workers=workers,
            )
            training = self._prepare(job, batches, folder, resume)
            evaluation = self._loop(job, training, epochs, clip_norm, on or {})
            if folder is not None:
                training.export(Path(folder) / "model.pth")
            batches.close()
            return Fit(
                model=unwrap(training.models[0]),
                steps=training.number,
                epochs=training.position.epoch,
                evaluation=evaluation,
            )

    def _prepare(
        self, job: Job, batches: Batches, folder: str | Path | None, resume: str
    ) -> Training:
        module = self.model if isinstance(self.model, nn.Module) else self.model()
        module = module.to(job.device)
        if job.data.size > 1 and plain_batchnorms(module) and not self.reproducible:
            module = sync_batchnorm(job, module)
        model = ddp(job, module, bucket_mb=self.bucket_mb)
        optimizer = self.optimizer(model.parameters())
        checkpoints = None
        if folder is not None:
            checkpoints = Checkpoints(Path(folder) / "checkpoints", every_epochs=1, resume=resume)
        training = Training(
            job,
            model,
            optimizer,
            batches,
            schedule=None if self.schedule is None else self.schedule(optimizer),
            precision=self.precision,
            count="tokens" if isinstance(self.loss, PerToken) else "samples",
            checkpoints=checkpoints,
            reproducible=self.reproducible,
            desync_every=self.desync_every,
            desync_also=self.desync_also,
        )
        training.report(
            None if folder is None else str(folder), progress=True, loggers=self.loggers
        )
        return training

    def _loop(
        self,
        job: Job,
        training: Training,
        epochs: int,
        clip_norm: float | None,
        on: Mapping[str, Callable[[Moment], None]],
    ) -> Evaluation | None:
        def call(event: str, **facts: Any) -> None:
            if event in on:
                on[event](Moment(event=event, job=job, training=training, **facts))

        model = training.models[0]
        evaluation: Evaluation | None = None
        call("start")
        for step in training.steps(epochs=epochs):
            step.run(partial(self._forward, model), reduction=self._reduction)
            step.update(clip_norm=clip_norm)
            training.log(loss=step.loss)
            call("step", step=step)
            if step.ends_epoch:
                call("epoch", step=step)
                if self._is_due(step.epoch + 1, epochs):
                    evaluation = self._evaluate(job, model)
                    training.log(**_numbers(evaluation))
                    call("validated", step=step, evaluation=evaluation)
        if evaluation is None and self.validation is not None:
            evaluation = self._evaluate(job, model)  # an earlier run finished the training
        call("end", evaluation=evaluation)
        return evaluation

    def _forward(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, Any]:
        if isinstance(batch, Mapping):
            result, size = self.loss(model(**batch), batch), len(next(iter(batch.values())))
        else:
            *inputs, target = _parts(batch)
            result, size = self.loss(model(*inputs), target), len(target)
        return result if isinstance(result, tuple) else (result, size)

    def _is_due(self, epochs_done: int, epochs: int) -> bool:
        if self.validation is None:
            return False
        return epochs_done % self.validation.every_epochs == 0 or epochs_done == epochs

    def _evaluate(self, job: Job, model: nn.Module) -> Evaluation:
        assert self.validation is not None
        return evaluate(
            job,
            model,
            self.validation.dataset,
            self.validation.score or self._loss_alone,
            micro_batch=self.validation.micro_batch,
        )

    def _loss_alone(self, model: nn.Module, batch: Batch) -> dict[str, Any]:
        loss, count = self._forward(model, batch)
        return {"loss": (loss * count if self._reduction == "mean" else loss, count)}


def _parts(batch: Batch) -> tuple[Any, ...]:
    if not isinstance(batch, tuple | list) or len(batch) < 2:
        raise ConfigError(
            f"Trainer needs samples (input, ..., target) or dicts, got {type(batch).__name__}.",
            fix="return tuples or dicts from the dataset, or write the loop (docs/howto/loop.md).",
        )
    return tuple(batch)


def _summing(loss: Callable[..., Any]) -> Callable[..., Any]:
    """The loss as a scalar: torch's functions get reduction="sum", its modules keep a sum or a mean."""
    if isinstance(loss, nn.Module):
        if getattr(loss, "reduction", "sum") not in ("sum", "mean"):
            raise ConfigError(
                f"{type(loss).__name__} has reduction={loss.reduction!r}.",
                fix=f'{type(loss).__name__}(reduction="sum")',
            )
        return loss
    if isinstance(loss, PerToken):
        return loss
    if "reduction" in inspect.signature(loss).parameters:
        return partial(loss, reduction="sum")
    return loss


def _is_mean(loss: Callable[..., Any]) -> bool:
    return isinstance(loss, nn.Module) and getattr(loss, "reduction", "sum") == "mean"


def _numbers(evaluation: Evaluation) -> dict[str, Any]:
    return {
        f"validation_{name}": float(value)
        for name, value in evaluation.values.items()
        if isinstance(value, int | float)
        or (isinstance(value, torch.Tensor) and value.numel() == 1)
    }
