"""`Strategy`: how the ranks of one training run a step together and sum their gradients.

`Training` chooses the strategy that fits how its models were wrapped. A reproducible training keeps one
object. Any other makes a new one when a loop begins: what must outlive a loop is kept on the wrapper, as
`Compression` is. `Step` leaves everything about ranks to its strategy. A new form of parallelism is a new
subclass in a new file, and an entry in `STRATEGIES`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from paceline.data.batches import Batches
from paceline.data.plan import MicroBatch, PlannedStep
from paceline.job import collectives
from paceline.job.job import Job
from paceline.parallel import syncbn
from paceline.parallel.modules import is_split, unwrap, warn_untrained


class ScheduledStep(Protocol):
    """A step whose micro-batches the strategy runs. They have indices from 0.

    Attributes:
        num_micro_batches: Number of this rank's micro-batches.
    """

    num_micro_batches: int

    def forward_context(self, index: int) -> AbstractContextManager[None]:
        """The context of a forward: precision, and dropout's generator seeded for the micro-batch."""

    def seed_layers(self, index: int, stage: int) -> None:
        """Seed dropout's generator for the layers of a later stage, which draw masks of their own."""

    def call_loss_function(self, index: int) -> Any:
        """What the user's loss function returns for a micro-batch."""

    def weigh(self, index: int, result: Any) -> tuple[torch.Tensor, bool]:
        """Check and record a result of `call_loss_function`. The last call counts.

        Returns:
            The loss to differentiate, and whether it has a gradient. A mean over no tokens has none.
        """


class Strategy:
    """The strategy of one process, and the base of those for several ranks.

    A step calls `begin_step`, then `before_forward` and `backward` for each micro-batch (`backward` once
    for each loss), or `run_micro_batches` in place of these two. It calls `finish` for each optimizer after
    its last backward, or after `end_micro_batches` if that may repeat the step.

    Attributes:
        divisor: After `finish` a gradient is the sum over all ranks divided by this number.
        needs_equal_micro_batches: Whether every rank must run the same number of micro-batches. A rank
            with fewer samples then gets ghosts: real samples with weight 0.
        repeats_steps: Whether `end_micro_batches` may return True, so that micro-batches must be kept.
        is_reproducible: Whether the result is bit for bit equal on any number of ranks.
        runs_micro_batches: Whether `run_micro_batches` runs all forwards and backwards of a step, instead of
            the loop over its micro-batches. Then there is one optimizer.
        reduces_gradients: Whether ranks add whole gradients. The speed of their connection is then measured,
            for the advice about bottlenecks.
        keeps_token_divisor: Whether gradients of consecutive steps must share one divisor, because the
            strategy carries values from step to step.
    """

    divisor = 1
    repeats_steps = False
    is_reproducible = False
    reduces_gradients = False
    keeps_token_divisor = False
    runs_micro_batches = False

    def __init__(
        self,
        job: Job,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        batches: Batches,
    ) -> None:
        self._job = job
        self._models = list(models)
        self._optimizers = list(optimizers)
        self._ghost_mode = syncbn.GhostMode(models)
        self.needs_equal_micro_batches = job.data.size > 1 and self._ghost_mode.synchronised
        self._prepare(batches)

    def _prepare(self, batches: Batches) -> None:
        """The constructor of a subclass. Raises ConfigError for what the subclass cannot train."""

    @classmethod
    def fits(cls, job: Job, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> bool:
        """Whether this strategy trains models that are wrapped like these.

        Among the strategies with the same `is_reproducible`, at most one fits.
        """
        return job.world_size == 1 and not any(map(is_split, models))

    def check(self) -> None:
        """Check that each trained parameter gets its gradient from all ranks.

        Called before the first step and at the start of each epoch.

        Raises:
            StepError: parameters that each rank would train alone, or that no rank can train.
        """
        for model in self._models:
            warn_untrained(model, self._optimizers)

    def check_precision(self, precision: str, *, skips_non_finite: bool) -> None:
        """Raise ConfigError if a model cannot be trained in this format: "fp32", "bf16" or "fp16".

        Args:
            skips_non_finite: Whether the training goes on after a gradient with NaN or infinity.
        """

    def begin_step(self, step: PlannedStep) -> None:
        """Prepare for the micro-batches of a step, or for their repetition."""

    def before_forward(self, micro: MicroBatch) -> None:
        """Prepare for the forward of a micro-batch."""
        if self.needs_equal_micro_batches:
            self._ghost_mode.set(micro.is_ghost)

    def backward(
        self,
        loss: torch.Tensor,
        start: torch.Tensor,
        micro: MicroBatch,
        inputs: Sequence[torch.Tensor] | None,
    ) -> None:
        """Add the gradients of `start * loss` to the parameters.

        Args:
            start: The gradient that the backward starts from, shape ().
            inputs: With several optimizers, the parameters to differentiate; None for all.
        """
        torch.autograd.backward(loss, start, inputs=inputs)

    def end_micro_batches(self) -> bool:
        """Called after the last micro-batch. Returns whether all must be run again, equal on all ranks."""
        if self.needs_equal_micro_batches:
            self._ghost_mode.set(False)
        return False

    def leave_step(self) -> None:
        """Undo what an unfinished step has set on the models. Called when the loop ends or is left."""
        self._ghost_mode.set(False)

    def run_micro_batches(self, step: ScheduledStep) -> None:
        """Run forward and backward of all micro-batches, if `runs_micro_batches`."""
        raise NotImplementedError

    def sum_loss_count(self, count: float | torch.Tensor) -> float | torch.Tensor:
        """The loss count of this data rank after `run_micro_batches`, summed over a pipeline's stages."""
        return count

    def finish(self, optimizer: Optimizer) -> None:
        """Complete the sums over ranks of an optimizer's gradients, after its last backward.

        Raises:
            StepError: a parameter got no gradient, or one that is not summed over ranks.
        """

    def grad_norm(self, gradients: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
        """The p-norm of all gradients as one vector, shape (), the same on all ranks."""
        return get_total_norm(gradients, norm_type, foreach=True)

    def plain_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss as a plain tensor, if layers return `DTensor`s; differentiable."""
        return loss

    def _norms_over_ranks(
        self, own: torch.Tensor, norm_type: float, group: dist.ProcessGroup | None
    ) -> torch.Tensor:
        """The p-norms of vectors that are split over the ranks of a group, from those of this rank's parts.

        Args:
            own: Shape (number of vectors,), float64.
        """
        # Gathered, because a maximum over ranks does not keep NaN on every backend, and a sum of powers may
        # overflow.
        each = collectives.gather_rows(self._job, own, group)
        norms: torch.Tensor = torch.linalg.vector_norm(each, norm_type, dim=0)
        return norms

    def logged_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss of a micro-batch in the form that is added up for the log."""
        return loss

    def facts(self) -> dict[str, Any]:
        """Settings that decide how long the ranks take to communicate, for reports and advice."""
        return {}

    def measurements(self) -> dict[str, Any]:
        """Values of the last step for the log, by name; usually none."""
        return {}

    def whole_state(self, model: nn.Module) -> Iterator[tuple[str, Any]]:
        """The unsharded state of a model, for a file: names and values, each gathered when it is reached.

        All ranks iterate over it to its end. A rank that keeps no value needs memory for one.
        """
        yield from unwrap(model).state_dict().items()

    def wants(self, path: str) -> bool:
        """Whether this rank needs the tensor at this path of a saved state."""
        return True

    def own_part(self, saved: dict[str, Any]) -> dict[str, Any]:
        """The part of a saved state that belongs to parameters of this rank's models."""
        return saved

    def state_dict(self) -> Any:
        """What a resumed training needs of this object; None if nothing. All ranks call it."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """Load what `state_dict` returned in an earlier run, on any number of ranks."""


# Filled on import: training.py adds those of one process and of replicas; fsdp.py and pipeline.py add their
# own, since importing FSDP2 takes 0.5 s. The order has no meaning.
STRATEGIES: list[type[Strategy]] = []
