"""Tells the clock when a backward of DDP waits for other ranks.

On a GPU its functions that wait return at once; there the events of the clock show what the device waits for.
"""

from __future__ import annotations

import torch

from paceline import torch_private
from paceline.clock.step_clock import COMMUNICATION, clock

_ENGINE = "torch.autograd.Variable._execution_engine"


def watch_backward(loss: torch.Tensor) -> None:
    """Count what the next backward of `loss` does after its last gradient as communication.

    DDP waits for the sums of its buckets in a callback at the end of the backward. Callbacks run in the order
    in which they were queued, so one that is queued by the gradient of the loss runs before it.
    """
    engine = torch_private.find(_ENGINE)
    if engine is not None and loss.requires_grad:

        def on_begin(_: torch.Tensor) -> None:
            engine.queue_callback(_enter_communication)

        loss.register_hook(on_begin)  # type: ignore[no-untyped-call]


def _enter_communication() -> None:
    clock.enter(COMMUNICATION)
