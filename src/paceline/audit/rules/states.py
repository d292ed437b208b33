"""The states of named tensors, which must be equal on all ranks at the same point of the script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.audit.events import Digests

Point = tuple[int, ...]  # in the order of the script
States = Mapping[Point, Digests]  # of one rank


def differing(each: Sequence[States]) -> dict[Point, dict[str, bool]]:
    """Whether a tensor differs between ranks, by point and name.

    A tensor is missing at a point at which a rank did not record it: that says nothing of its value.
    """
    found = {}
    for point in sorted(set.intersection(*map(set, each))):
        first, *others = (own[point] for own in each)
        found[point] = {
            name: any(own[name] != value for own in others)
            for name, value in first.items()
            if all(name in own for own in others)
        }
    return found


def first_difference(each: Sequence[States]) -> tuple[Point, list[str]] | None:
    """The first point at which tensors differ between ranks, and their names."""
    named = (
        (point, [name for name, differs in states.items() if differs])
        for point, states in differing(each).items()
    )
    return next((found for found in named if found[1]), None)
