"""Number formats of a step: fp32, bf16 or fp16 autocast, and the loss scale that fp16 needs.

A front to `torch.autocast` and `torch.amp.GradScaler`, on CPU as on CUDA. Ranks need no exchange
for the scaler: summed gradients, with their NaN and infinity, are equal on all ranks. Under FSDP each rank
holds parts of them, and torch exchanges what its scaler has found.
"""

from __future__ import annotations

from typing import Any

import torch

from paceline import torch_private
from paceline.errors import ConfigError

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """Autocast around a forward, and the loss scale around a backward.

    Attributes:
        name: The format in use.
        scales: Whether the loss is scaled, as in fp16.
        scaler: Scales the loss; it is disabled in the other formats.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._autocast = autocast_of(name, device)
        self.name = name
        self.scales = name == "fp16"
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.scales)
        # The first `scale` creates the scaler's tensors; `update` needs them on every rank.
        self.scaler.scale(torch.zeros((), device=device))
        self._inside = False

    def enter(self) -> None:
        if self._autocast is not None and not self._inside:
            self._autocast.__enter__()  # type: ignore[no-untyped-call] # untyped in torch
            self._inside = True

    def leave(self) -> None:
        """End a forward. torch advises to run backward outside of autocast."""
        if self._autocast is not None and self._inside:
            self._inside = False
            self._autocast.__exit__(None, None, None)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale."""
        return self.scaler.scale(loss) if self.scales else loss

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the loss scale."""
        if self.scales:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step an optimizer whose gradients are unscaled; False if they are not finite, so it is left out."""
        if not self.scales:
            optimizer.step()
            return True
        found = torch_private.find("torch.amp.GradScaler._found_inf_per_device")
        # Read before the step, because reading waits for the device.
        is_finite = found is None or not any(found(self.scaler, optimizer).values())
        self.scaler.step(optimizer)
        return is_finite

    def end_step(self) -> None:
        """Adapt the loss scale after all optimizers."""
        if self.scales:
            self.scaler.update()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a loss scale. The state of a training in another format is ignored."""
        if "scale" in state:
            self.scaler.load_state_dict(state)


def autocast_of(name: str, device: torch.device) -> torch.autocast | None:
    """The context of a forward in a format; None for fp32."""
    if name == "fp32":
        return None
    if name not in _DTYPES:
        raise ConfigError(f"precision must be fp32, bf16 or fp16; got {name!r}.")
    return torch.autocast(device.type, dtype=_DTYPES[name])
