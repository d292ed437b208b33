"""Clipping of gradients that are complete on all ranks, as `torch.nn.utils` clips them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from paceline.errors import ConfigError
from paceline.parallel.modules import local


@dataclass(frozen=True, kw_only=True)
class Clipping:
    """How to clip a gradient: all of it to a norm, or each element to a value.

    Attributes:
        norm: Bound of the norm.
        norm_type: p of the p-norm; infinity is the largest absolute value.
        value: Bound of the absolute value of each element.

    Raises:
        ConfigError: a bound or the type is out of range, or the options do not fit each other.
    """

    norm: float | None
    norm_type: float
    value: float | None

    def __post_init__(self) -> None:
        for name, bound in (("clip_norm", self.norm), ("clip_value", self.value)):
            if bound is not None and not bound > 0:
                raise ConfigError(
                    f"{name} must be more than 0, got {bound}.",
                    fix=f"leave {name} out to train without clipping.",
                )
        if self.norm is not None and self.value is not None:
            raise ConfigError(
                "clip_norm and clip_value cannot be combined.", fix="leave one of them out."
            )
        if not self.norm_type > 0:
            raise ConfigError(
                f"norm_type must be more than 0, got {self.norm_type}.",
                fix="leave it out for the 2-norm, or give math.inf for the largest absolute value.",
            )
        if self.norm is None and self.norm_type != 2.0:
            raise ConfigError(
                "norm_type has no effect without clip_norm.", fix="give clip_norm too."
            )


def clip(
    gradients: Sequence[torch.Tensor],
    norm_of: Callable[[Sequence[torch.Tensor], float], torch.Tensor],
    clipping: Clipping,
) -> torch.Tensor:
    """Clip gradients in place.

    Args:
        norm_of: The p-norm of gradients over all ranks, shape (), from gradients and p.

    Returns:
        The norm before clipping, shape (), on the gradients' device; the largest absolute value if values are
        clipped.
    """
    parts = [local(gradient) for gradient in gradients]
    # The norm shows NaN and infinity, which clipping of values would hide.
    norm = norm_of(gradients, math.inf if clipping.norm is None else clipping.norm_type)
    if clipping.norm is not None:
        torch._foreach_mul_(parts, torch.clamp(clipping.norm / (norm + 1e-6), max=1.0))
    if clipping.value is not None:
        for part in parts:
            part.clamp_(-clipping.value, clipping.value)
    return norm
