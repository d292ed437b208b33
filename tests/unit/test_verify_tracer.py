"""How the audit finds the line that changes weights."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from paceline.audit import weight_tracer
from paceline.audit.events import Event, WeightsChanged
from paceline.audit.run_plan import RunPlan
from paceline.audit.weight_tracer import WeightTracer


class Slow(Dataset[torch.Tensor]):
    """Samples that take many lines of the script's own code."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([sum(self._squares(500))])

    def _squares(self, count: int) -> list[int]:
        squares = []
        for each in range(count):
            squares.append(each * each)
        return squares


@pytest.mark.parametrize(("lines", "is_found"), [(1, True), (5000, False)])
def test_the_cost_of_the_search_is_bounded(
    lines: int, is_found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples cost nothing; after many lines of other code the search is given up."""
    events: list[Event] = []
    recorder = SimpleNamespace(write=events.append)
    plan = RunPlan(Path("x"), "ordinary", 2, 20)
    progress: Any = SimpleNamespace(plan=plan, recorder=recorder, steps=3)
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(20)))
    reads = 0

    def read(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal reads
        reads += 1
        return tensor.detach()

    monkeypatch.setattr(weight_tracer, "plain", read)
    tracer = WeightTracer(progress, cast(Any, SimpleNamespace(called_or_wrapped=lambda: [model])))
    before = sys.gettrace()
    tracer.start()
    for _ in DataLoader(Slow(), 2):
        pass
    for _ in range(lines):
        pass
    model[3].weight.data = torch.ones(2, 2)
    tracer.stop()
    tracer.start()
    is_on = sys.gettrace() is not None
    tracer.stop()
    sys.settrace(before)
    assert (is_on, len(events)) == (is_found, is_found)
    assert reads <= (101_000 if lines > 1 else 2_000)
    for event in events:
        assert isinstance(event, WeightsChanged)
        line = int(event.at.partition(":")[2].partition(" ")[0])
        assert "model[3].weight.data" in linecache.getline(__file__, line)


def test_a_weight_that_is_not_a_number_does_not_change_by_itself() -> None:
    events: list[Event] = []
    progress: Any = SimpleNamespace(
        plan=RunPlan(Path("x"), "ordinary", 2, 20),
        recorder=SimpleNamespace(write=events.append),
        steps=3,
    )
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LazyLinear(2))
    torch.nn.init.constant_(model[0].weight, float("nan"))
    tracer = WeightTracer(progress, cast(Any, SimpleNamespace(called_or_wrapped=lambda: [model])))
    before = sys.gettrace()
    tracer.start()
    for _ in range(3):
        pass
    tracer.stop()
    sys.settrace(before)
    assert events == []
