"""Files that several ranks share, and process groups of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.audit.audit import judge
from paceline.audit.events import (
    BackwardBegun,
    CollectiveBegun,
    CollectiveEnded,
    DDPBuilt,
    Event,
    FileRead,
    FileWritten,
    ForwardBegun,
    ForwardEnded,
    GroupInitialised,
    OptimizerStepBegun,
    OptimizerStepEnded,
)
from paceline.audit.evidence import RankLog, Run
from paceline.audit.rules.files import shared_files
from paceline.audit.rules.groups import group_of_one
from paceline.audit.rules.rule import Case, Finding, NoFault, NotJudged
from paceline.audit.run_plan import RunPlan

READ, WRITE = FileRead(at="t.py:9", path="a.pt"), FileWritten(at="t.py:7", path="a.pt")


def case(of_ranks: list[list[Event]]) -> Case:
    logs = [RankLog(rank, own, []) for rank, own in enumerate(of_ranks)]
    ordinary = Run(RunPlan(Path(), "ordinary", len(logs), 1), logs, 0)
    return Case(Run(RunPlan(Path(), "solo", 1, 1), [RankLog(0, [], [])], 0), ordinary)


def barrier(count: int) -> list[Event]:
    return [CollectiveBegun(op="barrier", group=list(range(count))), CollectiveEnded()]


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize(("contents", "is_note"), [((1, 2), False), ((1, 1), True), ((0, 2), True)])
def test_a_file_that_several_ranks_write(
    count: int, contents: tuple[int, int], is_note: bool
) -> None:
    of_ranks: list[list[Event]] = [
        [FileWritten(at="t.py:7", path="a.pt", content=contents[min(rank, 1)], steps_done=4)]
        for rank in range(count)
    ]
    found = shared_files(case(of_ranks))
    assert isinstance(found, Finding), found
    assert ([*found.ranks], found.at, found.step) == ([*range(count)], "t.py:7", 4)
    assert found.is_note == is_note


@pytest.mark.parametrize(
    ("contents", "is_fault"), [((1, 1), False), ((0, 0), False), ((1, 2), True)]
)
def test_a_file_that_several_ranks_replace_as_a_whole(
    contents: tuple[int, int], is_fault: bool
) -> None:
    of_ranks = [[FileWritten(path="a.pt", content=each, is_whole=True)] for each in contents]
    found = shared_files(case([[*own] for own in of_ranks]))
    assert isinstance(found, Finding if is_fault else NoFault)
    if isinstance(found, Finding):
        assert found.is_note  # equal values may have other bytes


@pytest.mark.parametrize("count", [2, 3])
def test_ranks_that_take_turns_to_write_a_file(count: int) -> None:
    of_ranks: list[list[Event]] = [
        [
            *barrier(count) * rank,
            FileWritten(path="a.pt", content=rank + 1),
            *barrier(count) * (count - rank),
        ]
        for rank in range(count)
    ]
    assert isinstance(shared_files(case(of_ranks)), NoFault)


def test_a_note_on_one_file_hides_no_fault_on_another() -> None:
    of_ranks: list[list[Event]] = [
        [FileWritten(path="a.json"), FileWritten(path="b.pt", content=rank)] for rank in (1, 2)
    ]
    found = shared_files(case(of_ranks))
    assert isinstance(found, Finding)
    assert not found.is_note


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize(
    ("writer", "reader", "is_found"),
    [
        (["write", "barrier"], ["barrier", "read"], False),
        (["write", "barrier"], ["read", "barrier"], True),
        (["barrier", "write"], ["barrier", "read"], True),
        (["barrier", "write"], ["read", "barrier"], False),
        (["write"], ["read"], True),
        (["write", "read"], [], False),
    ],
)
def test_a_read_beside_a_write(
    count: int, writer: list[str], reader: list[str], is_found: bool
) -> None:
    kinds: dict[str, list[Event]] = {"read": [READ], "write": [WRITE], "barrier": barrier(count)}
    for place in range(count):  # of the rank that writes
        of_ranks = [
            [event for kind in (writer if rank == place else reader) for event in kinds[kind]]
            for rank in range(count)
        ]
        found = shared_files(case(of_ranks))
        assert isinstance(found, Finding) == is_found, found
        if isinstance(found, Finding):
            assert (found.at, found.is_note) == ("t.py:9", True)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(
    ("size", "wrapped", "drifts", "is_found"),
    [
        (1, None, False, True),
        ("all", "all", True, False),
        ("all", 1, True, True),
        ("all", 1, False, False),  # the script reduces the gradients
        (None, None, True, False),
    ],
)
def test_groups_of_one_rank(
    count: int, size: Any, wrapped: Any, drifts: bool, is_found: bool
) -> None:
    sizes = {"all": count, 1: 1}
    of_ranks = []
    for rank in range(count):
        events: list[Event] = []
        if size:
            events += [GroupInitialised(at="t.py:1"), GroupInitialised(size=sizes[size])]
        if wrapped:
            events.append(DDPBuilt(at="t.py:5", group_size=sizes[wrapped]))
        for step in (0, 1):
            own = {"w": step * rank * drifts}
            events += [
                ForwardEnded(trains=True, steps_done=step, params=own),
                BackwardBegun(),
                OptimizerStepBegun(step=step + 1),
                OptimizerStepEnded(step=step + 1),
            ]
        of_ranks.append(events)
    found = group_of_one(case(of_ranks))
    assert isinstance(found, Finding) == is_found, found
    if isinstance(found, Finding) and wrapped:
        assert found.at == "t.py:5"


def alone_in_ddp(*, exchanges: bool) -> Case:
    """Two ranks, each with a DDP over itself, whose weights differ after a step."""
    of_ranks = []
    for rank in range(2):
        events: list[Event] = [
            GroupInitialised(at="t.py:1"),
            GroupInitialised(size=2),
            DDPBuilt(at="t.py:5", group_size=1),
        ]
        for step in (0, 1):
            events.append(ForwardBegun(steps_done=step))
            events += [CollectiveBegun(op="all_reduce", group=[0, 1])] * exchanges
            events += [
                ForwardEnded(trains=True, steps_done=step, params={"w": step * rank}),
                BackwardBegun(),
                OptimizerStepBegun(step=step + 1),
                OptimizerStepEnded(step=step + 1),
            ]
        of_ranks.append(events)
    return case(of_ranks)


def test_a_ddp_of_one_rank_is_judged_although_its_group_is_not_that_of_all_ranks() -> None:
    found = judge(alone_in_ddp(exchanges=False))["process groups"]
    assert isinstance(found, Finding), found


def test_a_ddp_of_one_rank_may_hold_a_part_of_a_model() -> None:
    found = judge(alone_in_ddp(exchanges=True))["process groups"]
    assert isinstance(found, NotJudged), found
