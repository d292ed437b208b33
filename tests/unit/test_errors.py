"""Texts that all errors share."""

from __future__ import annotations

import pickle

import pytest

from paceline.errors import CheckpointError, DataError, SaveFailed, StepError, name_ranks


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([4], "rank 4"),
        ([2, 0], "ranks 0 and 2"),
        ([0, 1], "ranks 0 and 1"),
        ([0, 2, 3, 4, 5, 7], "ranks 0, 2-5 and 7"),
        ([0, 1, 2, 5, 7, 8], "ranks 0-2, 5, 7 and 8"),
        (range(9), "ranks 0-8"),
    ],
)
def test_ranks_are_named(ranks: list[int], text: str) -> None:
    assert name_ranks(ranks) == text
    assert name_ranks(ranks, world_size=9) == ("all ranks" if len(ranks) == 9 else text)


def test_documented_attributes_are_none_if_they_are_not_known() -> None:
    assert StepError("no batch").seen is None
    assert SaveFailed("no space", path="runs").step is None
    assert CheckpointError("damaged").parameter is None
    error = pickle.loads(pickle.dumps(DataError("broken", sample=3)))
    assert (error.sample, error.worker) == (3, None)
    with pytest.raises(AttributeError, match="no attribute 'smaple'"):
        error.smaple  # noqa: B018
