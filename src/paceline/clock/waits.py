"""Tells the clock when torch waits for other ranks.

torch has no hook for that on the CPU, so its two functions that wait are wrapped. On a GPU they return at
once; there the events of the clock show what the device waits for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from paceline import torch_private
from paceline.clock.step_clock import COMMUNICATION, COMMUNICATION_TP, clock

_WAIT_TENSOR = "torch.distributed._functional_collectives.wait_tensor"
_ENGINE = "torch.autograd.Variable._execution_engine"


@functools.cache
def watch_waits() -> None:
    """Count the time in `Work.wait`, and in tensor parallelism's wait, as communication."""
    dist.Work.wait = _timed(dist.Work.wait, COMMUNICATION)  # type: ignore[method-assign]
    torch_private.wrap(_WAIT_TENSOR, lambda wait: _timed(wait, COMMUNICATION_TP))


def _timed(wait: Callable[..., Any], phase: int) -> Callable[..., Any]:
    @functools.wraps(wait)
    def wrapper(*args: Any, **options: Any) -> Any:
        was = clock.begin(phase)
        try:
            return wait(*args, **options)
        finally:
            clock.end(was)

    return wrapper


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
