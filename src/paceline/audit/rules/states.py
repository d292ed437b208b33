"""The states of named tensors, which must be equal on all ranks at the same point of the script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.audit.events import Digests

Point = tuple[int, ...]  # in the order of the script
States = Mapping[Point, Digests]  # of one rank
# By point and name, whether the ranks differ. A tensor that a rank did not record at a point is missing
# there, which says nothing of its value.
Differs = dict[Point, dict[str, bool]]


def differing(each: Sequence[States]) -> Differs:
    """Compare the states of all ranks at the points that all of them recorded, in the order of the script."""
    found: Differs = {}
    for point in sorted(set.intersection(*map(set, each))):
        first, *others = (own[point] for own in each)
        found[point] = {
            name: any(own[name] != value for own in others)
            for name, value in first.items()
            if all(name in own for own in others)
        }
    return found


def first_difference(differs: Differs) -> tuple[Point, list[str]] | None:
    """The first point at which tensors differ between ranks, and their names."""
    for point, states in differs.items():
        if names := [name for name, differ in states.items() if differ]:
            return point, names
    return None
