"""Number formats of a step: fp32, bf16 or fp16 autocast, the loss scale that fp16 needs, and "auto".

A front to `torch.autocast` and `torch.amp.GradScaler`, on CPU as on CUDA. The scaler's verdict needs no
agreement between ranks: gradients that were summed are equal everywhere, NaN and infinity included.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch

from paceline import log
from paceline.errors import ConfigError
from paceline.job.job import Job
from paceline.training.turns import Turns

Format = Literal["fp32", "bf16", "fp16", "auto"]


class Precision:
    """Autocast around a forward, and the loss scale around a backward.

    With "auto" the first 32 steps are done in fp32 and bf16 by turns, and timed; then all ranks take what
    was faster on rank 0, which checkpoints keep.

    Args:
        steady: Whether the same bits must come out of every run.

    Attributes:
        name: The format in use.

    Collective: none, but where a method says so.
    """

    def __init__(self, name: str, job: Job, *, steady: bool) -> None:
        if name not in get_args(Format):
            raise ConfigError(
                f"precision must be one of {', '.join(get_args(Format))}; got {name!r}."
            )
        if steady and name == "auto":
            raise ConfigError(
                "precision='auto' goes by the clock, and reproducible=True by the bits.",
                fix="choose 'fp32', 'bf16' or 'fp16'.",
            )
        device = job.device
        self._job = job
        self._turns = Turns(job, ["fp32", "bf16"]) if name == "auto" else None
        self._is_auto = name == "auto"
        self.name = "fp32" if name == "auto" else name
        self.scaler = torch.amp.GradScaler(device.type) if name == "fp16" else None
        if self.scaler is not None:
            # It is set up by its first use, which a rank without samples in the first step lacks.
            self.scaler.scale(torch.zeros((), device=device))
        self._autocast = self._make_autocast()
        self._inside = False

    def _make_autocast(self) -> torch.autocast | None:
        if self.name == "fp32":
            return None
        dtype = torch.bfloat16 if self.name == "bf16" else torch.float16
        return torch.autocast(self._job.device.type, dtype=dtype)

    def _use(self, name: str) -> None:
        self.name = name
        self._autocast = self._make_autocast()

    @property
    def is_settled(self) -> bool:
        """Whether the format will not change any more."""
        return self._turns is None

    def enter(self) -> None:
        """Begin a forward."""
        if self._turns is not None:
            self._turns.begin()
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
        """Adapt the loss scale after all optimizers; False where the step was left out.

        Collective: all ranks.
        """
        if self._turns is not None:
            self._follow(self._turns)
        if self.scaler is None:
            return True
        before = self.scaler.get_scale()
        self.scaler.update()
        return self.scaler.get_scale() >= before

    def _follow(self, turns: Turns) -> None:
        is_final = turns.end_step()
        self._use(turns.way)
        if is_final:
            self._turns = None
            if self._job.rank == 0:
                log.logger.info("precision: %s.", turns.verdict)

    def state_dict(self) -> dict[str, Any]:
        """The loss scale and its history, or what "auto" has chosen; empty where there is none."""
        if self._is_auto and self._turns is None:
            return {"chosen": self.name}
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a loss scale; one from another precision has no meaning here and is left out."""
        if self._is_auto and "chosen" in state:
            self._turns = None
            self._use(state["chosen"])
        if self.scaler is not None and "chosen" not in state and state:
            self.scaler.load_state_dict(state)
