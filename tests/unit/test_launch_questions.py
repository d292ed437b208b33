"""Questions of the launcher to the probes of its ranks."""

from __future__ import annotations

import itertools
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.errors import PeerFailed
from paceline.launch.local_ranks import UNSOLICITED_ID, Event, LocalRanks, Question, Rank
from paceline.watch.crash import Error


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The launcher's end of a rank's socket, and that of the rank."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    with ours, theirs:
        yield ours, theirs


def rank_of(ours: socket.socket, **more: Any) -> Any:
    rank: Any = object.__new__(Rank)
    facts = {"rank": 0, "returncode": None, "events": [], "state": {}, "_is_asked": False}
    vars(rank).update(facts | {"_socket": ours} | more)
    return rank


def test_a_rank_that_does_not_answer_is_asked_once(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """Its socket would become full, and the launcher would wait for it."""
    ours, theirs = pair
    rank = rank_of(ours)
    for _ in range(3):
        question = Question([rank], now=0.0, within_s=1.0)
    (asked,) = map(json.loads, theirs.recv(1 << 16).splitlines())
    answer = {"event": "state", "id": asked["id"]}
    rank._add_events([json.dumps(answer).encode()])
    assert not question.answers  # this is the answer to the first one
    question = Question([rank], now=0.0, within_s=1.0)
    (asked,) = map(json.loads, theirs.recv(1 << 16).splitlines())
    rank._add_events([json.dumps(answer | {"id": asked["id"]}).encode()])
    assert not question.is_open(0.0)


def test_a_failure_is_not_described_by_answers_from_before(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    numbers = itertools.count(UNSOLICITED_ID)
    ranks = [
        rank_of(pair[0], rank=number, returncode=1, state={"id": next(numbers)})
        for number in range(3)
    ]
    for rank in ranks:
        rank.poll = lambda: 1
    local_ranks: Any = object.__new__(LocalRanks)
    local_ranks.ranks = ranks
    local_ranks.request_states()
    # The one that a failing rank gave by itself is kept.
    assert [rank.state for rank in ranks] == [{"id": UNSOLICITED_ID}, {}, {}]


def test_a_rank_that_blocked_the_others_did_not_fail_by_their_end(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    error = Error.of(PeerFailed("rank 0 failed first"), "")
    assert error.lost_peer
    rank = rank_of(
        pair[0],
        events=[Event(event="final_error", time=2.0, error=error)],
        returncode=1,
        hung=True,
        pid=7,
        ended_at=2.0,
        told_to_end_at=1.0,
        suspended=False,
        lost_in=0,
        streams=(),
    )
    assert rank.outcome().error is None
    assert rank.outcome().how.startswith("blocked the other ranks")
