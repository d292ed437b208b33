"""Whether two runs of a script that uses paceline are one training, up to rounding. Pure.

Rounding is not one number. A sum over ranks rounds in another order, by about 1e-7 of its terms; where the
terms cancel, little is left but that. Such gradients are real: the bias of attention's keys has none but
rounding, nor has a bias before BatchNorm. Adam divides by their size and steps by the learning rate in a
direction that chance decides. So an element whose gradients differ by no more than rounding, and yet by more
than the tolerance, is from then on left out of the comparison of weights.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from paceline.verify.trail import Moment, Trail

# How far rounding alone moves an element of the gradient, relative to the norm of the whole. BatchNorm of two
# samples came to 2e-5 in fp32.
_ROUNDING = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 2e-3}
# A loss may pass through zero, and all its digits with it.
_FLOOR = 1e-3
_NAMED = 5


@dataclass(frozen=True)
class Difference:
    """The first thing that differs.

    Attributes:
        step: After how many optimizer steps of its training.
        quantity: "weights at the start", "samples", "loss", "gradient norm", "gradient", "parameter",
            "buffer", "parameter of ranks", "evaluation" or "samples of an evaluation".
        name: Of the parameter or the score.
        counts: The numbers of processes of the two runs; of "parameter of ranks" the two ranks.
        values: What they have.
        relative: How much, relative; None for what has no size.
    """

    step: int
    quantity: str
    name: str
    counts: tuple[int, int]
    values: tuple[Any, Any]
    relative: float | None = None


class Likeness:
    """Looks for the first difference between runs.

    Args:
        rtol: Relative difference that is allowed; 0 allows no bit.
        values: Whether losses, gradients and weights must be alike, besides samples.

    Attributes:
        unknown: What turned out not to be judged, and why.
    """

    def __init__(self, rtol: float, *, values: bool) -> None:
        self._rtol, self._values = rtol, values
        self.unknown: tuple[str, ...] = ()
        self._seen: Counter[str] = Counter()
        self._largest: dict[str, float] = {}
        self._apart: dict[str, float] = {}

    def first_difference(self, one: Trail, other: Trail) -> tuple[Difference, Moment] | None:
        """The first, in the order of the script. Both have the same kinds of moments."""
        pair = _Pair(self, one, other)
        for a, b in zip(one.moments, other.moments, strict=True):
            found = next(pair.differences(a, b), None)
            if found is not None:
                return found, a
        return None

    def equal(self) -> list[str]:
        """What was found equal, and how nearly."""
        lines = []
        for what, times in self._seen.items():
            near = ""
            if self._rtol and what in self._largest:
                near = f", the largest relative difference {self._largest[what]:.2g}"
            lines.append(f"{what}: {times} compared{near}")
        return lines


class _Pair:
    """Two runs, walked through side by side."""

    def __init__(self, likeness: Likeness, one: Trail, other: Trail) -> None:
        self._all = likeness
        self._rtol = likeness._rtol
        self._one, self._other = one, other
        self._used: dict[tuple[int, int], Counter[int]] = {}
        self._scale: dict[tuple[int, str], float] = {}
        self._chance: dict[tuple[int, str], set[int]] = {}
        self._path: dict[tuple[int, str], tuple[list[float], float]] = {}

    def differences(self, a: Moment, b: Moment) -> Iterator[Difference]:
        if a.kind == "evaluation":
            yield from self._evaluations(a, b)
            return
        if a.kind == "step":
            yield from self._samples(a, b)
            if self._all._values:
                yield from self._size(a, "loss", a.loss, b.loss)
                yield from self._gradients(a, b)
        yield from self._ranks(b)
        if self._all._values:
            for event in b.ranks:
                yield from self._parameters(a, event["params"])
            if a.kind == "step":
                yield from self._buffers(a, b)

    def _found(self, at: Moment, quantity: str, name: str, *values: Any, **more: Any) -> Difference:
        counts = (self._one.count, self._other.count)
        return Difference(at.step, quantity, name, counts, (values[0], values[1]), **more)

    def _samples(self, a: Moment, b: Moment) -> Iterator[Difference]:
        mine, theirs = a.ids, b.ids
        if mine != theirs:
            only = [
                sorted((x - y).elements())[:_NAMED] for x, y in ((mine, theirs), (theirs, mine))
            ]
            yield self._found(a, "samples", "ids in one of the two only", *only)
        used = self._used.setdefault((a.training, a.ranks[0]["epoch"]), Counter())
        used.update(theirs)
        twice = [i for i in theirs if used[i] > 1]
        if twice:
            yield self._found(a, "samples", "ids used before in this epoch", [], twice[:_NAMED])
        self._all._seen["samples of a step"] += 1

    def _size(self, at: Moment, quantity: str, mine: float, theirs: float) -> Iterator[Difference]:
        """A number that is compared by its size, and by the largest of its kind up to now."""
        key = (at.training, quantity)
        scale = self._scale[key] = max(self._scale.get(key, 0.0), abs(mine), abs(theirs))
        size = max(abs(mine), abs(theirs), _FLOOR * scale, 1e-30)
        yield from self._number(at, quantity, "", mine, theirs, size)

    def _number(
        self, at: Moment, quantity: str, name: str, mine: float, theirs: float, size: float
    ) -> Iterator[Difference]:
        self._all._seen[quantity] += 1
        relative = 0.0 if mine == theirs else abs(mine - theirs) / size
        if not relative <= self._rtol:
            yield self._found(at, quantity, name, mine, theirs, relative=relative)
        self._all._largest[quantity] = max(self._all._largest.get(quantity, 0.0), relative)

    def _gradients(self, a: Moment, b: Moment) -> Iterator[Difference]:
        mine, theirs = a.ranks[0]["grads"], b.ranks[0]["grads"]
        whole = [math.hypot(*(g[0] for g in grads.values())) for grads in (mine, theirs)]
        yield from self._size(a, "gradient norm", *whole)
        told = self._one.trainings[a.training]["precision"]
        rounding = _ROUNDING[told] * max(whole) if self._rtol else 0.0
        for name in [*mine, *(set(theirs) - set(mine))]:
            if name not in mine or name not in theirs:
                values = [grads[name][0] if name in grads else None for grads in (mine, theirs)]
                yield self._found(a, "gradient", name, *values)
                continue
            (norm, x), (other, y) = mine[name], theirs[name]
            allowed = self._rtol * max(norm, other) + rounding
            if not max(abs(norm - other), math.dist(x, y)) <= allowed * (1 + 1e-9):
                size = max(norm, other, 1e-30)
                apart = max(abs(norm - other), math.dist(x, y)) / size
                yield self._found(a, "gradient", name, norm, other, relative=apart)
            self._note_chance((a.training, name), x, y)

    def _note_chance(self, key: tuple[int, str], x: list[float], y: list[float]) -> None:
        """Elements whose gradient rounding decides."""
        chance = self._chance.setdefault(key, set())
        chance.update(
            at
            for at, (g, h) in enumerate(zip(x, y, strict=True))
            if abs(g - h) > self._rtol * max(abs(g), abs(h))
        )

    def _ranks(self, b: Moment) -> Iterator[Difference]:
        """Ranks of one run, whose weights are equal to the last bit whatever else differs."""
        first = b.ranks[0]["params"]
        for rank, event in enumerate(b.ranks[1:], 1):
            for name, theirs in event["params"].items():
                self._all._seen["parameter of ranks"] += 1
                if first.get(name, theirs)[0] != theirs[0]:
                    pair = _first_unequal(first[name], theirs)
                    yield Difference(b.step, "parameter of ranks", name, (0, rank), pair)

    def _parameters(self, a: Moment, theirs: dict[str, Any]) -> Iterator[Difference]:
        quantity = "weights at the start" if a.kind == "start" else "parameter"
        for name, mine in a.ranks[0]["params"].items():
            self._all._seen[quantity] += 1
            other, key = theirs.get(name), (a.training, name)
            moved = self._moved(key, mine[2])
            if other is None:
                yield self._found(a, quantity, name, mine[1], None)
            elif mine[0] != other[0]:
                relative = self._distance(key, mine, other, moved)
                if not relative <= self._rtol or not self._rtol:
                    pair = _first_unequal(mine, other, self._chance.get(key, set()))
                    yield self._found(a, quantity, name, *pair, relative=relative)
                self._all._largest[quantity] = max(self._all._largest.get(quantity, 0.0), relative)

    def _buffers(self, a: Moment, b: Moment) -> Iterator[Difference]:
        """Running statistics. They follow a bias, and with it whatever chance did to it."""
        chance = any(elements for (t, _), elements in self._chance.items() if t == a.training)
        for event in b.ranks:
            for name, mine in a.ranks[0]["buffers"].items():
                self._all._seen["buffer"] += 1
                other = event["buffers"].get(name, [None, math.inf, []])
                relative = (
                    0.0 if mine[0] == other[0] else self._distance((-1, name), mine, other, 0.0)
                )
                if relative <= self._rtol:
                    continue
                if not chance or not self._rtol:
                    pair = _first_unequal(mine, other)
                    yield self._found(a, "buffer", name, *pair, relative=relative)
                self._all.unknown = (
                    f"evaluations after step {a.step}: the running statistics {name} follow a bias whose "
                    "gradient is rounding alone. --bitwise judges them.",
                )

    def _moved(self, key: tuple[int, str], now: list[float]) -> float:
        """How far the training has carried a parameter, which its rounding errors go by."""
        before, path = self._path.get(key, (now, 0.0))
        path += math.dist(before, now)
        self._path[key] = (now, path)
        return path

    def _distance(
        self, key: tuple[int, str], mine: list[Any], other: list[Any], moved: float
    ) -> float:
        chance = self._chance.get(key, set())
        if len(mine[2]) != len(other[2]):
            return math.inf
        kept = [
            (x, y)
            for at, (x, y) in enumerate(zip(mine[2], other[2], strict=True))
            if at not in chance
        ]
        apart = math.dist([x for x, _ in kept], [y for _, y in kept])
        size = max(math.hypot(*(x for x, _ in kept)), moved, 1e-30)
        whole = 0.0 if chance else abs(mine[1] - other[1]) / max(mine[1], moved, 1e-30)
        return max(apart / size, whole)

    def _evaluations(self, a: Moment, b: Moment) -> Iterator[Difference]:
        samples = a.ranks[0]["samples"]
        for event in b.ranks:
            if event["samples"] != samples:
                yield self._found(a, "samples of an evaluation", "", samples, event["samples"])
            self._all._seen["samples of an evaluation"] += 1
            judged = self._all._values and not self._all.unknown
            for name, mine in a.ranks[0]["values"].items() if judged else ():
                theirs = event["values"].get(name, math.nan)
                size = max(abs(mine), abs(theirs), 1e-30)
                if self._rtol and _is_share(mine, samples) and _is_share(theirs, samples):
                    # A count may be off by the samples that rounding puts on the other side.
                    size = max(size, 1 / (samples * self._rtol))
                yield from self._number(a, "evaluation", name, mine, theirs, size)


def _is_share(value: float, samples: int) -> bool:
    """Whether a score counts samples, as accuracy does."""
    counted = value * samples
    return 0 <= value <= 1 and abs(counted - round(counted)) < 1e-4


def _first_unequal(
    mine: list[Any], other: list[Any], without: set[int] | frozenset[int] = frozenset()
) -> tuple[Any, Any]:
    """The first element that differs, else the norms."""
    for at, (x, y) in enumerate(zip(mine[2], other[2], strict=False)):
        if x != y and at not in without:
            return (x, y)
    return (mine[1], other[1])
