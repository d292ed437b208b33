"""The buffers of models as they were before a step, for a step that is repeated."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from paceline.parallel.modules import unwrap


class Buffers:
    """The buffers of models, such as those of BatchNorm, as they were before a step."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._buffers = [buffer for model in models for buffer in unwrap(model).buffers()]
        self._copies = [buffer.clone() for buffer in self._buffers]

    def keep(self) -> None:
        """Copy them."""
        if self._buffers:
            torch._foreach_copy_(self._copies, self._buffers)

    def restore(self) -> None:
        """Undo what has changed since `keep`, or since this object was made."""
        with torch.no_grad():
            for buffer, copy in zip(self._buffers, self._copies, strict=True):
                buffer.copy_(copy)
