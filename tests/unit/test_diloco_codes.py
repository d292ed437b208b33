"""What `diloco` sends in int8, and how it cuts a model into fragments."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from paceline.parallel.diloco import _cut, _from_int8, _to_int8


def test_int8_is_off_by_half_a_step_of_its_block_at_most() -> None:
    values = torch.randn(4, 1024, generator=torch.Generator().manual_seed(0))
    values *= torch.tensor([1e-6, 1.0, 1e6, 0.0])[:, None]
    data = _to_int8(values.view(-1))
    assert data.numel() == 4 * (1024 + 4)
    error = (_from_int8(data).view(4, 1024) - values).abs().amax(1)
    assert (error <= values.abs().amax(1) / 127 * 0.501).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_int8_shows_values_that_are_not_finite(bad: float) -> None:
    values = torch.ones(2048)
    values[3] = bad
    got = _from_int8(_to_int8(values))
    assert not got[3].isfinite()
    assert (got[1024:] - 1).abs().max() < 1e-6


@pytest.mark.parametrize("number", [1, 2, 3, 6])
def test_fragments_are_of_about_equal_sizes(number: int) -> None:
    sizes = [5, 900, 10, 800, 7, 700]
    named = [([f"{i}"], nn.Parameter(torch.zeros(size))) for i, size in enumerate(sizes)]
    parts = _cut(named, number)
    assert [pair for part in parts for pair in part] == named
    assert len(parts) == number
    totals = [sum(p.numel() for _, p in part) for part in parts]
    assert number == 6 or max(totals) < 1.3 * sum(sizes) / number


def test_a_parameter_that_is_larger_than_a_fragment_gives_fewer_fragments() -> None:
    named = [([f"{i}"], nn.Parameter(torch.zeros(size))) for i, size in enumerate([10, 900, 10])]
    assert [len(part) for part in _cut(named, 3)] == [1, 1, 1]
    assert len(_cut(named, 4)) < 4
