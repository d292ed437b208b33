"""`on_non_finite`: steps whose gradient holds NaN or infinity are left out, or are an error on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch

from paceline import log
from paceline.errors import NonFinite, listed
from paceline.job.job import Job
from paceline.training.control_word import MicroBatchLoss, name_samples

# fp16 leaves out about 16 at most, while the loss scale falls from 65536 to 1.
_MOST_SKIPPED = 100


class NonFiniteSteps:
    """The steps of one training whose gradient holds NaN or infinity.

    Args:
        samples_of: See `Control.gather_bad_samples`; the ranks whose gradients are summed call it.

    Attributes:
        are_skipped: Whether such a step is left out; else it is an error.
        num_skipped: Steps that were left out since this training was made.
        num_in_row: How many of them came without another step since.

    Collective: all ranks whose gradients are summed call each method alike.
    """

    def __init__(
        self,
        job: Job,
        samples_of: Callable[[list[MicroBatchLoss]], dict[int, list[int]]],
        *,
        are_skipped: bool,
    ) -> None:
        self._job, self._samples_of = job, samples_of
        self.are_skipped = are_skipped
        self.num_skipped = 0
        self.num_in_row = 0

    @property
    def counts(self) -> list[int]:
        """What `load` takes."""
        return [self.num_skipped, self.num_in_row]

    def load(self, counts: list[int]) -> None:
        """Continue with the counts of another rank."""
        self.num_skipped, self.num_in_row = counts

    def count(self, step: int, was_stepped: Sequence[bool], losses: list[MicroBatchLoss]) -> None:
        """Count a step of which optimizers were left out, if any were.

        Raises:
            NonFinite: too many steps in a row were left out.
        """
        if all(was_stepped):
            self.num_in_row = 0
            return
        self.num_skipped += 1
        self.num_in_row += 1
        if self._job.rank == 0:
            left_out = [str(n) for n, stepped in enumerate(was_stepped) if not stepped]
            log.logger.info(
                "step %d was left out%s: its gradient holds NaN or infinity (%d so far).",
                step,
                f" by optimizer {listed(left_out)}" if any(was_stepped) else "",
                self.num_skipped,
            )
        if self.num_in_row < _MOST_SKIPPED or self._job.is_dry_run:
            return
        samples = self._samples_of(losses)
        raise NonFinite(
            f"{_MOST_SKIPPED} steps in a row were left out: their gradients held NaN or infinity.",
            where=name_samples(samples),
            why="a few bad samples do not come in each step, so it is the weights, the learning rate or all "
            "samples.",
            fix="start again from a checkpoint, with a lower learning rate; or training.rollback().",
            quantity="gradient",
            step=step,
            ranks=list(samples),
            samples=samples,
        )

    def refuse(
        self,
        step: int,
        norm: torch.Tensor,
        named_parameters: Iterable[tuple[str, torch.Tensor]],
        losses: list[MicroBatchLoss],
    ) -> None:
        """Raise NonFinite for a gradient of this norm, on the CPU.

        On a GPU the check would wait for the device. There the control word reports the next step's loss,
        which is NaN.
        """
        if norm.device.type != "cpu" or math.isfinite(norm.item()):
            return
        bad = [
            name
            for name, p in named_parameters
            if p.grad is not None and not bool(torch.isfinite(p.grad).all())
        ]
        samples = self._samples_of(losses)
        because = (
            "the loss became NaN or infinite" if samples else "the loss of all ranks is finite"
        )
        raise NonFinite(
            f"the gradient of step {step} holds NaN or infinity in {listed(bad) or 'its norm'}; the step was "
            "not taken.",
            where=name_samples(samples),
            why=f"{because}.",
            fix="look at these samples, lower the learning rate, or find the operation with "
            "torch.autograd.set_detect_anomaly(True); or leave such steps out: Training(..., "
            'on_non_finite="skip").',
            quantity="gradient",
            step=step,
            parameters=bad,
            ranks=list(samples),
            samples=samples,
        )
