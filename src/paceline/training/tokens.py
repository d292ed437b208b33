"""How many tokens a step has over all ranks, by which its summed gradients are divided."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from paceline.errors import CountError, StepError
from paceline.job.job import Job


class TokenTotals:
    """The token counts of one step, one for each optimizer, in the order in which those were given.

    Attributes:
        sums: float64, shape (optimizers,), on the job's device: this rank's until all ranks' are added.

    Collective: as the methods say.
    """

    def __init__(self, job: Job, counts: Sequence[float | torch.Tensor]) -> None:
        each = [torch.as_tensor(count, dtype=torch.float64, device=job.device) for count in counts]
        self.sums = torch.stack([count.reshape(()) for count in each])
        self._work: dist.Work | None = None

    def start(self, job: Job) -> None:
        """Start adding up the ranks' counts; `factor` waits for it.

        Collective: all ranks, after their last micro-batch.
        """
        group = job.control if self.sums.device.type == "cpu" else job.group
        if group is not None:
            self._work = dist.all_reduce(self.sums, group=group, async_op=True)

    def add(self, job: Job) -> None:
        """Add up the ranks' counts now, where they meet in memory.

        Collective: all ranks, after their gradients were summed.
        """
        try:
            dist.all_reduce(self.sums, group=job.group)
        except RuntimeError as error:
            job.reraise(error)

    def factor(
        self, number: int, divisor: float, where: Callable[[], str], step: int
    ) -> torch.Tensor:
        """What to multiply the gradients of an optimizer by that were divided by `divisor`; shape ().

        Raises:
            CountError: the counts of all ranks sum to 0.
        """
        if self._work is not None:
            self._work.wait()
        total = self.sums[number]
        if total.device.type != "cpu":
            # Not read here, which would wait for the device; the next control word refuses a total of 0.
            return torch.where(total > 0, divisor / total, 0.0).to(torch.float32)
        if not total.item() > 0:
            raise CountError(
                f"the counts of all ranks in this step sum to {total.item():g}.",
                where=where(),
                why="every token of the step's samples is masked.",
                fix="leave such samples out of the dataset, or use a larger global_batch.",
                step=step,
            )
        return divisor / total


def too_early(where: str, step: int) -> StepError:
    """What to say where an optimizer is updated before the tokens are counted."""
    return StepError(
        'with several optimizers and count="tokens", this `update` came too early.',
        where=where,
        why="the tokens of all ranks are counted when the loop over micro-batches is over.",
        fix="call step.update(optimizer) for each after that loop.",
        step=step,
    )
