"""What describes a job in the reports of its trainings: ranks, hosts, hardware and versions."""

from __future__ import annotations

import platform
import socket
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import paceline
from paceline.job.job import Job
from paceline.machine import usable_cores


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
