"""Clipping of a gradient that is complete on all ranks, as `torch.nn.utils.clip_grad_norm_` does it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.errors import ConfigError
from paceline.parallel.modules import local


def check_clip_norm(clip_norm: float | None) -> None:
    """Raise ConfigError for a bound that is not more than 0."""
    if clip_norm is not None and not clip_norm > 0:
        raise ConfigError(
            f"clip_norm must be more than 0, got {clip_norm}.",
            fix="leave clip_norm out to train without clipping.",
        )


def clip(gradients: Sequence[torch.Tensor], norm: torch.Tensor, clip_norm: float) -> None:
    """Scale gradients in place, so that their norm is at most `clip_norm`.

    Args:
        norm: The norm of these gradients over all ranks, shape ().
    """
    factor = torch.clamp(clip_norm / (norm + 1e-6), max=1.0)
    torch._foreach_mul_([local(gradient) for gradient in gradients], factor)
