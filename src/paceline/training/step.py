"""`Step`: one optimizer step in the user's loop. Micro-batches go in, one update comes out.

After the last micro-batch `p.grad` is the gradient of the global mean on every rank, times the loss scale.
`update` then does each of these once, in this order: divide by the loss scale, clip, check, step the
optimizers, update the scaler, step the schedules. The training's `Strategy` does everything that concerns
ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.clock.step_clock import (
    BACKWARD,
    COMMUNICATION,
    DATA,
    FORWARD,
    OPTIMIZER,
    OTHER,
    clock,
)
from paceline.data.plan import MicroBatch, PlannedStep
from paceline.data.samples import refuse_dropped_samples
from paceline.errors import ConfigError, StepError
from paceline.job import current_step
from paceline.job.current_step import OUTSIDE, Forward
from paceline.job.exchange import IN_SUM
from paceline.job.job import Job
from paceline.job.rng import pair_seed
from paceline.metrics.step_loss import StepLoss
from paceline.parallel.buffers import Buffers
from paceline.parallel.loss_graph import discard_gradients
from paceline.parallel.modules import local, whole
from paceline.parallel.strategy import Strategy
from paceline.training import weight
from paceline.training.auto_micro_batch import AutoMicroBatch
from paceline.training.control_word import Control, MicroBatchLoss
from paceline.training.non_finite import NonFiniteSteps
from paceline.training.optimizers import TrainedOptimizer
from paceline.training.precision import Precision
from paceline.training.recheck import Recheck
from paceline.training.weight import Reduction


@dataclass(slots=True, eq=False, kw_only=True)
class StepContext:
    """What the steps of one training share. `Training` makes it.

    When a loop begins, `Training` chooses `strategy` again and sets `check_losses_until`.

    Attributes:
        count_unit: "samples" or "tokens".
        checks_rows: Whether to check that a micro-batch holds all of its samples.
        generator: The device's generator, seeded for each micro-batch from `dropout_key`.
        token_divisor: With count="tokens", what losses are divided by until the total of tokens is known.
        check_losses_until: Losses of steps below this number are checked for being sums.
        auto: With `micro_batch="auto"`: repeats steps that run out of memory.
        recheck: With `recheck_every`: computes steps again.
        buffers: Those of the models before the step, if it may be undone or left out.
        recover: Called with an error of a step's collectives. It raises this error or its cause, or continues
            the training in place, with `Step.begin_again` or `Step.take_over`.
    """

    job: Job
    optimizers: list[TrainedOptimizer]
    strategy: Strategy
    precision: Precision
    control: Control
    non_finite: NonFiniteSteps
    count_unit: str
    checks_rows: bool
    generator: torch.Generator
    dropout_key: int
    token_divisor: float
    recover: Callable[[RuntimeError, Step], None]
    check_losses_until: int = 0
    auto: AutoMicroBatch | None = None
    recheck: Recheck | None = None
    buffers: Buffers | None = None
    _start: torch.Tensor | None = None  # the last result of `start_of`, for `_start_for`
    _start_for: tuple[float, torch.dtype, torch.device] | None = None

    def leave_step(self) -> None:
        """Undo what an unfinished step has set: autocast, and what the strategy has set on the models."""
        self.precision.leave()
        self.strategy.leave_step()
        if self.recheck is not None:
            self.recheck.leave_step()
        current_step.forward = OUTSIDE

    def start_of(
        self, loss: torch.Tensor, divisor: float, count: int | torch.Tensor
    ) -> torch.Tensor:
        """Initial gradient of backward, so that it is that of `count * loss / divisor`; shape ()."""
        # With a loss scale gradients are multiplied by the strategy's divisor after the last backward
        # instead. Here it would make fp16 gradients larger by the number of ranks, so that they overflow.
        undo = 1 if self.precision.scales else self.strategy.divisor
        on_host = 1 if isinstance(count, torch.Tensor) else count
        key = (undo * on_host / divisor, loss.dtype, loss.device)
        if self._start is None or key != self._start_for:
            self._start = torch.full((), key[0], dtype=loss.dtype, device=loss.device)
            self._start_for = key
        return self._start * count if isinstance(count, torch.Tensor) else self._start


@dataclass(slots=True, eq=False)
class _Record:
    """Losses, counts and backwards of one optimizer in this step."""

    trained: TrainedOptimizer
    needs_backward: bool = False  # of the current micro-batch
    loss: torch.Tensor | None = None
    count: float | torch.Tensor = 0
    total: torch.Tensor | None = None  # with count="tokens": the count summed over ranks, shape ()
    backwards: int = 0
    is_complete: bool = False  # whether `p.grad` is the gradient of all ranks
    with_grad: torch.Tensor | None = None  # a parameter that has a gradient since the last backward
    is_updated: bool = False
    was_stepped: bool = False  # by `update`, unless the loss scaler left it out

    def find_gradient(self) -> None:
        """Note a parameter that has a gradient now."""
        self.with_grad = next((p for p in self.trained.parameters if p.grad is not None), None)


@dataclass(slots=True, eq=False)
class _Attempt:
    """What one run over the micro-batches of a step has recorded. To repeat the step, it gets a new one.

    Attributes:
        records: One for each optimizer.
        micro: The micro-batch whose body of the loop runs.
        num_begun: Micro-batches that the loop or `run` has got.
        losses: Of the micro-batches.
        last_loss: With several optimizers, the last loss that was differentiated.
        is_recheck: Whether gradients are computed again, and stay on this rank.
        awaits_loop: Whether it was made inside the body of the loop. The rest of that body belongs to the
            attempt before, so its `update` does nothing.
    """

    records: list[_Record]
    micro: MicroBatch | None = None
    num_begun: int = 0
    losses: list[MicroBatchLoss] = field(default_factory=list)
    last_loss: torch.Tensor | None = None
    is_recheck: bool = False
    awaits_loop: bool = False


class Step:
    """One optimizer step. Iterate over its micro-batches, `backward` for each, then `update`.

    `Training.steps` yields it.

    Attributes:
        number: 1 for the first step of the training; the state after `update` is that of step `number`.
        epoch: Counted from 0.
        num_samples: Samples of this step over all ranks.
        ends_epoch: Whether this is the last step of its epoch.
        grad_norm: After an `update` that clips: the norm of the gradient before that, shape (); else None.

    Collective: see the methods.
    """

    def __init__(self, context: StepContext, planned: PlannedStep, number: int) -> None:
        self._context = context
        self._planned = planned
        self._attempt = self._new_attempt()
        self.number = number
        self.epoch = planned.epoch
        self.num_samples = planned.num_samples
        self.ends_epoch = planned.ends_epoch
        self.grad_norm: torch.Tensor | None = None
        self.is_updating = False

    def __repr__(self) -> str:
        return f"Step(number={self.number}, epoch={self.epoch}, num_samples={self.num_samples})"

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's micro-batches, on its device. A rank may have fewer than others, or none."""
        self._refuse_second_loop()
        if self._context.auto is not None:
            raise self._error(
                'micro_batch="auto" cannot be used with a loop over the micro-batches.',
                why="a step that runs out of memory is repeated, and a loop cannot be.",
                fix="step.run(loss_fn), where loss_fn(batch) returns the loss; or give a number.",
            )
        return self._run_micro_batches()

    def _refuse_second_loop(self) -> None:
        if self._attempt.num_begun:
            raise self._error(
                "the loop over the micro-batches of this step has begun already.",
                why="it gives the samples of the step once.",
                fix="use `for batch in step`, or `step.run`, once in each step.",
            )

    def _run_micro_batches(self) -> Iterator[Any]:
        """Run the micro-batches, again if the ranks had to connect again."""
        if (recheck := self._context.recheck) is not None:
            yield from recheck.run(self.number, self._planned, self._run_attempt, self._run_again)
            return
        is_over = False
        while not is_over:
            self._attempt.awaits_loop = False
            try:
                yield from self._run_attempt()
            except RuntimeError as error:  # of the strategy; the loop's own errors do not come here
                self._context.recover(error, self)
            is_over = not self._attempt.awaits_loop or self.is_done

    def _run_attempt(self) -> Iterator[Any]:
        context, planned = self._context, self._planned
        for trained in context.optimizers:
            trained.clear_gradients_if_extended()
        # Forwards are collectives, or this rank has none and goes straight to the sum of the gradients.
        if context.strategy.needs_equal_micro_batches or not planned.num_micro_batches:
            self.advance(IN_SUM)
        clock.enter(DATA)
        for micro in context.strategy.micro_batches(planned):
            # The strategy repeats the step.
            if self._attempt.num_begun == planned.num_micro_batches:
                self._attempt = self._new_attempt()
                if context.recheck is not None:
                    context.recheck.forget()
            yield from self._run_one(micro)
            if self._attempt.awaits_loop:
                return
            if self._attempt.num_begun < planned.num_micro_batches:
                clock.enter(DATA)
        if left := [record for record in self._attempt.records if not record.is_complete]:
            self._complete_gradients(left)

    def _run_one(self, micro: MicroBatch) -> Iterator[Any]:
        context, attempt = self._context, self._attempt
        clock.enter(FORWARD)
        attempt.num_begun += 1
        attempt.micro = micro
        current_step.forward = Forward(self._planned.num_micro_batches, micro.is_padding)
        if context.checks_rows:
            refuse_dropped_samples(micro.batch, micro.count, self._where)
        for record in attempt.records:
            record.needs_backward = True
        # Dropout depends on the step and the first sample, not on the rank.
        context.generator.manual_seed(self._dropout_seed(micro))
        context.precision.enter()
        yield micro.batch
        if attempt is not self._attempt:
            return
        context.precision.leave()
        attempt.micro = None
        current_step.forward = OUTSIDE
        if any(record.needs_backward for record in attempt.records):
            raise self._error(
                f"micro-batch {attempt.num_begun} of {self._planned.num_micro_batches} had no "
                "`step.backward`.",
                fix=self._backward_fix(),
            )

    def _run_again(self, micros: list[MicroBatch]) -> Iterator[Any]:
        """Run micro-batches for `recheck_every`, whose gradients stay on this rank."""
        kept, self._attempt = self._attempt, self._new_attempt(is_recheck=True)
        try:
            for micro in self._context.strategy.without_sums(micros):
                yield from self._run_one(micro)
        finally:
            self._attempt = kept

    def begin_again(self, cut: Callable[[PlannedStep], PlannedStep]) -> None:
        """Forget what was done in this step; `cut` gives its micro-batches again."""
        self._leave_attempt()
        self._planned = cut(self._planned)

    def take_over(self) -> None:
        """Another rank has finished this step, and its state was loaded: nothing is left to do in it."""
        self._leave_attempt()
        for record in self._attempt.records:
            record.is_updated = record.was_stepped = True

    def _leave_attempt(self) -> None:
        self._context.leave_step()
        for trained in self._context.optimizers:
            trained.clear_gradients()
        self._attempt = self._new_attempt(awaits_loop=True)

    @property
    def was_taken_over(self) -> bool:
        """Whether another rank has finished this step, see `take_over`."""
        return self.is_done and self._attempt.awaits_loop

    def _new_attempt(self, *, is_recheck: bool = False, awaits_loop: bool = False) -> _Attempt:
        records = [_Record(trained) for trained in self._context.optimizers]
        return _Attempt(records, is_recheck=is_recheck, awaits_loop=awaits_loop)

    def advance(self, part: int) -> None:
        """Note for other ranks how far this rank is in the step."""
        if (exchange := self._context.job.exchange) is not None:
            exchange.advance(self.number, part)

    def _dropout_seed(self, micro: MicroBatch) -> int:
        return pair_seed(self._context.dropout_key, self.number, micro.offset)

    def _loss_and_count(self, result: Any, micro: MicroBatch) -> tuple[Any, Any]:
        if isinstance(result, tuple):
            if len(result) != 2:
                raise self._error(
                    "the function given to `step.run` must return the loss, or (loss, count); it returned "
                    f"{len(result)} values.",
                )
            loss, count = result
            return loss, count
        if self._context.count_unit == "tokens":
            raise self._error(
                'with count="tokens", the function given to `step.run` must return (loss, count).'
            )
        return result, micro.count

    def run(self, loss_fn: Callable[[Any], Any], *, reduction: Reduction | None = None) -> None:
        """Run forward and backward of every micro-batch: the loop over micro-batches in one call.

        Args:
            loss_fn: `loss_fn(batch)` computes the loss of a micro-batch. It returns a pair `(loss, count)`,
                as for `backward`, or the loss alone, whose count is then the number of samples of the
                micro-batch.
            reduction: See `backward`.

        With several optimizers, the loss is that of all of them.

        Raises:
            StepError: see `backward`.

        Collective: all ranks.
        """
        run = _LossRun(self, loss_fn, reduction)
        if self._context.auto is not None:
            self._refuse_second_loop()
            self._context.auto.run(run.run_loop, self.begin_again)
        else:
            self._context.strategy.run(run)

    def backward(
        self,
        loss: torch.Tensor,
        *,
        count: int | torch.Tensor | None = None,
        reduction: Reduction | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Add the gradient of a micro-batch; the last one sums the gradients of all ranks.

        After it `p.grad` is the gradient of the mean over the samples (or tokens) of all ranks, times the
        loss scale in fp16. With `reproducible=True` that holds after the loop over micro-batches.

        Args:
            loss: Shape (): the mean of the losses over the samples (or tokens) of this micro-batch, as
                torch's loss functions return it.
            count: With `Training(count="tokens")` the number of tokens in the loss; 0 is legal in one
                micro-batch. None: the number of samples of the micro-batch.
            reduction: "sum" for a loss that is the sum over its samples or tokens, "mean" for a mean. None is
                a mean too, and an error for a loss whose last operation is a plain `sum()`.
            optimizer: With several optimizers: the one that this loss belongs to, as in a GAN; only its
                parameters are differentiated. None: the loss belongs to all of them.

        Raises:
            StepError: The loss is not a scalar, is not what `reduction` says, or depends on no parameter.
                The count of tokens is missing or negative, a count is not the number of samples of the
                micro-batch, or the counts of all ranks sum to 0. A parameter got no gradient, or a gradient
                that is not summed over ranks. Called outside of the loop over micro-batches, or for an
                unknown optimizer.

        Collective: all ranks, for each of their micro-batches.
        """
        clock.enter(BACKWARD)
        context, attempt, micro = self._context, self._attempt, self._attempt.micro
        records = self._records_of(optimizer)
        context.precision.leave()
        if micro is None:
            raise self._error(
                "`step.backward` belongs inside `for batch in step`, once for each micro-batch."
            )
        # First: the graph of a loss whose backward has run cannot be read.
        self._refuse_backward(loss, records, optimizer)
        count = self._checked_count(loss, count, reduction, micro)
        reduction = reduction or "mean"
        self._refuse_cleared(records[0])
        for record in records:
            record.needs_backward = False
            record.backwards += 1
        if type(loss) is not torch.Tensor:
            loss = whole(loss)  # a DTensor, if a layer returns one
        scaled = context.precision.scale(loss)
        own = None
        if micro.is_padding:
            start = torch.zeros_like(scaled)
        else:
            start, own = self._start_and_logged(loss, count, reduction, scaled, micro)
            for record in records:
                record.loss = own if record.loss is None else record.loss + own
                record.count = record.count + count
        if context.recheck is not None:
            context.recheck.record_loss(loss, own)
        hooks = []
        if micro.is_padding or weight.has_no_gradient(loss, count, reduction):
            hooks = discard_gradients(scaled)
        inputs = None
        if len(records) < len(attempt.records):
            inputs = [p for record in records for p in record.trained.parameters]
        if micro.is_last:
            self.advance(IN_SUM)
        try:
            if attempt.is_recheck:
                torch.autograd.backward(scaled, start, inputs=inputs)
                is_complete = False
            else:
                is_complete = context.strategy.backward(scaled, start, micro, inputs)
            if is_complete:
                if context.auto is not None:
                    context.auto.after_backward()
                self._complete_gradients(records)
            else:
                for record in records:
                    record.find_gradient()
        except RuntimeError as error:
            context.recover(error, self)
        finally:
            for hook in hooks:
                hook.remove()
        if any(other.needs_backward for other in self._attempt.records):
            context.precision.enter()  # a forward for the next optimizer may follow
            clock.enter(FORWARD)
        else:
            clock.enter(OTHER)

    def _checked_count(
        self,
        loss: torch.Tensor,
        count: int | torch.Tensor | None,
        reduction: Reduction | None,
        micro: MicroBatch,
    ) -> int | torch.Tensor:
        context = self._context
        if reduction not in ("sum", "mean", None):
            raise StepError(
                f'reduction must be "sum" or "mean", got {reduction!r}.', where=self._where()
            )
        number = weight.checked_count(count, micro.count, context.count_unit, self._where)
        if self.number < context.check_losses_until:
            known = int(number) if weight.is_on_host(number) else None
            weight.check_loss(loss, known, reduction, self._where)
        return number

    def _start_and_logged(
        self,
        loss: torch.Tensor,
        count: int | torch.Tensor,
        reduction: Reduction,
        scaled: torch.Tensor,
        micro: MicroBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradient that the backward of `scaled` starts from, and the sum of the losses for the log."""
        by_tokens = self._context.count_unit == "tokens"
        strategy = self._context.strategy
        divisor = self._context.token_divisor if by_tokens else strategy.num_samples(self._planned)
        start = self._context.start_of(scaled, divisor, count if reduction == "mean" else 1)
        unit = strategy.loss_unit
        own = weight.as_sum(loss.detach(), count, reduction, unit)
        self._attempt.losses.append(MicroBatchLoss(self.epoch, micro.places, own))
        return start, own

    def update(
        self,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        clip_norm: float | None = None,
    ) -> None:
        """Take the optimizer step with the gradient of all ranks' samples.

        Args:
            optimizer: With several optimizers, the one to step; None steps all, and clips their gradients
                together.
            clip_norm: Bound of the gradient's 2-norm, > 0; `grad_norm` holds the norm before clipping.

        Raises:
            ConfigError: `clip_norm` is not more than 0.
            StepError: a micro-batch was left out or had no backward, or the step was updated already.
            NonFinite: the gradient's norm is NaN or infinite; no rank has taken the step. Checked on
                CPU only, when clipping, without a loss scale, and if `on_non_finite` is "raise". With "skip":
                100 steps in a row were left out.

        Collective: all ranks, once for all optimizers or once for each.
        """
        attempt, context = self._attempt, self._context
        if attempt.awaits_loop:
            return
        records = self._records_of(optimizer)
        for record in records:
            self._refuse_update(record)
        check_clip_norm(clip_norm)
        clock.enter(OPTIMIZER)
        for record in records:
            context.precision.unscale(record.trained.optimizer, context.strategy.largest_over_ranks)
        is_finite = self._clip(records, clip_norm)
        self.is_updating = True
        for record in records:
            record.was_stepped = is_finite and context.precision.step(record.trained.optimizer)
            record.is_updated = True
        if self.is_done:
            context.precision.end_step()  # first: `count` may raise
            was_stepped = [each.was_stepped for each in attempt.records]
            if context.buffers is not None and not any(was_stepped):
                context.buffers.restore()  # BatchNorm's statistics may hold NaN now
            context.non_finite.count(self.number, was_stepped, attempt.losses)
            for each in attempt.records:
                if each.was_stepped and each.trained.scheduler is not None:
                    each.trained.scheduler.step()
            context.strategy.after_update(self.number, self._planned)
        self.is_updating = False
        for record in records:
            record.trained.clear_gradients()
        clock.enter(OTHER)

    def _complete_gradients(self, records: list[_Record]) -> None:
        """Make `p.grad` the gradient of the global mean, times the loss scale, after the last backward."""
        context = self._context
        if context.count_unit == "tokens":
            totals = weight.total_counts(
                context.strategy.gradient_job, [record.count for record in records]
            )
            for record, total in zip(records, totals, strict=True):
                record.total = total
        for record in records:
            record.is_complete = True
            context.strategy.finish(record.trained.optimizer)
            factor = self._factor(record)
            if factor is not None:
                parts = [local(p.grad) for p in record.trained.parameters if p.grad is not None]
                if parts:  # with `cpu_offload` of FSDP they are on the host
                    torch._foreach_mul_(parts, factor.to(parts[0].device))
            record.find_gradient()

    def _factor(self, record: _Record) -> torch.Tensor | None:
        """What `start_of` has left out of the gradients of an optimizer, shape (); None for 1."""
        context = self._context
        factor = None
        if record.total is not None:
            factor = weight.token_factor(
                record.total, context.token_divisor, self._where, self.number
            )
        if context.precision.scales and context.strategy.divisor != 1:
            undo = torch.full((), float(context.strategy.divisor), device=context.job.device)
            factor = undo if factor is None else factor * undo
        return factor

    def _clip(self, records: list[_Record], clip_norm: float | None) -> bool:
        """Clip. False, on all ranks, if the update must be left out because of NaN or infinity."""
        self.grad_norm = None
        context, scales = self._context, self._context.precision.scales
        skips = context.non_finite.are_skipped and not scales
        if clip_norm is None and not skips:
            return True
        parameters = [p for record in records for p in record.trained.parameters]
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = context.strategy.grad_norm(gradients)
        if clip_norm is not None:
            # As `torch.nn.utils.clip_grad_norm_`.
            factor = torch.clamp(clip_norm / (norm + 1e-6), max=1.0)
            torch._foreach_mul_([local(gradient) for gradient in gradients], factor)
            self.grad_norm = norm
        if skips:
            return math.isfinite(norm.item())
        if not scales:  # else the scaler skips such a step
            named = (pair for record in records for pair in record.trained.named_parameters())
            context.non_finite.refuse(self.number, norm, named, self._attempt.losses)
        return True

    def stop(self) -> None:
        """Request the end of the training. When any rank calls it, all ranks stop after the same step.

        That is this step if it ends an epoch, and in a job of one process; else one within about 0.2 s,
        or the next step if that is later.
        """
        self._context.control.own.stop = True

    def stop_on_all_ranks(self) -> None:
        """End the training after this step; for callers that do it on all ranks alike."""
        self._context.control.agreed.stop = True

    @property
    def is_padding(self) -> bool:
        """Whether the current micro-batch is a padding micro-batch: a real sample with weight 0.

        A rank that has fewer micro-batches than others gets such, so that all ranks run the same
        collectives. Leave it out of your own sums.
        """
        micro = self._attempt.micro
        return micro is not None and micro.is_padding

    @property
    def loss(self) -> StepLoss:
        """The mean loss of this step over all ranks, of the first optimizer.

        See `StepLoss`.

        Collective: none. Converting it to a number: all ranks.
        """
        context = self._context
        return StepLoss(context.job, self.number, *self._local_loss())

    @property
    def is_partly_updated(self) -> bool:
        """Whether an update has begun and not ended, or only some optimizers have taken the step."""
        done = [record.is_updated for record in self._attempt.records]
        return self.is_updating or (any(done) and not all(done))

    @property
    def is_done(self) -> bool:
        """Whether every optimizer was updated."""
        return all(record.is_updated for record in self._attempt.records)

    @property
    def has_begun(self) -> bool:
        """Whether a forward of this step may have run."""
        return self._attempt.num_begun > 0

    @property
    def micro_losses(self) -> list[MicroBatchLoss]:
        """The losses of this rank's micro-batches."""
        return self._attempt.losses

    def _local_loss(self) -> tuple[torch.Tensor | None, Any]:
        records = self._attempt.records
        loss, count = records[0].loss, records[0].count
        totals = [record.total for record in records if record.total is not None]
        if len(records) == 1 or not totals or totals[0].device.type == "cpu":
            return loss, count
        # The totals on a device are not read; those of the other optimizers may be 0 too.
        return loss, weight.reported_count(count, torch.stack(totals))

    def _records_of(self, optimizer: torch.optim.Optimizer | None) -> list[_Record]:
        records = self._attempt.records
        if optimizer is None:
            return records
        if found := [record for record in records if record.trained.optimizer is optimizer]:
            return found
        raise self._error(
            "this optimizer was not given to Training.",
            fix="Training(job, models, [optimizer, ...], batches).",
        )

    def _refuse_backward(
        self,
        loss: torch.Tensor,
        records: list[_Record],
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        attempt = self._attempt
        if loss is attempt.last_loss:
            raise self._error(
                "this loss had its `step.backward` already, for another optimizer.",
                fix="call step.backward(loss) once, without optimizer=: it serves all optimizers. Then "
                "step.update().",
            )
        if not all(record.needs_backward for record in records):
            raise self._error(
                "this micro-batch had its `step.backward` already.",
                fix="add the losses up, and call step.backward once for each micro-batch and optimizer.",
            )
        if optimizer is None or len(attempt.records) == 1:
            return
        attempt.last_loss = loss
        if next(each for each in attempt.records if each.needs_backward) is not records[0]:
            raise self._error(
                "the backwards came in another order than the optimizers were given to Training.",
                fix="give Training the optimizers in the order of their backwards.",
            )

    def _refuse_cleared(self, record: _Record) -> None:
        # A single gradient may be dropped on purpose, as of a layer that is frozen for some steps.
        if record.with_grad is None or record.with_grad.grad is not None:
            return
        if all(p.grad is None for p in record.trained.parameters):
            raise self._error(
                "the gradients of this step are gone.",
                why="the loop calls optimizer.zero_grad(), or sets p.grad, before `step.update()`.",
                fix="leave it out: `step.update()` clears the gradients.",
            )

    def _refuse_update(self, record: _Record) -> None:
        attempt, planned = self._attempt, self._planned.num_micro_batches
        if record.is_updated:
            raise self._error(
                "this step was updated already.", fix="call step.update once for each optimizer."
            )
        if attempt.num_begun < planned:
            raise self._error(
                f"`update` was called after {attempt.num_begun} of {planned} micro-batches.",
                why="the loop over the step was not run, or was left by `break`.",
                fix="let `for batch in step` run to its end; samples cannot be left out.",
            )
        if record.backwards < planned:
            raise self._error(
                f"{planned} micro-batches, but {record.backwards} calls of `step.backward`.",
                fix=self._backward_fix(),
            )
        if not record.is_complete or (attempt.micro is not None and self._context.recheck):
            raise self._error(
                "`update` was called inside `for batch in step`.",
                why="with reproducible=True, the gradients of all ranks are summed when that loop ends; with "
                "recheck_every, its body runs several times in some steps.",
                fix="call step.update after the loop.",
            )
        self._refuse_cleared(record)

    def _backward_fix(self) -> str:
        several = (
            ", or with optimizer=... for each optimizer" if len(self._attempt.records) > 1 else ""
        )
        return (
            "write `step.backward(loss)` in place of `loss.backward()`, once for each micro-batch"
            f"{several}."
        )

    def _error(self, what: str, *, why: str = "", fix: str = "") -> StepError:
        return StepError(what, where=self._where(), why=why, fix=fix, step=self.number)

    def _where(self) -> str:
        return self._context.job.where(step=self.number)


def check_clip_norm(clip_norm: float | None) -> None:
    """Raise ConfigError for a bound that is not more than 0."""
    if clip_norm is not None and not clip_norm > 0:
        raise ConfigError(
            f"clip_norm must be more than 0, got {clip_norm}.",
            fix="leave clip_norm out to train without clipping.",
        )


class _LossRun:
    """A call of `Step.run`; see `paceline.parallel.strategy.LossRun`."""

    def __init__(
        self,
        step: Step,
        loss_fn: Callable[[Any], Any],
        reduction: Reduction | None,
    ) -> None:
        self._step, self._loss_fn = step, loss_fn
        self._given = reduction
        self._reduction: Reduction = reduction or "mean"
        self._micros: list[MicroBatch] = []
        self._sums: dict[int, tuple[torch.Tensor, Any]] = {}

    def run_loop(self, before_forward: Callable[[bool], None] | None = None) -> None:
        """Run the loop, and `before_forward(is_last)` before the forward of each micro-batch."""
        step = self._step
        step._refuse_second_loop()
        for batch in step._run_micro_batches():
            micro = step._attempt.micro
            assert micro is not None
            if before_forward is not None:
                before_forward(micro.is_last)
            loss, count = step._loss_and_count(self._loss_fn(batch), micro)
            step.backward(loss, count=count, reduction=self._given)

    def begin(self) -> int:
        step = self._step
        step._refuse_second_loop()
        step.advance(IN_SUM)
        clock.enter(DATA)
        self._micros = list(step._planned)
        if step._context.checks_rows:
            for micro in self._micros:
                refuse_dropped_samples(micro.batch, micro.count, step._where)
        step._attempt.num_begun = len(self._micros)
        clock.enter(COMMUNICATION)  # the stages of this rank enter their own phases
        return len(self._micros)

    def end(self, count: float | torch.Tensor) -> None:
        clock.enter(BACKWARD)
        losses = [self._sums[index][0] for index in sorted(self._sums)]
        records = self._step._attempt.records
        for record in records:
            record.backwards = len(self._micros)
            record.loss = sum(losses[1:], losses[0]) if losses else None
            record.count = count
        self._step._complete_gradients(records)
        clock.enter(OTHER)

    def is_padding(self, index: int) -> bool:
        return self._micros[index].is_padding

    @contextmanager
    def forward_context(self, index: int) -> Iterator[None]:
        context = self._step._context
        context.generator.manual_seed(self._step._dropout_seed(self._micros[index]))
        context.precision.enter()
        try:
            yield
        finally:
            context.precision.leave()

    def seed_layers(self, index: int, stage: int) -> None:
        seed = self._step._dropout_seed(self._micros[index])
        self._step._context.generator.manual_seed(pair_seed(seed, stage, 0))

    def call_loss_function(self, index: int) -> Any:
        return self._loss_fn(self._micros[index].batch)

    def weigh(self, index: int, result: Any) -> tuple[torch.Tensor, bool]:
        step, micro = self._step, self._micros[index]
        loss, count = step._loss_and_count(result, micro)
        count = step._checked_count(loss, count, self._given, micro)
        if micro.is_padding:
            return loss * 0, False
        scaled = step._context.precision.scale(loss)
        start, own = step._start_and_logged(loss, count, self._reduction, scaled, micro)
        self._sums[index] = own, count
        return scaled * start, not weight.has_no_gradient(loss, count, self._reduction)

    @property
    def count(self) -> Any:
        return sum(self._sums[index][1] for index in sorted(self._sums))
