"""What describes a training in its reports: ranks, hosts, hardware, versions, and the sizes of its models."""

from __future__ import annotations

import platform
import re
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import paceline
from paceline.job.job import Job
from paceline.machine import usable_cores

_BUCKET_BYTES, _FIRST_BUCKET_BYTES = 25 << 20, 1 << 20  # torch's defaults for DDP
# Tensors of the size of a parameter in the state of torch's optimizers, besides one for momentum.
_STATES = {
    "SGD": 0,
    "Muon": 0,
    "RMSprop": 1,
    "Adagrad": 1,
    "Adam": 2,
    "AdamW": 2,
    "NAdam": 2,
    "RAdam": 2,
}


def job_facts(job: Job) -> dict[str, Any]:
    """The facts that are the same for all trainings of a job, by name."""
    facts: dict[str, Any] = {
        "script": Path(sys.argv[0]).name,
        "world_size": job.world_size,
        "data_ranks": job.data.size,
        "local_world_size": job.local_world_size,
        "host": socket.gethostname(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "launcher": job.launcher,
        "restarts": job.restarts,
        "device": job.device.type,
        "backend": "none" if job.group is None else dist.get_backend(job.group),
        "mesh": None if job.mesh is None else str(job.mesh),
        "torch": torch.__version__,
        "paceline": paceline.__version__,
        "python": platform.python_version(),
    }
    if job.device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(job.device)
    return facts


def model_facts(
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    *,
    bucket_bytes: int,
    param_bytes: int,
) -> dict[str, Any]:
    """Sizes of the models, unsharded, by name; `paceline plan` needs them.

    "buckets" are the bytes of DDP's buckets in the order of the backward; "blocks" the bytes that FSDP
    gathers for each block, and those of its gradients; "powersgd_bytes" what PowerSGD sends for each rank of
    its approximation, and besides. "state_bytes" is the sum of weights, gradients and optimizer state; None
    with an optimizer that is not torch's.

    Args:
        bucket_bytes: The largest bucket of DDP; 0 for torch's default.
        param_bytes: Of an element of the parameters that FSDP gathers; 0 for their own dtype.
    """
    parameters = [p for model in models for p in model.parameters()]
    trained = [p for p in parameters if p.requires_grad]
    matrices = [p for p in trained if p.dim() > 1 and len(p)]
    weight_bytes = sum(p.nbytes for p in parameters)
    state_bytes = weight_bytes + sum(p.nbytes for p in trained)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            tensors = _STATES.get(type(optimizer).__name__, 0) + (group.get("momentum", 0) > 0)
            state_bytes += tensors * sum(p.nbytes for p in group["params"])
    # A block of FSDP is an element of a list of modules, such as layers.3; the rest of a model is one too.
    blocks: dict[tuple[int, str], list[int]] = {}
    for number, model in enumerate(models):
        for name, p in model.named_parameters():
            block = re.match(r"(?:.*?\.)?\d+\.", name)
            sizes = blocks.setdefault((number, block[0] if block else ""), [0, 0])
            sizes[0] += p.numel() * (param_bytes or p.element_size())
            sizes[1] += p.nbytes * p.requires_grad
    return {
        "parameters": sum(p.numel() for p in trained),
        "weight_bytes": weight_bytes,
        "state_bytes": state_bytes
        if {type(o).__name__ for o in optimizers} <= {*_STATES}
        else None,
        "buckets": _buckets([p.nbytes for p in reversed(trained)], bucket_bytes),
        "blocks": list(blocks.values()),
        "powersgd_bytes": [
            sum(p.element_size() * (len(p) + p.numel() // len(p)) for p in matrices),
            sum(p.nbytes for p in trained if p.dim() < 2),
        ],
    }


def _buckets(sizes: Sequence[int], limit: int) -> list[int]:
    """The bytes of DDP's buckets: each ends with the gradient that makes it as large as its limit."""
    limits = [limit] if limit not in (0, _BUCKET_BYTES) else [_FIRST_BUCKET_BYTES, _BUCKET_BYTES]
    buckets: list[int] = []
    filled = 0
    for size in sizes:
        filled += size
        if filled >= limits[min(len(buckets), len(limits) - 1)]:
            buckets.append(filled)
            filled = 0
    return [*buckets, *([filled] if filled else [])]
