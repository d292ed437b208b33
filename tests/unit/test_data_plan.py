"""The plan: exhaustive over small topologies, and the statistics of the permutation."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data import plan as plan_module
from paceline.data.plan import Permutation, Plan, Position
from paceline.errors import ConfigError
from paceline.job import rng


def _order(size: int, seed: int, epoch: int) -> list[int]:
    return Permutation(size, rng.key(seed, rng.SHUFFLE, epoch))(np.arange(size)).tolist()


def _plan(n: int, b: int, micro: int, rank: int = 0, world: int = 1, shuffle: bool = True) -> Plan:
    return Plan(n, b, micro, shuffle, rank, world)


def test_a_permutation_has_each_member_once() -> None:
    for size in [*range(1, 130), 1000, 1023, 1024, 1025, 1797, 4099]:
        assert sorted(_order(size, 3, 1)) == list(range(size))


@settings(deadline=None, max_examples=50)  # the machine may be busy
@given(st.integers(1, 10**12), st.integers(0, 2**64), st.data())
def test_any_part_of_a_permutation_equals_that_part_of_the_whole(size, seed, data) -> None:
    permutation = Permutation(min(size, 10**9), rng.key(seed, 1, 0))
    places = data.draw(st.lists(st.integers(0, permutation.size - 1), min_size=1, max_size=20))
    together = permutation(np.array(places, dtype=np.int64)).tolist()
    alone = [int(permutation(np.array([place], dtype=np.int64))[0]) for place in places]
    assert together == alone
    assert all(0 <= member < permutation.size for member in together)


def test_the_order_of_an_epoch_is_part_of_the_contract() -> None:
    # Old checkpoints resume into these orders. A change here changes every training.
    assert _order(10, 0, 0) == [7, 9, 6, 5, 4, 1, 8, 3, 0, 2]
    assert _order(2000, 7, 3)[:8] == [1457, 300, 1201, 908, 639, 32, 675, 1922]
    assert Permutation(10**7, rng.key(7, rng.SHUFFLE, 3))(np.arange(4)).tolist() == [
        4343743,
        6953751,
        7375648,
        4432974,
    ]


@pytest.mark.parametrize("size", [3, 4])
def test_all_orders_of_a_small_set_are_equally_likely(size: int) -> None:
    draws = 4000
    counts = Counter(tuple(_order(size, 11, epoch)) for epoch in range(draws))
    orders = list(itertools.permutations(range(size)))
    expected = draws / len(orders)
    chi2 = sum((counts[order] - expected) ** 2 / expected for order in orders)
    assert chi2 < {3: 20.5, 4: 49.7}[size]  # the 99.9 % quantiles for 5 and 23 degrees of freedom


@pytest.mark.parametrize("size", [2, 3, 5, 8, 10])
def test_each_member_is_equally_likely_at_each_place(size: int) -> None:
    draws = 2000
    counts = np.zeros((size, size))
    for draw in range(draws):
        counts[np.arange(size), _order(size, draw % 40, draw // 40)] += 1
    expected = draws / size
    # Rows and columns of the table both sum to the draws, hence the factor.
    chi2 = ((counts - expected) ** 2 / expected).sum() * (size - 1) / size
    freedom = (size - 1) ** 2
    # The 99.9 % quantile by Wilson and Hilferty's approximation.
    quantile = freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert chi2 < quantile


def test_a_large_set_has_no_trace_of_its_own_order() -> None:
    size = 20_000
    order = np.array(_order(size, 5, 0))
    places = np.arange(size)
    assert abs(np.corrcoef(places, order)[0, 1]) < 4 / size**0.5
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 4 / size**0.5
    rises = int((order[1:] > order[:-1]).sum())
    assert abs(rises - size / 2) < 4 * (size / 12) ** 0.5
    fixed = int((order == places).sum())
    assert fixed < 10  # Poisson of mean 1


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {tuple(_order(50, seed, epoch)) for seed in range(8) for epoch in range(8)}
    assert len(orders) == 64


@pytest.mark.parametrize("aligned", [False, True])
def test_ranks_share_each_step_and_padding_fill_up_to_equal_numbers(aligned: bool) -> None:
    for n, b in itertools.product(range(1, 12), range(1, 8)):
        steps = list(_plan(n, b, b).steps(Position(0), 2))
        assert steps == [(epoch, at, min(b, n - at)) for epoch in range(2) for at in range(0, n, b)]
        assert len(steps) == 2 * _plan(n, b, b).steps_per_epoch
        for world, micro in itertools.product(range(1, 6), range(1, b + 1)):
            plans = [Plan(n, b, micro, True, rank, world, aligned) for rank in range(world)]
            for _, _, size in steps:
                dealt = [list(plan.micro_batch_ranges(size, False)) for plan in plans]
                pieces = [piece for own in dealt for piece in own]
                places = [place for begin, end, _ in pieces for place in range(begin, end)]
                assert places == list(range(size))
                assert all(1 <= end - begin <= micro for begin, end, _ in pieces)
                if aligned:
                    starts = [begin for begin, _, _ in pieces]
                    assert starts == list(range(0, size, micro))
                else:
                    shares = [sum(end - begin for begin, end, _ in own) for own in dealt]
                    assert max(shares) - min(shares) <= 1
                most = max(len(own) for own in dealt)
                assert most == plan_module.max_micro_batches(size, micro, len(plans))
                for plan, own in zip(plans, dealt, strict=True):
                    padding = [(0, 1, True)] * (most - len(own))
                    assert list(plan.micro_batch_ranges(size, True)) == own + padding


def test_steps_from_a_position_are_the_rest() -> None:
    plan = _plan(11, 4, 2)
    everything = list(plan.steps(Position(5), 3))
    for number, (epoch, offset, _) in enumerate(everything):
        assert list(plan.steps(Position(5, epoch, offset), 3)) == everything[number:]
    assert list(plan.steps(Position(5, 3, 0), 3)) == []


@pytest.mark.parametrize(
    "values", [(0.5, 0, 0), (0, -1, 0), (0, 0, -1), (0, True, 0), ("7", 0, 0), (0, 0, 1.0)]
)
def test_a_position_is_three_integers(values) -> None:
    with pytest.raises(ConfigError):
        Position(*values)
