"""The buffers of models as they were before a step, for a step that is repeated or not saved."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from paceline.parallel.modules import unwrap


class Buffers:
    """A copy of the buffers of models, such as those of BatchNorm.

    Args:
        saved_only: Only buffers that a checkpoint holds: not those with `persistent=False`, such as the
            tables of rotary embeddings.
    """

    def __init__(self, models: Sequence[nn.Module], *, saved_only: bool = False) -> None:
        modules = [unwrap(model) for model in models]
        found = [buffer for module in modules for buffer in module.buffers()]
        if saved_only:
            saved = {id(x) for m in modules for x in m.state_dict(keep_vars=True).values()}
            found = [buffer for buffer in found if id(buffer) in saved]
        # On a GPU a copy of tensors of one dtype is one kernel.
        self._groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for buffer in found:
            self._groups.setdefault((buffer.dtype, buffer.device), []).append(buffer)
        self._copies = [[b.clone() for b in group] for group in self._groups.values()]

    def keep(self) -> None:
        """Copy them again."""
        for copies, buffers in zip(self._copies, self._groups.values(), strict=True):
            torch._foreach_copy_(copies, buffers)

    @torch.no_grad()
    def restore(self) -> None:
        """Undo what has changed since `keep`, or since this object was made."""
        for copies, buffers in zip(self._copies, self._groups.values(), strict=True):
            torch._foreach_copy_(buffers, copies)
