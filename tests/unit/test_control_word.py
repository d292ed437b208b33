"""Requests in the control word: a request of any rank reaches all ranks, and no other one does."""

from __future__ import annotations

from dataclasses import fields

from paceline.training.control_word import Requests


def test_each_request_of_a_rank_is_read_from_the_sums_over_ranks() -> None:
    sent = [field.name for field in fields(Requests) if field.name != "best"]
    for name in sent:
        own = Requests(**{name: True})
        sums = [sum(each) for each in zip(own.pack(), Requests().pack(), own.pack(), strict=True)]
        assert Requests.unpack(sums) == own
    assert Requests.unpack(Requests(best=True).pack()) == Requests()
