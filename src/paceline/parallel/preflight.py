"""What must hold of a module before it is spread over ranks, checked with names and before any wrapper.

torch finds the same faults late, or in words of buckets and indices. Nothing here changes the module.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from torch import nn
from torch.nn.parameter import UninitializedParameter

from paceline.errors import ConfigError, RankDisagreement, place
from paceline.job.collectives import gather
from paceline.job.job import Job

_NAMES_SHOWN = 5


def refuse_module(job: Job, module: nn.Module) -> None:
    """Refuse parameters without a shape, on a wrong device, or none to train.

    Raises:
        ConfigError: names the first (`parameters`), and the fix.
    """
    for name, p in module.named_parameters():
        if isinstance(p, UninitializedParameter):
            raise ConfigError(
                f"parameter {name!r} has no shape yet.",
                why="a lazy module gets its parameters in its first forward.",
                fix="run one forward before paceline.ddp(...).",
                parameters=[name],
            )
        if p.device != job.device:
            raise ConfigError(
                f"parameter {name!r} is on {p.device}, this rank computes on {job.device}.",
                where=place(job.rank, job.world_size),
                fix="model.to_empty(device=job.device), then initialise it."
                if p.is_meta
                else "model.to(job.device) before paceline.ddp(...) and before the optimizer is made.",
                parameters=[name],
            )
    if not any(p.requires_grad for p in module.parameters()):
        raise ConfigError(
            f"{type(module).__name__} has no trainable parameter.",
            fix="unfreeze some with requires_grad_(True), or do not wrap it.",
        )
    torchs = [name for name, m in module.named_modules() if isinstance(m, nn.SyncBatchNorm)]
    if torchs and job.group is not None and job.device.type == "cpu":
        raise ConfigError(
            f"{listed(torchs)}: torch's SyncBatchNorm does not work on CPU.",
            fix="paceline.sync_batchnorm(job, model) converts it.",
        )


def agree_on_parameters(job: Job, module: nn.Module, options: str) -> None:
    """Check that all ranks hold parameters of the same names, shapes and types in the same order.

    A digest travels; the whole list only where that differs. `options` is compared too.

    Raises:
        RankDisagreement: on all ranks, naming the first that differs (`values`: one per rank).

    Collective: all ranks, same order as the job's other collectives.
    """
    rows = [options]
    for name, p in module.named_parameters():
        kind = "trainable" if p.requires_grad else "frozen"
        rows.append(f"{name}: {list(p.shape)} {p.dtype}, strides {list(p.stride())}, {kind}")
    digest = hashlib.sha256("\n".join(rows).encode()).hexdigest()
    digests = gather(job, digest)
    if all(other == digests[0] for other in digests):
        return
    lists = gather(job, rows)
    longest = max(len(rows) for rows in lists)
    for at in range(longest):
        values = [rows[at] if at < len(rows) else "nothing more" for rows in lists]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            raise RankDisagreement(
                f"ranks wrap different models: rank 0 has [{values[0]}], "
                f"rank {other} has [{values[other]}].",
                why="DDP adds gradients up by position.",
                fix="build the same model on all ranks; nothing in it may depend on the rank.",
                values=values,
            )


def listed(names: Sequence[str]) -> str:
    """Render the first few names and how many more there are."""
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more
