"""When to save and where to resume: `Checkpoints`, a folder for each save, written by all ranks.

Commit last: what has no manifest was never saved, and only what is whole is read. A save is staged in host
memory and written in the background; at most one is in flight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from paceline import log
from paceline.checkpoint import codec
from paceline.checkpoint.layout import Planner
from paceline.checkpoint.manifest import Damaged, Manifest, parse
from paceline.checkpoint.reader import read
from paceline.checkpoint.sharing import check_shared, megabytes
from paceline.checkpoint.staging import Buffer, Staging
from paceline.checkpoint.store import committed, open_store, read_manifest_text
from paceline.checkpoint.writer import Save, Verdict
from paceline.errors import CheckpointError, ConfigError, NonFinite, SaveFailed
from paceline.job import collectives, rng
from paceline.job.job import Job

Resume = Literal["auto", "never", "must"]
AUTO_SHARE = 0.035  # of the time, that `every_s="auto"` lets saving cost
_GUESSED_BYTES_PER_S = 300e6  # until a save was timed
_RNG = "$rng."


class Checkpoints:
    """Where a training is kept, and how often.

    Args:
        folder: Seen by all ranks; made if missing. Holds `step-N` folders. A path, or a URL for fsspec.
        every_steps, every_epochs: When to save; neither means at the end only.
        every_s: In seconds by rank 0's clock; "auto" saves as often as costs at most 3.5 % of the time.
        keep: How many of the newest to keep, at least 1; the last one marked best is kept too.
        shadow: Whether the newest state is kept in shared memory too, as often as costs at most 3 % of the
            time: where all ranks die and the host lives, `paceline run` goes on from there.
        resume: "auto" goes on from the newest if there is one; "must" fails where there is none; "never"
            starts anew and sets what is there aside in `before-N`.

    Raises:
        ConfigError: a number that is less than 1 (0 seconds), or an unknown way to resume.

    Collective: none to make it.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        every_steps: int | None = None,
        every_epochs: int | None = None,
        every_s: float | Literal["auto"] | None = None,
        keep: int = 3,
        shadow: bool = False,
        resume: str = "auto",
    ) -> None:
        for name, value in (
            ("every_steps", every_steps),
            ("every_epochs", every_epochs),
            ("keep", keep),
        ):
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}.")
        if every_s not in (None, "auto") and not (isinstance(every_s, int | float) and every_s > 0):
            raise ConfigError(f"every_s must be more than 0, or 'auto'; got {every_s!r}.")
        if resume not in get_args(Resume):
            known = ", ".join(get_args(Resume))
            raise ConfigError(f"resume must be one of {known}; got {resume!r}.")
        if shadow and resume == "never":
            raise ConfigError("shadow=True has no effect with resume='never'.")
        self.folder = folder
        self.shadow = shadow
        self.last_saved = 0
        self._store = open_store(folder)
        self._every_steps = every_steps
        self._every_epochs = every_epochs
        self._every_s = every_s
        self._keep = keep
        self._resume_how = resume
        self._planner = Planner()
        self._buffer = Buffer()
        self._flight: Save | None = None
        self._count = 0
        self._last_begun = time.monotonic()
        self._stall_s = 0.0
        self.may_be_lost = False  # where all are damaged: None, and no error
        self.written_s = 0.0  # of this rank's processor for the last save, outside of its training
        self._cost_s = 0.0

    def is_due(self, step: int, *, epoch: int, ends_epoch: bool) -> bool:
        """Whether to save after `step`; `epoch` counts the epochs that are finished.

        Collective: none.
        """
        if self._every_steps is not None and step % self._every_steps == 0:
            return True
        return ends_epoch and self._every_epochs is not None and epoch % self._every_epochs == 0

    def is_time(self) -> bool:
        """Whether `every_s` has passed by this rank's clock; rank 0's counts. Collective: none."""
        if self._every_s is None or self._flight is not None:
            return False
        every_s = self._cost_s / AUTO_SHARE if self._every_s == "auto" else float(self._every_s)
        return time.monotonic() - self._last_begun >= every_s

    def save(
        self,
        job: Job,
        step: int,
        state: Any,
        *,
        best: bool = False,
        wait: bool = True,
        steady: Collection[torch.Tensor] = (),
        finite: str = "",
    ) -> None:
        """Save `state` as that of `step`, whole or not at all, and drop the oldest beyond `keep`.

        Args:
            state: Dictionaries, lists, numbers, strings, arrays and tensors, sharded ones too; alike on
                all ranks. Values are rank 0's; of what several ranks hold, each writes a part.
            best: Keep it until another one is saved as the best.
            wait: Until it is saved; else `finish` tells how it ended.
            steady: Tensors of `state` that nobody changes before `staged` has returned.
            finite: Prefix of the paths of tensors of which none may hold NaN or infinity.

        Raises:
            SaveFailed: on all ranks, if `wait`, where the storage fails.
            CheckpointError: on all ranks, where the state cannot be saved.
            NonFinite: on all ranks, if `wait`; see `finite`.

        Collective: all ranks, same step.
        """
        self.finish(job)
        began = self._last_begun = time.monotonic()
        tree, tensors = codec.encode(state)
        tensors[f"{_RNG}{job.rank}"] = rng.snapshot(job.device)
        staging = Staging(self._planner.plan(job, tensors), tensors, steady, self._buffer)
        self._count += 1
        self._flight = Save(
            job,
            self._store,
            staging,
            number=self._count,
            step=step,
            best=best,
            tree=tree,
            finite=finite,
            waited=wait,
            prune=self._prune,
        )
        self._stall_s = time.monotonic() - began
        if wait:
            self.finish(job, must=True)

    @property
    def in_flight(self) -> int:
        """The step that is being saved; 0 for none. Collective: none."""
        return 0 if self._flight is None else self._flight.step

    def staged(self) -> None:
        """Return when what was named steady may change again. Collective: none."""
        if self._flight is not None:
            began = time.monotonic()
            self._flight.staging.wait()
            self._stall_s += time.monotonic() - began

    def poll(self, job: Job) -> bool:
        """Take note of a save that has ended; True if it failed in a way that `finish` raises.

        Collective: none.
        """
        save = self._flight
        if save is None or not save.is_done:
            return False
        if save.verdict is not None and save.verdict.kind not in ("saved", "disk"):
            return True
        self.finish(job)
        return False

    def finish(self, job: Job, *, must: bool = False) -> None:
        """Wait for the save in flight; where the storage failed, warn, or with `must` raise.

        Raises:
            SaveFailed, CheckpointError, NonFinite: see `save`.

        Collective: all ranks, if one of them does.
        """
        save, self._flight = self._flight, None
        if save is None or (verdict := save.wait()) is None:
            return
        self.written_s = save.cost_s
        self._cost_s = self._stall_s + self.written_s
        if verdict.kind == "saved":
            self.last_saved = save.step
            return
        error = self._error(job, save, verdict)
        if must or not isinstance(error, SaveFailed):
            raise error
        if job.rank == 0:
            log.logger.warning("training goes on without this checkpoint: %s", error)

    def close(self, job: Job) -> None:
        """Wait for the save in flight where the job ends well, and give it up where it does not.

        Collective: all ranks, when they leave.
        """
        if not job.failed:
            self.finish(job)
        elif (save := self._flight) is not None:
            self._flight = None
            if job.world_size > 1:
                save.cancel()
            elif (verdict := save.wait()) is not None and verdict.kind != "saved":
                log.logger.warning("%s", self._error(job, save, verdict))

    def resume(
        self,
        job: Job,
        *,
        like: Callable[[str], torch.Tensor | None] = lambda path: None,
        size_bytes: int = 0,
        instead: Callable[[int], Any] = lambda newest: None,
    ) -> Any:
        """The newest state that is committed and whole; None to start anew. Generators go on from it.

        Args:
            like: A tensor for a path in the state (`models.0.weight`): where that is sharded, what is
                read is too.
            size_bytes: How much a save will take at least; less room is refused now.
            instead: Given the newest step on disk (0 for none), a later state from elsewhere, or None.

        Raises:
            CheckpointError: none is there and resume="must"; all of them are damaged; one is not ours.
            SaveFailed: the folder cannot be written, or has no room.
            RankDisagreement: the ranks do not see one folder.

        Collective: all ranks.
        """
        check_shared(job, self._store, str(self.folder), size_bytes)
        self._cost_s = self._cost_s or size_bytes / _GUESSED_BYTES_PER_S
        collectives.on_rank0(job, self._tidy)
        newest = collectives.on_rank0(job, lambda: max(committed(self._store), default=0))
        if (later := instead(newest)) is not None:
            self.last_saved = newest
            return later
        passed: list[int] = []
        while True:
            step = collectives.on_rank0(job, lambda: self._newest(passed))
            if step is None:
                return None
            where = f"{self.folder}, before step {step + 1}"
            fix = f"put {self.folder} on storage that all hosts share."
            has = step in committed(self._store)
            collectives.agree(job, "checkpoint to resume", has, where=where, fix=fix)
            state, why = self._read(job, step, like)
            whys = [w for w in collectives.gather(job, why) if w]
            if not whys:
                self.last_saved = step
                self._last_begun = time.monotonic()
                return state
            passed.append(step)
            collectives.on_rank0(job, lambda: self._set_aside(step, whys[0]))  # noqa: B023 - runs now

    def _read(
        self, job: Job, step: int, like: Callable[[str], torch.Tensor | None]
    ) -> tuple[Any, str]:
        own = f"{_RNG}{job.rank}"
        try:
            manifest = self._manifest(step)
            state, tensors = read(
                self._store, manifest, like, lambda path: path == own or not path.startswith(_RNG)
            )
        except Damaged as error:
            return None, str(error)
        except OSError as error:
            raise CheckpointError(
                f"step {step} in {self.folder} cannot be read: {error}", path=str(self.folder)
            ) from error
        if own in tensors:
            rng.restore(job.device, tensors[own])
        return state, ""

    def _manifest(self, step: int) -> Manifest:
        return parse(read_manifest_text(self._store, step), f"{self.folder}/step-{step}")

    def _newest(self, passed: list[int]) -> int | None:
        left = [step for step in committed(self._store) if step not in passed]
        if left:
            return left[-1]
        if self.may_be_lost or (not passed and self._resume_how != "must"):
            return None
        what = "every checkpoint is damaged" if passed else "there is no checkpoint"
        raise CheckpointError(
            f"{what} in {self.folder}.",
            fix="start anew with resume='never', which sets aside what is there.",
            path=str(self.folder),
        )

    def _set_aside(self, step: int, why: str) -> None:
        log.logger.warning(
            "checkpoint step-%d is damaged (%s); it is set aside as damaged-%d, and the one before is "
            "tried.",
            *(step, why, step),
        )
        name, number = f"damaged-{step}", 1
        while name in self._store.names():
            number += 1
            name = f"damaged-{step}-{number}"
        try:
            self._store.rename(f"step-{step}", name)
        except OSError as error:
            log.logger.warning("step-%d stays where it is: %s", step, error)

    def _tidy(self) -> None:
        """Remove what killed saves left, and set aside what shall not be resumed from."""
        names = self._store.names()
        for name in names:
            if name.startswith("unfinished-"):
                self._store.remove(name)
        steps = committed(self._store) if self._resume_how == "never" else []
        number = 1
        while f"before-{number}" in names:
            number += 1
        for step in steps:
            self._store.rename(f"step-{step}", f"before-{number}/step-{step}")

    def _prune(self) -> None:
        """Drop the oldest by step; never the newest, nor the last that was marked as the best."""
        steps = committed(self._store)
        doomed = steps[: -self._keep]
        best = next((s for s in reversed(steps) if self._is_best(s)), None) if doomed else None
        for step in doomed:
            if step != best:
                self._store.remove(f"step-{step}")

    def _is_best(self, step: int) -> bool:
        try:
            return self._manifest(step).best
        except (Damaged, CheckpointError):
            return False

    def _error(
        self, job: Job, save: Save, verdict: Verdict
    ) -> CheckpointError | NonFinite | SaveFailed:
        step, where = save.step, f"rank {verdict.rank} of {job.world_size}"
        if verdict.kind == "non-finite":
            name = verdict.text.split(".", 2)[-1]
            return NonFinite(
                f"{name} holds NaN or infinity; step {step} was not saved.",
                where=where,
                fix="resume from the checkpoint before, with a lower learning rate.",
                quantity="parameter",
                parameters=[name],
                step=step,
            )
        if verdict.kind == "other":
            return CheckpointError(f"step {step} was not saved: {verdict.text}.", where=where)
        try:
            free = self._store.free_bytes()
        except OSError:
            free = None
        room = "" if free is None else f", {megabytes(free)} are free"
        return SaveFailed(
            f"step {step} cannot be saved in {self.folder}: {verdict.text}",
            where=where,
            why=f"this rank writes about {megabytes(save.staging.layout.size_bytes)}{room}.",
            fix="check space and permission; earlier checkpoints there are untouched.",
            path=str(self.folder),
            step=step,
        )
