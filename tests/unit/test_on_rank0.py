"""Waiting for what rank 0 answers."""

from __future__ import annotations

import json
import types
from typing import Any

from paceline.errors import PeerFailed
from paceline.job.collectives import _await_answer


def test_an_answer_counts_more_than_a_failure_that_followed_it() -> None:
    values: dict[str, str] = {}

    def failure() -> PeerFailed:
        # Rank 0 has answered and left since this rank looked for the answer.
        values["answer"] = json.dumps({"value": 7})
        return PeerFailed("rank 0 failed.", rank=0)

    store = types.SimpleNamespace(check=lambda keys: keys[0] in values, get=values.__getitem__)
    job: Any = types.SimpleNamespace(store=store, peers=types.SimpleNamespace(failure=failure))
    assert _await_answer(job, "answer", None) == 7
