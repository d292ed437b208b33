"""The weight of a micro-batch's loss in the gradient of a step, from its sum of losses and its count.

A step needs the mean over its samples, or tokens. The user gives a sum and a count, and backward starts from
`strategy.divisor / number` instead of 1, so that the sum over ranks is that mean for any split over ranks.
The number of samples is known before the step. The number of tokens is not: there the divisor is a power
of two near the last total, and `update` multiplies by `token_divisor / total`. Dividing by a power of two
does not round, so the result does not depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from paceline import torch_private
from paceline.errors import CountError, LossError
from paceline.job import collectives
from paceline.job.job import Job

Count = Literal["samples", "tokens"]

# Reductions as torch's loss functions save them for backward (`_saved_reduction`).
_MEAN_REDUCTION = 1
_NODE = "torch.autograd.graph.Node"


def next_token_divisor(total: float) -> float:
    """The power of two nearest to the last total."""
    return 2.0 ** round(math.log2(max(total, 1.0)))


def total_counts(job: Job, counts: Sequence[float | torch.Tensor]) -> torch.Tensor:
    """The counts of a step summed over ranks, float64, on the job's device.

    Args:
        counts: This rank's, one for each optimizer.
    """
    each = [torch.as_tensor(count, dtype=torch.float64, device=job.device) for count in counts]
    return collectives.all_reduce(job, torch.stack([count.reshape(()) for count in each]))


def token_factor(
    total: torch.Tensor, token_divisor: float, where: Callable[[], str], step: int
) -> torch.Tensor:
    """The factor for gradients that were divided by `token_divisor` instead of `total`, shape ().

    Raises:
        CountError: the counts of all ranks sum to 0.
    """
    if total.device.type != "cpu":
        # Reading it would wait for the device; the next control word refuses a total of 0.
        return torch.where(total > 0, token_divisor / total, 0.0).to(torch.float32)
    if not total.item() > 0:
        raise CountError(
            f"the counts of all ranks in this step sum to {total.item():g}.",
            where=where(),
            why="every token of the step's samples is masked.",
            fix="leave such samples out of the dataset, or use a larger global_batch.",
            step=step,
        )
    return token_divisor / total


def check_loss(loss: Any, count: int | None, where: Callable[[], str]) -> None:
    """Raise LossError unless `loss` is a scalar that can be a sum over `count` samples.

    A mean is recognised by the operation it came from: torch's loss functions and `mean` record it.
    `count` is None if it is not known on the host.
    """
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.dim() > 0:
        got = (
            f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        )
        raise LossError(
            f"the loss must be a scalar tensor, got {got}.",
            where=where(),
            fix='use reduction="sum", or sum over the samples: `loss.sum()`.',
        )
    if not loss.requires_grad:
        raise LossError(
            "the loss depends on no trainable parameter.",
            where=where(),
            fix="compute it from the model's output, outside of `torch.no_grad()`.",
        )
    if _is_mean(loss.grad_fn, count):
        raise LossError(
            "the loss is a mean over the samples; it must be their sum.",
            where=where(),
            why="a sum and its count are exact over ragged micro-batches and ranks; means are not.",
            fix='use reduction="sum"; `step.backward(loss, count=...)` divides by the count.',
        )


def _is_mean(node: Any, count: int | None) -> bool:
    """Whether a loss is a mean over samples, as far as its last operations show.

    Later scaling is not checked: `mean * len(y)` is a sum.
    """
    if count is not None and count < 2:
        return False  # over one sample, mean and sum are the same
    kind = type(node).__name__
    if torch_private.attribute(f"{_NODE}._saved_reduction", node) == _MEAN_REDUCTION:
        return True
    if kind in ("MeanBackward0", "MeanBackward1"):
        # A mean over features, after a sum over samples, is a legal loss.
        sizes = torch_private.attribute(f"{_NODE}._saved_self_sym_sizes", node)
        return sizes is not None and len(sizes) > 0 and sizes[0] == count
    if kind == "AddBackward0":
        return any(_is_mean(term, count) for term, _ in node.next_functions)
    return False


def check_count(
    count: int | torch.Tensor, samples: int, kind: str, where: Callable[[], str]
) -> None:
    """Raise CountError unless `count` fits a micro-batch of `samples`.

    A count of tokens that is a tensor on a device is not checked: reading it would wait for the device.
    """
    if isinstance(count, torch.Tensor) and count.device.type != "cpu" and kind == "tokens":
        return
    if not count >= 0:
        raise CountError(f"count must be 0 or more, got {count}.", where=where(), count=count)
    if kind == "samples" and count != samples:
        raise CountError(
            f"count is {count}, but this micro-batch holds {samples} samples.",
            where=where(),
            fix='pass count=len(batch); to weigh by tokens, `Training(..., count="tokens")`.',
            count=count,
        )
