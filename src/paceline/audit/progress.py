"""How many steps the script has made, and how it ends after the wanted number.

Then its training loaders end and stay empty, so that evaluation and saving are recorded too. The script is
ended when it starts to train again. A script without loaders is ended in its next optimizer step.
"""

from __future__ import annotations

from paceline.audit.evidence import RunPlan
from paceline.audit.record import Recorder

# A loop that ignores the end of its loader is ended after this many further steps.
_GRACE_STEPS = 2
# A loop that restarts an empty loader is ended after this many passes.
_EMPTY_LAPS = 1000


class Enough(SystemExit):
    """Ends the script successfully after enough steps."""


class Progress:
    """The state that the watchers of one rank share.

    Attributes:
        steps: Rounds of updates; one round is one update of each optimizer.
        training_loaders: The loaders whose batches were followed by a backward.
        ends_by_itself: Whether the script uses paceline, whose `Training` gets the number of steps.
        evaluations: The number of evaluations: forwards without gradient between two backwards.
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
        """The latest batch is used for training."""
        self._evaluating = False
        if self._last_loader is not None:
            self.training_loaders.add(self._last_loader)

    @property
    def evaluation(self) -> int | None:
        """The number of the present evaluation; None in training."""
        return self.evaluations if self._evaluating else None

    def begins_evaluation(self, *, of_trained: bool) -> bool:
        """A forward without gradient: whether it is the first since training.

        On a training batch, the forward of a model that is not trained (a teacher) belongs to the training.
        """
        if not of_trained and not self._evaluating and self._last_loader in self.training_loaders:
            return False
        begins = not self._evaluating
        self._evaluating = True
        self.evaluations += begins
        if begins and self.is_over:
            # A file, because an evaluation on one rank must end the other ranks too.
            self._evaluated_after.touch()
        return begins

    def number_of(self, optimizer: object) -> int:
        """The number, from 1, of this optimizer's next step."""
        begins = not self._round or id(optimizer) in self._round
        return self.steps + 1 if begins else self.steps

    def stepped(self, optimizer: object) -> None:
        """An optimizer has stepped.

        Raises:
            Enough: the wanted steps are done, and there is no loader to end the loop.
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
        """The script starts another pass over a training loader after the wanted steps.

        Raises:
            Enough: a rank of this host has evaluated since then.
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
