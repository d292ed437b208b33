"""Compares runs of a script that uses paceline: the same training on 1 and on N processes. Pure.

The runs are compared in the order of the script: the weights at the start, then samples, loss and gradient of
each step, and the evaluations. The ranks of one run must have equal weights after every step. With
`bitwise`, digests of all gradients, weights and buffers are compared too. Only the first difference is
reported, because it may cause all later ones.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from paceline.audit.events import (
    Evaluated,
    ForwardEnded,
    PointEvent,
    Summary,
    TrainingBuilt,
    TrainingStep,
    WeightsAt,
)
from paceline.audit.evidence import Run

P = TypeVar("P", bound=PointEvent)

# Relative difference that is allowed for losses, gradient norms and scores. In float32 the examples stay
# below a tenth of it for 20 steps; a wrong sample or weight causes a hundred times as much.
_RTOL = 1e-3
# A difference is relative to the size of the number, or to this part of the largest one so far if that is
# more: a loss near zero has a large relative rounding error, in the first step too if its terms cancel out.
_LEAST_SCALE = 1e-3
_MAX_IDS = 5
_BEFORE = "what was compared before was equal"
_WHY = {
    "samples": "the ranks together did not get the samples of one process; in all earlier steps they did.",
    "weights at the start": "the model is built or loaded in a way that depends on the number of processes.",
    "loss": f"{_BEFORE}. The data, the loss or an earlier update depends on the rank or on the number of "
    "processes.",
    **dict.fromkeys(
        ("gradient norm", "gradient"),
        f"{_BEFORE}: its reduction, a change after it, or a layer that computes over the samples of a "
        "forward, such as BatchNorm, depends on the number of processes.",
    ),
    "parameter": f"{_BEFORE}: the optimizer step, or a change outside of it, depends on the number of "
    "processes.",
    "buffer": f"{_BEFORE}: the buffer is computed from one rank's samples.",
    "evaluation": f"{_BEFORE}: the score depends on the rank or on the number of processes.",
    "samples of an evaluation": "the evaluated data depends on the number of processes.",
    "parameter of ranks": "all ranks of one run must hold bitwise equal weights: a change outside of the "
    "reduced gradients was made on one rank.",
}


@dataclass(frozen=True)
class Difference:
    """The first difference.

    Attributes:
        quantity: A key of `_WHY`.
        name: The name of the parameter or the score.
        values: The two values. For a tensor its norms, or its sums or digests if the norms are equal.
        relative: The relative difference; None for samples and missing tensors.
        step: The step in which the runs differ, from 1; for an evaluation the step before it; 0 at the start.
        counts: The numbers of processes of the two runs; for "parameter of ranks" the two ranks.
    """

    quantity: str
    name: str
    values: tuple[Any, Any]
    relative: float | None = None
    step: int = 0
    counts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """The result: which runs were compared, which quantities were equal, and the first difference.

    Attributes:
        at: The line of the evaluation that differs, else that where the training was built.
        evaluations: How many evaluations each run made.
        why: Why the runs differ or could not be compared.
        equal: How often each quantity was compared, and its largest difference.
        not_seen: What was not compared, with the reason.
    """

    verdict: Literal["passed", "fault", "not seen"]
    compared: str
    at: str
    evaluations: int = 0
    difference: Difference | None = None
    why: str = ""
    equal: list[str] = field(default_factory=list)
    not_seen: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Point:
    """The same point of the script on every rank: the start of a training, a step of it, or an evaluation.

    Attributes:
        training: The number of the `Training` in the script, from 0; for an evaluation, the latest one.
        step: Steps that this training had completed.
        ranks: The event of each rank.
    """

    training: int
    step: int
    ranks: list[PointEvent]

    @property
    def kind(self) -> str:
        """ "start", "step" or "evaluation"."""
        if self.of(Evaluated):
            return "evaluation"
        return "step" if self.of(TrainingStep) else "start"

    def of(self, kind: type[P]) -> list[P]:
        """The events of the ranks, those of this kind."""
        return [event for event in self.ranks if isinstance(event, kind)]

    @property
    def ids(self) -> Counter[int]:
        """The samples of a step over all ranks."""
        return Counter(i for step in self.of(TrainingStep) for i in step.ids)

    @property
    def loss(self) -> float:
        """The mean loss of a step; the ranks' sums are added in rank order."""
        return sum(step.loss for step in self.of(TrainingStep)) / self._count

    @property
    def loss_size(self) -> float:
        """The same of the absolute losses of the micro-batches, whose rounding the mean loss has."""
        return sum(step.loss_size for step in self.of(TrainingStep)) / self._count

    @property
    def _count(self) -> float:
        return sum(step.count for step in self.of(TrainingStep)) or 1.0


def _points(run: Run) -> list[Point]:
    found = []
    training = step = 0
    for ranks in zip(*(log.of(PointEvent) for log in run.ranks), strict=False):
        if isinstance(ranks[0], WeightsAt):
            training, step = ranks[0].training, ranks[0].step
        found.append(Point(training, step, list(ranks)))
    return found


def compare(runs: Sequence[Run], *, rtol: float | None, bitwise: bool) -> Comparison:
    """Compare runs on several numbers of processes with the first of them.

    Args:
        rtol: Relative difference that is allowed; None for `_RTOL`. Without effect with `bitwise`.
        bitwise: Whether every bit must be equal.
    """
    one, *others = runs
    sizes = [run.plan.world_size for run in runs]
    points = _points(one)
    trainings = one.ranks[0].of(TrainingBuilt)
    how = "bitwise" if bitwise else f"within a relative difference of {rtol or _RTOL:g}"
    listed = f"{', '.join(map(str, sizes[:-1]))} and {sizes[-1]}"
    compared = f"{_count(points, 'step')} steps on {listed} processes, {how}"
    steps = [step for run in runs for log in run.ranks for step in log.of(TrainingStep)]
    if any(step.dropout_off for step in steps):
        compared += ", with dropout turned off"
    result = Comparison("passed", compared, trainings[0].at, _count(points, "evaluation"))
    for run in others:
        why = _why_not_comparable(points, _points(run), one.plan.world_size, run.plan.world_size)
        if why:
            return replace(result, verdict="not seen", why=why)
    no_values, no_scores = ([], []) if bitwise else _not_compared(runs, rtol)
    not_seen = no_values + no_scores
    search = _Search(
        0.0 if bitwise else (rtol or _RTOL),
        with_values=not no_values,
        with_scores=not not_seen,
    )
    for run in others:
        for first, point in zip(points, _points(run), strict=True):
            difference = search.first_difference(first, point)
            if difference is not None:
                at = (
                    first.ranks[0] if point.kind == "evaluation" else trainings[first.training]
                ).at
                why = _WHY[difference.quantity]
                found = replace(result, verdict="fault", at=at, difference=difference, why=why)
                return replace(found, equal=search.equal(), not_seen=not_seen)
        search.next_run()
    result = replace(result, equal=search.equal(), not_seen=not_seen)
    if not no_values:
        return result
    why = "the losses and gradients were not compared, for the reason below."
    return replace(result, verdict="not seen", why=why)


def _count(points: list[Point], kind: str) -> int:
    return sum(point.kind == kind for point in points)


def _why_not_comparable(one: list[Point], other: list[Point], count: int, other_count: int) -> str:
    """Why two runs cannot be compared point by point; empty if they can."""
    for kind in ("step", "evaluation"):
        number, other_number = _count(one, kind), _count(other, kind)
        if number != other_number:
            return (
                f"the script makes {number} {kind}{'s' * (number != 1)} with {processes(count)} and "
                f"{other_number} with {other_count}: the number depends on the number of processes."
            )
    for x, y in zip(one, other, strict=True):
        if (x.kind, x.training, x.step) != (y.kind, y.training, y.step):
            return (
                f"after step {x.step} the script continues with: {x.kind} on {processes(count)}, "
                f"{y.kind} on {other_count}."
            )
    return ""


def _not_compared(runs: Sequence[Run], rtol: float | None) -> tuple[list[str], list[str]]:
    """Why losses and gradients are not compared, and why evaluations are not."""
    values, scores = [], []
    logs = [log for run in runs for log in run.ranks]
    # From the last run, because one process does not synchronise.
    norms = {training.batchnorm for training in runs[-1].ranks[0].of(TrainingBuilt)}
    sizes = [_normalised_together(run) for run in runs]
    # Reproducible training, which --bitwise turns on, refuses sync_batchnorm.
    can_be_bitwise = "synchronised" not in norms
    if any(e.drew for log in logs for e in log.of(ForwardEnded) if e.trains):
        values.append(
            "losses and gradients: the forward draws random numbers (noise, or a dropout that is not "
            "torch's), and the micro-batches of a step depend on the number of processes."
            + " With --bitwise they do not."
            * can_be_bitwise
        )
    if "local" in norms:
        values.append(
            "losses and gradients: BatchNorm normalises each rank's micro-batch alone. sync_batchnorm "
            "normalises over all ranks. With --bitwise the micro-batches do not depend on the number of "
            "processes."
        )
    elif "synchronised" in norms and len(set(sizes)) > 1:
        shown = ", ".join(
            f"{n} on {processes(len(r.ranks))}" for n, r in zip(sizes, runs, strict=True)
        )
        values.append(
            f"losses and gradients: BatchNorm normalises different numbers of samples together: {shown}. It "
            "depends on the micro-batches: without micro_batch, each rank has one in a step."
        )
    elif "synchronised" in norms and logs[0].of(Evaluated):
        scores.append(
            "evaluations: the running statistics of BatchNorm include biases whose gradient is only "
            "rounding error."
        )
    precisions = {training.precision for training in runs[0].ranks[0].of(TrainingBuilt)}
    coarse = sorted(precisions - {"fp32"})
    if coarse and rtol is None:
        values.append(
            f"losses and gradients: rounding in {' and '.join(coarse)} is coarse. Give the allowed "
            f"difference with --rtol{', or use --bitwise' * can_be_bitwise}."
        )
    return values, scores


def _normalised_together(run: Run) -> int:
    """The samples of all ranks in their first forward of training."""
    return sum(log.first_forward.samples or 0 for log in run.ranks)


class _Search:
    """Finds the differences between pairs of points.

    Args:
        rtol: Relative difference that is allowed; 0 for bitwise comparison.
        with_values: Whether losses and gradients are compared.
        with_scores: Whether evaluations are compared.
    """

    def __init__(self, rtol: float, *, with_values: bool, with_scores: bool) -> None:
        self._rtol, self._with_values, self._with_scores = rtol, with_values, with_scores
        self._bitwise = not rtol  # else the values of the tensors of a step are not compared
        self._times: Counter[str] = Counter()
        self._largest: dict[str, float] = {}
        self._scale: dict[tuple[int, str], float] = {}

    def next_run(self) -> None:
        """Begin the comparison with another run."""
        self._scale.clear()

    def equal(self) -> list[str]:
        """How often each quantity was compared, and its largest difference."""
        lines = []
        for quantity, times in self._times.items():
            near = ""
            if self._rtol and quantity in self._largest:
                near = f", the largest relative difference {self._largest[quantity]:.2g}"
            lines.append(f"{quantity}: {times} compared{near}")
        return lines

    def first_difference(self, one: Point, other: Point) -> Difference | None:
        """The first difference between two points, in the order of the script."""
        found = next(self._differences(one, other), None)
        if found is None:
            return None
        return replace(
            found, step=one.step, counts=found.counts or (len(one.ranks), len(other.ranks))
        )

    def _differences(self, one: Point, other: Point) -> Iterator[Difference]:
        if one.kind == "evaluation":
            yield from self._evaluations(one, other)
            return
        if one.kind == "step":
            yield from self._samples(one, other)
            if self._with_values:
                sizes = one.loss_size, other.loss_size
                yield from self._number(
                    "loss", (one.loss, other.loss), training=one.training, sizes=sizes
                )
                grads = one.of(TrainingStep)[0].grads, other.of(TrainingStep)[0].grads
                x, y = (math.hypot(*(g.norm for g in each.values())) for each in grads)
                yield from self._number("gradient norm", (x, y), training=one.training)
                yield from self._tensors("gradient", *grads, by_value=self._bitwise)
        params, others = one.of(WeightsAt)[0].params, other.of(WeightsAt)[0].params
        for rank, event in enumerate(other.of(WeightsAt)[1:], 1):
            for found in self._tensors("parameter of ranks", others, event.params):
                yield replace(found, counts=(0, rank))
        for event in other.of(WeightsAt):
            if not isinstance(event, TrainingStep):
                yield from self._tensors(
                    "weights at the start", params, event.params, rtol=self._rtol
                )
            elif self._with_values:
                buffers = one.of(TrainingStep)[0].buffers
                yield from self._tensors("parameter", params, event.params, by_value=self._bitwise)
                yield from self._tensors("buffer", buffers, event.buffers, by_value=self._bitwise)

    def _samples(self, one: Point, other: Point) -> Iterator[Difference]:
        ids = one.ids, other.ids
        if not any(ids):
            return  # not recorded in either run, so nothing was compared
        self._times["samples of a step"] += 1
        if ids[0] != ids[1]:
            only = [sorted((x - y).elements())[:_MAX_IDS] for x, y in (ids, ids[::-1])]
            yield Difference("samples", "ids", (only[0], only[1]))

    def _evaluations(self, one: Point, other: Point) -> Iterator[Difference]:
        first = one.of(Evaluated)[0]
        samples = first.samples
        for event in other.of(Evaluated):
            quantity = "samples of an evaluation"
            self._times[quantity] += 1
            if event.samples != samples:
                yield Difference(quantity, "", (samples, event.samples))
            for name in first.values | event.values if self._with_scores else ():
                x, y = (values.get(name, math.nan) for values in (first.values, event.values))
                least = 0.0
                if self._rtol and _is_share(x, samples) and _is_share(y, samples):
                    # Rounding may change the prediction for one sample.
                    least = 1 / (samples * self._rtol)
                yield from self._number("evaluation", (float(x), float(y)), name=name, least=least)

    def _number(
        self,
        quantity: str,
        pair: tuple[float, float],
        *,
        training: int = 0,
        name: str = "",
        sizes: Iterable[float] = (),
        least: float | None = None,
    ) -> Iterator[Difference]:
        """The difference of two numbers, relative to the larger one or to `least` if that is more.

        By default, `least` is the part `_LEAST_SCALE` of the largest such number of the training so far, or
        of the largest of `sizes`.
        """
        self._times[quantity] += 1
        if least is None:
            key = training, quantity
            largest = max(self._scale.get(key, 0.0), *map(abs, pair), *sizes)
            self._scale[key], least = largest, _LEAST_SCALE * largest
        x, y = pair
        is_equal = x == y or (math.isnan(x) and math.isnan(y))
        relative = 0.0 if is_equal else abs(x - y) / max(abs(x), abs(y), least, 1e-30)
        self._largest[quantity] = max(self._largest.get(quantity, 0.0), relative)
        if not relative <= self._rtol:
            yield Difference(quantity, name, pair, relative)

    def _tensors(
        self,
        quantity: str,
        one: dict[str, Summary],
        other: dict[str, Summary],
        *,
        rtol: float = 0.0,
        by_value: bool = True,
    ) -> Iterator[Difference]:
        """The differences of tensors: of their names, and of their values unless `by_value` is False."""
        for name in [*one, *(name for name in other if name not in one)]:
            if name not in one or name not in other:
                present = [each[name].norm if name in each else None for each in (one, other)]
                yield Difference(quantity, name, (present[0], present[1]))
            elif by_value:
                self._times[quantity] += 1
                x, y = one[name], other[name]
                size = max(x.norm, y.norm, 1e-30)
                relative = max(abs(x.norm - y.norm), abs(x.sum - y.sum)) / size
                if x.digest != y.digest and not (rtol and relative <= rtol):
                    pairs = [(x.norm, y.norm), (x.sum, y.sum), (x.digest, y.digest)]
                    shown = next(pair for pair in pairs if pair[0] != pair[1])
                    yield Difference(quantity, name, shown, relative)


def _is_share(value: float, samples: int) -> bool:
    """Whether a score is a share of the samples, such as an accuracy."""
    count = value * samples
    return 0 <= value <= 1 and abs(count - round(count)) < 1e-4


def processes(count: int) -> str:
    """A number of processes in words."""
    return f"{count} process{'es' * (count != 1)}"
