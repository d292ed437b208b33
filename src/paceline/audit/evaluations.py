"""The evaluations of a rank: what it evaluated, and what it reduced, gathered and read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from paceline.audit.events import (
    BatchGiven,
    CollectiveBegun,
    CollectiveEnded,
    Event,
    ForwardEnded,
    NumberRead,
)

# Only tensors of up to this many values are metrics, whose values are recorded.
MAX_METRIC_VALUES = 16
MAX_SUMS = 1024  # the same for reductions: one may be of a confusion matrix

_EVALUATIONS_PER_STEP = 100


@dataclass(frozen=True, eq=False)
class MetricCall:
    """A call that reduced or gathered a few values."""

    begun: CollectiveBegun
    results: list[float]
    samples: int  # those that this rank evaluated for it


def first_evaluation(steps: int) -> int:
    """The number of the first evaluation after so many steps.

    It depends on the steps, so that an evaluation on one rank alone does not shift the numbers of later ones.
    """
    return _EVALUATIONS_PER_STEP * steps + 1


@dataclass
class Evaluation:
    """What a rank did from a forward without gradient to the next forward or backward of training."""

    at: str = ""  # the line of the first forward
    steps_done: int = 0
    # What was evaluated, by loader: the indices of its batches. Without them, the digests of the inputs.
    rows: dict[str, list[Any]] = field(default_factory=dict)
    forwards: int = 0
    exchanges: bool = False  # whether something was reduced or gathered
    gathers: bool = False
    calls: dict[str, list[MetricCall]] = field(default_factory=dict)  # by line
    # By line, the numbers that the script took: those after the first gather; without one, after the first
    # reduction; without any, all.
    numbers: dict[str, list[float]] = field(default_factory=dict)

    @property
    def samples(self) -> list[Any]:
        """What was evaluated of all loaders."""
        return [(loader, row) for loader, rows in self.rows.items() for row in rows]


class EvaluationReader:
    """Reads the evaluations from the events of a rank.

    Args:
        training_loaders: The loaders whose batches the script trains on.
    """

    def __init__(self, training_loaders: Collection[str]) -> None:
        self._training_loaders = training_loaders
        self._found: defaultdict[int, Evaluation] = defaultdict(Evaluation)
        self._batches: list[BatchGiven] = []  # those since the latest forward
        self._has_ids = False  # whether the latest batches of an evaluation have indices
        self._in_training = False  # whether the latest batch is one of the training
        self._call: CollectiveBegun | None = None
        self._samples = 0  # those that were evaluated for the latest call
        self._is_used = True  # whether a call came after the latest forward

    def read(self, events: Iterable[Event]) -> dict[int, Evaluation]:
        """The evaluations, by number."""
        for event in events:
            if isinstance(event, BatchGiven):
                self._in_training = event.loader in self._training_loaders
                self._batches += [event] * (not self._in_training)
            elif isinstance(event, CollectiveBegun):
                is_exchange = "reduce" in event.op or "gather" in event.op
                self._call = event if is_exchange else None
                if is_exchange and event.evaluation is not None:
                    self._on_exchange(self._found[event.evaluation], "gather" in event.op)
            elif isinstance(event, CollectiveEnded):
                self._on_result(event.values or [])
            elif isinstance(event, NumberRead) and not self._in_training:
                numbers = self._found[event.evaluation].numbers
                numbers.setdefault(event.at, []).append(event.value)
            elif isinstance(event, ForwardEnded):
                self._on_forward(event)
        return dict(self._found)

    def _on_exchange(self, evaluation: Evaluation, gathers: bool) -> None:
        if not evaluation.gathers and (gathers or not evaluation.exchanges):
            evaluation.numbers.clear()
        evaluation.exchanges = True
        evaluation.gathers |= gathers
        self._is_used = True

    def _on_result(self, results: list[float]) -> None:
        call = self._call
        if call is not None and call.evaluation is not None and call.values:
            calls = self._found[call.evaluation].calls
            calls.setdefault(call.at, []).append(MetricCall(call, results, self._samples))

    def _on_forward(self, event: ForwardEnded) -> None:
        batches, self._batches = self._batches, []
        if event.evaluation is None:
            return
        own, self._in_training = self._found[event.evaluation], False
        if not own.forwards:
            own.at, own.steps_done = event.at, event.steps_done
            self._has_ids, self._is_used = False, True
        own.forwards += 1
        self._samples = (0 if self._is_used else self._samples) + (event.samples or 0)
        self._is_used = False
        # The loader may be ahead of the models; several models, or one in parts, may get a batch.
        if batches:
            self._has_ids = all(batch.ids for batch in batches)
        for batch in batches if self._has_ids else ():
            own.rows.setdefault(batch.loader, []).extend(batch.ids or ())
        if not self._has_ids:
            own.rows.setdefault("", []).extend(event.rows or ())
