"""Turns the loss of a micro-batch into its part of the gradient of a step.

A step needs the mean over its N samples or tokens. The user gives the mean over the `count` of a
micro-batch, and backward starts from `count * strategy.divisor / N` instead of 1: the strategy divides by its
divisor when it sums over ranks, so the result is the mean, however samples are split over ranks. For a sum,
backward starts from `strategy.divisor / N`.

The number of tokens of a step is known only after its last micro-batch. So backward divides by
`token_divisor`, a constant power of two, and after the last backward gradients are multiplied by
`token_divisor / total`. Division by a power of two does not round.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from paceline import torch_private
from paceline.errors import StepError
from paceline.job import collectives
from paceline.job.job import Job
from paceline.parallel.loss_graph import uses_all_gather

Reduction = Literal["sum", "mean"]

# Reductions as torch's loss functions save them for backward (`_saved_reduction`).
_MEAN_REDUCTION = 1
_SUM_REDUCTION = 2
_NODE = "torch.autograd.graph.Node"


def token_divisor(global_batch: int) -> float:
    """The power of two nearest to the number of samples: that of tokens is not known yet.

    It is constant, because PowerSGD and exact sums carry gradients and their scales from step to step.
    """
    return 2.0 ** round(math.log2(global_batch))


def total_counts(job: Job, counts: Sequence[float | torch.Tensor]) -> torch.Tensor:
    """The counts of a step summed over ranks, float64, on the job's device.

    Args:
        counts: This rank's, one for each optimizer.
    """
    each = [
        count.to(job.device, torch.float64).reshape(())
        if isinstance(count, torch.Tensor)
        else torch.full((), count, dtype=torch.float64, device=job.device)  # without a copy
        for count in counts
    ]
    return collectives.all_reduce(job, torch.stack(each))


def reported_count(count: float | torch.Tensor, totals: torch.Tensor) -> torch.Tensor:
    """`count`, or 0 if a total is 0; does not wait for the device. The control word refuses a count of 0."""
    return torch.as_tensor(count, device=totals.device) * (totals > 0).all()


def token_factor(
    total: torch.Tensor, token_divisor: float, where: Callable[[], str], step: int
) -> torch.Tensor:
    """The factor for gradients that were divided by `token_divisor` instead of `total`, shape ().

    Raises:
        StepError: the counts of all ranks sum to 0.
    """
    if total.device.type != "cpu":
        # Reading it would wait for the device; the next control word refuses a total of 0.
        return torch.where(total > 0, token_divisor / total, 0.0).to(torch.float32)
    if not total.item() > 0:
        raise zero_count_error(step, where())
    return token_divisor / total


def zero_count_error(step: int, where: str = "") -> StepError:
    return StepError(
        f"the counts of all ranks in step {step} sum to 0.",
        where=where,
        why="every token of the step's samples is masked.",
        fix="leave such samples out of the dataset, or use a larger global_batch.",
        step=step,
    )


def checked_count(
    count: Any, samples: int, count_unit: str, where: Callable[[], str]
) -> int | torch.Tensor:
    """The count of a loss: as given, an integer or a tensor of shape (); by default the number of samples.

    A count of tokens that is a tensor on a device is not checked: reading it would wait for the device.

    Raises:
        StepError: it is missing, although the loss is weighed by tokens; it is not one number; it does not
            fit a micro-batch of `samples`.
    """
    if count is None:
        if count_unit == "samples":
            return samples
        raise StepError(
            "the loss has no count.",
            where=where(),
            why='with count="tokens" the number of tokens of a micro-batch is not known.',
            fix="pass count=, the number of tokens in the loss.",
        )
    number: int | torch.Tensor
    if isinstance(count, torch.Tensor):
        if count.numel() != 1:
            raise StepError(
                f"count must be an integer or a tensor of shape (), got shape {tuple(count.shape)}.",
                where=where(),
                fix="pass the sum of the counts: count.sum().",
            )
        number = count.reshape(())
    else:
        try:
            number = operator.index(count)  # numpy's integers too
        except TypeError:
            raise StepError(
                f"count must be an integer or a tensor of shape (), got {count!r}.",
                where=where(),
                fix="pass the number of tokens in the loss; for samples leave `count` out.",
            ) from None
    if count_unit == "tokens" and not is_on_host(number):
        return number
    if not number >= 0:
        raise StepError(f"count must be 0 or more, got {number}.", where=where(), count=number)
    if count_unit == "samples" and number != samples:
        raise StepError(
            f"count is {number}, but this micro-batch holds {samples} samples.",
            where=where(),
            fix='pass count=len(batch); to weigh by tokens, `Training(..., count="tokens")`. A collate '
            "function must keep all samples: leave unwanted ones out of the dataset or the sampler.",
            count=number,
        )
    return number


def as_sum(
    loss: torch.Tensor,
    count: int | torch.Tensor,
    reduction: Reduction,
    unit: float | None = None,
) -> torch.Tensor:
    """The sum of the losses, shape (), float32 or wider; 0 if the count is 0 and the mean is NaN.

    Args:
        unit: Round the sum to a multiple of this, in float64.
    """
    if loss.dtype.itemsize < 4:  # sums of a step need more bits and range than half precision has
        loss = loss.float()
    total = loss * count if reduction == "mean" else loss
    if unit is not None:
        total = (total.double() / unit).round() * unit
    if isinstance(count, torch.Tensor):
        return torch.where((count == 0) & total.isnan(), torch.zeros_like(total), total)
    return torch.zeros_like(total) if count == 0 and bool(total.isnan()) else total


def has_no_gradient(loss: torch.Tensor, count: int | torch.Tensor, reduction: Reduction) -> bool:
    """Whether a loss is known to be a mean over no tokens, or a multiple of it."""
    if not is_on_host(count) or count != 0:
        return False
    return reduction == "mean" or bool(loss.isnan())


def is_on_host(count: int | torch.Tensor) -> bool:
    """Whether a count can be read without waiting for a device."""
    return not isinstance(count, torch.Tensor) or count.device.type == "cpu"


def check_loss(
    loss: Any, count: int | None, reduction: Reduction | None, where: Callable[[], str]
) -> None:
    """Raise StepError unless `loss` is a scalar that can be the sum or mean over `count` samples.

    Its last operation shows it: torch's loss functions, `mean` and `sum` record it. Later scaling is not
    checked. `count` is None if it is not known on the host.
    """
    if not isinstance(loss, torch.Tensor) or loss.dim() > 0:
        is_tensor = isinstance(loss, torch.Tensor)
        got = f"shape {tuple(loss.shape)}" if is_tensor else type(loss).__name__
        raise StepError(
            f"the loss must be a scalar tensor, got {got}.",
            where=where(),
            fix="take the mean over the samples: `loss.mean()`."
            if is_tensor
            else "pass the loss itself, without `.item()`, so that it has a gradient.",
        )
    if not loss.requires_grad:
        raise StepError(
            "the loss depends on no trainable parameter.",
            where=where(),
            fix="compute it from the model's output, outside of `torch.no_grad()`.",
        )
    node, name = loss.grad_fn, type(loss.grad_fn).__name__
    kind = torch_private.attribute(f"{_NODE}._saved_reduction", node)
    sizes = torch_private.attribute(f"{_NODE}._saved_self_sym_sizes", node)
    is_one = count is not None and count < 2  # over one sample, mean and sum are the same
    is_mean = kind == _MEAN_REDUCTION or (
        name.startswith("MeanBackward") and sizes is not None and sizes[:1] == (count,)
    )
    if reduction == "sum" and not is_one and is_mean:
        raise StepError(
            'the loss is a mean, and reduction="sum" was given.',
            where=where(),
            fix='leave `reduction="sum"` out, or compute the sum.',
        )
    if reduction == "sum" or is_one:
        return
    is_plain_sum = (
        name.startswith("SumBackward")
        and sizes is not None
        and count is not None
        and math.prod(sizes) >= count
    )
    if kind == _SUM_REDUCTION or (reduction is None and is_plain_sum):
        raise StepError(
            "the loss is a sum; `step.backward` takes the mean.",
            where=where(),
            fix='compute the mean over the samples (or tokens). Or say what the loss is: reduction="sum", or '
            'reduction="mean" if a sum has computed a mean.',
        )
    # cross_entropy and nll_loss divide by the sum of the weights of all targets that are not ignored.
    total = torch_private.attribute(f"{_NODE}._saved_total_weight", node)
    if count is None or total is None or total.device.type != "cpu" or uses_all_gather(loss):
        return
    if float(total) != count and float(total) != count * _targets_per_sample(node, count):
        raise StepError(
            f"the loss is a mean over a total weight of {float(total):g}, but the count is {count}.",
            where=where(),
            why="its targets are tokens, or have class weights, or some are ignored (ignore_index).",
            fix='use Training(..., count="tokens") and pass that total as count.',
        )


def _targets_per_sample(node: Any, count: int) -> float:
    """The number of targets of each of `count` samples that a loss does not ignore; NaN if they differ."""
    targets = torch_private.attribute(f"{_NODE}._saved_target", node)
    ignored = torch_private.attribute(f"{_NODE}._saved_ignore_index", node)
    if targets is None or ignored is None or not count or targets.numel() % count:
        return math.nan
    # torch returns a negative index as an unsigned number of 64 bits.
    ignored = ignored - 2**64 if ignored >= 2**63 else ignored
    numbers = (targets.reshape(count, -1) != ignored).sum(1)
    return float(numbers[0]) if bool((numbers == numbers[0]).all()) else math.nan
