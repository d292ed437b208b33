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
        roots = [unwrap(model) for model in models]
        found = [
            (module, name, buffer)
            for root in roots
            for module in root.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        if saved_only:
            saved = {id(x) for root in roots for x in root.state_dict(keep_vars=True).values()}
            found = [each for each in found if id(each[2]) in saved]
        self._places = [(module, name) for module, name, _ in found]
        self._copy([buffer for _, _, buffer in found])

    @torch.no_grad()
    def _copy(self, buffers: list[torch.Tensor]) -> None:
        self._buffers = buffers
        # On a GPU a copy of tensors of one dtype is one kernel.
        groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for buffer in buffers:
            groups.setdefault((buffer.dtype, buffer.device), []).append(buffer)
        self._groups = [(group, [b.clone() for b in group]) for group in groups.values()]

    @torch.no_grad()
    def keep(self) -> None:
        """Copy them again."""
        buffers = [getattr(module, name) for module, name in self._places]
        # A forward may assign another tensor, instead of changing the values of the first one.
        if any(new is not old for new, old in zip(buffers, self._buffers, strict=True)):
            self._copy(buffers)
            return
        for group, copies in self._groups:
            torch._foreach_copy_(copies, group)

    @torch.no_grad()
    def restore(self) -> None:
        """Undo what has changed since `keep`, or since this object was made."""
        for (module, name), buffer in zip(self._places, self._buffers, strict=True):
            setattr(module, name, buffer)
        for group, copies in self._groups:
            torch._foreach_copy_(group, copies)
