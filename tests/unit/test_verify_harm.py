"""What looks like a fault and does no harm is not called one: the rules of the audit on made-up evidence."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils.data import DataLoader

from paceline.audit import record_data, record_loop
from paceline.audit.audit import judge
from paceline.audit.digests import digest_rows
from paceline.audit.events import (
    BackwardBegun,
    CollectiveBegun,
    DDPBuilt,
    Evaluated,
    Event,
    ForwardEnded,
    OptimizerStepBegun,
    OptimizerStepEnded,
    PassExhausted,
    PassStopped,
    TrainingBuilt,
)
from paceline.audit.evidence import RankLog, Run
from paceline.audit.progress import Progress
from paceline.audit.rules.collectives import unmatched_collective
from paceline.audit.rules.rule import Case, Finding, NoFault, Rule
from paceline.audit.run_plan import RunPlan
from paceline.verify.compare import compare


def run(mode: Any, *ranks: list[Event]) -> Run:
    logs = [RankLog(rank, events, []) for rank, events in enumerate(ranks)]
    return Run(RunPlan(Path("x"), mode, len(ranks), 20), logs, 0)


def case(*ranks: list[Event], solo: list[Event] | None = None, union: bool = False) -> Case:
    """The ranks beside one process; with `union`, it did the same with their samples and weights."""
    one = solo or ranks[0]
    return Case(run("solo", one), run("ordinary", *ranks), run("union", one) if union else None)


# Where passes end


def test_a_pass_that_verify_ends_is_not_exhausted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("__iter__", "__len__"):
        monkeypatch.setattr(DataLoader, name, getattr(DataLoader, name))
    events: list[Event] = []
    recorder: Any = SimpleNamespace(write=events.append)
    progress = Progress(RunPlan(tmp_path, "ordinary", 2, 1), recorder, 0)
    record_data.install(progress)
    optimizer = object()
    for _ in DataLoader(cast(Any, range(6)), 2):
        progress.on_forward(trains=True)
        progress.on_backward()
        progress.on_step(optimizer)
    kinds = [type(event) for event in events]
    assert PassStopped in kinds
    assert PassExhausted not in kinds


def test_an_optimizer_in_the_memory_of_a_deleted_one_is_a_new_one(tmp_path: Path) -> None:
    recorder: Any = SimpleNamespace(write=lambda event: None)
    progress = Progress(RunPlan(tmp_path, "ordinary", 2, 90), recorder, 0)
    optimizers = [object(), object()]

    def take_steps(optimizer: object) -> None:
        for _ in range(3):
            progress.on_batch("a")
            progress.on_step(optimizer)

    for optimizer in optimizers:
        take_steps(optimizer)
    del optimizers[0]
    take_steps(object())
    assert progress.steps == 9


def test_a_note_hides_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Finding(what="x", at="", why="", fix="", evidence="", effect="")
    for is_note in (True, False):
        rules = (
            Rule("cause", lambda _, is_note=is_note: replace(fault, is_note=is_note)),
            Rule("effect", lambda _: fault, consequence_of=("cause",)),
        )
        monkeypatch.setattr("paceline.audit.audit.RULES", rules)
        assert isinstance(judge(case([], []))["effect"], Finding) == is_note


# Noise and devices


def test_what_another_module_computed_is_no_sample() -> None:
    inputs = torch.ones(3, 2)
    assert record_loop._samples((inputs,)) == (3, digest_rows(inputs))
    assert record_loop._samples((torch.nn.Linear(2, 2)(inputs),)) == (3, None)
    assert record_loop._samples((torch.nn.Parameter(inputs),)) == (3, None)


# Updates


def test_the_collectives_of_a_ddp_of_some_ranks_are_not_those_of_all() -> None:
    barrier = CollectiveBegun(op="barrier", group=[0, 1, 2], at="t.py:9")
    trainer: list[Event] = [
        DDPBuilt(group_size=2), ForwardEnded(trains=True, sync=True), BackwardBegun(at="t.py:3"), barrier,
    ]  # fmt: skip
    assert isinstance(unmatched_collective(case(trainer, trainer, [barrier])), NoFault)


def test_a_network_that_measures_between_the_forward_of_ddp_and_its_backward() -> None:
    def rank(*, measures: bool = True) -> list[Event]:
        events: list[Event] = [DDPBuilt(group_size=2)]
        for number in (1, 2, 3):
            events.append(ForwardEnded(trains=True, sync=True, steps_done=number - 1))
            events += [ForwardEnded(model=100)] * measures
            events += [BackwardBegun(), OptimizerStepBegun(step=number)]
            events.append(OptimizerStepEnded(step=number))
        return events

    assert isinstance(unmatched_collective(case(rank(), rank(measures=False))), NoFault)
    assert isinstance(unmatched_collective(case(rank(), rank()[:-5])), Finding)


def test_a_score_that_is_not_a_number_on_both_runs_is_equal() -> None:
    def scored(value: float) -> list[Event]:
        return [Evaluated(at="t.py:9", samples=3, values={"auc": value})]

    both = [
        run("solo", [TrainingBuilt(at="t.py:1"), *scored(math.nan)]),
        run("ordinary", *[[TrainingBuilt(at="t.py:1"), *scored(math.nan)]] * 2),
    ]
    assert isinstance(compare(*both, rtol=None, bitwise=False)["evaluation"], NoFault)
    both[1] = run("ordinary", *[[TrainingBuilt(at="t.py:1"), *scored(0.5)]] * 2)
    assert isinstance(compare(*both, rtol=None, bitwise=False)["evaluation"], Finding)
