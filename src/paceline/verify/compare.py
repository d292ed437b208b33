"""Compares runs of a script that uses paceline: the same training on any number of processes. Pure.

What is looked at, in this order: the number of steps, the samples of each step, its loss, the norm of its
gradient, and every parameter after it. The first difference is the verdict; all later ones follow from it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from paceline.verify.evidence import Event, Run

# Relative, in the 2-norm of a parameter. Of float32 on the examples, after 20 steps, less than a tenth of
# it was seen (docs/verify.md); a wrong sample or weight gives a hundred times as much.
RTOL = 1e-3
_NAMED = 5


@dataclass(frozen=True)
class Difference:
    """The first thing that differs.

    Attributes:
        quantity: "samples", "loss", "gradient norm", "parameter" or "evaluation".
        relative: How much, relative; None for what has no size.

    Collective: none.
    """

    step: int
    quantity: str
    name: str
    counts: tuple[int, int]
    values: tuple[Any, Any]
    relative: float | None = None


@dataclass(frozen=True)
class Comparison:
    """What was compared, what was equal, and the first difference.

    Collective: none.
    """

    verdict: Literal["sound", "fault", "refused"]
    compared: str
    at: str
    difference: Difference | None = None
    why: str = ""
    equal: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        """For `--json`. Collective: none."""
        return asdict(self)

    def words(self) -> list[str]:
        """The report, line by line. Collective: none."""
        lines = []
        if self.verdict == "refused":
            lines += [f"could not be verified: {self.why}", f"  where: {self.at}", ""]
        if self.difference is not None:
            lines += [*_difference_words(self.difference, self.at, self.why), ""]
        lines.append(f"compared: {self.compared}")
        if self.equal:
            lines += [f"found equal ({len(self.equal)}):", *(f"  {line}" for line in self.equal)]
        if self.unknown:
            lines.append(f"could not be judged ({len(self.unknown)}):")
            lines += [f"  {line}" for line in self.unknown]
        if self.verdict == "sound":
            lines.append("sound: the same training on every number of processes")
        return lines


def compare(runs: Sequence[Run], *, rtol: float | None, bitwise: bool) -> Comparison:
    """Compare runs at several numbers of processes with the first of them.

    Args:
        rtol: Relative difference that is allowed; None for `RTOL`. Without effect where `bitwise`.
        bitwise: Whether every bit must be equal.

    Collective: none.
    """
    at = runs[0].ranks[0].of("training")[0]["at"]
    each = [_Training(run) for run in runs]
    counts = [run.plan.world_size for run in runs]
    how = "to the last bit" if bitwise else f"within {rtol or RTOL:g}, relative"
    listed = f"{', '.join(map(str, counts[:-1]))} and {counts[-1]}"
    compared = f"{len(each[0].steps)} steps on {listed} processes, {how}"
    for other in each[1:]:
        if len(other.steps) != len(each[0].steps):
            why = (
                f"the script takes {len(each[0].steps)} steps with {counts[0]} process and "
                f"{len(other.steps)} with {other.count}; its number of steps depends on it."
            )
            return Comparison("refused", compared, at, why=why)
    unknown = [] if bitwise else _unlike(each, rtol)
    look = _Look(0.0 if bitwise else (rtol or RTOL), values=not unknown)
    for other in each[1:]:
        difference = look.first_difference(each[0], other)
        if difference is not None:
            why = _before(difference)
            return Comparison("fault", compared, at, difference, why, look.equal(), unknown)
    return Comparison("sound", compared, at, equal=look.equal(), unknown=unknown)


class _Training:
    """One run, added up over its ranks."""

    def __init__(self, run: Run) -> None:
        self.count = run.plan.world_size
        self.ranks = run.ranks
        logs = [log.of("paceline-step") for log in run.ranks]
        self.steps: list[list[Event]] = [list(step) for step in zip(*logs, strict=False)]
        self.evaluations = run.ranks[0].of("evaluated")
        self.told = run.ranks[0].of("training")[0]
        self.draws = any(
            event["drew"] for log in run.ranks for event in log.of("forward-end") if event["trains"]
        )
        norms: dict[int, float] = {}
        for event in run.ranks[0].of("step"):
            squares = sum(norm**2 for _, norm in event["grads"].values())
            norms[event["s"]] = math.hypot(norms.get(event["s"], 0.0), math.sqrt(squares))
        self.norms = norms

    def ids(self, number: int) -> Counter[int]:
        """The samples of a step over all ranks."""
        return Counter(i for event in self.steps[number] for i in event["ids"])

    def loss(self, number: int) -> float:
        """The mean loss of a step over all ranks; sums of ranks are added in rank order."""
        total: float = sum(event["loss"] for event in self.steps[number])
        return total / (sum(event["count"] for event in self.steps[number]) or 1)


def _unlike(each: list[_Training], rtol: float | None) -> list[str]:
    """Why values need not be equal within rounding; empty if they must be."""
    found = []
    if any(training.draws for training in each):
        found.append(
            "losses and weights: the forward draws random numbers (dropout), and how a step is cut into "
            "micro-batches depends on the number of processes. --bitwise cuts it alike."
        )
    if each[0].told["batchnorm"]:
        found.append(
            "losses and weights: BatchNorm normalises each rank's micro-batch by itself. --bitwise cuts "
            "it alike; sync_batchnorm normalises over all ranks."
        )
    if each[0].told["precision"] != "fp32" and rtol is None:
        found.append(
            f"losses and weights: in {each[0].told['precision']} rounding is coarse; --rtol says what "
            "is to be allowed, --bitwise allows nothing."
        )
    return found


class _Look:
    def __init__(self, rtol: float, *, values: bool) -> None:
        self._rtol, self._values = rtol, values
        self._largest: dict[str, float] = {}
        self._seen: Counter[str] = Counter()

    def first_difference(self, one: _Training, other: _Training) -> Difference | None:
        used: dict[int, Counter[int]] = {}
        for number in range(len(one.steps)):
            found = next(self._in_step(one, other, number, used), None)
            if found is not None:
                return found
        return next(self._evaluations(one, other), None) if self._values else None

    def equal(self) -> list[str]:
        """What was found equal, and how nearly."""
        lines = []
        for what, times in self._seen.items():
            largest = self._largest.get(what)
            near = "" if largest is None else f", the largest relative difference {largest:.2g}"
            lines.append(f"{what}: {times} compared{near if self._rtol else ''}")
        return lines

    def _in_step(
        self, one: _Training, other: _Training, number: int, used: dict[int, Counter[int]]
    ) -> Iterator[Difference]:
        counts = (one.count, other.count)
        step, epoch = number + 1, one.steps[number][0]["epoch"]
        a, b = one.ids(number), other.ids(number)
        if a != b:
            values = (sorted((a - b).elements())[:_NAMED], sorted((b - a).elements())[:_NAMED])
            yield Difference(step, "samples", "ids in one of the two only", counts, values)
        used.setdefault(epoch, Counter()).update(b)
        twice = [i for i in b if used[epoch][i] > 1]
        if twice:
            yield Difference(
                step, "samples", "ids used before in this epoch", counts, ([], twice[:_NAMED])
            )
        self._seen["samples of a step"] += 1
        if not self._values:
            return
        yield from self._values_in(step, "loss", "", counts, one.loss(number), other.loss(number))
        norms = (one.norms.get(step, 0.0), other.norms.get(step, 0.0))
        yield from self._values_in(step, "gradient norm", "", counts, *norms)
        for event in other.steps[number]:
            for name, mine in one.steps[number][0]["params"].items():
                yield from self._parameter(step, name, counts, mine, event["params"].get(name))

    def _values_in(
        self, step: int, quantity: str, name: str, counts: tuple[int, int], a: float, b: float
    ) -> Iterator[Difference]:
        relative = abs(a - b) / max(abs(a), abs(b), 1e-30)
        self._seen[quantity] += 1
        if not relative <= self._rtol:
            yield Difference(step, quantity, name, counts, (a, b), relative)
        self._largest[quantity] = max(self._largest.get(quantity, 0.0), relative)

    def _parameter(
        self,
        step: int,
        name: str,
        counts: tuple[int, int],
        mine: list[Any],
        theirs: list[Any] | None,
    ) -> Iterator[Difference]:
        self._seen["parameter"] += 1
        if theirs is None:
            yield Difference(step, "parameter", name, counts, (mine[1], None))
            return
        if mine[0] == theirs[0]:
            return
        apart = math.dist(mine[2], theirs[2]) if len(mine[2]) == len(theirs[2]) else math.inf
        relative = apart / (math.hypot(*mine[2]) or 1e-30)
        relative = max(relative, abs(mine[1] - theirs[1]) / (mine[1] or 1e-30))
        if not relative <= self._rtol or not self._rtol:
            pair = next(((x, y) for x, y in zip(mine[2], theirs[2], strict=False) if x != y), None)
            yield Difference(
                step, "parameter", name, counts, pair or (mine[1], theirs[1]), relative
            )
        self._largest["parameter"] = max(self._largest.get("parameter", 0.0), relative)

    def _evaluations(self, one: _Training, other: _Training) -> Iterator[Difference]:
        counts = (one.count, other.count)
        for number, (a, b) in enumerate(zip(one.evaluations, other.evaluations, strict=False), 1):
            for name, value in a["values"].items():
                theirs, label = b["values"].get(name, math.nan), f"{number}: {name}"
                yield from self._values_in(
                    len(one.steps), "evaluation", label, counts, value, theirs
                )


def _before(difference: Difference) -> str:
    """What was equal up to the difference, which narrows down where it comes from."""
    return {
        "samples": "the ranks were not given the samples that one process is given; all before was equal.",
        "loss": "the samples were the same, and the weights before this step were equal: the data or the "
        "loss depends on the rank.",
        "gradient norm": "the samples and losses were equal: the gradient was changed on the way.",
        "parameter": "samples, losses and gradients were equal: the optimizer's step, or something "
        "outside of it, depends on the rank.",
        "evaluation": "the weights were equal: the score depends on the rank or on how samples are cut.",
    }[difference.quantity]


def _difference_words(difference: Difference, at: str, why: str) -> list[str]:
    one, many = difference.counts
    what = f"{difference.quantity} {difference.name}".strip()
    shown = f"{_say(difference.values[0])} on {one} process, {_say(difference.values[1])} on {many}"
    if difference.relative is not None:
        shown += f"; relative difference {difference.relative:.3g}"
    return [
        f"FAULT  in step {difference.step}, {what} differs between {one} and {many} processes.",
        f"  where: the training made at {at}, step {difference.step}",
        f"  why:   {why}",
        f"  shown: {shown}",
    ]


def _say(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return repr(value)
