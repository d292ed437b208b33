"""The evaluations of a rank: what it evaluated, and what it reduced, gathered and read."""

from __future__ import annotations

import math
from collections import defaultdict, deque
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
_REDUCTIONS = ("all_reduce", "reduce", "all_gather", "all_gather_into_tensor")

_EVALUATIONS_PER_STEP = 100
# A loader may be asked for one batch more than the script has used, as by Accelerate.
_MAX_AHEAD = 2


@dataclass(frozen=True, eq=False)
class MetricCall:
    """A call that reduced small values, or gathered those of each rank."""

    call: CollectiveBegun
    results: list[float]  # those of a gather are summed over the ranks


def first_evaluation(steps: int) -> int:
    """The number of the first evaluation after so many steps.

    It depends on the steps, so that an evaluation on one rank alone does not shift the numbers of later ones.
    """
    return _EVALUATIONS_PER_STEP * steps + 1


@dataclass
class Evaluation:
    """What a rank did from a forward without gradient to the next forward or backward of training."""

    # What was evaluated, by loader and pass: indices, or else contents. A batch that several models are given
    # counts once.
    rows: dict[tuple[str, int], list[Any]] = field(default_factory=dict)
    num_samples: int = 0  # the samples before the first collective
    collectives: list[CollectiveBegun] = field(default_factory=list)
    gathers_samples: bool = False  # whether it gathers a value for each sample, such as predictions
    metric_calls: list[MetricCall] = field(default_factory=list)
    # By line, the numbers that the script took: those after the first gather; without one, after the first
    # collective; without any, all.
    numbers: dict[str, list[float]] = field(default_factory=dict)

    @property
    def gathers(self) -> list[CollectiveBegun]:
        """The collectives that gather."""
        return [event for event in self.collectives if "gather" in event.op]


class EvaluationReader:
    """Reads the evaluations from the events of a rank.

    Args:
        training_loaders: The loaders whose batches the script trains on.
        trained: The digests of the rows that the script trained on.
    """

    def __init__(self, training_loaders: Collection[str], trained: Collection[int]) -> None:
        self._training_loaders, self._trained = training_loaders, frozenset(trained)
        self._found: defaultdict[int, Evaluation] = defaultdict(Evaluation)
        self._unused: deque[BatchGiven] = deque()  # batches that no model was given yet
        self._is_new = False  # whether a batch came since the latest forward
        self._batch: BatchGiven | None = None  # the one that a model was given last
        self._model: int | None = None  # the first model that was given it
        self._in_training = False  # whether the latest batch is one of the training
        self._samples: int | None = None  # of the latest forward
        self._call: CollectiveBegun | None = None
        self._is_of_samples = False  # whether the latest call gathers values of each sample

    def read(self, events: Iterable[Event]) -> dict[int, Evaluation]:
        """The evaluations, by number."""
        for event in events:
            if isinstance(event, BatchGiven):
                self._on_batch(event)
            elif isinstance(event, CollectiveBegun):
                self._on_call(event)
            elif isinstance(event, CollectiveEnded):
                self._on_result(event.values or [])
            elif isinstance(event, NumberRead) and not self._in_training:
                numbers = self._found[event.evaluation].numbers
                numbers.setdefault(event.at, []).append(event.value)
            elif isinstance(event, ForwardEnded):
                self._on_forward(event)
        return dict(self._found)

    def _on_batch(self, event: BatchGiven) -> None:
        last = self._unused[-1] if self._unused else event
        if (last.loader, last.pass_number) != (event.loader, event.pass_number):
            self._unused.clear()
        self._unused.append(event)
        self._is_new = True
        if len(self._unused) > _MAX_AHEAD:  # the script leaves batches out
            self._unused = deque([event])
        self._in_training = event.loader in self._training_loaders

    def _on_call(self, event: CollectiveBegun) -> None:
        self._call = event
        if event.evaluation is None:
            return
        evaluation = self._found[event.evaluation]
        gathers = "gather" in event.op
        if not evaluation.gathers and (gathers or not evaluation.collectives):
            evaluation.numbers.clear()
        evaluation.collectives.append(event)
        values = max(event.items, math.prod(event.shape))
        is_one_each = event.shape[:1] == [self._samples]
        self._is_of_samples = gathers and (values > MAX_METRIC_VALUES or is_one_each)
        evaluation.gathers_samples |= self._is_of_samples

    def _on_result(self, results: list[float]) -> None:
        call = self._call
        if call is None or call.evaluation is None or self._is_of_samples:
            return
        gathers = "gather" in call.op
        most = MAX_METRIC_VALUES if gathers else MAX_SUMS
        if 0 < len(results) <= most and call.op in _REDUCTIONS:
            if gathers:
                length = len(results) // max(len(call.group), 1)
                results = [sum(results[k::length]) for k in range(length)]
            self._found[call.evaluation].metric_calls.append(MetricCall(call, results))

    def _on_forward(self, event: ForwardEnded) -> None:
        # The next batch, if one came since the latest forward. Or if the model of that forward gets another
        # one of the batches that were fetched ahead; another model may be given the same batch.
        if self._unused and (self._is_new or self._model == event.model):
            self._batch, self._model = self._unused.popleft(), None
        self._is_new = False
        if event.evaluation is None:
            return
        own, rows, batch = self._found[event.evaluation], event.rows or [], self._batch
        self._in_training, self._samples = False, event.samples
        own.num_samples += 0 if own.collectives else event.samples or 0
        if batch is not None and batch.loader in self._training_loaders and rows:
            if self._trained.intersection(rows):
                return  # a teacher's forward, or a metric on training samples
            batch = self._batch = None
        ids = batch.ids if batch is not None else None
        # A batch counts once: for the model that gets it first. That model may get it in parts, each with its
        # own rows; with indices, the first part has those of the whole batch.
        is_again = self._model is not None and (self._model != event.model or ids)
        if rows and not (batch is not None and is_again):
            self._model = event.model if batch is not None else None
            key = (batch.loader, batch.pass_number) if batch is not None else ("", 0)
            own.rows.setdefault(key, []).extend(ids or rows)
