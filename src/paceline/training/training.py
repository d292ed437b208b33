"""`Training`: one model, its optimizer and its data, in the user's own loop.

Holds what a step needs (precision, divisors, control word), commits each step before the next one
begins, and keeps what a checkpoint needs. The arithmetic of a step is in `steps`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from paceline import log
from paceline.checkpoint.export import write_file
from paceline.checkpoint.manager import Checkpoints
from paceline.data.batches import Batches
from paceline.data.plan import PlannedStep, Position
from paceline.errors import CheckpointError, ConfigError, StepError
from paceline.job import collectives, current_step
from paceline.job.job import Job
from paceline.job.preemption import Preempted, notice
from paceline.job.rng import MICRO_BATCH, default_generator, key, pair_seed
from paceline.metrics.report import Report, refuse_values
from paceline.parallel import ddp as parallel
from paceline.parallel import syncbn
from paceline.parallel.buffers import equalize_buffers
from paceline.training import clipping, state, weight
from paceline.training.control_word import Control, Word
from paceline.training.optimizers import (
    Schedule,
    Track,
    check_bounds,
    check_models,
    make_tracks,
    named_parameters,
    refuse_static_accumulation,
)
from paceline.training.precision import Precision
from paceline.training.reproducing import Reproducing
from paceline.training.saving import Saving
from paceline.training.step import Step
from paceline.training.summing import choose_summing
from paceline.training.tuning import BucketTuning

# Losses and gradients are looked at closely in the first steps only: what is wrong with them is wrong
# from the start, or when the model is changed, which is looked at once an epoch.
CLOSE_LOOKS = 3
_ENDLESS = 2**40  # epochs


class Training:
    """A training in progress: its steps, its state, its log.

    Args:
        job: From `paceline.join`.
        model: From `paceline.ddp`, or several (a GAN).
        optimizer: Over the models' parameters, or several.
        batches: Which samples make each step.
        schedule: A scheduler of torch over the optimizer, or a function from the number of optimizer steps
            taken to a factor of the learning rate; with several optimizers, one for each. It counts
            optimizer steps, so it is the same for any number of ranks.
        precision: "fp32", "bf16" or "fp16" autocast; "auto" measures the first steps, see docs/precision.md.
        count: What `step.backward(count=...)` counts: "samples", whose number is checked, or "tokens".
        checkpoints: Where and when to save; None saves nothing.
        reproducible: Whether weights, optimizer state and logged losses are to be equal to the last bit on
            any number of ranks; see docs/reproducible.md for what that costs.
        desync_every: After how many steps, and before each save, replicas are compared bit for bit; None
            chooses so that it takes 0.5 % of the time, 0 never compares.
        desync_also: What else is to be equal: "buffers", "rng" (of Python and NumPy; also torch's on the
            CPU where the model is elsewhere, else dropout draws from it, on each rank another way).

    Raises:
        ConfigError: on all ranks, before the first step: a model that is not wrapped, has nothing to
            train, or settings that would have no effect.
        GradientError: parameters whose gradients would not be summed over ranks.

    Collective: all ranks, same arguments.
    """

    def __init__(
        self,
        job: Job,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        batches: Batches,
        *,
        schedule: Schedule | Sequence[Schedule | None] | None = None,
        precision: str = "fp32",
        count: str = "samples",
        checkpoints: Checkpoints | None = None,
        reproducible: bool = False,
        desync_every: int | None = None,
        desync_also: Collection[str] = (),
    ) -> None:
        job.refuse_if_left()
        weight.check_count_kind(count)
        self.job = job
        self.models = [model] if isinstance(model, torch.nn.Module) else list(model)
        self.batches = batches
        self.count = count
        self.precision = Precision(precision, job, steady=reproducible)
        self.distributed = job.world_size > 1
        optimizers = (
            [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        )
        check_models(job, self.models, optimizers)
        refuse_static_accumulation(job, self.models, batches.global_batch, batches.micro_batch)
        self.tracks = make_tracks(self.models, optimizers, schedule)
        tracks = list(self.tracks.values())
        self.reproducing = Reproducing(job, self.models, tracks, batches) if reproducible else None
        self.tuning = BucketTuning(job, [] if reproducible else self.models)
        layers = [layer for model in self.models for layer in syncbn.layers(model)]
        self.syncbn_layers = layers if self.distributed else []
        self.control = Control(job)
        self.number = 0
        self._start = Position(job.seed, 0, 0)
        self._last: PlannedStep | None = None
        self.close_look_until = 0
        self.scope = 0
        self._dropout_stem = key(job.seed, MICRO_BATCH)
        self._generator = default_generator(job.device)
        self.summing = choose_summing(self)
        self._divisor = 0.0
        self._weight = torch.zeros(())
        self._kept: dict[str, Any] = {}
        self.saving = Saving(self, checkpoints, desync_every, desync_also)
        self._report = Report(job)
        self._stopping = self._preempted = False
        # The step in progress, or the last when the loop was left early; and which of the two.
        self._open: tuple[Step, PlannedStep] | None = None
        self._is_in_loop = False
        self._begun = 0  # the last step of which a micro-batch went through the model
        job.on_leave(self._close)

    @property
    def position(self) -> Position:
        """Where in the data the next step starts. Collective: none."""
        # Made when asked for: most steps are never asked.
        return self._start if self._last is None else self._last.next_position

    def keep(self, **objects: Any) -> None:
        """Have objects with `state_dict` and `load_state_dict` join the checkpoints.

        Collective: all ranks, before `steps`.
        """
        for name, thing in objects.items():
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                raise ConfigError(f"{name} has no state_dict and load_state_dict to keep it by.")
            self._kept[name] = thing

    def report(
        self, folder: str | None = None, *, progress: bool = False, tensorboard: bool = False
    ) -> None:
        """Say where `log` goes: `folder`/metrics.jsonl, a progress bar, TensorBoard. Rank 0 alone writes.

        Collective: none; the other ranks may call it too.
        """
        self._report.open(folder, progress=progress, tensorboard=tensorboard)

    def steps(self, epochs: int | None = None, *, until: int | None = None) -> Iterator[Step]:
        """Give the optimizer steps that are left, resuming from the newest checkpoint first.

        The step before is committed when the next one is asked for.

        Args:
            epochs: Up to the end of how many epochs, counted from the start of the training.
            until: Up to which step number; both None is an endless training.

        Raises:
            StepError: a step was left without `update`; a rank left the loop alone.
            NonFinite: on all ranks, where the loss of a step was NaN or infinite.
            AuditError: the first epoch lost samples or saw some twice.
            Preempted: on all ranks, after the same step and with it saved, where SIGTERM, SIGUSR1 or
                SIGUSR2 came to any; it exits with code 75.

        Collective: all ranks, same arguments.
        """
        self.job.settle()
        check_bounds(epochs, until)
        self._resume()
        if self._is_finished(epochs, until):
            text = "finished: %d steps and %d epochs are done, nothing is left to train."
            log.logger.info(text, self.number, self.position.epoch)
            return
        self._begin(epochs, until)
        notice.watch(self)
        try:
            yield from self._loop(epochs, math.inf if until is None else until)
            self._finish()
            preempted = Preempted(notice.take(), self.number) if self._preempted else None
        finally:
            notice.unwatch(self)
        if preempted is not None:
            self.saving.say(preempted)
            raise preempted
        notice.deliver()  # it came after the last exchange, so this rank alone knows of it

    def log(self, **values: Any) -> None:
        """Note values of the step in progress: numbers, tensors of shape (), or `step.loss`.

        They are written by rank 0 within about 0.2 s, when the losses of all ranks are known.

        Collective: none, but `step.loss` is summed over all ranks either way.
        """
        if self._open is None or not self._is_in_loop:
            raise StepError("`training.log` belongs inside the loop over `training.steps`.")
        step, _ = self._open
        refuse_values(values)
        self._report.note(step.number, step.epoch, step.num_samples, values)

    def state_dict(self) -> dict[str, Any]:
        """Everything that a later run needs, under the models' own names, the same on every rank.

        Collective: none.
        """
        at, tracks = self.position, list(self.tracks.values())
        return state.save(self.models, [track.optimizer for track in tracks]) | {
            "step": self.number,
            "position": [at.seed, at.epoch, at.offset],
            "schedules": [t.schedule.state_dict() if t.schedule else {} for t in tracks],
            "divisors": [track.divisor for track in tracks],
            "scaler": self.precision.state_dict(),
            "buckets": self.tuning.state_dict(),
            "exact": self.reproducing.state_dict() if self.reproducing else None,
            "threads": torch.get_num_threads(),
            "kept": {name: thing.state_dict() for name, thing in self._kept.items()},
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load the state of an earlier step or run, of any number of ranks.

        Checkpoints of the same or later steps are superseded by the next save, and set aside then.

        Raises:
            CheckpointError: the state is of another kind of training; nothing was changed.

        Collective: all ranks, same state.
        """
        self._load(saved)
        self.saving.rolled_back()

    def _load(self, saved: dict[str, Any]) -> None:
        tracks = list(self.tracks.values())
        optimizers = [track.optimizer for track in tracks]
        state.check(self.models, optimizers, saved)
        self._refuse_other(saved)
        self.saving.staged()
        state.load(self.models, optimizers, saved)
        for track, schedule, divisor in zip(
            tracks, saved["schedules"], saved["divisors"], strict=True
        ):
            track.divisor = divisor
            if track.schedule is not None:
                track.schedule.load_state_dict(schedule)
        self.precision.load_state_dict(saved["scaler"])
        self.tuning.load_state_dict(saved.get("buckets", {}))  # older ones have none
        if self.reproducing is not None:
            self.reproducing.load_state_dict(saved["exact"])
            torch.set_num_threads(saved["threads"])
        for name, thing in self._kept.items():
            thing.load_state_dict(saved["kept"][name])
        self.number, self._start, self._last = saved["step"], Position(*saved["position"]), None

    def _refuse_other(self, saved: dict[str, Any]) -> None:
        seed = saved["position"][0]
        if seed != self.job.seed:
            raise CheckpointError(
                f"the checkpoint was trained with seed {seed}, this job has {self.job.seed}.",
                fix="join with the same seed, or start anew with resume='never'.",
            )
        differing = sorted(set(self._kept) ^ set(saved["kept"]))
        if differing:
            raise CheckpointError(
                f"the checkpoint holds another set of objects; {', '.join(differing)} differ.",
                fix="keep() the same objects as the run that saved it.",
            )
        if (saved["exact"] is None) != (self.reproducing is None):
            raise CheckpointError(
                "the checkpoint and this training differ in `reproducible`.",
                why="the bits of a training depend on it from the first step.",
                fix="use the setting of the run that saved it, or resume='never'.",
            )

    def save(self, *, best: bool = False) -> None:
        """Save after the step in progress, whatever is due; `best` keeps it until a better one is saved.

        Collective: all ranks, inside the loop, in the same step.
        """
        self.saving.request(best=best)

    def export(self, path: str | Path) -> None:
        """Write the weights alone to one file, under the model's own names, for `torch.load` anywhere.

        Collective: all ranks, between steps or after them.
        """
        for model in self.models:
            equalize_buffers(self.job, model)
        states = [parallel.unwrap(model).state_dict() for model in self.models]
        weights = states[0] if len(states) == 1 else states
        collectives.on_rank0(self.job, lambda: write_file(Path(path), weights))

    # What a step calls. Not for users.

    def seed_dropout(self, step: int, offset: int) -> None:
        """Key the model's random draws by (seed, step, first sample), whatever the rank.

        Collective: none.
        """
        self._begun = step
        self._generator.manual_seed(pair_seed(self._dropout_stem, step, offset))

    def check_parameters(self) -> None:
        """Refuse parameters that ranks do not share, as far as they are known now. Collective: none."""
        for model in self.models:
            parallel.check_parameters(self.job, model, list(self.tracks))

    def weight_for(
        self, track: Track, num_samples: int, loss: torch.Tensor, *, ghost: bool
    ) -> torch.Tensor:
        """What a backward starts from in place of 1, shape (). Collective: none."""
        divisor = track.divisor if self.count == "tokens" else num_samples
        if ghost:
            return torch.zeros_like(loss)
        if divisor != self._divisor or loss.dtype != self._weight.dtype:
            value = self.summing.before / divisor
            self._weight = torch.tensor(value, dtype=loss.dtype, device=loss.device)
            self._divisor = divisor
        return self._weight

    def check_norm(self, norm: torch.Tensor, track: Track, where: Callable[[], str]) -> None:
        """Refuse a norm that is not finite, where reading it costs no wait for a device.

        On a device the loss of the next step shows it in the next control word. Collective: none.
        """
        if self.precision.scaler is not None or norm.device.type != "cpu":
            return
        if not math.isfinite(norm.item()):
            raise clipping.non_finite(named_parameters(self.models, track), where())

    def _loop(self, epochs: int | None, last: float) -> Iterator[Step]:
        for planned in self.batches.iterate(
            self.position,
            epochs=_ENDLESS if epochs is None else epochs,
            equal=bool(self.syncbn_layers),
        ):
            step = Step(self, planned, self.number + 1)
            if planned.offset == 0:
                self.check_parameters()
            if self.count == "tokens":
                for track in self.tracks.values():
                    track.divisor = track.divisor or weight.divisor_for_tokens(step.num_samples)
            self._open, self._is_in_loop = (step, planned), True
            current_step.step = step.number
            try:
                yield step
            except GeneratorExit:
                # A `break`, or an exception on its way out. Nothing can be raised from here, since
                # Python drops what a generator raises while it is closed: `job.settle` looks at it.
                self._is_in_loop = False
                self.job.left_loop = (step.number, step.is_done)
                raise
            self._open, self._is_in_loop = None, False
            self._commit(step, planned, now=step.ends_epoch or step.number >= last)
            if self._stopping or self.number >= last:
                break

    def _begin(self, epochs: int | None, until: int | None) -> None:
        self.summing, self._divisor = choose_summing(self), 0.0
        self.close_look_until = self.number + 1 + CLOSE_LOOKS
        self._stopping = self._preempted = False
        self.scope = 0 if self.job.peers is None else self.job.peers.new_scope()
        self.control.begin(self.number, anew=True)
        for model in self.models if self.reproducing is None else ():
            syncbn.warn_plain_batchnorm(self.job, model)
        total = None
        if epochs is not None and self.batches.steps_per_epoch is not None:
            total = epochs * self.batches.steps_per_epoch
        if until is not None:
            total = until if total is None else min(total, until)
        self._report.begin(self.number, total)

    def _commit(self, step: Step, planned: PlannedStep, *, now: bool) -> None:
        if self.job.peers is not None:
            self.job.peers.passed = step.number
        step.refuse_unless_done()
        self.number = step.number
        self._last = planned
        loss, count = step.local_loss()
        self.saving.tell()
        for word in self.control.end_step(step.number, loss, count, now=now):
            self._take(word)
        self.saving.step_ended(step.number, ends_epoch=step.ends_epoch)
        self.tuning.step_ended(active=self.precision.is_settled)

    def _take(self, word: Word) -> None:
        self._stopping = self._stopping or word.stop
        self._preempted = self._preempted or word.preempt
        self.saving.take(word)
        if self.count == "tokens" and word.totals[-1].count > 0 and self.reproducing is None:
            # Of the first optimizer; for others any power of two gives the same bits.
            divisor = weight.divisor_for_tokens(word.totals[-1].count)
            for track in self.tracks.values():
                track.divisor = divisor
        self._report.write(word.totals)

    def _finish(self) -> None:
        """End a loop that ran to its end: exchange what is left, save the last step."""
        for word in self.control.flush(self.number):
            self._take(word)
        self.saving.loop_ended()
        self._report.end()

    def _resume(self) -> None:
        saved = self.saving.resume()
        if saved is not None:
            self._load(saved)
            log.logger.info("resumed after step %d (epoch %d).", self.number, self.position.epoch)

    def _is_finished(self, epochs: int | None, until: int | None) -> bool:
        return (epochs is not None and self.position.epoch >= epochs) or (
            until is not None and self.number >= until
        )

    def _close(self) -> None:
        """Leave autocast, note a `break`, and save the step that a preempted evaluation interrupted."""
        self.precision.leave()
        notice.unwatch(self)
        if self._open is not None and self._is_in_loop:
            self.job.left_loop = (self._open[0].number, self._open[0].is_done)
        try:
            if self.job.preempted is not None:
                self._save_open(self.job.preempted)
        finally:
            self._report.end()

    def _save_open(self, preempted: Preempted) -> None:
        if self._open is None or self.job.left_loop is None:
            return  # raised by the loop itself, which has saved, or in another training's
        step, planned = self._open
        self._open = self.job.left_loop = None
        if step.is_done:
            self._commit(step, planned, now=True)
        elif any(collectives.gather(self.job, self._begun == step.number)):
            # Its forwards have changed buffers and generators: this is the state of no step.
            log.once("the step in progress was cut off; what was saved before it stays the newest.")
            return
        self._finish()
        preempted.step = self.number
        self.saving.say(preempted)
