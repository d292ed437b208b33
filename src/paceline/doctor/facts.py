"""Facts about one rank and its host, as values that JSON can represent, without judgement."""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch

import paceline
from paceline.credentials import public_variables
from paceline.job.environment import FIREWALL_PORTS, RankInfo
from paceline.job.network import addresses_of
from paceline.machine import (
    ephemeral_ports,
    network_interfaces,
    owner_of_port,
    read_memory,
    read_text,
    usable_cores,
)

Facts = dict[str, Any]

_VARIABLES = ("NCCL_", "TORCH_", "GLOO_", "OMP_", "CUDA_", "MASTER_", "PYTORCH_", "PACELINE_")
_WRITTEN_BYTES = 64 << 20


def gather(info: RankInfo, folder: Path | None) -> Facts:
    """Facts of this rank, and of its host if this is the host's first rank.

    Args:
        folder: the run folder, to test its disk with a file that is removed again.
    """
    facts: Facts = {
        "rank": info.rank,
        "local_rank": info.local_rank,
        "local_world_size": info.local_world_size,
        "host": socket.gethostname(),
        "variables": public_variables(_VARIABLES),
        "device": _device(info),
    }
    if info.local_rank == 0:
        memory = read_memory()
        facts |= {
            "versions": _versions(),
            "cores": usable_cores(),
            "cores_of_host": os.cpu_count(),
            "memory_limit": memory.limit_bytes,
            "memory_kills": memory.kills,
            "shm_size": memory.shm_bytes,
            "shm_free": memory.shm_free_bytes,
            "gpus": torch.cuda.device_count(),
            "infiniband": sorted(p.name for p in Path("/sys/class/infiniband").glob("*")),
            "interfaces": network_interfaces(),
            "addresses": addresses_of(socket.gethostname()),
            "port_owner": owner_of_port(FIREWALL_PORTS[0]),
            "ephemeral_ports": list(ephemeral_ports() or ()),
            "folder": _folder(folder) if folder is not None else None,
        }
    return facts


def _versions() -> dict[str, str]:
    nccl = ""
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        version: Any = torch.cuda.nccl.version
        nccl = ".".join(str(number) for number in version())
    driver = read_text(Path("/proc/driver/nvidia/version")).partition("Module ")[2].split()
    return {
        "paceline": paceline.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "nccl": nccl or "none",
        "driver": driver[0] if driver else "none",
        "byte order": sys.byteorder,
    }


def _device(info: RankInfo) -> Facts | None:
    """The GPU that this rank would use."""
    count = torch.cuda.device_count()
    if count == 0:
        return None
    index = info.local_rank if count > 1 else 0
    if index >= count:
        return {"index": index, "missing": True}
    properties: Any = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    return {
        "index": index,
        "missing": False,
        "uuid": str(properties.uuid),
        "name": properties.name,
        "used": total - free,
        "total": total,
    }


def _folder(folder: Path) -> Facts:
    """Free space and write speed of a folder's disk, with one file that is synchronized like a checkpoint."""
    path = folder / f".paceline-doctor-{secrets.token_hex(4)}"
    facts: Facts = {"path": str(folder.resolve())}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        data = os.urandom(1 << 20)  # incompressible, because some filesystems compress
        began = time.perf_counter()
        with path.open("wb") as file:
            for _ in range(_WRITTEN_BYTES // len(data)):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
        facts["bytes_per_s"] = _WRITTEN_BYTES / (time.perf_counter() - began)
        disk = os.statvfs(folder)
        facts["free"] = disk.f_bavail * disk.f_frsize + _WRITTEN_BYTES
    except OSError as error:
        facts["error"] = f"{error.strerror}"
    finally:
        with contextlib.suppress(OSError):  # it may not exist
            path.unlink()
    return facts
