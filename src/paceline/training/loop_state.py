"""`LoopState`: where the loop over the steps of a training is."""

from __future__ import annotations

from collections.abc import Callable

from paceline.job import current_step
from paceline.job.exchange import AFTER_STEP, BEFORE_SUM
from paceline.job.job import Job, LeftLoop
from paceline.training.step import Step


class LoopState:
    """Where the loop over the steps of one training is.

    The loop is in one of three states:

    - Between steps: before the first one, after the last one, and while a step is committed.
    - In a step: `Training.steps` has yielded `step`, and the loop body runs.
    - Left early: a `break` or an exception in the loop body has ended the loop. `Job.left_loop` says so until
      `Job.check_loop_exit` has made sure that all ranks have left the loop in the same step.

    Only `Training` calls the methods: `begin` before each loop; `enter` and `end` for each step; `leave` in
    place of `end`, if the loop is left early.

    This object writes what other ranks and the launcher are told about the loop: `Job.left_loop`,
    `Exchange.place` and `current_step.step`. `Job.check_loop_exit` and the end of the job reset
    `Job.left_loop`.

    Attributes:
        step: The step in progress; None outside of a step.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.step: Step | None = None
        self._left: tuple[LeftLoop, Step] | None = None

    def begin(self) -> None:
        """A loop begins, even if an earlier one is still open in a step. All ranks call it."""
        self.step = self._left = None
        if self._job.exchange is not None:
            self._job.exchange.begin_loop()

    def enter(self, step: Step) -> None:
        """A step is about to be yielded."""
        self.step = step
        current_step.step = step.number
        self._advance(step, BEFORE_SUM)

    def end(self, step: Step) -> None:
        """The next step was requested, so `step` is about to be committed."""
        self.step = None
        self._advance(step, AFTER_STEP)

    def leave(self, finish: Callable[[], None]) -> None:
        """The loop was left early, in the step in progress.

        Args:
            finish: See `LeftLoop`.
        """
        step, self.step = self.step, None
        assert step is not None
        self._job.left_loop = LeftLoop(step.number, finish)
        self._left = self._job.left_loop, step

    def take_left(self) -> Step | None:
        """The step in which this loop was left early, if no rank has settled that yet.

        The caller commits the step or drops it; `Job.check_loop_exit` does not wait for other ranks any more.
        """
        if self._left is None or self._left[0] is not self._job.left_loop:
            return None
        self._job.left_loop = None
        return self._left[1]

    def _advance(self, step: Step, part: int) -> None:
        if self._job.exchange is not None:
            self._job.exchange.advance(step.number, part)
