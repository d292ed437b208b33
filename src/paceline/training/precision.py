"""Number formats of a step: fp32, bf16 or fp16 autocast, and the loss scale that fp16 needs.

A front to `torch.autocast` and `torch.amp.GradScaler`, on CPU as on CUDA. Ranks need no exchange
for the scaler: summed gradients, with their NaN and infinity, are equal on all ranks. Under FSDP each rank
holds parts of them, and torch exchanges what its scaler has found.
"""

from __future__ import annotations

from typing import Any

import torch

from paceline import log, torch_private
from paceline.errors import ConfigError
from paceline.job import collectives
from paceline.job.job import Job

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_FORMATS = ("fp32", *_DTYPES, "auto")


class Precision:
    """Autocast around a forward, and the loss scale around a backward.

    "auto" is bf16 if the processor or GPU of rank 0 computes in bf16, else fp32.

    Attributes:
        name: The format in use.
        scaler: Scales the loss in fp16; it is disabled in the other formats.
    """

    def __init__(self, name: str, job: Job, *, reproducible: bool) -> None:
        if name not in _FORMATS:
            raise ConfigError(f"precision must be one of {', '.join(_FORMATS)}; got {name!r}.")
        if name == "auto":
            if reproducible:
                raise ConfigError(
                    "precision='auto' cannot be combined with reproducible=True.",
                    why="it depends on the hardware, so two runs may differ.",
                    fix="choose 'fp32', 'bf16' or 'fp16'.",
                )
            name = collectives.on_rank0(job, lambda: _best_format(job.device))
            if job.rank == 0:
                log.logger.info("precision: %s.", name)
        self.name = name
        self.scaler = torch.amp.GradScaler(job.device.type, enabled=name == "fp16")
        # The first `scale` creates the scaler's tensors; `update` needs them on every rank.
        self.scaler.scale(torch.zeros((), device=job.device))
        self._autocast = autocast_of(name, job.device)
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

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step an optimizer whose gradients are unscaled; False if they are not finite, so it is left out."""
        found = None
        if self.scaler.is_enabled():
            found = torch_private.find("torch.amp.GradScaler._found_inf_per_device")
        # Read before the step, because reading waits for the device.
        is_finite = found is None or not any(found(self.scaler, optimizer).values())
        self.scaler.step(optimizer)
        return is_finite

    def end_step(self) -> None:
        """Adapt the loss scale after all optimizers."""
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


def _best_format(device: torch.device) -> str:
    if device.type == "cpu":
        # torch 2.11 lacks get_capabilities; "auto" is then fp32.
        known: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
        has_bf16 = bool(known.get("amx_bf16") or known.get("avx512_bf16"))
    elif device.type == "cuda":
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has_bf16 = bool(torch.get_device_module(device).is_bf16_supported())
    return "bf16" if has_bf16 else "fp32"
