import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.job.rng import key, keys

ints = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(ints, max_size=4), st.lists(ints, min_size=1, max_size=8))
def test_numpy_and_python_give_the_same_keys(meaning: list[int], last: list[int]) -> None:
    got = keys(key(*meaning), np.array(last, dtype=np.int64))
    assert got.tolist() == [key(*meaning, x) for x in last]


def test_keys_are_part_of_the_contract() -> None:
    # A change of these numbers changes the data order and the dropout of every training.
    assert key() == 0
    assert key(0) == 16294208416658607535
    assert key(1, 2) == 13608149317741381227
    assert key(2, 1) == 16171810823986729605
    assert key(-1) == 16490336266968443936


def test_keys_do_not_collide_in_a_million() -> None:
    assert len(np.unique(keys(key(7, 1), np.arange(1_000_000)))) == 1_000_000
