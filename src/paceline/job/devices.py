"""Choose or check the device and the backend of a rank."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from paceline.errors import ConfigError
from paceline.job import environment
from paceline.shm import group as shm

_IDLE_S = 1.0  # a step that needs no lost rank ends within this time as a rule
_POLL_S = 0.005


def choose_device(asked: str | torch.device | None, info: environment.RankInfo) -> torch.device:
    """The device of this rank: as asked, else an accelerator if there is one; the local rank is the index.

    Raises:
        ConfigError: this host has no such device, or fewer devices than local ranks.
    """
    if asked is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        kind = accelerator.type if accelerator and accelerator.type in ("cuda", "xpu") else "cpu"
        asked = torch.device(kind)
    try:
        device = torch.device(asked)
        module = torch.get_device_module(device)
    except RuntimeError as error:
        raise ConfigError(
            f"no such device: {asked!r}.", fix='use "cpu", "cuda" or "xpu".'
        ) from error
    if device.type == "cpu":
        return device
    count = module.device_count() if module.is_available() else 0
    if count == 0:
        variable = " and CUDA_VISIBLE_DEVICES" if device.type == "cuda" else ""
        raise ConfigError(
            f"device {device.type!r} was asked for, but none is visible to this process.",
            fix=f"check the driver{variable}, or pass device='cpu'.",
        )
    # A scheduler may show each rank only its own device, which is then number 0.
    own = info.local_rank if count > 1 else 0
    index = own if device.index is None else device.index  # torch's stubs: never None
    # Raise on all ranks of the host, not only on those without a device.
    if index >= count or (1 < count < info.local_world_size and device.index is None):
        raise ConfigError(
            f"{info.local_world_size} ranks on this host, {count} {device.type} devices.",
            where=f"local rank {info.local_rank}",
            fix=f"start at most {count} ranks here, or pass device='cpu'.",
        )
    return torch.device(device.type, index)


def choose_backend(asked: str | None, device: torch.device, info: environment.RankInfo) -> str:
    """The backend string for torch: `asked`, else `PACELINE_BACKEND`, else chosen by device.

    On CPU that is "shm" if all ranks are on one host, else "gloo". A group of "shm" whose ranks cannot share
    memory uses Gloo and logs a warning. "mpi" is torch's own backend if torch was built with MPI, else
    that of `paceline.mpi`, which initializes MPI here.

    Raises:
        ConfigError: the installed torch does not have the backend; mpi4py is missing; MPI has another number
            of processes than the job.
    """
    shm.register()
    source = "leave `backend` out" if asked else "unset PACELINE_BACKEND"
    asked = asked or os.environ.get("PACELINE_BACKEND")
    if asked is None:
        by_device = {"cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}
        asked = by_device.get(device.type, "shm" if info.one_host else "gloo")
    parts = [_over_mpi4py(part, info) for part in asked.split(",")]
    for part in parts:
        name = part.rpartition(":")[2]
        if not dist.is_backend_available(name):
            raise ConfigError(
                f"this build of torch {torch.__version__} has no backend {name!r}.",
                fix=f"{source} to choose by device.",
                backend=name,
            )
    return ",".join(parts)


def _over_mpi4py(part: str, info: environment.RankInfo) -> str:
    """A part of a backend string, with mpi4py's backend in place of one that this torch does not have."""
    device, colon, name = part.rpartition(":")
    if "mpi" not in name or (name == "mpi" and dist.is_mpi_available()):
        return part
    from paceline.mpi import group as mpi
    from paceline.mpi import world as mpi_world

    if name not in ("mpi", mpi.NAME):
        return part
    mpi.register()
    if info.world_size > 1:
        where = f"rank {info.rank} of {info.world_size}"
        mpi_world.refuse_wrong_world(info.world_size, where=where)
    return f"{device}{colon}{mpi.NAME}"


def becomes_idle(device: torch.device) -> bool:
    """Whether a device ends the work that was queued for it, within a second.

    The program runs ahead of an accelerator: its optimizer steps may be queued behind a collective that waits
    for a lost rank. When the process groups are aborted they would run, with gradients that are not summed.
    """
    if device.type == "cpu":
        return True
    deadline = time.monotonic() + _IDLE_S
    try:
        stream = torch.accelerator.current_stream(device)
        while not stream.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
    except torch.AcceleratorError:
        return False
    return True
