"""The batch that all ranks share, and the random states in its step."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch

from paceline.audit.run_plan import RunPlan
from paceline.audit.shared_batch import SharedBatch


def _seed(rank: int) -> None:
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)


def _draw() -> tuple[float, ...]:
    return torch.rand(1).item(), random.random(), random.gauss(), float(np.random.randn())


def test_ranks_share_batch_and_random_states_and_go_on_with_their_own(tmp_path: Path) -> None:
    plan = RunPlan(tmp_path, "ordinary", 2, 20)
    inside = []
    for rank in range(2):
        _seed(rank)
        _draw()
        own = _draw()
        _seed(rank)
        _draw()
        shared = SharedBatch(plan, rank)
        assert shared.in_place_of(rank, "a-0-7", 7) == rank
        assert not shared.is_given
        assert shared.in_place_of(rank, "a-0-8", 8) == 0
        assert shared.is_given
        inside.append(_draw())
        shared.end()
        assert not shared.is_given
        assert _draw() == own
    assert inside[0] == inside[1]
