"""`Training`: one model, its optimizer and its data, in the user's own loop.

It yields the steps, commits each one before the next begins, saves and resumes. Its parts are:

- `Step` runs the micro-batches of a step and updates the weights; `StepContext` is what all steps share.
- `Control` exchanges losses and requests, such as a stop, between the ranks.
- `TrainingState` makes the state that is saved, from `number`, `position` and the other parts, and loads it.
"""

from __future__ import annotations

import functools
import math
import os
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from paceline import log
from paceline.checkpoint.export import write_file
from paceline.checkpoint.manager import Checkpoints
from paceline.clock.step_clock import CHECKPOINT, clock
from paceline.data.batches import Batches
from paceline.data.plan import PlannedStep, Position
from paceline.errors import CheckpointError, ConfigError, StepError
from paceline.job import collectives, current_step
from paceline.job import recovery as job_recovery
from paceline.job.arguments import require_integers, require_positive
from paceline.job.exchange import AFTER_STEP, BEFORE_SUM
from paceline.job.job import Job, LeftLoop
from paceline.job.preemption import Preempted, notice
from paceline.job.rng import MICRO_BATCH, default_generator, key
from paceline.metrics.logger import Logger
from paceline.metrics.report import Report, refuse_values
from paceline.parallel import ddp, syncbn
from paceline.parallel.buffers import Buffers
from paceline.parallel.modules import equalize_buffers, find_wrapper, is_split
from paceline.parallel.strategies import strategy_for
from paceline.parallel.strategy import Strategy
from paceline.training import dry_run, recovery, survivors, weight
from paceline.training.auto_micro_batch import AutoMicroBatch
from paceline.training.control_word import Control, MicroBatchLoss, Word
from paceline.training.desync import ReplicaCheck
from paceline.training.non_finite import NonFiniteSteps
from paceline.training.optimizers import trained_optimizers
from paceline.training.precision import Precision
from paceline.training.recheck import Recheck
from paceline.training.run_facts import job_facts, model_facts
from paceline.training.schedules import Schedule
from paceline.training.step import Step, StepContext
from paceline.training.training_state import TrainingState

# Only the losses of the first steps are checked for being sums: a wrong loss is wrong from the start.
_CHECKED_STEPS = 3
_ENDLESS = 2**40  # epochs

T = TypeVar("T")


class Training:
    """A training in progress: its steps, its state, its log.

    Args:
        job: From `paceline.join`.
        model: From `paceline.ddp`, or several (a GAN).
        optimizer: Over the models' parameters, or several.
        batches: The samples of each step.
        schedule: A scheduler of torch over the optimizer, or a function from the number of optimizer steps
            taken to a factor of the learning rate; with several optimizers, one for each. It counts
            optimizer steps, so it is the same for any number of ranks. Step one that counts epochs, or that
            takes a metric, in your loop, and give it to `keep`.
        precision: "fp32", or "bf16" or "fp16" autocast.
        on_non_finite: What happens in a step whose gradient is NaN or infinite, decided alike on all ranks.
            "skip" leaves its update out: parameters, optimizer and schedule stay as they are, as with torch's
            `GradScaler`; 100 such steps in a row are an error. "raise" raises NonFinite on all ranks; in fp16
            only if the loss is NaN or infinite, because scaled gradients may overflow there. None is "skip"
            for fp16, else "raise". See [precision](../howto/precision.md) for what that costs.
        count: What `step.backward(count=...)` counts: "samples", whose number is checked, or "tokens".
        checkpoints: Where and when to save; None saves nothing.
        reproducible: Whether weights, optimizer state and logged losses are bit for bit equal on any
            number of ranks; see [reproducible](../concepts/reproducible.md) for what that costs.
        desync_every: Number of steps from one bitwise comparison of the replicas to the next; they are
            also compared before each save, and more often in the first steps. A comparison reads all
            parameters and optimizer state once. 0 never compares.
        recheck_every: Number of steps between two that are computed again, to find faulty hardware; None
            computes none again. See [hardware](../howto/hardware.md) for what is found and what it needs.

    Attributes:
        job: As given.
        batches: As given.
        checkpoints: As given.
        models: All models, wrapped as given.
        optimizers: All optimizers.
        number: Number of steps done.
        precision: The format in use: "fp32", "bf16" or "fp16".
        reproducible: As given.
        num_skipped: Number of steps without an update because of NaN or infinity, since this object was made.

    Raises:
        ConfigError: on all ranks, before the first step: a model is not wrapped or has no trainable
            parameter, or a setting has no effect.
        StepError: gradients of some parameters would not be summed over ranks.

    Collective: all ranks, same arguments.
    """

    def __init__(
        self,
        job: Job,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | Sequence[Optimizer],
        batches: Batches,
        *,
        schedule: Schedule | Sequence[Schedule | None] | None = None,
        precision: str = "fp32",
        on_non_finite: Literal["raise", "skip"] | None = None,
        count: str = "samples",
        checkpoints: Checkpoints | None = None,
        reproducible: bool = False,
        desync_every: int = 1000,
        recheck_every: int | None = None,
    ) -> None:
        job.refuse_if_left()
        if count not in ("samples", "tokens"):
            raise ConfigError(f'count must be "samples" or "tokens", got {count!r}.')
        if on_non_finite not in ("raise", "skip", None):
            raise ConfigError(f'on_non_finite must be "raise" or "skip", got {on_non_finite!r}.')
        if not isinstance(checkpoints, Checkpoints | None):
            raise ConfigError(
                f"checkpoints must be a paceline.Checkpoints, got {type(checkpoints).__name__}.",
                fix='checkpoints=paceline.Checkpoints("runs/x/checkpoints", every_epochs=1)',
            )
        if not isinstance(batches, Batches):
            raise ConfigError(
                f"batches must be a paceline.Batches, got {type(batches).__name__}.",
                fix="paceline.Batches(job, dataset, global_batch=64)",
            )
        self.job = job
        self.batches = batches
        self.models = _as_list("model", model, nn.Module, "paceline.ddp(job, model)")
        self.optimizers = _as_list(
            "optimizer", optimizer, Optimizer, "torch.optim.AdamW(model.parameters())"
        )
        self.reproducible = reproducible
        self.number = 0
        formats = Precision(precision, job.device)
        skips = on_non_finite == "skip" or (on_non_finite is None and formats.name == "fp16")
        skips |= job.is_dry_run  # what a rank receives there has no meaning
        self._control = Control(
            job,
            lambda epoch, places: batches.samples_at(self.position.seed, epoch, places),
            skips_non_finite=skips,
        )
        trained = trained_optimizers(self.models, self.optimizers, schedule)
        self._context = StepContext(
            job=job,
            optimizers=trained,
            precision=formats,
            strategy=self._choose_strategy(),
            control=self._control,
            non_finite=NonFiniteSteps(job, self._bad_samples, are_skipped=skips),
            count_unit=count,
            token_divisor=weight.token_divisor(batches.global_batch),
            recover=self._recover,
            checks_rows=count == "samples" and batches.may_drop_samples,
            generator=default_generator(job.device),
            dropout_key=key(job.seed, MICRO_BATCH),
        )
        self.precision = self._context.precision.name
        if batches.is_auto:
            self._context.auto = AutoMicroBatch(job, batches, self.models, self._context.strategy)
        self._context.strategy.check()
        self._context.strategy.check_precision(self.precision, skips_non_finite=skips)
        self._start = Position(job.seed, 0, 0)  # or the loaded one
        self._last: PlannedStep | None = None  # the step `number`, if it was done since the start
        # The loop is in a step while its body runs, or between steps, or it was left early: a `break` or an
        # exception in the body has ended it, and `Job.left_loops` holds it until `Job.check_loop_exit` has
        # made sure that all ranks have left it in the same step.
        self._step: Step | None = None  # in which the loop is
        self._left: tuple[LeftLoop, Step] | None = None  # in which it was left early
        self._state = TrainingState(self._context, self.models, batches, reproducible=reproducible)
        self._loop_token = object()  # of the newest loop
        self._rollback: str | None = None  # `data` of a call of `rollback`, until it is done
        self._report = Report(job)
        self._replica_check = ReplicaCheck(
            job, self.models, trained, desync_every, self._context.strategy.hosts
        )
        if recheck_every is not None and not job.is_dry_run:
            self._context.recheck = Recheck(
                job,
                self.models,
                trained,
                batches,
                self._context.strategy,
                self._replica_check,
                recheck_every,
                # Scaled gradients may overflow. On a device, reading one waits for it.
                reads_gradients=not formats.scales and (skips or job.device.type == "cpu"),
            )
        self._recovers = False  # in place
        self._has_connected_again = False  # since the loop began, or just before
        self.checkpoints = checkpoints
        self._is_resumed = False
        # The job must not keep the models alive, so it refers to this object weakly.
        weakref.finalize(self, job.on_leave(functools.partial(_job_left, weakref.ref(self))))

    def _choose_strategy(self) -> Strategy:
        syncbn.agree_on_layers(self.job, self.models)
        kind = strategy_for(self.job, self.models, reproducible=self.reproducible)
        return kind(self.job, self.models, self.optimizers, self.batches)

    def _bad_samples(self, losses: list[MicroBatchLoss]) -> dict[int, list[int]]:
        return self._control.gather_bad_samples(losses, self._context.strategy.gradient_job)

    @property
    def num_skipped(self) -> int:
        return self._context.non_finite.num_skipped

    @property
    def position(self) -> Position:
        """Where in the data the next step starts."""
        return self._start if self._last is None else self._last.next_position

    def keep(self, **objects: Any) -> None:
        """Save and restore objects in the checkpoints. They must have `state_dict` and `load_state_dict`.

        A checkpoint must hold the same objects as the training that resumes from it, except those with an
        attribute `is_optional` that is True. A tensor that differs between ranks is saved from one of them.

        Raises:
            ConfigError: an object has not both methods, or another one is kept under its name.
            StepError: the training has resumed already, so the states were not loaded.

        Collective: all ranks, before `steps` and `resume`.
        """
        if self._is_resumed:
            raise StepError(
                "`training.keep` was called after the training had resumed.",
                where=self.job.where(),
                why="a checkpoint that holds the state of the object was not loaded into it.",
                fix="call training.keep(...) before training.steps(...).",
            )
        self._state.keep(objects)

    def report(
        self,
        folder: str | Path | None = None,
        *,
        progress: bool = False,
        loggers: Sequence[Logger] = (),
        flops: float | None = None,
    ) -> None:
        """Choose where `log` writes.

        Args:
            folder: For metrics.jsonl, one line per step.
            progress: Show progress, the values of `log`, and where the time of each rank goes: in a terminal
                or a notebook in place, elsewhere as plain lines.
            loggers: Such as `paceline.WandB(project="...")`, or your own; see `Logger`.
            flops: Floating-point operations of one sample (with `count="tokens"`, of one token), forward and
                backward, such as 6 times the number of parameters of a transformer. Then the utilisation of
                the devices (MFU) is shown, or the operations per second where their peak is not known.

        Raises:
            ConfigError: the folder cannot be made, something that is given is not a logger, or `flops` is
                not above 0.
            StepError: called inside the loop.

        Collective: none; only rank 0 writes, the other ranks may call it too.
        """
        if self._step is not None:
            raise StepError(
                "`training.report` was called inside the loop over `training.steps`.",
                where=self.job.where(),
                fix="call it before the loop.",
            )
        if flops is not None:
            require_positive(flops=flops)
        if not self.job.is_dry_run:
            self._report.open(folder, progress=progress, loggers=loggers, flops=flops)

    def steps(self, epochs: int | None = None, *, until: int | None = None) -> Iterator[Step]:
        """Resume from the newest checkpoint, then yield the optimizer steps that are left.

        A step is committed when the next one is requested.

        Args:
            epochs: The training ends after this many epochs, counted from its start.
            until: The training ends after the step of this number. If both are None, it does not end.

        Raises:
            StepError: a step was left without `update`; a rank left the loop alone.
            NonFinite: on all ranks, if the loss of a step was NaN or infinite.
            Preempted: on all ranks, after the same step and with it saved, if any rank received SIGTERM,
                SIGUSR1 or SIGUSR2; it exits with code 75.

        Collective: all ranks, same arguments.
        """
        require_integers(1, or_none=True, epochs=epochs, until=until)
        self.job.check_loop_exit()
        self.resume()
        if self._rollback is not None:  # an exception has left the loop, and kept it
            self._load_newest_again()
        last_epoch, last_step = (math.inf if n is None else n for n in (epochs, until))
        if self.position.epoch >= last_epoch or self.number >= last_step:
            text = "finished: %d steps and %d epochs are done, nothing is left to train."
            log.logger.info(text, self.number, self.position.epoch)
            self._context.strategy.end_loop()  # it may have been preempted in its last step
            return
        self._begin(epochs, until)
        self._loop_token = token = object()
        notice.watch(self, saves_after_failure=self._may_save_after_failure)
        self._offer_recovery()
        clock.start(_new_event(self.job.device))
        hooks = [o.register_step_pre_hook(self._refuse_own_step) for o in self.optimizers]
        try:
            yield from self._loop(epochs, until)
            self._finish()
            is_preempted = self._control.agreed.preempt
            preempted = Preempted(notice.take(), self.number) if is_preempted else None
        finally:
            for hook in hooks:
                hook.remove()
            if token is self._loop_token:  # else a newer loop has begun, and uses them
                clock.stop()
                notice.unwatch(self)
                self._context.leave_step()
        if preempted is not None:
            self._log_preempted(preempted)
            raise preempted
        notice.deliver()  # a signal that only this rank received, after the last exchange

    def log(
        self,
        *,
        reduce: Literal["rank0", "mean", "sum"] = "rank0",
        **values: Any,
    ) -> None:
        """Log values of the step in progress: numbers, tensors of shape (), or `step.loss`.

        Rank 0 writes them within 0.2 s, or three steps if that is longer, when the losses of all ranks are
        known.

        Args:
            reduce: "rank0" writes rank 0's values and costs no communication; "mean" and "sum" combine the
                values of all ranks with equal weight, in one gather of the ranks for all steps that are
                written together. `step.loss` is over all ranks in any case.

        Raises:
            ConfigError: a value is not one number, or an option is out of range.
            StepError: called outside of the loop.

        Collective: none with "rank0"; otherwise all ranks, with the same names in the same steps. If they
        differ, all ranks raise a RankDisagreement within that time.
        """
        if reduce not in ("rank0", "mean", "sum"):
            raise ConfigError(f'reduce must be "rank0", "mean" or "sum", got {reduce!r}.')
        step = self._step
        if step is None:
            raise StepError("`training.log` belongs inside the loop over `training.steps`.")
        refuse_values(values, reduce, step.number)
        self._control.own.reduce |= reduce != "rank0"
        self._report.keep_values(step.number, step.epoch, values, reduce)

    def state_dict(self) -> dict[str, Any]:
        """The state that a later run needs, under the models' own names, equal on every rank.

        Its tensors share memory with the models and optimizers: copy them to return to this state later.

        Raises:
            StepError: a step is in progress, so weights and position do not belong together.
        """
        self._refuse_in_step("state_dict")
        return self._state.save(self.number, self.position)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load the state of an earlier step or run, of any number of ranks.

        Loads the newest checkpoint first, as `resume`, so `steps` continues from `saved`. A program that
        begins with a saved state, and must resume from its own checkpoints when it is started again, calls
        `resume` and then loads the state only if `number` is 0.

        Raises:
            CheckpointError: the state does not fit this training, or its step is before a checkpoint of this
                training, from which a restarted job would resume; nothing was changed. An object given to
                `keep` may raise errors of its own: then models and optimizers are loaded already.
            StepError: a step is in progress.

        Collective: all ranks, same state.
        """
        self._refuse_in_step("load_state_dict")
        self.job.check_loop_exit()
        self._await_all("load_state_dict")
        self.resume()  # here, because `steps` would replace the state by that of a checkpoint
        if self.checkpoints is not None:
            newest = self.checkpoints.last_saved
            self.checkpoints.refuse_earlier(saved.get("step", newest) + 1, newest)
        self._load(saved)

    def _load(self, saved: dict[str, Any]) -> None:
        self.number, self._start = self._state.load(saved)
        self._last = None
        self._is_resumed = True
        self._replica_check.reset(self.number)

    def _await_all(self, method: str) -> None:
        """Wait until all ranks have come to this call. Raises StepError if a rank goes on without it."""
        collectives.gather(self.job, None, call=f"training.{method}")

    def _refuse_in_step(self, what: str) -> None:
        if self._step is not None:
            raise StepError(
                f"`training.{what}` was called inside the loop over `training.steps`.",
                where=self.job.where(),
                why="the position moves on when the next step is requested.",
                fix="call training.save() to save this step; otherwise call it before or after the loop.",
                step=self._step.number,
            )

    def save(self, *, best: bool = False) -> None:
        """Save after the step in progress. With `best` the checkpoint is kept until the next `best` one.

        Raises:
            ConfigError: this training has no checkpoints.
            StepError: no step is in progress, or a rank has ended this step without the call.

        Collective: all ranks, inside the loop, in the same step.
        """
        if self.checkpoints is None:
            raise self._no_checkpoints()
        step = self._step
        if step is None:
            raise StepError(
                "`training.save` was called outside the loop over `training.steps`.",
                where=self.job.where(),
                why="a checkpoint is written after the step in progress; the last step is always saved.",
                fix="call it inside the loop; outside of it use Checkpoints.save(job, step, state).",
            )
        agreed = self._control.agreed
        if not agreed.save:
            self._await_all("save")
        agreed.save = True
        agreed.best |= best

    def _no_checkpoints(self) -> ConfigError:
        return ConfigError(
            "this training has no checkpoints.",
            fix="Training(..., checkpoints=paceline.Checkpoints(folder)).",
        )

    def export(self, path: str | Path, *, number: int | None = None) -> None:
        """Write only the weights to one file, under the model's own names, for `torch.load` anywhere.

        Args:
            number: The index of the model, in a training of several models.

        Raises:
            ConfigError: there are several models and no `number`, or there is no such model.
            StepError: a rank ended the step, or left the job, without the call.

        Collective: all ranks, at the same point: outside the loop, or in it after `update`.
        """
        count = len(self.models)
        if (number is None and count > 1) or not 0 <= (number or 0) < count:
            raise ConfigError(
                f"the training has {count} model{'s' if count > 1 else ''}, got number={number}.",
                why="a file holds the weights of one model.",
                fix=f"export(path, number=...), from 0 to {count - 1}; one file for each model."
                if count > 1
                else "leave `number` out.",
            )
        if self.job.is_dry_run:
            return
        self.job.check_loop_exit()
        self._await_all("export")
        model = self.models[number or 0]
        equalize_buffers(self.job, model)
        weights = {}
        for name, value in self._context.strategy.whole_state(model):
            if self.job.rank == 0:
                # A model that is split may be larger than the memory of the device.
                weights[name] = value.cpu() if is_split(model) else value
        collectives.on_rank0(self.job, lambda: write_file(Path(path), weights))

    # The loop.

    def _loop(self, epochs: int | None, until: int | None) -> Iterator[Step]:
        while (yield from self._run_steps(epochs, math.inf if until is None else until)):
            stops = any(collectives.gather(self.job, self._control.asks_stop))
            self._load_newest_again()
            if stops or self._control.agreed.stop:
                return
            self._report.end("rolled back")
            self._begin(epochs, until)

    def _run_steps(self, epochs: int | None, last: float) -> Generator[Step, None, bool]:
        """Run the loop to its end, or until a step is rolled back: then return True."""
        context, control = self._context, self._control
        for planned in self.batches.iterate(
            self.position,
            epochs=_ENDLESS if epochs is None else epochs,
            equal=context.strategy.needs_equal_micro_batches,
        ):
            step = Step(context, planned, self.number + 1)
            if planned.offset == 0:
                context.strategy.check()
            self._step = step
            current_step.step = step.number
            if context.buffers is not None:
                context.buffers.keep()
            step.advance(BEFORE_SUM)
            try:
                yield step
            except GeneratorExit:
                # A `break`, or an exception. Python drops what a generator raises while it is closed, so
                # `job.check_loop_exit` reports it.
                if self._step is not step:
                    raise  # of an earlier loop, whose generator was closed after a new one had begun
                self._leave_loop(step)
                # The weights are those of this step, so the next one follows it.
                if step.is_done and not step.is_updating:
                    self.number, self._last = step.number, planned
                raise
            if self._rollback is not None:
                return True
            ends_all = step.ends_epoch and step.epoch + 1 == epochs
            is_end = step.number >= last or ends_all
            is_last = is_end or control.agreed.stop
            self._commit(step, now=step.ends_epoch or is_last, is_last=is_last, is_end=is_end)
            if is_last or control.agreed.stop:
                break
        return False

    def _leave_loop(self, step: Step) -> None:
        self._step = None
        self._left = LeftLoop(step.number, self._finish_save), step
        self.job.left_loops.append(self._left[0])

    def _begin(self, epochs: int | None, until: int | None) -> None:
        context = self._context
        context.leave_step()  # of an earlier loop that is still open
        if not self.reproducible:
            # Chosen again, because a communication hook may have been registered in the meantime.
            if not self._has_connected_again:
                context.strategy = self._choose_strategy()
            for model in self.models:
                syncbn.warn_other_statistics(
                    self.job,
                    model,
                    micro_batch=self.batches.micro_batch,
                    global_batch=self.batches.global_batch,
                )
        self._has_connected_again = False
        context.check_losses_until = self.number + 1 + _CHECKED_STEPS
        self._step = self._left = None
        if self.job.exchange is not None:
            self.job.exchange.begin_loop()
        self._control.begin_loop(self.number)
        self._control.own_times = self._report.clock.own_times
        for trained in context.optimizers:
            trained.optimizer.zero_grad()  # of a backward before the loop, or of a step that was left
        total = None
        if epochs is not None and self.batches.steps_per_epoch is not None:
            total = epochs * self.batches.steps_per_epoch
        if until is not None:
            total = until if total is None else min(total, until)
        context.strategy.begin_loop(self.number, total)
        counts_tokens = context.count_unit == "tokens"
        self._report.begin(self.number, total, self._facts, counts_tokens=counts_tokens)

    def _refuse_own_step(self, optimizer: torch.optim.Optimizer, *args: object) -> None:
        step = self._step
        if step is not None and not step.is_done and not step.is_updating:
            raise StepError(
                f"the loop called `step()` of its {type(optimizer).__name__}.",
                where=self.job.where(),
                why="`step.update()` steps the optimizer, so this would be a second step.",
                fix="remove optimizer.step(): step.update() takes its place.",
                step=step.number,
            )

    def _facts(self) -> dict[str, Any]:
        """What describes this run, for reports and advice."""
        strategy = self._context.strategy
        facts = job_facts(self.job) | {
            "strategy": type(strategy).__name__.removesuffix("Strategy"),
            "precision": self.precision,
            "reproducible": self.reproducible,
        }
        facts |= strategy.facts() | self.batches.facts()
        sizes = {key: facts.get(key, 0) for key in ("bucket_bytes", "param_bytes")}
        facts |= model_facts(self.models, self.optimizers, **sizes)
        if self.checkpoints is not None:
            facts |= self.checkpoints.facts()
        return facts

    def _commit(self, step: Step, *, now: bool, is_last: bool, is_end: bool = False) -> None:
        """End a step: exchange what is due, compare replicas, save. All ranks call it.

        Args:
            is_last: Whether the loop ends, perhaps because it was preempted; `is_end`: as was asked for.
        """
        step.advance(AFTER_STEP)
        if not step.is_done:
            self._leave_loop(step)
            raise StepError(
                "the step was left without `step.update()`.",
                where=self.job.where(),
                fix="call step.update() in place of optimizer.step(), after the loop over micro-batches"
                + ("." if len(self.optimizers) == 1 else ", without optimizer= or once for each."),
                step=step.number,
            )
        self._step = None
        self.number, self._last = step.number, step._planned
        if self.job.is_dry_run:
            self._end_dry_step(is_last=is_last or step.number >= dry_run.STEPS)
            return
        clock.end_step()
        self._report.end_step(step.number, step.epoch, step.num_samples)
        checkpoints, control = self.checkpoints, self._control
        own = control.own
        if checkpoints is not None:
            own.save_failed |= checkpoints.poll(self.job)
            own.save |= self.job.rank == 0 and checkpoints.is_due_by_clock()
        own.times |= self._report.clock.asks(is_last=is_last)
        is_due = checkpoints is not None and checkpoints.is_due(
            step.number, epoch=self.position.epoch, ends_epoch=step.ends_epoch
        )
        if step.was_taken_over:  # its exchange is over for the others
            own.save |= is_due
            return
        loss, count = step._local_loss()
        try:
            words = control.end_step(step.number, loss, count, step.micro_losses, now=now)
            for word in words:
                self._apply(word)
            is_preempted = control.agreed.preempt or self.job.preempted is not None
            if is_end or ((is_last or control.agreed.stop) and not is_preempted):
                self._context.strategy.end_loop()
            recheck = self._context.recheck
            if step.number >= self._replica_check.due:
                self._replica_check.compare_as_due(step.number)
            elif recheck is not None and recheck.is_due(step.number):
                self._replica_check.compare(step.number)
        except RuntimeError as error:
            if is_last:
                self.job.reraise(error)
            self._recover(error, step)
            control.own.save |= is_due  # the new process is not in this step: all save a later one
            return
        if checkpoints is None:
            return
        if control.agreed.save or is_due:
            with clock.during(CHECKPOINT):
                if control.agreed.save or not checkpoints.is_behind(self.job, step.number):
                    self._save(checkpoints, wait=False)

    # Going on after the failure of another rank, see recovery.py.

    def _offer_recovery(self) -> None:
        """Tell the launcher whether this training can go on when another rank has been replaced."""
        why_not = self._why_not_in_place()
        if why_not:
            log.once(f"--recover in-place: after a failure all ranks start again; {why_not}.")
        elif job_recovery.is_on(os.environ):
            job_recovery.tell_launcher("recovers")
        self._recovers = job_recovery.is_on(os.environ) and not why_not
        context = self._context
        skips = context.non_finite.are_skipped or context.precision.scales
        has_use = self._recovers or self._may_save_after_failure or skips
        # A checkpoint has the saved buffers; a step that is repeated in place reads the others too.
        saved_only = not self._recovers
        context.buffers = Buffers(self.models, saved_only=saved_only) if has_use else None

    def _why_not_in_place(self) -> str:
        return recovery.why_not(self.models, self._context, self.batches, self._state)

    def _recover(self, error: RuntimeError, step: Step) -> None:
        """Connect to the other ranks again, and bring all to the newest state; then go on with the step.

        Raises:
            RuntimeError: `error`, or the failure behind it: this training cannot recover from it.
        """
        saves_best = self._control.agreed.best or (
            self.checkpoints is not None and self.checkpoints.saves_best
        )
        # Asked again: an object that is kept may have been empty before.
        may_recover = self._recovers and not self._why_not_in_place()
        if not may_recover or saves_best or not job_recovery.is_lost_peer(error):
            self.job.reraise(error)
        is_cancelled = self.checkpoints is not None and self.checkpoints.is_saving
        if not step.is_done and self._context.buffers is not None:
            self._context.buffers.restore()  # before another rank gets them
        self._connect_again(error)
        current_step.step = step.number
        assert self.job.exchange is not None
        self.job.exchange.begin_loop()
        self._control.begin_again(self.number)
        self._control.own.save |= is_cancelled
        if self.number < step.number:
            step.begin_again(self.batches.begin_again)
        elif not step.is_done:
            step.take_over()

    def _connect_again(self, cause: BaseException) -> None:
        """Connect to the other ranks, and get the newest state if this rank is behind."""
        job = self.job
        step = -1 if job.is_replacement else self.number
        job.reconnect(cause)
        for model in self.models:
            wrapper = find_wrapper(model)
            assert isinstance(wrapper, ddp.Replica)
            ddp.reconnect(job, wrapper)
        self._context.strategy = self._choose_strategy()
        saved = recovery.newest_state(job, step, self._running_state)
        if saved is not None:
            self._context.non_finite.load(saved.pop("skipped"))
            self._load(saved)
        self._replica_check.reset(self.number)
        if self.checkpoints is not None:
            self.checkpoints.begin_again(job)
        self._report.forget_pending(self.number)
        job_recovery.tell_launcher("recovered", step=self.number, generation=job.generation)

    def _running_state(self) -> dict[str, Any]:
        """The state for another rank of this run: also what begins anew when a checkpoint is loaded."""
        state = self._state.save(self.number, self.position)
        return state | {"skipped": self._context.non_finite.counts}

    def _end_dry_step(self, *, is_last: bool) -> None:
        if not is_last:
            dry_run.forget_peak(self.job.device)
            return
        assert self._last is not None
        state = self._state.save(self.number, self.position)
        shown = dry_run.lines(self.job, self._last, self.models, self.optimizers, state)
        print("\n".join(shown), flush=True)
        raise SystemExit(0)

    def _apply(self, word: Word) -> None:
        """Act on a control word. All ranks call it after the same step."""
        if word.requests.save_failed:
            self._finish_save()
        self._report.write(word.totals, reduce=word.requests.reduce)
        if word.times:
            self._report.write_times(word.step, word.times)

    def _finish(self) -> None:
        """Exchange what is left and save the last step, after a loop that ran to its end."""
        for word in self._control.flush(self.number):
            self._apply(word)
        checkpoints = self.checkpoints
        if checkpoints is not None:
            checkpoints.finish(self.job)
        if checkpoints is not None and checkpoints.last_saved != self.number:
            self._save(checkpoints, wait=True)
        agreed = self._control.agreed
        stopped = "stopped early" if agreed.stop else "finished"
        self._report.end("preempted" if agreed.preempt else stopped)
        self._report.clock.advise()

    # Saving and resuming.

    def _save(self, checkpoints: Checkpoints, *, wait: bool) -> None:
        agreed = self._control.agreed
        best, agreed.save, agreed.best = agreed.best, False, False
        self._replica_check.compare(self.number)
        for model in self.models:
            equalize_buffers(self.job, model)
        checkpoints.save(
            self.job,
            self.number,
            self.state_dict(),
            best=best,
            wait=wait,
            finite=self._state.trained_paths(),
        )

    def _finish_save(self) -> None:
        """Wait for the save in progress, if there is one."""
        if self.checkpoints is not None:
            self.checkpoints.finish(self.job)

    def resume(self) -> None:
        """Load the newest checkpoint, if there is one, now instead of when `steps` begins.

        For programs that look at the state, such as `number`, before the loop. A second call does nothing.

        Raises:
            CheckpointError: the checkpoint does not fit this training, or `resume="must"` found none.
            RankDisagreement: the ranks have different datasets.

        Collective: all ranks, after `keep`.
        """
        if self._is_resumed:
            return
        self.job.check_loop_exit()
        job_recovery.num_trainings += 1
        if self.job.is_replacement:
            why_not = self._why_not_in_place()
            self._connect_again(job_recovery.needs_all_ranks(why_not or "the state of the others"))
            self._has_connected_again = True
            return
        self._await_all("resume")
        if self.checkpoints is not None or self.job.world_size > 1:
            self._state.read_content()
        saved = None
        if self.checkpoints is not None and not self.job.is_dry_run:
            saved = self._read_newest(self.checkpoints)
        if self.checkpoints is None or saved is None:
            self._is_resumed = True
            return
        has_unknown = self._state.has_unknown_schedule()  # loading hides it
        self._load(saved)
        log.logger.info("resumed after step %d (epoch %d).", self.number, self.position.epoch)
        if has_unknown:
            log.logger.warning(
                "a scheduler was not restored and starts from its beginning, because the training does not "
                "know it. Use Training(..., schedule=scheduler), or training.keep(scheduler=scheduler)."
            )

    def _read_newest(self, checkpoints: Checkpoints) -> dict[str, Any] | None:
        saved: dict[str, Any] | None = checkpoints.resume(
            self.job,
            like=self._state.templates(),
            wants=self._context.strategy.wants,
            size_bytes=self._state.size_bytes(),
        )
        return saved

    def rollback(self, *, data: Literal["keep", "skip"] = "keep") -> None:
        """Go back to the newest checkpoint, without a restart: weights, optimizers, schedules, kept objects.

        In the loop it takes effect when the body ends, and the step in progress is dropped, with or without
        `update`. The next step follows that of the checkpoint. Later lines of metrics.jsonl are removed.

        After NonFinite, or another error that all ranks have raised, call it outside the loop, and begin the
        loop again.

        Args:
            data: "keep" goes back in the data too. The same steps follow, with equal results unless the
                program changes something, such as the learning rate. "skip" goes on with the samples after
                the step in progress; those since the checkpoint are used up. A restart before the next save
                goes back in the data too.

        Raises:
            ConfigError: the training has no checkpoints; `data` is out of range.
            CheckpointError: nothing was saved yet, or no checkpoint is whole.

        Collective: all ranks, in the same step.
        """
        if data not in ("keep", "skip"):
            raise ConfigError(f'data must be "keep" or "skip", got {data!r}.')
        if self.checkpoints is None:
            raise self._no_checkpoints()
        self.job.check_loop_exit()
        self._await_all("rollback")
        self._rollback = data
        if self._step is None:
            self._load_newest_again()

    def _load_newest_again(self) -> None:
        checkpoints, data = self.checkpoints, self._rollback
        assert checkpoints is not None
        step = self._step or (self._left[1] if self._left is not None else None)
        number, position = self.number, self.position
        if step is not None and step.number > number:
            number, position = step.number, step._planned.next_position
        self._step = self._left = None
        self._context.leave_step()
        checkpoints.finish(self.job)
        saved = self._read_newest(checkpoints)
        if saved is None:
            raise CheckpointError(
                f"there is no checkpoint to go back to in {checkpoints.folder}.",
                where=self.job.where(),
                fix="save earlier: Checkpoints(folder, every_steps=...), or training.save().",
                path=str(checkpoints.folder),
            )
        self._load(saved)
        self._rollback = None
        if data == "skip":
            self._start = position
        self._context.non_finite.num_in_row = 0
        log.logger.info(
            "rolled back from step %d to step %d; the samples in between are %s.",
            number,
            self.number,
            "used again" if data == "keep" else "left out",
        )

    def _log_preempted(self, preempted: Preempted) -> None:
        saved = "nothing was saved, because there are no checkpoints"
        if self.checkpoints is not None:
            saved = f"saved in {self.checkpoints.folder}"
        log.logger.info(
            "preempted by %s after step %d: %s; exit code %s requests a restart.",
            preempted.signal_name,
            preempted.step,
            saved,
            preempted.code,
        )

    # Leaving the job.

    def _leave(self) -> None:
        """Leave autocast, and save the step that a preempted evaluation interrupted."""
        self._context.leave_step()
        notice.unwatch(self)
        if self._step is not None:
            self._leave_loop(self._step)
        try:
            if self.job.failure is not None and survivors.may_save(self.job.failure):
                self._save_after_failure()
            if self.job.preempted is not None:
                self._save_interrupted(self.job.preempted)
        finally:
            self._report.close()
            if self.checkpoints is not None:
                self.checkpoints.close(self.job)

    @property
    def _may_save_after_failure(self) -> bool:
        """Whether the ranks that are left can have a whole copy of the state, and a place to save it."""
        if self.checkpoints is None or self.job.is_dry_run or not self._is_resumed:
            return False
        if self._context.strategy.hosts is not None:  # each host has weights of its own
            return False
        # A stage of a pipeline knows its own names only, so several cannot save without process groups.
        return self.job.mesh is None or self.job.mesh.pp == 1

    def _save_after_failure(self) -> None:
        """Save the last completed step of a job that has failed."""
        checkpoints = self.checkpoints
        if checkpoints is None or not self._may_save_after_failure:
            return
        if self._rollback is not None:  # `number` may not be the step of the weights
            return
        if not self.job.is_sound:
            log.logger.warning(
                "the last step is not saved: the device still waited for a rank that was lost. The job "
                "resumes from its last checkpoint."
            )
            return
        assert self.job.failure is not None
        peers = self.job.peers
        others_go_on = self._recovers and peers is not None and not peers.all_failed()
        if others_go_on and not job_recovery.is_lost_peer(self.job.failure):
            return  # or they save, if they cannot go on
        step = self._left[1] if self._left is not None else None
        if step is not None and step.number > self.number:
            if step.is_partly_updated:
                return
            if step.is_done:  # the weights are those of this step
                self.number, self._last = step.number, step._planned
            elif self._context.buffers is not None:
                self._context.buffers.restore()
        if self.number <= checkpoints.last_saved:
            return

        def save(job: Job) -> None:
            state = self._state.save(self.number, self.position)
            finite = self._state.trained_paths()
            checkpoints.save_after_failure(job, self.number, state, finite=finite)

        parts = survivors.parts_of_ranks(self.job, self.models)
        survivors.save_newest(self.job, str(checkpoints.folder), self.number, parts, save)

    def _save_interrupted(self, preempted: Preempted) -> None:
        if self._left is None or self._left[0] not in self.job.left_loops:
            return  # the loop itself raised it and has saved, or it came from another training's loop
        left, step = self._left
        self.job.left_loops.remove(left)
        if step.is_done:
            self._commit(step, now=True, is_last=True)
        elif any(collectives.gather(self.job, step.has_begun)):
            # Forwards of this step have changed buffers and generators, so the state belongs to no step.
            log.once(
                "the step in progress was interrupted and is not saved; resume starts before it."
            )
            return
        self._finish()
        preempted.step = self.number
        self._log_preempted(preempted)


def _as_list(name: str, given: Any, kind: type[T], example: str) -> list[T]:
    """One object or several as a list.

    Raises:
        ConfigError: what is given is neither.
    """
    several = list(given) if isinstance(given, list | tuple) else [given]
    for each in several:
        if not isinstance(each, kind):
            raise ConfigError(
                f"{name} must be a torch {kind.__name__}, or a list of them, got {type(each).__name__}.",
                fix=f"{name} = {example}",
            )
    return several


def _job_left(reference: weakref.ref[Training]) -> None:
    training = reference()
    if training is not None:
        training._leave()


def _new_event(device: torch.device) -> Callable[[], Any] | None:
    """Makes the events with which the clock measures phases on a GPU; None on the CPU."""
    if device.type == "cpu":
        return None
    return functools.partial(torch.get_device_module(device).Event, enable_timing=True)
