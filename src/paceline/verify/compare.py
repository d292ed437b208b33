"""Compares runs of a script that uses paceline: the same training on any number of processes. Pure.

What is looked at, in the order of the script: the weights at the start; of each step its samples, its loss,
its gradient, and every parameter after it; the evaluations. The first difference is the verdict; all later
ones follow from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from paceline.audit.evidence import Run
from paceline.verify.tolerance import Difference, Likeness
from paceline.verify.trail import Trail

# Of float32 on the examples, after 20 steps, less than a tenth of it was seen (docs/verify.md); a wrong
# sample or weight gives a hundred times as much.
RTOL = 1e-3


@dataclass(frozen=True)
class Comparison:
    """What was compared, what was equal, and the first difference."""

    verdict: Literal["sound", "fault", "refused"]
    compared: str
    at: str
    difference: Difference | None = None
    why: str = ""
    equal: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)

    def words(self) -> list[str]:
        """The report, line by line."""
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
    """
    trails = [Trail(run) for run in runs]
    one, others = trails[0], trails[1:]
    counts = [trail.count for trail in trails]
    how = "to the last bit" if bitwise else f"within {rtol or RTOL:g}, relative"
    listed = f"{', '.join(map(str, counts[:-1]))} and {counts[-1]}"
    compared = f"{one.steps} steps on {listed} processes, {how}"
    for other in others:
        why = _other_course(one, other)
        if why:
            return Comparison("refused", compared, one.trainings[0]["at"], why=why)
    unknown = [] if bitwise else _unlike(trails, rtol)
    look = Likeness(0.0 if bitwise else (rtol or RTOL), values=not unknown)
    for other in others:
        found = look.first_difference(one, other)
        if found is not None:
            difference, moment = found
            at = one.trainings[moment.training]["at"]
            if moment.kind == "evaluation":
                at = moment.ranks[0]["at"]
            why = _before(difference)
            return Comparison("fault", compared, at, difference, why, look.equal(), unknown)
    at, unknown = one.trainings[0]["at"], unknown + list(look.unknown)
    return Comparison("sound", compared, at, equal=look.equal(), unknown=unknown)


def _other_course(one: Trail, other: Trail) -> str:
    """Why two runs cannot be laid side by side; empty if they can."""
    for what, mine, theirs in (
        ("steps", one.steps, other.steps),
        ("evaluations", one.evaluations, other.evaluations),
    ):
        if mine != theirs:
            return (
                f"the script takes {mine} {what} with {_processes(one.count)} and {theirs} with "
                f"{other.count}; its number of {what} depends on it."
            )
    for a, b in zip(one.moments, other.moments, strict=True):
        if (a.kind, a.training, a.step) != (b.kind, b.training, b.step):
            return (
                f"after step {a.step} comes another part of the script with {_processes(one.count)} "
                f"({a.kind}) than with {other.count} ({b.kind})."
            )
    return ""


def _unlike(trails: list[Trail], rtol: float | None) -> list[str]:
    """Why values need not be equal within rounding; empty if they must be."""
    found = []
    if any(trail.draws for trail in trails):
        found.append(
            "losses and weights: the forward draws random numbers (dropout), and how a step is cut into "
            "micro-batches depends on the number of processes. --bitwise cuts it alike."
        )
    # Of the runs on several: one process has nothing to synchronise.
    if any(training["batchnorm"] for training in trails[-1].trainings):
        found.append(
            "losses and weights: BatchNorm normalises each rank's micro-batch by itself. --bitwise cuts "
            "it alike; sync_batchnorm normalises over all ranks."
        )
    coarse = sorted({training["precision"] for training in trails[0].trainings} - {"fp32"})
    if coarse and rtol is None:
        found.append(
            f"losses and weights: in {' and '.join(coarse)} rounding is coarse; --rtol says what "
            "is to be allowed, --bitwise allows nothing."
        )
    return found


def _before(difference: Difference) -> str:
    """What was equal up to the difference, which narrows down where it comes from."""
    if difference.quantity == "parameter of ranks":
        return (
            "ranks of one run must hold the same weights to the last bit: something outside of the "
            "reduced gradients changes them on one rank."
        )
    return {
        "samples": "the ranks were not given the samples that one process is given; those of all steps "
        "before were equal.",
        "weights at the start": "the model is made or loaded in a way that depends on the number of "
        "processes.",
        "loss": "the samples were the same, and the weights before this step were equal: the data or the "
        "loss depends on the rank or on how the step is cut.",
        "gradient norm": "the samples and losses were equal: the gradient was changed on the way.",
        "gradient": "the samples and losses were equal, and so were the other gradients before it: this "
        "one was changed on the way.",
        "parameter": "samples, losses and gradients were equal: the optimizer's step, or something "
        "outside of it, depends on the number of processes.",
        "buffer": "samples, losses and weights were equal: the running statistics are of a rank's own "
        "share.",
        "evaluation": "the weights were equal: the score depends on the rank or on how samples are cut.",
        "samples of an evaluation": "the data that is evaluated depends on the number of processes.",
    }[difference.quantity]


def _difference_words(difference: Difference, at: str, why: str) -> list[str]:
    one, many = difference.counts
    what = f"{difference.quantity} {difference.name}".strip()
    values = [_say(value) for value in difference.values]
    if difference.quantity == "parameter of ranks":
        what = f"parameter {difference.name} differs between rank {one} and rank {many}."
        shown = f"{values[0]} on rank {one}, {values[1]} on rank {many}"
    else:
        what = f"{what} differs between {one} and {many} processes."
        shown = f"{values[0]} on {_processes(one)}, {values[1]} on {many}"
    if difference.relative is not None:
        shown += f"; relative difference {difference.relative:.3g}"
    evaluated = "evaluation" in difference.quantity
    place = f"the {'evaluation' if evaluated else 'training made'} at {at}"
    when = "after" if evaluated else "in"
    when = f"{when} step {difference.step}" if difference.step else "before the first step"
    return [
        f"FAULT  {when}, {what}",
        f"  where: {place}",
        f"  why:   {why}",
        f"  shown: {shown}",
    ]


def _processes(count: int) -> str:
    return f"{count} process" if count == 1 else f"{count} processes"


def _say(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return repr(value)
