"""When to save and where to resume: `Checkpoints`, one file per save, written by rank 0.

Commit last: a new folder is written, flushed to disk, given a manifest with size and digest, and renamed;
what was not renamed was never saved. Only what is committed and whole is read. The state is
the same on every rank, so one writer is enough; it is read with torch's weights-only unpickler.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from paceline import collectives, log
from paceline.errors import CheckpointError, ConfigError
from paceline.job import Job

Resume = Literal["auto", "never", "must"]
_FORMAT = 1


class Checkpoints:
    """Where a training is kept, and how often.

    Args:
        folder: Seen by all ranks; made if missing. Holds `step-N` folders.
        every_steps, every_epochs: When to save; neither means at the end only.
        keep: How many of the newest to keep, at least 1.
        resume: "auto" goes on from the newest if there is one; "must" fails where there is none; "never"
            starts anew and sets what is there aside in `before-N`.

    Raises:
        ConfigError: a number that is less than 1, or an unknown way to resume.

    Collective: none to make it.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        every_steps: int | None = None,
        every_epochs: int | None = None,
        keep: int = 3,
        resume: str = "auto",
    ) -> None:
        for name, value in (
            ("every_steps", every_steps),
            ("every_epochs", every_epochs),
            ("keep", keep),
        ):
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}.")
        if resume not in get_args(Resume):
            raise ConfigError(
                f"resume must be one of {', '.join(get_args(Resume))}; got {resume!r}."
            )
        self.folder = Path(folder)
        self.last_saved = 0
        self._every_steps = every_steps
        self._every_epochs = every_epochs
        self._keep = keep
        self._resume_how = resume

    def is_due(self, step: int, *, epoch: int, ends_epoch: bool) -> bool:
        """Whether to save after `step`; `epoch` counts the epochs that are finished.

        Collective: none.
        """
        if self._every_steps is not None and step % self._every_steps == 0:
            return True
        return ends_epoch and self._every_epochs is not None and epoch % self._every_epochs == 0

    def save(self, job: Job, step: int, state: dict[str, Any]) -> None:
        """Save `state` as that of `step`, whole or not at all, and drop the oldest beyond `keep`.

        Raises:
            CheckpointError: on rank 0, where the folder cannot be written; the others get PeerFailed.

        Collective: all ranks, same step.
        """
        collectives.on_rank0(job, lambda: self._write(step, state))
        self.last_saved = step

    def resume(self, job: Job) -> dict[str, Any] | None:
        """The newest state that is committed and whole; None to start anew.

        Raises:
            CheckpointError: none is there and resume="must"; or all of them are damaged.

        Collective: all ranks.
        """
        step = collectives.on_rank0(job, self._choose)
        if step is None:
            return None
        self.last_saved = step
        where = f"{self.folder}, before step {step + 1}"
        fix = f"put {self.folder} on storage that all hosts share."
        collectives.agree(job, "checkpoint to resume", self._has(step), where=where, fix=fix)
        path = self.folder / f"step-{step}" / "state.pt"
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        return state

    def _has(self, step: int) -> bool:
        return (self.folder / f"step-{step}" / "manifest.json").exists()

    def _choose(self) -> int | None:
        steps = self._committed()
        if self._resume_how == "never":
            if steps:
                self._set_aside()
            return None
        for step in reversed(steps):
            why = _damage(self.folder / f"step-{step}")
            if why is None:
                return step
            log.logger.warning(
                "checkpoint step-%d is damaged (%s); trying the one before.", step, why
            )
        if steps or self._resume_how == "must":
            what = "every checkpoint is damaged" if steps else "there is no checkpoint"
            raise CheckpointError(
                f"{what} in {self.folder}.",
                fix="start anew with resume='never', which sets aside what is there.",
                path=str(self.folder),
            )
        return None

    def _set_aside(self) -> None:
        number = 1
        while (aside := self.folder / f"before-{number}").exists():
            number += 1
        aside.mkdir()
        for step in self._committed():
            (self.folder / f"step-{step}").rename(aside / f"step-{step}")

    def _committed(self) -> list[int]:
        found = self.folder.glob("step-*/manifest.json")
        names = [path.parent.name.removeprefix("step-") for path in found]
        return sorted(int(name) for name in names if name.isdigit())

    def _write(self, step: int, state: dict[str, Any]) -> None:
        scratch = self.folder / f"unfinished-{step}"
        final = self.folder / f"step-{step}"
        try:
            if scratch.exists():
                shutil.rmtree(scratch)
            scratch.mkdir(parents=True)
            torch.save(state, scratch / "state.pt")
            manifest = {
                "format": _FORMAT,
                "step": step,
                "size_bytes": (scratch / "state.pt").stat().st_size,
                "sha256": _digest(scratch / "state.pt"),
            }
            (scratch / "manifest.json").write_text(json.dumps(manifest))
            for path in (scratch / "state.pt", scratch / "manifest.json", scratch):
                _flush(path)
            if final.exists():
                shutil.rmtree(final)  # of the same step, so of no other content
            scratch.rename(final)
            _flush(self.folder)
            for old in self._committed()[: -self._keep]:
                shutil.rmtree(self.folder / f"step-{old}")
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
            raise CheckpointError(
                f"step {step} cannot be saved in {self.folder}: {error}",
                fix="check space and permission; earlier checkpoints there are untouched.",
                path=str(self.folder),
                step=step,
            ) from error


def write_file(path: Path, content: Any) -> None:
    """Write a file of tensors whole or not at all, replacing one of that name.

    Raises:
        CheckpointError: it cannot be written; what was there is untouched.

    Collective: none; for one rank.
    """
    scratch = path.with_name(f"{path.name}.unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, scratch)
        _flush(scratch)
        scratch.replace(path)
        _flush(path.parent)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be written: {error}", path=str(path)) from error


def _damage(folder: Path) -> str | None:
    """What is wrong with a committed checkpoint; None if it is whole."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        state = folder / "state.pt"
        if manifest["format"] != _FORMAT:
            return f"format {manifest['format']}"
        if state.stat().st_size != manifest["size_bytes"]:
            return "state.pt has another size"
        return None if _digest(state) == manifest["sha256"] else "state.pt has another digest"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return str(error)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
