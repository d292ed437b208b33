"""Compares runs of a script that uses paceline: the same training on 1 and on N processes. Pure.

The runs are compared in the order of the script: the weights at the start, then samples, loss and gradient of
each step, and the evaluations. The ranks of one run must have equal weights after every step. With
`bitwise`, digests of all gradients, weights and buffers are compared too. Only the first difference is
reported, because it may cause all later ones.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

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
from paceline.audit.refusals import Refused
from paceline.audit.rules.rule import Finding, Judgement, NoFault, NotJudged

P = TypeVar("P", bound=PointEvent)

# Relative difference that is allowed for losses, gradient norms and scores. Rounding in float32 causes 1e-7
# in the first steps, and up to a tenth of it where a training amplifies it; a wrong sample or weight of a
# step causes a hundred times as much.
_RTOL = 1e-3
_BEFORE = "what was compared before was equal"
_WHY = {
    "samples of a step": "the ranks together did not get the samples of one process; in all earlier steps "
    "they did.",
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


class Difference(NamedTuple):
    """The first difference.

    Attributes:
        quantity: A key of `_WHY`.
        name: The name of the parameter or the score.
        values: The two values. For samples, those of one run only. For a tensor its norms, or its sums or
            digests if the norms are equal.
        relative: The relative difference; None for samples and missing tensors.
        rank: For "parameter of ranks", the rank that differs from rank 0.
    """

    quantity: str
    name: str
    values: tuple[Any, Any]
    relative: float | None = None
    rank: int | None = None


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
    def key(self) -> tuple[type, int, int]:
        """What is equal for the same point of two runs."""
        return type(self.ranks[0]), self.training, self.step

    def of(self, kind: type[P]) -> list[P]:
        """The events of the ranks, those of this kind."""
        return [event for event in self.ranks if isinstance(event, kind)]


def compare(one: Run, several: Run, *, rtol: float | None, bitwise: bool) -> dict[str, Judgement]:
    """Compare a run on several processes with that on one process: a judgement for each quantity.

    Args:
        rtol: Relative difference that is allowed; None for `_RTOL`. Without effect with `bitwise`.
        bitwise: Whether every bit must be equal.

    Raises:
        Refused: the runs make other steps or evaluations.
    """
    trainings = one.ranks[0].of(TrainingBuilt)
    points, others = _points(one), _points(several)
    if [point.key for point in points] != [point.key for point in others]:
        raise Refused(
            f"the script makes {_made(points)} with 1 process and {_made(others)} with "
            f"{several.plan.world_size}.",
            where=trainings[0].at,
            why="their number or order depends on the number of processes.",
            fix="make it independent of the number of processes.",
            output=[],
        )
    not_judged = {} if bitwise else _not_compared(one, several, rtol)
    if not any(point.of(Evaluated) for point in points):
        not_judged["evaluation"] = NotJudged("no evaluation by Paceline was reached.")
    search = _Search(
        0.0 if bitwise else rtol or _RTOL,
        with_values="losses and gradients" not in not_judged,
        with_scores="evaluation" not in not_judged,
    )
    for point, other in zip(points, others, strict=True):
        if (found := search.first_difference(point, other)) is not None:
            is_score = bool(point.of(Evaluated))
            at = point.ranks[0].at if is_score else trainings[point.training].at
            finding = _finding(found, point, at, several.plan.world_size)
            return search.equal() | not_judged | {found.quantity: finding}
    return search.equal() | not_judged


def _finding(found: Difference, point: Point, at: str, count: int) -> Finding:
    a, b = (_shown(value) for value in found.values)
    what = f"{found.quantity} {found.name}".strip()
    if found.rank is not None:
        what = f"parameter {found.name} differs between rank 0 and rank {found.rank}"
        shown = f"{a} on rank 0, {b} on rank {found.rank}"
    else:
        verb = "differ" if found.quantity == "samples of a step" else "differs"
        what = f"{what} {verb} between 1 and {count} processes"
        shown = f"{a} on 1 process, {b} on {count}"
    when = f"{'after' if point.of(Evaluated) else 'in'} step {point.step}"
    effect = "one of the two has other ones"
    if found.relative is not None:
        effect = f"relative difference {found.relative:.3g}"
    return Finding(
        what=f"{when if point.step else 'before the first step'}, {what}.",
        at=at,
        why=_WHY[found.quantity],
        fix="make the result independent of the rank and of the number of processes.",
        evidence=shown,
        effect=effect,
        step=point.step or None,
        ranks=() if found.rank is None else [found.rank],
    )


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value[:5])) + ", ..." * (len(value) > 5) or "none"
    return "none" if value is None else repr(value)


def _points(run: Run) -> list[Point]:
    found = []
    training = step = 0
    for ranks in zip(*(log.of(PointEvent) for log in run.ranks), strict=False):
        if isinstance(ranks[0], WeightsAt):
            training, step = ranks[0].training, ranks[0].step
        found.append(Point(training, step, list(ranks)))
    return found


def _made(points: list[Point]) -> str:
    steps = sum(bool(point.of(TrainingStep)) for point in points)
    scores = sum(bool(point.of(Evaluated)) for point in points)
    return f"{steps} step{'s' * (steps != 1)} and {scores} evaluation{'s' * (scores != 1)}"


def _not_compared(one: Run, several: Run, rtol: float | None) -> dict[str, Judgement]:
    """The quantities that are not compared, with the reasons."""
    # One process does not synchronise.
    trainings = several.ranks[0].of(TrainingBuilt)
    norms = {training.batchnorm for training in trainings}
    normalised = {sum(e.first_forward.samples or 0 for e in run.ranks) for run in (one, several)}
    coarse = sorted({training.precision for training in trainings} - {"fp32"})
    reasons = []
    logs = [*one.ranks, *several.ranks]
    if any(e.drew for log in logs for e in log.of(ForwardEnded) if e.trains):
        reasons.append(
            "the forward draws random numbers (noise, or a dropout that is not torch's), and the "
            "micro-batches of a step depend on the number of processes."
        )
    if "local" in norms or ("synchronised" in norms and len(normalised) > 1):
        reasons.append(
            "BatchNorm normalises over a micro-batch, and these depend on the number of processes. With "
            "sync_batchnorm they are compared, if the first micro-batches of all ranks together are as "
            "large as that of one process."
        )
    if coarse and rtol is None:
        reasons.append(
            f"rounding in {' and '.join(coarse)} is coarse. --rtol gives the allowed difference."
        )
    if reasons:
        # Reproducible training refuses sync_batchnorm.
        if "synchronised" not in norms:
            reasons.append("--bitwise compares them.")
        why = NotJudged(" ".join(reasons))
        return {"losses and gradients": why, "evaluation": why}
    if "synchronised" in norms:
        biases = (
            "the running statistics of BatchNorm include biases whose gradient is rounding error."
        )
        return {"evaluation": NotJudged(biases)}
    return {}


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

    def equal(self) -> dict[str, Judgement]:
        """How often each quantity was compared, and its largest difference."""
        found: dict[str, Judgement] = {}
        for quantity, times in self._times.items():
            near = ", all bits are equal"
            if self._rtol and quantity in self._largest:
                near = f", the largest relative difference is {self._largest[quantity]:.2g}"
            elif self._rtol:
                near = ""
            found[quantity] = NoFault(f"{times} compared{near}.")
        return found

    def first_difference(self, one: Point, other: Point) -> Difference | None:
        """The first difference between two points, in the order of the script."""
        if one.of(Evaluated):
            return next(self._evaluations(one, other), None)
        return next(self._differences(one, other), None)

    def _differences(self, one: Point, other: Point) -> Iterator[Difference]:
        steps, others = one.of(TrainingStep), other.of(TrainingStep)
        if steps:
            yield from self._samples(steps, others)
        if steps and self._with_values:
            losses = [sum(s.loss for s in each) / _count(each) for each in (steps, others)]
            # The terms of a loss may cancel out; its rounding is that of the terms.
            sizes = [sum(s.loss_size for s in each) / _count(each) for each in (steps, others)]
            least = self._largest_so_far(one.training, "loss", *losses, *sizes)
            yield from self._number("loss", losses[0], losses[1], least=least)
            grads = steps[0].grads, others[0].grads
            x, y = (math.hypot(*(g.norm for g in each.values())) for each in grads)
            least = self._largest_so_far(one.training, "gradient norm", x, y)
            yield from self._number("gradient norm", x, y, least=least)
            yield from self._tensors("gradient", *grads, by_value=self._bitwise)
        first, *rest = other.of(WeightsAt)
        for rank, event in enumerate(rest, 1):
            for found in self._tensors("parameter of ranks", first.params, event.params):
                yield found._replace(rank=rank)
        params = one.of(WeightsAt)[0].params
        if not steps:
            for event in (first, *rest):
                yield from self._tensors(
                    "weights at the start", params, event.params, rtol=self._rtol
                )
        elif self._with_values:
            for step in others:
                yield from self._tensors("parameter", params, step.params, by_value=self._bitwise)
                buffers = steps[0].buffers, step.buffers
                yield from self._tensors("buffer", *buffers, by_value=self._bitwise)

    def _samples(self, one: list[TrainingStep], other: list[TrainingStep]) -> Iterator[Difference]:
        x, y = (Counter(i for step in steps for i in step.ids) for steps in (one, other))
        if not x and not y:
            return  # not recorded in either run, so nothing was compared
        self._times["samples of a step"] += 1
        if x != y:
            only = sorted((x - y).elements()), sorted((y - x).elements())
            yield Difference("samples of a step", "", only)

    def _evaluations(self, one: Point, other: Point) -> Iterator[Difference]:
        first = one.of(Evaluated)[0]
        samples = first.samples
        for event in other.of(Evaluated):
            quantity = "samples of an evaluation"
            self._times[quantity] += 1
            if event.samples != samples:
                yield Difference(quantity, "", (samples, event.samples))
            for name in first.values | event.values if self._with_scores else ():
                x, y = (float(v.get(name, math.nan)) for v in (first.values, event.values))
                # Rounding may change the prediction for one sample.
                is_share = (
                    self._rtol and samples and _is_share(x, samples) and _is_share(y, samples)
                )
                least = 1 / (samples * self._rtol) if is_share else 0.0
                yield from self._number("evaluation", x, y, name=name, least=least)

    def _largest_so_far(self, training: int, quantity: str, *numbers: float) -> float:
        """A small loss, or gradient norm, has a rounding error relative to the larger ones before it."""
        key = training, quantity
        finite = [abs(x) for x in numbers if math.isfinite(x)]
        self._scale[key] = max(self._scale.get(key, 0.0), *finite, 0.0)
        return self._scale[key]

    def _number(
        self, quantity: str, x: float, y: float, *, name: str = "", least: float = 0.0
    ) -> Iterator[Difference]:
        """The difference of two numbers, relative to the larger one or to `least` if that is more."""
        self._times[quantity] += 1
        is_equal = x == y or (math.isnan(x) and math.isnan(y))
        relative = 0.0 if is_equal else abs(x - y) / max(abs(x), abs(y), least)
        self._largest[quantity] = max(self._largest.get(quantity, 0.0), relative)
        if not relative <= self._rtol:
            yield Difference(quantity, name, (x, y), relative)

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
        for name in one | other:
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


def _count(steps: list[TrainingStep]) -> float:
    return sum(step.count for step in steps) or 1.0


def _is_share(value: float, samples: int) -> bool:
    """Whether a score is a share of the samples, such as an accuracy."""
    count = value * samples
    return 0 <= value <= 1 and abs(count - round(count)) < 1e-4
