"""`Checkpoints`: when to save, where, how many to keep, and what to resume from.

One job owns a folder. A save is copied to host memory and written in the background by all ranks; at most one
is in flight. Only a committed checkpoint whose bytes match their digests is loaded.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from paceline import log
from paceline.checkpoint import codec
from paceline.checkpoint.layout import RNG, Planner
from paceline.checkpoint.manifest import Damaged
from paceline.checkpoint.owner import Ownership, take
from paceline.checkpoint.reader import read
from paceline.checkpoint.shared_folder import check_shared
from paceline.checkpoint.store import (
    committed,
    open_store,
    read_manifest,
    remove,
    sweep,
    unused_name,
    verify,
)
from paceline.checkpoint.writer import Buffer, Content, Save, SaveOutcome, Staging
from paceline.errors import CheckpointError, ConfigError, NonFinite, PeerFailed, SaveFailed
from paceline.job import collectives, rng
from paceline.job.arguments import require_integers, require_positive
from paceline.job.job import Job
from paceline.job.preemption import grace_s
from paceline.machine import format_bytes

Resume = Literal["auto", "must"]
_WAIT_S = 2.0  # age of a save up to which the next one waits for it instead of being left out


class Checkpoints:
    """A folder of checkpoints: when to save, how many to keep, and how to resume.

    Args:
        folder: A path that all ranks see, or a URL for fsspec: "s3://bucket/run", "gs://bucket/run" or
            "abfs://container/run" with the extra `s3`, `gcs` or `azure`. Created if missing, unlike a bucket.
            Holds `step-N` folders, of one job: a second job that is started there is refused while the first
            is alive.
        every_steps: Steps between saves. The end of the training is always saved.
        every_epochs: Epochs between saves.
        every_s: Seconds between saves by rank 0's clock.
        keep: How many of the newest checkpoints to keep, at least 1. The last one marked best is kept too.
        resume: "auto" resumes from the newest checkpoint if there is one; "must" raises if there is none.
            A run that must start from step 0 needs a folder of its own.

    Attributes:
        folder: As given.
        last_saved: The step that was last saved or loaded; 0 if none.

    Raises:
        ConfigError: a number is not an integer of at least 1 (`every_s`: not above 0); an unknown `resume`;
            a URL that holds credentials, or whose package is not installed.

    Collective: none to create it.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        every_steps: int | None = None,
        every_epochs: int | None = None,
        every_s: float | None = None,
        keep: int = 3,
        resume: str = "auto",
    ) -> None:
        require_integers(1, or_none=True, every_steps=every_steps, every_epochs=every_epochs)
        require_integers(1, keep=keep)
        if every_s is not None:
            require_positive(every_s=every_s)
        if resume not in get_args(Resume):
            known = ", ".join(get_args(Resume))
            raise ConfigError(f"resume must be one of {known}; got {resume!r}.")
        self.folder = folder
        self.last_saved = 0
        self._store = open_store(folder)
        self._every_steps = every_steps
        self._every_epochs = every_epochs
        self._every_s = every_s
        self._keep = keep
        self._resume_mode = resume
        self._planner = Planner()
        self._buffer = Buffer()
        self._in_flight: Save | None = None
        self._newest: int | None = None  # step of the newest checkpoint; None until it is read
        self._ownership: Ownership | None = None  # of the folder, on rank 0
        self._token = ""  # of rank 0, in the names of attempts to save
        self._attempts = 0
        self._is_behind = False  # whether a save was left out since the last one began
        self._last_begun = time.monotonic()

    def is_due(self, step: int, *, epoch: int, ends_epoch: bool) -> bool:
        """Whether to save after `step`; `epoch` is the number of finished epochs."""
        if self._every_steps is not None and step % self._every_steps == 0:
            return True
        return ends_epoch and self._every_epochs is not None and epoch % self._every_epochs == 0

    def facts(self) -> dict[str, Any]:
        """What describes the settings, for reports and advice."""
        settings = {
            "checkpoint_every_steps": self._every_steps,
            "checkpoint_every_epochs": self._every_epochs,
            "checkpoint_every_s": self._every_s,
        }
        return {name: value for name, value in settings.items() if value is not None}

    def is_due_by_clock(self) -> bool:
        """Whether `every_s` has passed by this rank's clock; the training asks rank 0 only."""
        if self._every_s is None or self._in_flight is not None:
            return False
        return time.monotonic() - self._last_begun >= self._every_s

    def is_behind(self, job: Job, step: int) -> bool:
        """Whether the save before is still being written, so that the one due after `step` is left out.

        Waits until that save is 2 s old, so that fast storage gets every save.

        Collective: all ranks, same step.
        """
        save = self._in_flight
        is_behind = save is not None and not save.wait_until_aged(min(_WAIT_S, job.timeout_s / 2))
        if not collectives.gather(job, is_behind)[0]:  # rank 0 commits
            return False
        if save is not None and job.rank == 0 and not self._is_behind:
            self._is_behind = True
            log.logger.warning(
                "step %d is not saved: the storage still writes step %d. More steps may be left out.",
                *(step, save.step),
            )
        return True

    def save(
        self,
        job: Job,
        step: int,
        state: Any,
        *,
        best: bool = False,
        wait: bool = True,
        finite: Collection[str] = (),
    ) -> None:
        """Save `state` as the checkpoint of `step`, and remove the oldest beyond `keep`.

        Args:
            state: Dictionaries, lists, numbers, strings, arrays and tensors, also sharded, with the same
                structure on all ranks. Values that are not tensors are taken from rank 0. If several
                ranks hold a tensor, each writes a part of it.
            best: Keep it until another one is saved as the best.
            wait: Return when it is saved; otherwise `finish` reports an error.
            finite: Paths of tensors that must not hold NaN or infinity, such as "models.0.weight".

        Raises:
            ConfigError: `step` is not an integer of at least 0.
            SaveFailed: on all ranks, if `wait`: the storage fails.
            PeerFailed: if `wait`: another rank failed meanwhile.
            CheckpointError: on all ranks: the state cannot be saved, another job saves there, or the folder
                holds a checkpoint of this or a later step.
            NonFinite: on all ranks, if `wait`; see `finite`.

        Collective: all ranks, same step.
        """
        require_integers(0, step=step)
        if job.is_dry_run:
            return
        # Before the first exchange, so that every rank whose state cannot be saved raises its own error.
        tree, tensors = codec.encode(state)
        if len(job.state_ranks) > 1:  # each knows its own names only
            trees = collectives.gather(job, tree)
            tree = codec.merge([trees[rank] for rank in job.state_ranks])
        self.finish(job)
        self._last_begun = time.monotonic()
        if self._newest is None:
            self._newest, self._token = collectives.on_rank0(job, self._begin_saves)
        self.refuse_earlier(step, self._newest)
        self._attempts += 1
        self._is_behind = False
        tensors[f"{RNG}{job.rank}"] = rng.snapshot(job.device)
        staging = Staging(self._planner.plan(job, tensors), tensors, self._buffer)
        content = Content(
            step=step,
            attempt=f"{self._token}-{self._attempts}",
            best=best,
            tree=tree,
            finite=finite,
        )
        self._in_flight = Save(
            job,
            self._store,
            content,
            staging,
            ownership=self._ownership,
            prune=self._prune,
        )
        if wait:
            self.finish(job, required=True)

    def refuse_earlier(self, step: int, newest: int) -> None:
        """Raise CheckpointError if a save of `step` would not be the newest checkpoint of the folder."""
        if step <= newest:
            raise CheckpointError(
                f"step {step} cannot be saved in {self.folder}, which holds step {newest}.",
                why="a job that is started again resumes from the newest checkpoint.",
                fix="give this training a folder of its own, or remove the later steps: `paceline ckpt rm`.",
                path=str(self.folder),
            )

    def _begin_saves(self) -> tuple[int, str]:
        """The newest step, and a name for the attempts of this object. Called on rank 0."""
        self._take_folder()
        return max(committed(self._store), default=-1), secrets.token_hex(4)

    def _take_folder(self) -> None:
        """Own the folder, and remove what jobs have left there that were killed in a save."""
        if self._ownership is not None:
            return
        try:
            self._ownership, is_new = take(self._store)
            if is_new:
                sweep(self._store)
        except OSError as error:
            raise SaveFailed(
                f"the folder {self.folder} cannot be changed: {error}.",
                fix="give rank 0 permission to rename and delete the files there.",
                path=str(self.folder),
            ) from error

    def poll(self, job: Job) -> bool:
        """Handle a save that has ended. Returns True if `finish` will raise its error."""
        save = self._in_flight
        if save is None or not save.is_done:
            return False
        if save.outcome is not None and save.outcome.kind not in ("saved", "disk"):
            return True
        self.finish(job)
        return False

    def finish(self, job: Job, *, required: bool = False) -> None:
        """Wait for the save in flight. If the storage failed, warn, or raise if `required`.

        Raises:
            SaveFailed, CheckpointError, NonFinite: see `save`.
            PeerFailed: if `required`: another rank failed before it had written its part.

        Collective: all ranks, if one of them does.
        """
        save, self._in_flight = self._in_flight, None
        if save is None:
            return
        outcome = save.wait()
        if outcome is None:
            if required:
                raise _peer_failed(job, save.step)
            return
        if outcome.kind == "saved":
            self.last_saved = self._newest = save.step
            grace = grace_s()
            if job.rank == 0 and grace is not None and save.took_s > grace:
                log.once(
                    f"a save took {save.took_s:.0f} s, and a preemption leaves {grace:g} s for it: the job "
                    "would be killed before. Use a longer --shutdown-timeout, and the same in the "
                    "scheduler."
                )
            return
        error = self._error(job, save, outcome)
        if required or not isinstance(error, SaveFailed):
            raise error
        if job.rank == 0:
            best = (
                " (the best so far; an earlier one stays marked as the best)" if save.best else ""
            )
            log.logger.warning("training continues without this checkpoint%s: %s", best, error)

    def close(self, job: Job) -> None:
        """Wait for the save in flight if the job ends normally; cancel it if the job has failed.

        Collective: all ranks, when they leave.
        """
        if not job.failed:
            self.finish(job)
        elif (save := self._in_flight) is not None:
            self._in_flight = None
            if job.world_size > 1:
                save.cancel()
            elif (outcome := save.wait()) is not None and outcome.kind != "saved":
                log.logger.warning("%s", self._error(job, save, outcome))
        self._ownership = self._newest = None  # another job may save there now

    @property
    def is_saving(self) -> bool:
        """Whether a save is in flight that has not been committed."""
        save = self._in_flight
        return save is not None and not (save.outcome is not None and save.outcome.kind == "saved")

    @property
    def saves_best(self) -> bool:
        """Whether that save is of the best checkpoint."""
        return self.is_saving and self._in_flight is not None and self._in_flight.best

    def begin_again(self, job: Job) -> None:
        """The ranks have connected again: cancel the save in flight, and begin to save as in a new process.

        Collective: all ranks.
        """
        self._cancel()
        self.last_saved = max(collectives.gather(job, self.last_saved))

    def _cancel(self) -> None:
        save, self._in_flight = self._in_flight, None
        if save is not None:
            save.cancel()
            if save.outcome is not None and save.outcome.kind == "saved":
                self.last_saved = save.step
        self._buffer = Buffer()  # the cancelled save may still write from the other one
        self._newest, self._attempts, self._is_behind = None, 0, False

    def save_after_failure(
        self, job: Job, step: int, state: Any, *, finite: Collection[str]
    ) -> None:
        """Save the state of a job that has failed by the ranks of `job`, see `Job.among`; see `save`.

        Raises:
            CheckpointError: it is not saved; the earlier checkpoints are as they were.

        Collective: the ranks of `job`.
        """
        self._cancel()
        if collectives.on_rank0(job, lambda: step in committed(self._store)):
            return  # it was in flight
        self._planner = Planner()  # these ranks write the shares of the others too
        self.save(job, step, state, finite=finite)

    def resume(
        self,
        job: Job,
        *,
        like: Callable[[str], torch.Tensor | None] = lambda path: None,
        wants: Callable[[str], bool] = lambda path: True,
        size_bytes: int = 0,
    ) -> Any:
        """Load the newest whole checkpoint and the random generators; None if there is no checkpoint to load.

        Args:
            like: For a path in the state (`models.0.weight`), a tensor; if that is sharded, the loaded one is
                sharded in the same way.
            wants: Which tensors this rank needs, by path in the state; the others are empty.
            size_bytes: The size of a checkpoint; less free space is refused now.

        Raises:
            CheckpointError: there is none and resume="must"; all are damaged; one was written by another
                program; another job saves there.
            SaveFailed: the folder cannot be written, or lacks space.
            RankDisagreement: the ranks do not see the same folder.

        Collective: all ranks.
        """
        check_shared(job, self._store, str(self.folder), size_bytes)
        self._newest = None
        collectives.on_rank0(job, self._take_folder)
        damaged: list[int] = []
        while True:
            step = collectives.on_rank0(job, lambda: self._newest_except(damaged))
            if step is None:
                if job.restarts:
                    log.logger.info(
                        "the restarted job found no checkpoint, and starts from step 0."
                    )
                return None
            where = f"{self.folder}, before step {step + 1}"
            fix = f"put {self.folder} on storage that all hosts share."
            has = step in committed(self._store)
            collectives.agree(job, "checkpoint to resume", has, where=where, fix=fix)
            state, generators, why = self._read(job, step, like, wants)
            damage = {rank: w for rank, w in enumerate(collectives.gather(job, why)) if w}
            if not damage:
                if generators is not None:  # None if fewer ranks have saved it
                    rng.restore(job.device, generators)
                self.last_saved = step
                self._last_begun = time.monotonic()
                return state
            damaged.append(step)
            collectives.on_rank0(job, lambda: self._set_damaged_aside(step, damage))  # noqa: B023 - runs now

    def _read(
        self,
        job: Job,
        step: int,
        like: Callable[[str], torch.Tensor | None],
        wants: Callable[[str], bool],
    ) -> tuple[Any, torch.Tensor | None, str]:
        """The state, this rank's random generators, and how it is damaged, or ""."""
        own = f"{RNG}{job.rank}"

        def is_read(path: str) -> bool:
            return path == own or (not path.startswith(RNG) and wants(path))

        try:
            manifest = read_manifest(self._store, step)
            state, tensors = read(self._store, manifest, like, is_read)
        except Damaged as error:
            return None, None, str(error)
        except OSError as error:
            raise CheckpointError(
                f"step {step} in {self.folder} cannot be read: {error}", path=str(self.folder)
            ) from error
        return state, tensors.get(own), ""

    def _newest_except(self, damaged: list[int]) -> int | None:
        left = [step for step in committed(self._store) if step not in damaged]
        if left:
            return left[-1]
        if not damaged and self._resume_mode != "must":
            return None
        what = "every checkpoint is damaged" if damaged else "there is no checkpoint"
        raise CheckpointError(
            f"{what} in {self.folder}.",
            fix="give this training a folder of its own, which starts from step 0."
            if damaged
            else "check the folder, or use resume='auto' to start from step 0.",
            path=str(self.folder),
        )

    def _set_damaged_aside(self, step: int, damage: dict[int, str]) -> None:
        """Rename a checkpoint that is damaged, unless only some hosts see it so."""
        (rank, why), *_ = damage.items()
        with contextlib.suppress(Damaged):
            verify(self._store, read_manifest(self._store, step))
            raise CheckpointError(
                f"rank {rank} reads step {step} in {self.folder} as damaged ({why}); rank 0 reads it whole.",
                why="the memory of that rank's host is faulty, or its view of the folder is old.",
                fix="start the job again, without that host if it happens again.",
                path=str(self.folder),
            )
        name = f"damaged-{step}"
        if name in self._store.names():
            name = unused_name(self._store, name)
        log.logger.warning(
            "checkpoint step-%d is damaged (%s); it is renamed to %s, and the one before is tried.",
            *(step, why, name),
        )
        try:
            self._store.rename(f"step-{step}", name)
        except OSError as error:
            log.logger.warning("step-%d cannot be renamed: %s", step, error)

    def _prune(self) -> None:
        """Remove the oldest, but not the newest `keep` and the last marked best."""
        steps = committed(self._store)
        old = steps[: -self._keep]
        best = next((s for s in reversed(steps) if self._is_best(s)), None) if old else None
        remove(self._store, [step for step in old if step != best])

    def _is_best(self, step: int) -> bool:
        try:
            return read_manifest(self._store, step).best
        except (Damaged, CheckpointError):
            return False

    def _error(
        self, job: Job, save: Save, outcome: SaveOutcome
    ) -> CheckpointError | NonFinite | SaveFailed:
        step, where = save.step, f"rank {outcome.rank} of {job.world_size}"
        if outcome.kind == "non-finite":
            name = outcome.text.split(".", 2)[-1]
            return NonFinite(
                f"{name} holds NaN or infinity; step {step} was not saved.",
                where=where,
                fix="resume from the checkpoint before, with a lower learning rate.",
                quantity="parameter",
                parameters=[name],
                step=step,
            )
        if outcome.kind == "other":
            return CheckpointError(
                f"step {step} was not saved: {outcome.text}.", where=where, fix=outcome.fix
            )
        try:
            free = self._store.free_bytes()
        except OSError:
            free = None
        available = "" if free is None else f", {format_bytes(free)} are free"
        return SaveFailed(
            f"step {step} cannot be saved in {self.folder}: {outcome.text}",
            where=where,
            why=f"the ranks write {format_bytes(outcome.size_bytes)} together{available}.",
            fix=f"{outcome.fix or 'check the storage.'} The earlier checkpoints are untouched.",
            path=str(self.folder),
            step=step,
        )


def _peer_failed(job: Job, step: int) -> PeerFailed:
    failure = None if job.peers is None else job.peers.failure_behind_broken_collective()
    return failure or PeerFailed(
        f"another rank failed while step {step} was saved.",
        where=job.where(),
        why="a checkpoint needs the parts of all ranks.",
    )
