"""How a training goes on after the failure of another rank, with `paceline run --recover in-place`.

The ranks that are left have the state of the last completed step, or of the one before where the gradients of
all ranks had not arrived. `newest_state` gives the newest one to those behind it, and to the process in place
of the failed rank. The step in progress is then repeated.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.checkpoint import codec
from paceline.data.batches import Batches
from paceline.job import recovery
from paceline.job.job import Job
from paceline.parallel.ddp import DDPStrategy, Replica, can_reconnect
from paceline.parallel.modules import find_wrapper
from paceline.parallel.syncbn import SyncBatchNorm
from paceline.training.step import StepContext
from paceline.training.training_state import TrainingState


def why_not(
    models: Sequence[nn.Module], context: StepContext, batches: Batches, state: TrainingState
) -> str:
    """Why a training cannot recover in place; "" if it can, or if the launcher does not replace ranks."""
    if not recovery.is_on(os.environ):
        return ""
    if recovery.num_trainings > 1:
        return "the script has begun another training before, with which a new process would begin"
    if type(context.strategy) is not DDPStrategy:
        return "that needs paceline.ddp without reproducible=True"
    if not all(isinstance(find_wrapper(model), Replica) for model in models):
        return "each model must be wrapped by paceline.ddp"
    if not can_reconnect():
        return "this torch cannot connect DDP again"
    if any(isinstance(layer, SyncBatchNorm) for model in models for layer in model.modules()):
        return "the forward of paceline.sync_batchnorm is a collective"
    if batches.num_samples is None:
        return "the steps of a stream cannot be read again"
    if batches.is_auto:
        return 'it cannot be combined with micro_batch="auto"'
    if len(context.optimizers) > 1:
        return "a step of several optimizers may be half done"
    if state.keeps:
        return "objects given to training.keep cannot be put back to the beginning of a step"
    if state.has_unknown_schedule():
        return "the training does not know the scheduler; use Training(..., schedule=scheduler)"
    if context.recheck is not None:
        return "it cannot be combined with recheck_every"
    return ""


def newest_state(job: Job, step: int, save: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
    """The state of the rank that has done the most steps, if this rank is behind it.

    Args:
        step: The last step that this rank has done; -1 without a state.
        save: Returns the state of this rank.

    Collective: all ranks.
    """
    exchange, control = job.exchange, job.control
    assert exchange is not None
    steps = exchange.gather("recovery", step)
    source = steps.index(max(steps))
    behind = [rank for rank, each in enumerate(steps) if each < steps[source]]
    if not behind:
        return None
    if job.rank == source:
        tree, tensors = codec.encode(save())
        layout = [
            [n, str(t.dtype).removeprefix("torch."), list(t.shape)] for n, t in tensors.items()
        ]
        exchange.gather_bytes("recovery", json.dumps([tree, layout]).encode())
        for tensor in tensors.values():
            data = _bytes_of(tensor.detach().cpu().contiguous())
            for rank in behind if data.numel() else ():
                dist.send(data, group=control, group_dst=rank)
        return None
    received = exchange.gather_bytes("recovery", b"")[source]
    if job.rank not in behind:
        return None
    tree, layout = json.loads(received)
    tensors = {}
    for name, dtype, shape in layout:
        tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype))
        data = _bytes_of(tensors[name])
        if data.numel():
            dist.recv(data, group=control, group_src=source)
    state: dict[str, Any] = codec.decode(tree, tensors)
    return state


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, which Gloo sends whatever its dtype is."""
    return tensor.reshape(-1).view(torch.uint8)
