"""Number formats of a step: fp32, bf16 or fp16 autocast, and the loss scale that fp16 needs.

A front to `torch.autocast` and `torch.amp.GradScaler`, on CPU as on CUDA. With DDP ranks need no exchange
for the scaler: summed gradients, with their NaN and infinity, are equal on all ranks. If ranks hold parts of
the model, they exchange what they have found, over all axes of the mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline import torch_private
from paceline.errors import ConfigError
from paceline.parallel.modules import local, owned_parameters

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class _Scaler(torch.amp.GradScaler):
    """torch's scaler, which can check gradients that are split over ranks.

    Attributes:
        agree: Makes a number the largest of all ranks, in place; None if gradients are equal on all ranks.
    """

    agree: Callable[[torch.Tensor], None] | None = None

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        if self.agree is None:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        gradients = [local(p.grad) for p in owned_parameters(optimizer) if p.grad is not None]
        if gradients := [g for g in gradients if g.numel()]:
            # With `cpu_offload` of FSDP they are on the host.
            torch._foreach_mul_(gradients, inv_scale.to(gradients[0].device))
            norms = torch._foreach_norm(gradients, float("inf"))
            is_finite = torch.stack([norm.float() for norm in norms]).isfinite().all()
            found_inf.copy_(~is_finite)
        self.agree(found_inf)
        return {found_inf.device: found_inf}


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
        self._device = device
        self.scaler = self._new_scaler()
        self._inside = False

    def _new_scaler(self) -> _Scaler:
        scaler = _Scaler(self._device.type, enabled=self.scales)
        # The first `scale` creates the scaler's tensors; `update` needs them on every rank.
        scaler.scale(torch.zeros((), device=self._device))
        return scaler

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

    def unscale(
        self, optimizer: torch.optim.Optimizer, agree: Callable[[torch.Tensor], None] | None
    ) -> None:
        """Divide the gradients by the loss scale. `agree`: see `Strategy.largest_over_ranks`."""
        if self.scales:
            self.scaler.agree = agree
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
            self.scaler = self._new_scaler()  # the old one may have left a step half done
            self.scaler.load_state_dict(state)


def autocast_of(name: str, device: torch.device) -> torch.autocast | None:
    """The context of a forward in a format; None for fp32."""
    if name == "fp32":
        return None
    if name not in _DTYPES:
        raise ConfigError(f"precision must be fp32, bf16 or fp16; got {name!r}.")
    return torch.autocast(device.type, dtype=_DTYPES[name])
