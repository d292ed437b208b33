"""Number formats of a step: fp32, bf16 or fp16 autocast, and the loss scale that fp16 needs.

A front to `torch.autocast` and `torch.amp.GradScaler`, on CPU as on CUDA. The scaler's verdict needs no
agreement between ranks: gradients that were summed are equal everywhere, NaN and infinity included.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch

from paceline.errors import ConfigError

Format = Literal["fp32", "bf16", "fp16"]


class Precision:
    """Autocast around a forward, and the loss scale around a backward.

    Collective: none.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        if name not in get_args(Format):
            raise ConfigError(
                f"precision must be one of {', '.join(get_args(Format))}; got {name!r}."
            )
        self.name = name
        self.scaler = torch.amp.GradScaler(device.type) if name == "fp16" else None
        if self.scaler is not None:
            # It is set up by its first use, which a rank without samples in the first step lacks.
            self.scaler.scale(torch.zeros((), device=device))
        self._autocast = None
        if name != "fp32":
            dtype = torch.bfloat16 if name == "bf16" else torch.float16
            self._autocast = torch.autocast(device.type, dtype=dtype)
        self._inside = False

    def enter(self) -> None:
        """Begin a forward."""
        if self._autocast is not None and not self._inside:
            self._autocast.__enter__()  # type: ignore[no-untyped-call] # torch leaves it untyped
            self._inside = True

    def leave(self) -> None:
        """End a forward; backward runs outside of autocast, as torch advises."""
        if self._autocast is not None and self._inside:
            self._inside = False
            self._autocast.__exit__(None, None, None)

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale; the loss itself where there is none."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the loss scale, noting NaN and infinity."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the optimizer, unless the scaler saw NaN or infinity in its gradients."""
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)

    def end_step(self) -> bool:
        """Adapt the loss scale after all optimizers; False where the step was left out."""
        if self.scaler is None:
            return True
        before = self.scaler.get_scale()
        self.scaler.update()
        return self.scaler.get_scale() >= before

    def state_dict(self) -> dict[str, Any]:
        """The loss scale and its history; empty where there is none."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a loss scale; one from another precision has no meaning here and is left out."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)
