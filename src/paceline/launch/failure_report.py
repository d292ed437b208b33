"""Writes the report of a failed job, a folder: the message, last output, stacks, collectives, versions.

It includes environment variables that are settings of the job by their name, except possible secrets.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import platform
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.credentials import public_variables, redact
from paceline.errors import ConfigError
from paceline.launch.local_ranks import Rank
from paceline.machine import private_folder
from paceline.watch.crash import RankOutcome

_PREFIXES = (
    *("CUDA_", "GLOO_", "KMP_", "LOCAL_", "MASTER_", "MKL_", "NCCL_", "OMP_", "PACELINE_", "PET_"),
    *("PYTHON", "RANK", "SLURM_", "TORCH", "WORLD_SIZE"),
)
_PACKAGES = ("paceline", "torch", "numpy", "accelerate", "lightning", "transformers")


def write(
    ranks: Sequence[Rank], outcomes: Sequence[RankOutcome], text: str, log_dir: str | None
) -> str:
    """Write the report in `log_dir`, or else in the temporary folder; returns its path.

    No report is ever removed.

    Raises:
        OSError: it cannot be written.
    """
    folder = Path(_folder(log_dir))
    _write(folder / "verdict.txt", text)
    for rank, outcome in zip(ranks, outcomes, strict=True):
        if outcome.error is not None:
            _write(folder / f"rank{rank.rank}-error.txt", outcome.error.traceback)
        if tail := b"".join(stream.tail for stream in rank.streams):
            _write(folder / f"rank{rank.rank}-output.txt", tail.decode(errors="replace"))
        state = {"stacks and collectives": rank.state, "last seen": rank.probe_text()}
        _dump(folder / f"rank{rank.rank}-state.json", state)
    _dump(folder / "environment.json", public_variables(_PREFIXES))
    _dump(folder / "versions.json", _versions())
    return str(folder)


def _folder(log_dir: str | None) -> str:
    now = time.strftime("%Y%m%d-%H%M%S")
    if log_dir is not None:
        reports = Path(log_dir)
    else:
        try:
            reports = private_folder(Path(tempfile.gettempdir())) / "reports"
        except ConfigError:  # another user took the name
            return tempfile.mkdtemp(prefix=f"paceline-failure-{now}-")
    reports.mkdir(parents=True, exist_ok=True)
    # The nodes of a job may share the folder.
    return tempfile.mkdtemp(prefix=f"failure-{now}-{socket.gethostname()}-", dir=reports)


def _versions() -> dict[str, str]:
    found = {"python": sys.version, "platform": platform.platform()}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _dump(path: Path, value: object) -> None:
    path.write_text(json.dumps(_redacted(value), indent=1) + "\n")


def _redacted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _redacted(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_redacted(entry) for entry in value]
    return redact(value) if isinstance(value, str) else value


def _write(path: Path, text: str) -> None:
    path.write_text(redact(text), errors="backslashreplace")
