"""`Strategy`: how the ranks of one training run a step together and sum their gradients.

`Step` leaves everything about ranks to its strategy. A new form of parallelism is a new subclass in a new
file, and an entry in `strategies.py`. It writes those of these eight members that differ from one process:

    prepare        what it cannot train is an error; `divisor` and `needs_equal_micro_batches` are set
    check          parameters whose gradient would not come from all ranks are an error
    micro_batches  the micro-batches of a step, with what must be set around each forward
    backward       the gradients of a micro-batch
    finish         complete the sums over ranks
    leave_step     undo what `micro_batches` has set, when a step is left
    grad_norm      the norm of a gradient whose parts are on several ranks
    whole_state    the state of a model whose parts are on several ranks
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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
from paceline.parallel.modules import unwrap, warn_untrained


class LossRun(Protocol):
    """A call of `step.run(loss_fn)`: what a strategy may do with it.

    `run_loop` is the loop over the micro-batches of `Step`. A strategy that runs forwards and backwards in an
    order of its own calls `begin`, then the other methods for micro-batches 0, 1, ..., then `end`.
    """

    def run_loop(self) -> None: ...

    def begin(self) -> int:
        """Load the micro-batches. Returns their number on this rank."""

    def is_padding(self, index: int) -> bool:
        """Whether it is a padding micro-batch."""

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

    @property
    def count(self) -> float | torch.Tensor:
        """The loss count of the micro-batches that were weighed on this rank."""

    def end(self, count: float | torch.Tensor) -> None:
        """Complete the gradients. `count` is the loss count of this data rank."""


class Replay(Protocol):
    """Lets a rank that failed in a micro-batch run it again, and join the collectives that are left in it."""

    def begin_micro_batch(self) -> None:
        """Called before each forward."""

    def repeat(self) -> None:
        """Reset the models to run the newest micro-batch again. It failed, or a later one did."""

    def reset(self) -> None:
        """Reset the models after a micro-batch that was not finished, or that was run again."""


class Strategy:
    """The strategy of one process, and the base of those for several ranks.

    A step iterates over `micro_batches` and calls `backward` once for each loss. It calls `finish` for each
    optimizer after the last backward, or at the end of `micro_batches`.

    Attributes:
        divisor: After `finish` a gradient is the sum over all ranks divided by this number.
        needs_equal_micro_batches: Whether every rank must run the same number of micro-batches. A rank
            with fewer samples then gets padding micro-batches: real samples with weight 0.
        gradient_job: The ranks whose gradients are summed: the job, or one host of it with `diloco`.
        hosts: The ranks of each host, if hosts have weights of their own; None: all ranks have equal ones.
        loss_unit: Losses for the log are rounded to multiples of this, so that their sum is exact; None: not.
    """

    divisor = 1
    loss_unit: float | None = None
    hosts: tuple[tuple[int, ...], ...] | None = None

    def __init__(
        self,
        job: Job,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        batches: Batches,
    ) -> None:
        self._job = self.gradient_job = job
        self._models = list(models)
        self._optimizers = list(optimizers)
        self._padding_mode = syncbn.PaddingMode(models)
        self.needs_equal_micro_batches = job.data.size > 1 and self._padding_mode.synchronised
        self.prepare(batches)
        self._has_padding = self.needs_equal_micro_batches and self._padding_mode.has_layers

    def prepare(self, batches: Batches) -> None:
        """The constructor of a subclass. Raises ConfigError for what the subclass cannot train."""

    def check(self) -> None:
        """Check that each trained parameter gets its gradient from all ranks.

        Called before the first step and at the start of each epoch.

        Raises:
            StepError: parameters that each rank would train alone, or that no rank can train.
        """
        for model in self._models:
            warn_untrained(model, self._optimizers)

    def micro_batches(self, step: PlannedStep) -> Iterator[MicroBatch]:
        """This rank's micro-batches of a step. It may yield all of them again, to repeat the step."""
        yield from self.without_sums(step)

    def without_sums(self, micros: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """Micro-batches whose gradients stay on this rank."""
        for micro in micros:
            if self._has_padding:
                self._padding_mode.set(micro.is_padding)
            yield micro
        if self._has_padding:
            self._padding_mode.set(False)

    def backward(
        self,
        loss: torch.Tensor,
        start: torch.Tensor,
        micro: MicroBatch,
        inputs: Sequence[torch.Tensor] | None,
    ) -> bool:
        """Add the gradients of `start * loss` to the parameters.

        Args:
            start: The gradient that the backward starts from, shape ().
            inputs: With several optimizers, the parameters to differentiate; None for all.

        Returns:
            Whether `finish` may be called now; False: not before the end of `micro_batches`.
        """
        torch.autograd.backward(loss, start, inputs=inputs)
        return micro.is_last

    def finish(self, optimizer: Optimizer) -> None:
        """Complete the sums over ranks of an optimizer's gradients, after its last backward.

        Raises:
            StepError: a parameter got no gradient, or one that is not summed over ranks.
        """

    def leave_step(self) -> None:
        """Undo what an unfinished step has set on the models. Called when the loop ends or is left."""
        self._padding_mode.set(False)

    def grad_norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """The 2-norm of all gradients as one vector, shape (), the same on all ranks."""
        return get_total_norm(gradients, foreach=True)

    def whole_state(self, model: nn.Module) -> Iterator[tuple[str, Any]]:
        """The unsharded state of a model, for a file: names and values, each gathered when it is reached.

        All ranks iterate over it to its end. A rank that keeps no value needs memory for one.
        """
        yield from unwrap(model).state_dict().items()

    # Few strategies need the following.

    def num_samples(self, step: PlannedStep) -> int:
        """The number of samples whose mean has the gradient of a step."""
        return step.num_samples

    def begin_loop(self, step: int, last: int | None) -> None:
        """A loop begins after this step, and ends with step `last` if that is known. All ranks call it."""

    def after_update(self, step: int, planned: PlannedStep) -> None:
        """All optimizers have taken this step. All ranks call it."""

    def end_loop(self) -> None:
        """The last step of a loop is done, before it is saved. All ranks call it."""

    def check_precision(self, precision: str, *, skips_non_finite: bool) -> None:
        """Raise ConfigError if a model cannot be trained in this format: "fp32", "bf16" or "fp16".

        Args:
            skips_non_finite: Whether the training goes on after a gradient with NaN or infinity.
        """

    # Makes a number the largest of all ranks, in place, so that all decide alike about an overflow in fp16;
    # None if each rank has whole gradients.
    largest_over_ranks: Callable[[torch.Tensor], None] | None = None

    def run(self, loss: LossRun) -> None:
        """Run forward and backward of all micro-batches of a step."""
        loss.run_loop()

    def make_replay(self) -> Replay | None:
        """How a rank that fails in a micro-batch joins the collectives of the others again, if it can."""
        return None

    def facts(self) -> dict[str, Any]:
        """Settings that decide how long the ranks take to communicate, for reports and advice."""
        return {}

    def wants(self, path: str) -> bool:
        """Whether this rank needs the tensor at this path of a saved state."""
        return True

    def templates(self) -> dict[str, torch.Tensor]:
        """Tensors that are sharded as those of `state_dict`, by path in a saved state."""
        return {}

    def trained_paths(self) -> list[str]:
        """Paths in a saved state of what is trained, beside the models."""
        return []

    def to_save(self, state: dict[str, Any]) -> dict[str, Any]:
        """What a checkpoint holds of this rank's state; `own_part` is the inverse."""
        return state

    def own_part(self, saved: dict[str, Any]) -> dict[str, Any]:
        """The part of a saved state that belongs to parameters of this rank's models."""
        return saved

    def state_dict(self) -> Any:
        """What a resumed training needs of this object; None if nothing. All ranks call it."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """Load what `state_dict` returned in an earlier run, on any number of ranks."""


def norms_over_ranks(job: Job, own: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The 2-norm of a vector that is split over the ranks of a group, from that of this rank's part."""
    # Gathered, because a sum of squares may overflow.
    each = collectives.gather_rows(job, own.double().reshape(1), group)
    norm: torch.Tensor = torch.linalg.vector_norm(each)
    return norm.to(own.dtype)
