"""One optimizer step as the user's loop sees it: micro-batches in, one update out.

The order inside `update` is: the empty rank's part, unscale, count, clip, check, optimizer, scaler,
schedule, each once. Gradients are reduced by the last backward alone, so a step has exactly one set of
collectives however many micro-batches it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from paceline.data.plan import MicroBatch, PlannedStep
from paceline.errors import StepError, place
from paceline.metrics.step_loss import StepLoss
from paceline.parallel import ddp as parallel
from paceline.parallel import reducer, syncbn
from paceline.training import clipping, weight
from paceline.training.optimizers import Track
from paceline.training.tokens import TokenTotals, too_early

if TYPE_CHECKING:
    from paceline.training.training import Training


@dataclass(slots=True, eq=False)
class _Tally:
    """What one optimizer has gathered in this step."""

    track: Track
    owed: bool = False
    loss: torch.Tensor | None = None
    count: float | torch.Tensor = 0
    backwards: int = 0
    updated: bool = False


class Step:
    """One optimizer step. Iterate over its micro-batches, `backward` for each, then `update`.

    Attributes:
        number: 1 for the first step of the training; the state after `update` is that of step `number`.
        epoch: counted from 0.
        num_samples: samples of this step over all ranks.
        ends_epoch: whether this step uses up its epoch.
        grad_norm: after `update(clip_norm=...)`: the norm before clipping, shape (), else None.
    """

    __slots__ = (
        "_job",
        "_left",
        "_micro",
        "_planned",
        "_seen",
        "_tallies",
        "_took_part",
        "_totals",
        "_training",
        "ends_epoch",
        "epoch",
        "grad_norm",
        "num_samples",
        "number",
    )

    def __init__(self, training: Training, planned: PlannedStep, number: int) -> None:
        self._training = training
        self._job = training.job
        self._planned = planned
        self._tallies = [_Tally(track) for track in training.tracks.values()]
        self._left = len(self._tallies)
        self._micro: MicroBatch | None = None
        self._took_part = False
        self._totals: TokenTotals | None = None
        self._seen = 0
        self.number = number
        self.epoch = planned.epoch
        self.num_samples = planned.num_samples
        self.ends_epoch = planned.ends_epoch
        self.grad_norm: torch.Tensor | None = None

    def __iter__(self) -> Iterator[Any]:
        """Give this rank's micro-batches, on its device; a rank may have fewer than others, or none."""
        training = self._training
        if training.reproducing is None:
            for model in training.models if training.distributed else ():
                reducer.disarm(model)
            yield from self._give(self._planned)
            self._take_part()
            return
        # A step whose gradients outgrew what was foreseen is run again, so its samples are kept.
        training.reproducing.begin(self.num_samples)
        kept = list(self._planned)
        yield from self._give(kept)
        while not training.reproducing.agree():
            training.reproducing.begin(self.num_samples)
            self._seen = 0
            self._tallies = [_Tally(tally.track) for tally in self._tallies]
            yield from self._give(kept)
        self._take_part()

    def _give(self, micros: Iterable[MicroBatch]) -> Iterator[Any]:
        training = self._training
        layers, precision = training.syncbn_layers, training.precision
        for micro in micros:
            self._seen += 1
            self._micro = micro
            if training.distributed:
                for model in training.models:
                    reducer.set_sync(model, micro.is_last and training.summing.by_ddp)
                if layers:
                    syncbn.set_ghost(layers, micro.is_ghost)
            for tally in self._tallies:
                tally.owed = True
            training.seed_dropout(self.number, micro.offset)
            training.tuning.begin()
            precision.enter()
            yield micro.batch
            precision.leave()
            self._micro = None
            if any(tally.owed for tally in self._tallies):
                raise StepError(
                    f"micro-batch {self._seen} of {self._planned.num_micro_batches} had no "
                    "`step.backward`.",
                    where=self._where(),
                    fix="call step.backward(loss, count=...) for each micro-batch"
                    + (" and optimizer." if len(self._tallies) > 1 else "."),
                    step=self.number,
                )

    def backward(
        self,
        loss: torch.Tensor,
        *,
        count: int | torch.Tensor,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Add the gradient of a micro-batch; the last one sums the gradients of all ranks.

        Args:
            loss: Shape (): the sum of the losses over the samples (or tokens) of this micro-batch.
            count: How many samples (or tokens) that sum has; 0 tokens are legal in one micro-batch.
            optimizer: With several optimizers: whose parameters to differentiate.

        Raises:
            LossError: the loss is no scalar, a mean, or depends on no parameter.
            CountError: the count is negative or does not fit.
            StepError: called outside of the loop over micro-batches, or for an unknown optimizer.

        Collective: all ranks, for each of their micro-batches.
        """
        training, micro = self._training, self._micro
        tally = self._tally(optimizer)
        training.precision.leave()
        if micro is None:
            raise StepError(
                "`step.backward` belongs inside `for batch in step`, once for each micro-batch.",
                where=self._where(),
                step=self.number,
            )
        if self.number < training.close_look_until:
            known = isinstance(count, int) or count.device.type == "cpu"
            host_count = int(count) if known else None
            weight.check_loss(loss, host_count, self._where())
        if count != micro.count:
            weight.check_count(count, micro.count, training.count, self._where())
        if not tally.owed or (len(self._tallies) > 1 and self._out_of_turn(tally)):
            raise self._wrong_backward(tally)
        tally.owed = False
        tally.backwards += 1
        scaled = training.precision.scaled(loss)
        weigh = training.weight_for(tally.track, self.num_samples, scaled, ghost=micro.is_ghost)
        if not micro.is_ghost:
            own = loss.detach()
            if training.reproducing is not None:
                own = training.reproducing.rounded(own)
            tally.loss = own if tally.loss is None else tally.loss + own
            tally.count = tally.count + count
        if micro.is_last and len(self._tallies) == 1 and training.reproducing is None:
            self._start_totals()  # while the gradients are summed
        inputs = None if len(self._tallies) == 1 else tally.track.parameters
        try:
            torch.autograd.backward(scaled, weigh, inputs=inputs)
        except RuntimeError as error:
            self._job.reraise(error)
        if training.reproducing is not None:
            number = (micro.offset - self._planned.offset) // training.batches.micro_batch
            training.reproducing.added(tally.track, number)
        elif micro.is_last and training.summing.in_memory:
            self._meet_in_memory()

    def update(
        self,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        clip_norm: float | None = None,
    ) -> None:
        """Take the optimizer step with the gradient of all ranks' samples.

        Args:
            optimizer: Which one, where there are several.
            clip_norm: Bound of the gradient's 2-norm, > 0; `grad_norm` holds it afterwards.

        Raises:
            StepError: micro-batches were left out, had no backward, or the step was updated already.
            CountError: the counts of all ranks sum to 0.
            GradientError: a parameter got no gradient, or one that ranks do not share.
            NonFinite: the gradient's norm is NaN or infinite; no rank has taken the step.

        Collective: all ranks, once for each optimizer.
        """
        training, planned = self._training, self._planned.num_micro_batches
        tally = self._tally(optimizer)
        track = tally.track
        if self._seen != planned or tally.backwards < planned or tally.updated:
            raise self._unfinished(tally)
        if clip_norm is not None:
            clipping.check_clip_norm(clip_norm)
        if tally.backwards == 0:
            self._take_part()
        if training.reproducing is not None:
            training.reproducing.sums[id(track)].finish()
        elif training.distributed and not training.summing.in_memory:
            self._refuse_unshared(track)
        training.precision.unscale(track.optimizer)
        factor = None
        if training.count == "tokens":
            if self._totals is None:
                raise too_early(self._where(), self.number)
            number = self._tallies.index(tally)
            factor = self._totals.factor(number, track.divisor, self._where, self.number)
        if training.summing.after != 1:
            undo = torch.tensor(float(training.summing.after), device=self._job.device)
            factor = undo if factor is None else factor * undo
        if factor is not None or clip_norm is not None:
            gradients = [p.grad for p in track.parameters if p.grad is not None]
            self.grad_norm = clipping.scale_and_clip(gradients, factor=factor, clip_norm=clip_norm)
            if self.grad_norm is not None:
                training.check_norm(self.grad_norm, track, self._where)
        training.saving.staged()
        training.precision.step(track.optimizer)
        tally.updated = True
        self._left -= 1
        if not self._left:
            training.tuning.stop()
            for each in self._tallies if training.precision.end_step() else ():
                if each.track.schedule is not None:
                    each.track.schedule.step()
        track.clear_gradients()

    def stop(self) -> None:
        """Ask that the training ends: all ranks stop after the same step, for one rank's asking.

        In a step that ends an epoch, and in a job of one process, that is this step; elsewhere it is
        one within about 0.2 s.

        Collective: none.
        """
        self._training.control.request_stop()

    @property
    def loss(self) -> StepLoss:
        """The mean loss of this step over all ranks, of the first optimizer. See `StepLoss`."""
        tally = self._tallies[0]
        scope = self._training.scope
        return StepLoss(self._job, scope, self.number, tally.loss, tally.count)

    def local_loss(self) -> tuple[torch.Tensor | None, Any]:
        """This rank's loss sum and count, for the control word. Collective: none."""
        return self._tallies[0].loss, self._tallies[0].count

    @property
    def is_done(self) -> bool:
        """Whether every optimizer was updated. Collective: none."""
        return not self._left

    def refuse_unless_done(self) -> None:
        """Raise StepError where `update` was forgotten. Collective: none."""
        if self._left:
            raise StepError(
                "the step was left without `step.update()`.",
                where=self._where(),
                fix="call step.update() after the loop over micro-batches"
                + ("." if len(self._tallies) == 1 else ", once for each optimizer."),
                step=self.number,
            )

    def _tally(self, optimizer: torch.optim.Optimizer | None) -> _Tally:
        if optimizer is None:
            if len(self._tallies) == 1:
                return self._tallies[0]
            raise StepError(
                f"this training has {len(self._tallies)} optimizers; say which one.",
                where=self._where(),
                fix="step.backward(loss, count=n, optimizer=...), step.update(optimizer).",
            )
        for tally in self._tallies:
            if tally.track.optimizer is optimizer:
                return tally
        raise StepError(
            "this optimizer was not given to Training.",
            where=self._where(),
            fix="Training(job, models, [optimizer, ...], batches).",
        )

    def _unfinished(self, tally: _Tally) -> StepError:
        """What to say where `update` comes too early, or twice."""
        planned = self._planned.num_micro_batches
        what = f"{planned} micro-batches, but {tally.backwards} calls of `step.backward`."
        why, fix = "", "call step.backward(loss, count=...) for each micro-batch."
        if tally.updated:
            what, fix = (
                "this step was updated already.",
                "call step.update once for each optimizer.",
            )
        elif self._seen < planned:
            what = f"`update` was called after {self._seen} of {planned} micro-batches."
            why = "the loop over the step was not run, or was left by `break`."
            fix = "let `for batch in step` run to its end; samples cannot be left out."
        return StepError(what, where=self._where(), why=why, fix=fix, step=self.number)

    def _out_of_turn(self, tally: _Tally) -> bool:
        """Whether an optimizer that was given before has not had its backward for this micro-batch."""
        before = self._tallies[: self._tallies.index(tally)]
        return any(other.owed for other in before)

    def _wrong_backward(self, tally: _Tally) -> StepError:
        what, fix = (
            "the optimizers' backwards came in another order than the optimizers were given in.",
            "give Training the optimizers in the order of their backwards: ranks without samples take "
            "part in that order.",
        )
        if not tally.owed:
            what = "this micro-batch had its `step.backward` already."
            fix = (
                "add the losses up, and call step.backward once for each micro-batch and optimizer."
            )
        return StepError(what, where=self._where(), fix=fix, step=self.number)

    def _take_part(self) -> None:
        """A rank without samples still sums gradients, of zeros, or the others would wait for it.

        Right after its micro-batches would have been, and in the order of the optimizers, so that
        all ranks meet in the same collectives in the same order.
        """
        training = self._training
        if self._took_part:
            return
        self._took_part = True
        self._start_totals()
        if self._planned.num_micro_batches or not training.distributed or training.reproducing:
            return
        try:
            for tally in self._tallies if training.summing.by_ddp else ():
                for model in tally.track.models:
                    reducer.set_sync(model, True)
                    reducer.zero_backward(model)
        except RuntimeError as error:
            self._job.reraise(error)
        if training.summing.in_memory:
            self._meet_in_memory()

    def _start_totals(self) -> None:
        """Start adding up the tokens of all ranks; the sums are read by `update`.

        All ranks come here after their last micro-batch and before anything else, those without
        samples too.
        """
        training = self._training
        if training.count == "tokens" and self._totals is None:
            self._totals = TokenTotals(self._job, [tally.count for tally in self._tallies])
            if not training.summing.in_memory:
                self._totals.start(self._job)

    def _meet_in_memory(self) -> None:
        """What ranks of one memory exchange when the step's last backward is over on all of them."""
        totals, direct = self._totals, self._training.summing.direct
        if self._planned.num_micro_batches:
            self._refuse_unshared(self._tallies[0].track)
        if direct is not None:
            direct.add(*([] if totals is None else [totals.sums]))
        elif totals is not None:
            totals.add(self._job)

    def _refuse_unshared(self, track: Track) -> None:
        """Raise GradientError where this rank's gradients cannot be, or were not, summed with the others'."""
        training = self._training
        track.refuse_changes(training.check_parameters)
        for model in track.models:
            parallel.refuse_unused(self._job, model, direct=training.summing.direct is not None)

    def _where(self) -> str:
        return place(self._job.rank, self._job.world_size, step=self.number)
