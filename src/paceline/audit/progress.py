"""How far the watched script is, and how it is brought to an end after the wanted number of steps.

A script is not cut off: its training loaders run out and stay empty, so that what comes after training
(evaluation, saving) is seen too. It is ended where it would train again after that. One that uses no
loader is ended in its next optimizer step.
"""

from __future__ import annotations

from paceline.audit.evidence import RunPlan
from paceline.audit.record import Recorder

# A loop that does not mind its loader's end is stopped after this many further steps.
_GRACE_STEPS = 2
# And so is one that asks an empty loader again and again.
_EMPTY_LAPS = 1000


class Enough(SystemExit):
    """Ends the script, well: it was watched for long enough."""


class Progress:
    """What the watchers of one rank know in common.

    Attributes:
        steps: Rounds of updates: one of each optimizer, where there are several.
        training_loaders: Those whose batches were followed by a backward.
        ends_by_itself: It is a training of paceline's, which is told its number of steps.
        evaluations: Runs of forwards without gradient, after training or before.
    """

    def __init__(self, plan: RunPlan, recorder: Recorder, rank: int) -> None:
        self.plan, self.recorder, self.rank = plan, recorder, rank
        self.steps = 0
        self.evaluations = 0
        self.ends_by_itself = False
        self.training_loaders: set[str] = set()
        self._last_loader: str | None = None
        self._fed = False
        self._evaluating = False
        self._round: set[int] = set()
        self._evaluated_after = plan.folder / "evaluated-after"
        self._empty_laps = 0

    @property
    def is_over(self) -> bool:
        """Whether the wanted steps are done."""
        return self.steps >= self.plan.steps

    def gave_batch(self, loader: str) -> None:
        """A loader has given a batch to the script."""
        self._last_loader, self._fed = loader, True

    def went_backward(self) -> None:
        """The batch that came last is one of training."""
        self._evaluating = False
        if self._last_loader is not None:
            self.training_loaders.add(self._last_loader)

    @property
    def evaluation(self) -> int | None:
        """The number of the evaluation that is on; None in training."""
        return self.evaluations if self._evaluating else None

    def begins_evaluation(self, *, of_trained: bool) -> bool:
        """A forward without gradient: whether it is the first since training.

        That of a model which is not trained, on a batch of training, belongs to the training (a teacher).
        """
        if not of_trained and not self._evaluating and self._last_loader in self.training_loaders:
            return False
        begins = not self._evaluating
        self._evaluating = True
        self.evaluations += begins
        if begins and self.is_over:
            # A file, since an evaluation on one rank alone is to end the others too.
            self._evaluated_after.touch()
        return begins

    def number_of(self, optimizer: object) -> int:
        """The number, from 1, of the step that this optimizer takes next."""
        begins = not self._round or id(optimizer) in self._round
        return self.steps + 1 if begins else self.steps

    def stepped(self, optimizer: object) -> None:
        """An optimizer has stepped.

        Raises:
            Enough: the wanted steps are done, and no loader is there to end the loop.
        """
        number = self.number_of(optimizer)
        if number == self.steps:
            self._round.add(id(optimizer))
            return
        self.steps, self._round = number, {id(optimizer)}
        late = not self._fed or self.steps > self.plan.steps + _GRACE_STEPS
        if self.is_over and late and not self.ends_by_itself:
            self.end()
        self._fed = False

    def begins_again(self) -> None:
        """A training loader is asked for another pass after the wanted steps.

        Raises:
            Enough: an evaluation was seen since then, on any rank of this host.
        """
        self._empty_laps += 1
        if self._evaluated_after.exists() or self._empty_laps > _EMPTY_LAPS:
            self.end()

    def end(self) -> None:
        """End the script here.

        Raises:
            Enough: always.
        """
        self.recorder.write("enough", steps=self.steps)
        raise Enough
