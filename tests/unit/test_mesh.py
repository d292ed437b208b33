"""Degrees of parallelism: their arithmetic, and what is refused before any group exists."""

from __future__ import annotations

from itertools import product

import pytest

from paceline import ConfigError, Mesh


@pytest.mark.parametrize(
    ("given", "resolved"),
    [
        ({"dp_replicate": -1}, (1, 8, 1, 1)),
        ({"dp_shard": -1, "tp": 2}, (1, 1, 4, 2)),
        ({"pp": 2, "dp_replicate": 2, "dp_shard": 2}, (2, 2, 2, 1)),
        ({"tp": 8}, (1, 1, 1, 8)),
    ],
)
def test_minus_one_is_the_ranks_that_are_left(given: dict[str, int], resolved: object) -> None:
    mesh = Mesh(**given).resolve(8, 8)
    assert tuple(mesh.axes.values()) == resolved
    assert mesh.data_size == mesh.dp_replicate * mesh.dp_shard


def test_ranks_of_an_axis_are_those_that_differ_in_it_alone() -> None:
    mesh = Mesh(pp=2, dp_replicate=3, dp_shard=2, tp=2)
    coordinates = list(product(*(range(size) for size in mesh.axes.values())))
    for rank, own in enumerate(coordinates):
        for at, axis in enumerate(mesh.axes):
            expected = [
                other
                for other, c in enumerate(coordinates)
                if c[:at] + c[at + 1 :] == own[:at] + own[at + 1 :]
            ]
            assert mesh.axis_ranks(rank, axis) == expected
        same_part = [
            other for other, c in enumerate(coordinates) if (c[0], c[3]) == (own[0], own[3])
        ]
        assert mesh.data_ranks(rank) == same_part


@pytest.mark.parametrize(
    ("given", "ranks", "local", "text"),
    [
        ({"tp": 3}, 8, 8, "tp=3 needs 3 ranks, the job has 8"),
        ({"tp": 3, "dp_shard": -1}, 8, 8, "tp=3 needs a multiple of 3 ranks, the job has 8"),
        ({"tp": -1, "dp_shard": -1}, 8, 8, "only one degree may be -1, got dp_shard and tp"),
        ({"dp_shard": 0}, 8, 8, "dp_shard must be a whole number of at least 1, or -1, got 0"),
        ({"pp": 2.0}, 8, 8, "pp must be a whole number"),
        ({"tp": 4, "dp_shard": 2}, 8, 2, "tp=4 does not divide the 2 ranks of a host"),
        ({}, 2, 2, "Mesh: all degrees are 1, but the job has 2 ranks"),
    ],
)
def test_wrong_degrees_are_refused(
    given: dict[str, int], ranks: int, local: int, text: str
) -> None:
    with pytest.raises(ConfigError, match=text) as refused:
        Mesh(**given).resolve(ranks, local)
    assert "fix" in str(refused.value) or "-1" in str(refused.value)
