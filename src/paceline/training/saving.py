"""When one training saves: `Checkpoints` tied to its steps, its control word and its state."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch

from paceline import log
from paceline.checkpoint import codec
from paceline.checkpoint.manager import Checkpoints
from paceline.errors import ConfigError
from paceline.job.preemption import Preempted
from paceline.parallel.buffers import equalize_buffers
from paceline.training import state
from paceline.training.control_word import Word
from paceline.training.desync import Replicas
from paceline.training.optimizers import refuse_non_finite_weights

if TYPE_CHECKING:
    from paceline.training.training import Training


class Saving:
    """The checkpoints of one training, or none, and the look at its replicas before each.

    Collective: as the methods say.
    """

    def __init__(
        self,
        training: Training,
        checkpoints: Checkpoints | None,
        desync_every: int | None,
        desync_also: Collection[str],
    ) -> None:
        self._training = training
        tracks = list(training.tracks.values())
        self._replicas = Replicas(training.job, training.models, tracks, desync_every, desync_also)
        self._checkpoints = checkpoints
        self._resumed = checkpoints is None
        self._now = self._best = False
        if checkpoints is not None:
            training.job.on_leave(functools.partial(checkpoints.close, training.job))

    def say(self, preempted: Preempted) -> None:
        """Tell where the last step is, which `loop_ended` has saved."""
        kept = "nothing is kept without checkpoints"
        if self._checkpoints is not None:
            kept = f"saved in {self._checkpoints.folder}"
        log.logger.info(
            "preempted by %s after step %d: %s; exit code %s asks to be started again.",
            *(preempted.signal_name, preempted.step, kept, preempted.code),
        )

    def resume(self) -> dict[str, Any] | None:
        """The state to go on from, once; None to start anew. Collective: all ranks."""
        if self._resumed:
            return None
        self._resumed = True
        assert self._checkpoints is not None
        training = self._training
        optimizers = [track.optimizer for track in training.tracks.values()]
        _, tensors = codec.encode(state.save(training.models, optimizers))
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        like = state.templates(training.models, optimizers)
        found: dict[str, Any] | None = self._checkpoints.resume(
            training.job, like=like, size_bytes=size
        )
        return found

    def request(self, *, best: bool) -> None:
        """Save after the step in progress. Collective: all ranks."""
        if self._checkpoints is None:
            raise ConfigError("this training has no checkpoints to save to.")
        self._now, self._best = True, best or self._best

    def rolled_back(self) -> None:
        """Have the next step saved even where one of its number was: its content is another."""
        if self._checkpoints is not None:
            self._checkpoints.last_saved = 0

    def staged(self) -> None:
        """Return when parameters may change."""
        if self._checkpoints is not None:
            self._checkpoints.staged()

    def tell(self) -> None:
        """Put into the control word what this rank has to say."""
        checkpoints = self._checkpoints
        if checkpoints is not None:
            job, control = self._training.job, self._training.control
            control.trouble = checkpoints.poll(job) or control.trouble
            control.save = control.save or (job.rank == 0 and checkpoints.is_time())

    def take(self, word: Word) -> None:
        """Take up a control word. Collective: all ranks."""
        self._now = self._now or word.save
        if word.trouble and self._checkpoints is not None:
            self._checkpoints.finish(self._training.job)

    def step_ended(self, step: int, *, ends_epoch: bool) -> None:
        """Compare replicas, and save, if it is due after this step. Collective: all ranks."""
        self._replicas.step_ended(step)
        if self._checkpoints is None:
            return
        epoch = self._training.position.epoch
        if self._now or self._checkpoints.is_due(step, epoch=epoch, ends_epoch=ends_epoch):
            best, self._now, self._best = self._best, False, False
            self._save(self._checkpoints, best=best, wait=False)

    def loop_ended(self) -> None:
        """Wait for the save in flight, and save the last step if it was not.

        Raises:
            SaveFailed: on all ranks, where that cannot be done.

        Collective: all ranks.
        """
        training = self._training
        if self._checkpoints is not None:
            self._checkpoints.finish(training.job)
            if self._checkpoints.last_saved != training.number:
                best, self._now, self._best = self._best, False, False
                self._save(self._checkpoints, best=best, wait=True)
                return
        refuse_non_finite_weights(training.job, training.models, training.number)

    def _save(self, checkpoints: Checkpoints, *, best: bool, wait: bool) -> None:
        training = self._training
        self._replicas.look(training.number)
        for model in training.models:
            equalize_buffers(training.job, model)
        # What the optimizer alone changes. Buffers are changed by the next forward already.
        steady: list[torch.Tensor] = [p for model in training.models for p in model.parameters()]
        for track in training.tracks.values():
            for values in track.optimizer.state.values():
                steady += [v for v in values.values() if isinstance(v, torch.Tensor)]
        checkpoints.save(
            training.job,
            training.number,
            training.state_dict(),
            best=best,
            wait=wait,
            steady=steady,
            finite="models.",
        )
