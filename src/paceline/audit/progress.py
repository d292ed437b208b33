"""What all hooks of a rank share: it counts the steps of the script, and ends it after the wanted number.

After the last wanted step the training loaders end and stay empty, so that evaluation and saving are recorded
too. The script is ended when it starts to train again. A script without loaders is ended after its next
optimizer step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import torch

from paceline.audit.digests import seed_all
from paceline.audit.evaluations import first_evaluation
from paceline.audit.events import EndedByVerify, TrainingContinues
from paceline.audit.evidence import TrainingLoaders
from paceline.audit.record import Recorder
from paceline.audit.run_plan import UNIONS, RunPlan

# A loop that ignores the end of its loader may take this many further steps; the next one ends it.
_GRACE_STEPS = 2
# A loop that restarts an empty loader is ended after this many passes.
_MAX_EMPTY_PASSES = 1000

# The second run of one process has other random numbers: this and a number is their seed.
NULL_SEED = 9_000_011


class Enough(SystemExit):
    """Ends the script successfully after enough steps."""


class Progress:
    """The state that the hooks of one rank share.

    Attributes:
        steps: Rounds in which each optimizer steps once. A training before the first DDP, which rank 0 may
            do alone, does not count.
        optimizer_calls: Calls of `optimizer.step()`, of all optimizers together.
        uses_paceline: Whether the script uses paceline, whose `Training` gets the number of steps.
        loaders_of_step: The loaders that gave a batch since the latest step.
        ends_pass: Whether this step takes the last batches of a pass, which may have fewer samples.
        random_at_batch: The state of torch's generator when the script got the latest batch; None after the
            next forward.
        evaluation: The number of the current evaluation (forwards without gradient, up to the next forward or
            backward of training); None in training. See `evaluations.first_evaluation`.
        weights_of_evaluation: In the ordinary run, the weights of each model at the beginning of the latest
            evaluation, by number; None if they are saved already.
        after_evaluation: What to call when the training goes on after the current evaluation.
    """

    def __init__(self, plan: RunPlan, recorder: Recorder, rank: int) -> None:
        self.plan, self.recorder, self.rank = plan, recorder, rank
        self.steps = 0
        self.evaluation: int | None = None
        self._last_evaluation = 0
        self.random_at_batch: torch.Tensor | None = None
        self.uses_paceline = False
        self._loaders = TrainingLoaders()
        self.loaders_of_step: Counter[str] = Counter()
        self._per_step: Counter[str] = Counter()  # the batches of each loader in the step before
        self.ends_pass = False
        self._batches = 0
        self._awaits_backward = False  # a forward of training has no backward yet
        self.optimizer_calls = 0
        # The optimizers that have stepped, in this round and at all. Not their ids: that of a deleted one may
        # be given to the next.
        self._round: set[object] = set()
        self._stepped: set[object] = set()
        self._evaluated_after = plan.folder / "evaluated-after"
        self._empty_passes = 0
        self._cut_at: int | None = None  # the step after which this run cut a pass
        self.weights_of_evaluation: dict[int, Any] | None = None
        self.after_evaluation: list[Callable[[], None]] = []

    @property
    def is_over(self) -> bool:
        """Whether the wanted steps are done."""
        return self.steps >= self.plan.steps

    def cuts_pass(self, batches: int) -> bool:
        """Whether to end this pass, of so many batches, now.

        A run whose steps end before the pass cuts it, to see the next one begin: the solo run after half of
        them, and the ordinary run after the same step. It cuts no later pass. Unions cut none.
        """
        if self.plan.mode in UNIONS or self.loaders_of_step:
            return False
        if self.plan.mode == "solo":
            cut_step, end = self.plan.steps // 2, self.plan.steps
        elif self.plan.cut_at is not None:
            cut_step = end = self.plan.cut_at
        else:
            return False
        # Another loader of the same step, as in `zip(one, other)`, is cut too; later ones are not.
        if batches <= end or self.steps < cut_step or self._cut_at not in (None, self.steps):
            return False
        self._cut_at = self.steps
        return True

    def restart(self) -> None:
        """Count steps and evaluations anew: the ranks train together from now on."""
        self.steps = self._last_evaluation = 0
        self._round.clear()
        self._stepped.clear()

    def on_batch(self, loader: str, left: int | None = None) -> None:
        """Note that a loader has given a batch, with so many left in the pass; None if unknown."""
        self._loaders.on_batch(loader)
        if not self.loaders_of_step:
            self.ends_pass = left is not None and left < self._per_step[loader]
        self.loaders_of_step[loader] += 1
        self._batches += 1
        if self.plan.mode == "null":  # for what the script draws before its forward
            seed_all(NULL_SEED + self._batches)
        self.random_at_batch = torch.get_rng_state()

    def on_backward(self) -> None:
        """Note a backward: the latest batch is used for training."""
        self._end_evaluation()
        self._awaits_backward = False
        self._loaders.on_backward()

    @property
    def training_loaders(self) -> Collection[str]:
        """The loaders whose batches the script trains on."""
        return self._loaders.names.keys()

    def on_forward(self, *, trains: bool) -> None:
        """Note a forward of a model."""
        self._loaders.on_forward()
        if trains:
            self._end_evaluation()
            self._awaits_backward = True

    def _end_evaluation(self) -> None:
        self.evaluation = None
        while self.after_evaluation:
            self.after_evaluation.pop()()

    def on_no_grad_forward(self, *, of_trained: bool) -> bool:
        """Note a forward without gradient, and return whether it begins an evaluation.

        A forward of a model that is not trained (a teacher) on a training batch belongs to the training, and
        so does one between a forward of training and its backward. After the step, and before the next
        batch, it is an evaluation.
        """
        if self.evaluation is not None:
            self._loaders.on_evaluation()
            return False
        if self._awaits_backward:
            return False
        is_on_training_batch = self._loaders.last in self.training_loaders and self.loaders_of_step
        if not of_trained and is_on_training_batch:
            return False
        self.evaluation = max(self._last_evaluation + 1, first_evaluation(self.steps))
        self._last_evaluation = self.evaluation
        self._loaders.on_evaluation()
        if self.is_over:
            # In a file, because after an evaluation on one rank the other ranks must end too.
            self._evaluated_after.touch()
        return True

    def step_number(self, optimizer: object) -> int:
        """The number, from 1, of this optimizer's next step."""
        # All optimizers step in the first round; a later one is built in place of another.
        is_new = self.steps > 1 and optimizer not in self._stepped
        begins = not self._round or optimizer in self._round or is_new
        return self.steps + 1 if begins else self.steps

    def on_step(self, optimizer: object) -> None:
        """Note a step of an optimizer.

        Raises:
            Enough: it is one step more than wanted, or three more if a loader can end the loop.
        """
        number = self.step_number(optimizer)
        self.optimizer_calls += 1
        self._stepped.add(optimizer)
        if number == self.steps:
            self._round.add(optimizer)
            return
        self.steps, self._round = number, {optimizer}
        grace = _GRACE_STEPS if self.loaders_of_step else 0
        if self.steps > self.plan.steps + grace and not self.uses_paceline:
            self.end()
        self._per_step = self.loaders_of_step.copy()
        self.loaders_of_step.clear()

    def on_empty_pass(self) -> None:
        """Note that the script starts another pass over a training loader after the wanted steps.

        Raises:
            Enough: a rank has evaluated since then, or the loop has begun 1000 such passes.
        """
        if not self._empty_passes:
            self.recorder.write(TrainingContinues())
        self._empty_passes += 1
        if self._evaluated_after.exists() or self._empty_passes > _MAX_EMPTY_PASSES:
            self.end()

    def end(self) -> None:
        """End the script here.

        Raises:
            Enough: always.
        """
        self.recorder.write(TrainingContinues())
        self.recorder.write(EndedByVerify())
        raise Enough
