"""The states of named tensors, which must be equal on all ranks at the same point of the script."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from paceline.audit.events import (
    Digests,
    Event,
    ForwardEnded,
    OptimizerStepEnded,
    full_name,
)
from paceline.audit.evidence import RankLog

P = TypeVar("P", bound=tuple[int, ...])  # a named tuple: a point of the script, in its order


def differing(of_ranks: Sequence[Mapping[P, Digests]]) -> dict[P, dict[str, bool]]:
    """By point and name, whether the states of the ranks differ, at the points that all of them recorded.

    A tensor that a rank did not record at a point is missing there, which says nothing of its value.
    """
    found: dict[P, dict[str, bool]] = {}
    for point in sorted(set.intersection(*map(set, of_ranks))):
        first, *others = (states[point] for states in of_ranks)
        found[point] = {
            name: any(states[name] != value for states in others)
            for name, value in first.items()
            if all(name in states for states in others)
        }
    return found


def first_difference(differs: Mapping[P, Mapping[str, bool]]) -> tuple[P, list[str]] | None:
    """The first point at which tensors differ between ranks, and their names."""
    for point, states in differs.items():
        if names := [name for name, differ in states.items() if differ]:
            return point, names
    return None


class WeightPoint(NamedTuple):
    """A point of the script at which a parameter is updated or used.

    A use is a forward of training. Updates and uses of a parameter may alternate in a step: `phase` is even
    at an update, and odd at a use. Its points,

        with one optimizer:  use (0, 1), update (1, 0), use (1, 1), update (2, 0), use (2, 1)
        with two in step 1, and a forward between them:
                             use (0, 1), update (1, 0), use (1, 1), update (1, 2), use (1, 3)
    """

    step: int  # the number of an update, from 1; the completed steps before a use
    phase: int


@dataclass(frozen=True)
class Mismatch:
    """The first difference between the weights of the ranks."""

    step: int  # the first step with different weights, from 1
    # Whether the weights differed before the update of that step, so that no optimizer made them differ.
    outside: bool
    names: list[str]  # the parameters
    is_restored: bool  # whether these parameters are equal again at some later step
    last_seen: WeightPoint | None  # where the first of these parameters was recorded before
    # By rank, the digests of that parameter: there, empty if it was not recorded; and at the difference.
    digests_before: list[int]
    digests_at: list[int]


def find_mismatch(ranks: Sequence[RankLog]) -> Mismatch | None:
    """The first point at which the ranks use different weights; None if there is none."""
    weights = [weights_of(log) for log in ranks]
    differs = differing(weights)
    # Optimizers that exchange updated weights are equal again when the model is used.
    uses = {point: own for point, own in differs.items() if point.phase % 2}
    found = first_difference(uses)
    if found is None:
        return None
    use, names = found
    before = {
        name: max((p for p in differs if p < use and name in differs[p]), default=None)
        for name in names
    }
    by_update = [name for name, last in before.items() if last is not None and differs[last][name]]
    names = by_update or names
    last = before[names[0]]
    later = [own for point, own in uses.items() if point > use]
    return Mismatch(
        step=last.step if by_update and last else use.step + 1,
        outside=not by_update,
        names=names,
        is_restored=all(any(own.get(name) is False for own in later) for name in names),
        last_seen=last,
        digests_before=[own[last][names[0]] for own in weights] if last else [],
        digests_at=[own[use][names[0]] for own in weights],
    )


def weights_of(log: RankLog) -> dict[WeightPoint, Digests]:
    """The weights of a rank, without models for one batch, which are its own."""
    forwards = (event for event in log.training_forwards if event.model in log.models_of_one_batch)
    left_out = {full_name(event.model, n) for event in forwards for n in event.params or ()}
    found: defaultdict[WeightPoint, Digests] = defaultdict(dict)
    phases: defaultdict[tuple[int, str], int] = defaultdict(int)
    events: list[Event] = log.of(ForwardEnded, OptimizerStepEnded)
    for event in events:
        if isinstance(event, OptimizerStepEnded):
            step, params, is_use = event.step, event.params, False
        elif isinstance(event, ForwardEnded) and event.trains:
            step, is_use = event.steps_done, True
            params = {full_name(event.model, n): own for n, own in (event.params or {}).items()}
        else:
            continue
        params = {name: value for name, value in params.items() if name not in left_out}
        for name, value in params.items():
            if is_use != (phases[step, name] % 2 == 1):
                phases[step, name] += 1  # an update follows a use, or a use an update
            found[WeightPoint(step, phases[step, name])][name] = value
    return found
