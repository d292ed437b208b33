"""Scaling and clipping of summed gradients in one pass, as `torch.nn.utils.clip_grad_norm_` does it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def scale_and_clip(
    gradients: Sequence[torch.Tensor],
    norm_of: Callable[[Sequence[torch.Tensor]], torch.Tensor],
    *,
    factor: torch.Tensor | None,
    clip_norm: float | None,
) -> torch.Tensor | None:
    """Multiply gradients in place by `factor`, then clip their 2-norm to `clip_norm`.

    Args:
        norm_of: The 2-norm of gradients over all ranks, shape ().
        factor: Shape (), on the gradients' device; None for 1.

    Returns:
        The norm after `factor` and before clipping, shape (), on the gradients' device; None without
        `clip_norm`, because the norm costs a pass.
    """
    if clip_norm is None:
        if factor is not None:
            torch._foreach_mul_(list(gradients), factor)
        return None
    norm = norm_of(gradients)
    if factor is not None:
        norm = norm * factor
    coefficient = torch.clamp(clip_norm / (norm + 1e-6), max=1.0)
    if factor is not None:
        coefficient = coefficient * factor
    torch._foreach_mul_(list(gradients), coefficient)
    return norm
