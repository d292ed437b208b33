"""What a dry run prints: what one rank of a larger job holds and does (`paceline run --dry-run`).

The rank computes real steps, and only communication is left out. So its memory is measured, not estimated.
The optimizer makes its state in the first step, so the second one shows the memory of all later steps.
"""

from __future__ import annotations

import resource
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.checkpoint import codec
from paceline.data.plan import PlannedStep
from paceline.job.job import Job
from paceline.machine import format_bytes
from paceline.parallel.modules import local

STEPS = 2


def forget_peak(device: torch.device) -> None:
    """Measure the peak of device memory from now on. The peak of a process cannot be forgotten."""
    if device.type != "cpu":
        torch.get_device_module(device).reset_peak_memory_stats(device)


def lines(
    job: Job,
    planned: PlannedStep,
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    state: dict[str, Any],
) -> list[str]:
    """What to print after the last step.

    Args:
        planned: The last step.
        state: What a checkpoint would hold.

    Raises:
        CheckpointError: the state cannot be saved.
    """
    parameters = [p for model in models for p in model.parameters()]
    gradients = [p for p in parameters if p.requires_grad]
    states = [value for o in optimizers for values in o.state.values() for value in values.values()]
    _, saved = codec.encode(state)
    number = planned.num_micro_batches
    mesh = "" if job.mesh is None else f" ({job.mesh})"
    if job.device.type == "cpu":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        what = "peak of the process, with Python, torch and the data"
    else:
        peak = torch.get_device_module(job.device).max_memory_allocated(job.device)
        what = "peak of the device, with activations"
    return [
        f"dry run of rank {job.rank} of {job.world_size}{mesh}:",
        f"  a step                   {planned.num_samples} samples; {number} micro-batches on this rank",
        f"  parameters               {format_bytes(_held(parameters))} on this rank, "
        f"{format_bytes(_whole(parameters))} unsharded",
        f"  gradients                {format_bytes(_held(gradients))}",
        f"  optimizer state          {format_bytes(_held(states))}",
        f"  memory                   {format_bytes(peak)}: {what}",
        f"  a checkpoint             {len(saved)} tensors, {format_bytes(_held(saved.values()))} on this "
        f"rank, {format_bytes(_whole(saved.values()))} unsharded",
        "Nothing was communicated, saved or logged, and the weights have no meaning.",
    ]


def _held(values: Iterable[Any]) -> int:
    """The bytes that this rank holds, each storage once."""
    sizes = {}
    for value in values:
        if isinstance(value, torch.Tensor):
            storage = local(value.detach()).untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def _whole(values: Iterable[torch.Tensor]) -> int:
    """The bytes of the tensors as one process would hold them."""
    return sum(value.numel() * value.element_size() for value in values)
