"""Weights and buffers that must be equal on all ranks, on made-up logs of ranks."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from paceline.audit.audit import judge
from paceline.audit.events import (
    BackwardBegun,
    BatchGiven,
    Clipped,
    CollectiveBegun,
    DDPBuilt,
    Event,
    ForwardEnded,
    GradientsCleared,
    LoaderSeen,
    ModelSeen,
    NotReduced,
    OptimizerStepBegun,
    OptimizerStepEnded,
    RankEnded,
    StateLoaded,
    TrainingContinues,
    full_name,
)
from paceline.audit.evidence import RankLog, Run
from paceline.audit.rules.buffers import equal_buffers
from paceline.audit.rules.rule import Case, Finding, Judgement, NoFault, NotJudged
from paceline.audit.rules.weights import equal_weights
from paceline.audit.run_plan import RunPlan

NOTE = "a note"


def case(*ranks: list[Event]) -> Case:
    logs = [RankLog(rank, events, []) for rank, events in enumerate(ranks)]
    ordinary = Run(RunPlan(Path("x"), "ordinary", len(ranks), 20), logs, 0)
    return Case(
        Run(RunPlan(Path("x"), "solo", 1, 20), logs[:1], 0), ordinary, why_no_union="no union."
    )


def kind(judged: Judgement) -> Any:
    """The type of a judgement, or `NOTE`."""
    return NOTE if isinstance(judged, Finding) and judged.is_note else type(judged)


def rank(
    weights: list[int],
    *,
    grads: list[int] | None = None,
    sync: bool | None = True,
    after: dict[int, list[Event]] | None = None,
    lr: float = 0.1,
    state: int = 0,
) -> list[Event]:
    """A rank whose steps begin with these weights.

    Args:
        grads: The gradients; without them 5 in each step.
        after: What is called after the backward of a step.
    """
    events: list[Event] = []
    for number, digest in enumerate(weights, 1):
        events += [
            GradientsCleared(),
            ForwardEnded(
                trains=True, sync=sync, steps_done=number - 1, params={"w": digest}, at="t.py:3"
            ),
            BackwardBegun(steps_done=number - 1, at="t.py:4"),
            *(after or {}).get(number, []),
            OptimizerStepBegun(
                step=number,
                at="t.py:8",
                grads={"w": grads[number - 1] if grads else 5},
                lrs=[lr],
                state=state,
            ),
            OptimizerStepEnded(
                step=number, params={"w": weights[number] if number < len(weights) else 99}
            ),
        ]
    return events


EQUAL, OTHER = [1, 2, 3, 4], [1, 2, 13, 14]  # different after step 2
CLIP: dict[int, list[Event]] = {2: [Clipped(at="t.py:6")]}


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(
    ("own", "at", "why"),
    [
        ({"grads": [5, 6, 7, 8]}, "t.py:8", "DDP did not reduce it"),
        ({"grads": [5, 6, 7, 8], "sync": None}, "t.py:8", "it was not reduced"),
        ({"lr": 0.2}, "t.py:8", "the learning rates differ"),
        ({"state": 1}, "t.py:8", "the states of the optimizers are not"),
        ({"after": CLIP, "grads": [5, 6, 7, 8]}, "t.py:6", "clipped, updated"),
        (
            {
                "grads": [5, 6, 7, 8],
                "after": {2: [NotReduced(name="w", at="t.py:2", steps_done=1)]},
            },
            "t.py:2",
            "added to the model after DDP had wrapped it",
        ),
    ],
)
def test_the_cause_of_weights_that_differ_after_a_step(
    count: int, own: dict[str, Any], at: str, why: str
) -> None:
    """The verdict is the same whichever rank is the one that differs."""
    usual = {"sync": None} if "sync" in own else {}
    assert isinstance(equal_weights(case(*[rank(EQUAL, **usual)] * count)), NoFault)
    ranks = [rank(OTHER, **own)] + [rank(EQUAL, **usual)] * (count - 1)
    for order in permutations(ranks):
        judged = equal_weights(case(*order))
        assert isinstance(judged, Finding)
        assert (judged.at, judged.step, judged.is_note) == (at, 2, False)
        assert why in judged.why


@pytest.mark.parametrize("what", ["model", "optimizer"])
def test_a_state_that_was_loaded_on_one_rank(what: str) -> None:
    load = StateLoaded(what=what, at="t.py:1")
    others = [11, 12, 13, 14] if what == "model" else OTHER
    judged = equal_weights(case(rank(EQUAL), [load, *rank(others, state=1)]))
    assert isinstance(judged, Finding)
    assert (judged.at, list(judged.ranks)) == ("t.py:1", [1])
    assert what in judged.what
    assert isinstance(equal_weights(case([load, *rank(EQUAL)], [load, *rank(EQUAL)])), NoFault)


def test_a_rank_that_does_not_step() -> None:
    steps = rank([1, 2, 3, 14, 15])
    third = next(
        i for i, e in enumerate(steps) if isinstance(e, ForwardEnded) and e.steps_done == 2
    )
    idle = [*steps[: third + 2], GradientsCleared(), *steps[third:]]
    judged = equal_weights(case(rank([1, 2, 3, 4, 5]), idle))
    assert isinstance(judged, Finding), judged
    assert "rank 0 updated; rank 1 did nothing" in judged.why


@pytest.mark.parametrize("count", [2, 3])
def test_weights_that_one_rank_changes_between_steps(count: int) -> None:
    """The line is that of the next use."""
    changed = [
        replace(e, params={"w": 7}) if isinstance(e, ForwardEnded) and e.steps_done == 2 else e
        for e in rank(EQUAL)
    ]
    judged = equal_weights(case(*[rank(EQUAL)] * (count - 1), changed))
    assert isinstance(judged, Finding)
    assert (judged.at, judged.step, list(judged.ranks)) == ("t.py:3", 3, [count - 1])
    assert "equal on all ranks after step 2, different before step 3" in judged.evidence


@pytest.mark.parametrize(
    ("grads", "sampler", "found"),
    [
        ([5, 5], False, Finding),
        ([5, 6], False, NOTE),
        ([5, 6], True, Finding),
        ([], False, NOTE),
        ([], True, Finding),
    ],
)
def test_ranks_that_start_with_different_weights(
    grads: list[int], sampler: bool, found: Any
) -> None:
    """With gradients of their own, they may train models of their own, if no sampler divides the samples."""
    loader = LoaderSeen(loader="a", sharding={"num_replicas": 2 if sampler else 1})
    ranks: list[list[Event]] = [
        [loader, BatchGiven(loader="a"), *rank([own, own + 1], grads=[grad] * 2, sync=None)]
        for own, grad in zip((1, 11), grads or (5, 5), strict=True)
    ]
    if not grads:  # no step is seen
        ranks = [own[:5] for own in ranks]
    judged = equal_weights(case(*ranks))
    assert kind(judged) == found
    assert isinstance(judged, Finding)
    assert "start with different weights" in judged.what


@pytest.mark.parametrize(("outside", "found"), [(["w"], NOTE), ([], Finding)])
def test_a_part_of_a_model_that_no_ddp_has_may_be_that_of_a_rank(
    outside: list[str], found: Any
) -> None:
    """Such as a head for a rank's own task, beside a trunk that is in DDP."""
    ranks: list[list[Event]] = [
        [ModelSeen(outside_ddp=outside), *rank([own, own + 1], grads=[own, own])] for own in (1, 11)
    ]
    assert kind(equal_weights(case(*ranks))) == found


@pytest.mark.parametrize("differ", [False, True])
def test_weights_that_no_model_uses_are_a_note_if_they_differ(differ: bool) -> None:
    steps = [OptimizerStepEnded(step=1, params={"w": weight}) for weight in (1, 1 + differ)]
    judged = equal_weights(case(*[[step] for step in steps]))
    assert kind(judged) == (NOTE if differ else NotJudged)


def test_a_rank_that_clips_alone_and_changes_nothing() -> None:
    assert isinstance(equal_weights(case(rank(EQUAL, after=CLIP), rank(EQUAL))), NoFault)


def test_weights_that_are_averaged_at_intervals() -> None:
    grads = {"grads": [5, 6, 7, 8], "sync": None}
    judged = equal_weights(case(rank(EQUAL, sync=None), rank([1, 12, 3, 4], **grads)))
    assert isinstance(judged, NotJudged)
    assert "local SGD" in judged.why


@pytest.mark.parametrize(
    ("sends", "continues", "found"),
    [(True, True, NOTE), (False, True, Finding), (True, False, Finding)],
)
def test_weights_that_may_be_averaged_after_the_watched_steps(
    sends: bool, continues: bool, found: Any
) -> None:
    def own(number: int) -> list[Event]:
        sent: list[Event] = [CollectiveBegun(op="broadcast", group=[0, 1])] * sends
        steps = rank([1, number, 10 * number], grads=[number] * 3, sync=None)
        return [*sent, *steps, *[TrainingContinues()] * continues]

    assert kind(equal_weights(case(own(2), own(3)))) == found


@pytest.mark.parametrize(("copies", "found"), [(True, NotJudged), (False, Finding)])
def test_a_model_for_one_batch_is_that_of_a_rank(copies: bool, found: type) -> None:
    def own(own: int) -> list[Event]:
        events: list[Event] = []
        for batch in range(3):
            events.append(BatchGiven(loader="a"))
            number = batch if copies else 0
            for step in (1, 2):
                done = 2 * batch + step - 1
                value = own if (step > 1 if copies else done) else 0
                use = ForwardEnded(trains=True, model=number, steps_done=done, params={"w": value})
                ended = {full_name(number, "w"): own, "outer": batch}
                begun = OptimizerStepBegun(step=done + 1, grads={"w": own})
                events += [use, BackwardBegun(), begun]
                events.append(OptimizerStepEnded(step=done + 1, params=ended))
        return events

    assert isinstance(equal_weights(case(own(2), own(3))), found)


def _trains_without_ddp(weights: list[int], *, exchanges: bool, steps: bool = True) -> list[Event]:
    """A rank that has these weights in its steps, and may exchange gradients and send weights."""
    events: list[Event] = []
    for number, digest in enumerate(weights, 1):
        done = number - 1 if steps else 0
        events += [
            ForwardEnded(trains=True, steps_done=done, params={"w": digest}),
            BackwardBegun(at="t.py:5", steps_done=done),
        ]
        reduced = CollectiveBegun(op="reduce", group=[0, 1], steps_done=done, at="t.py:6")
        sent = CollectiveBegun(op="broadcast", group=[0, 1], steps_done=done, at="t.py:9")
        begun = OptimizerStepBegun(step=number, at="t.py:8", grads={"w": 5}, lrs=[0.1])
        ended = OptimizerStepEnded(step=number, params={"w": digest + 1})
        events += [reduced] * exchanges + [begun, ended] * steps + [sent] * exchanges
    return events


def _findings(*ranks: list[Event]) -> list[str]:
    judged = judge(case(*ranks))
    return [name for name, each in judged.items() if isinstance(each, Finding)]


def test_one_rank_updates_and_sends_the_weights() -> None:
    chief = _trains_without_ddp([1, 2, 3], exchanges=True)
    # Verification ends the chief, and not the rank that never steps.
    other = _trains_without_ddp([1, 2, 3, 4], exchanges=True, steps=False)
    assert not _findings(chief, other)
    assert not _findings(other, chief)


def test_each_rank_trains_a_model_of_its_own_against_that_of_the_other() -> None:
    ranks: list[list[Event]] = [
        [
            ForwardEnded(evaluation=1, model=100, params={"w": other}),
            *rank([own, own + 1, own + 2], grads=[own] * 3, sync=None),
        ]
        for own, other in ((1, 7), (7, 1))
    ]
    judged = judge(case(*ranks))
    assert [name for name, each in judged.items() if isinstance(each, Finding)] == ["weights"]
    assert kind(judged["weights"]) == NOTE


def test_a_model_that_only_one_rank_trains_beside_the_shared_one() -> None:
    def own(*, trains_more: bool) -> list[Event]:
        events: list[Event] = []
        done = 0
        for digest in range(1, 5):
            forward = ForwardEnded(trains=True, sync=True, steps_done=done, params={"w": digest})
            done += 1
            begun = OptimizerStepBegun(step=done, grads={"w": 5}, lrs=[0.1])
            ended = OptimizerStepEnded(step=done, params={"w": digest + 1})
            events += [forward, BackwardBegun(steps_done=done - 1), begun, ended]
            if trains_more:
                done += 1
                events += [
                    OptimizerStepBegun(step=done, grads={"model 1: w": 8}, lrs=[0.1]),
                    OptimizerStepEnded(step=done, params={"model 1: w": digest}),
                ]
        return events

    assert not _findings(own(trains_more=True), own(trains_more=False))


def _generator_beside_a_critic(own: list[int], *, changes: bool) -> list[Event]:
    """A rank that trains a shared critic in each step, and a generator (model 1) after each fifth."""
    events: list[Event] = [DDPBuilt(group_size=2)]  # of the critic
    for done in range(16):
        if done % 5 == 0:
            weights = {"w": own[done // 5]}
            after = ([1, 2, 3, 4, 5] if changes else own)[done // 5 + 1]
            events += [
                ForwardEnded(model=1, trains=True, steps_done=done, params=weights, at="t.py:3"),
                OptimizerStepBegun(step=done + 1, at="t.py:9", grads={"model 1: w": after}),
                OptimizerStepEnded(step=done + 1, params={"model 1: w": after}),
            ]
        events += [
            ForwardEnded(trains=True, sync=True, steps_done=done, params={"w": 100 + done}),
            BackwardBegun(steps_done=done),
            OptimizerStepBegun(step=done + 1, grads={"w": 5}),
            OptimizerStepEnded(step=done + 1, params={"w": 101 + done}),
        ]
    return events


@pytest.mark.parametrize(
    ("other", "changes", "found"),
    [
        ([1, 2, 3, 4, 5], False, ""),
        ([1, 12, 13, 14, 15], False, "the ranks' weights differ after step 1: model 1: w."),
        ([1, 2, 3, 14, 15], False, "the ranks' weights differ after step 11: model 1: w."),
        ([11, 12, 13, 14, 15], False, "the ranks start with different weights."),
        ([1, 2, 13, 4, 5], True, "model 1: w was changed outside the optimizer on rank 1."),
        ([1, 2, 13, 4, 5], False, "are equal again some steps later"),
    ],
)
def test_a_model_that_is_not_used_in_each_step(other: list[int], changes: bool, found: str) -> None:
    """The steps between two uses of a model say nothing of its weights."""
    ranks = [_generator_beside_a_critic(own, changes=changes) for own in ([1, 2, 3, 4, 5], other)]
    judged = equal_weights(case(*ranks))
    assert isinstance(judged, Finding | NotJudged if found else NoFault)
    assert found in (judged.what if isinstance(judged, Finding) else str(judged))


# Buffers, and models that are not trained


def test_buffers_that_were_compared_are_called_equal() -> None:
    def judged(**buffers: int) -> str:
        return str(equal_buffers(case(*[[ForwardEnded(trains=True, buffers=buffers)]] * 2)))

    assert "the models with parameters have no buffers" in judged()
    assert "so were buffers when training" in judged(mean=1)
    assert isinstance(equal_buffers(case([], [])), NotJudged)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("all_evaluate", [True, False])
@pytest.mark.parametrize("end", [0, 9])
def test_buffers_that_differ_between_ranks(count: int, all_evaluate: bool, end: int) -> None:
    """Those of an evaluation on one rank may be made equal before it, or it may not matter."""

    def own(number: int) -> list[Event]:
        events: list[Event] = [ForwardEnded(trains=True, steps_done=1, buffers={"m": number})]
        if all_evaluate or number == 0:
            events.append(ForwardEnded(evaluation=1, steps_done=2, buffers={"m": number}))
        return [*events, RankEnded(buffers={"0": {"m": end or number}})]

    judged = equal_buffers(case(*map(own, range(count))))
    expected: Any = Finding if all_evaluate else NoFault if end else NOTE
    assert kind(judged) == expected
    if isinstance(judged, Finding):
        assert judged.step == 2


def test_buffers_of_ranks_whose_weights_differ_are_not_judged() -> None:
    ranks = [
        [*rank(weights, sync=None), ForwardEnded(evaluation=1, buffers={"m": weights[1]})]
        for weights in ([1, 2, 3], [1, 12, 3])
    ]
    assert isinstance(equal_buffers(case(*ranks)), NotJudged)


def test_a_mean_of_weights_that_one_rank_updates() -> None:
    def ranks(*digests: int) -> list[list[Event]]:
        uses = [ForwardEnded(evaluation=1, model=100, params={"w": each}) for each in digests]
        return [[DDPBuilt(group_size=2), use] for use in uses]

    assert isinstance(equal_buffers(case(*ranks(1, 1))), NoFault)
    judged = equal_buffers(case(*ranks(1, 2)))
    assert kind(judged) == Finding
    assert isinstance(judged, Finding)
    assert judged.effect == "1 of 1 parameters differ between ranks"


@pytest.mark.parametrize(
    ("digests", "found"),
    [
        ([(1, 2, 3), (1, 2, 3)], NoFault),
        ([(1, 2, 3), (1, 1, 1)], Finding),  # rank 0 alone updates it
        ([(1, 2, 3), (4, 5, 6)], NoFault),  # random weights, such as those of an augmentation
    ],
)
def test_a_teacher_that_one_rank_updates(digests: list[tuple[int, ...]], found: type) -> None:
    trains = ForwardEnded(trains=True, params={"w": 0})
    ranks: list[list[Event]] = [[DDPBuilt(group_size=2), trains] for _ in digests]
    for events, own in zip(ranks, digests, strict=True):
        for step, weight in enumerate(own):
            events.append(ForwardEnded(steps_done=step, model=100, params={"w": weight}))
    judged = equal_buffers(case(*ranks))
    assert isinstance(judged, found)
    if isinstance(judged, Finding):
        assert judged.step == 1
        assert "train with a model" in judged.what


def test_a_forward_that_measures_a_layer_before_the_weights_are_equal() -> None:
    def own(weight: int, *, measures: bool) -> list[Event]:
        use = ForwardEnded(evaluation=1, model=100, params={"w": weight})
        wrapped = DDPBuilt(group_size=2)
        return [use, wrapped] if measures else [wrapped, use]

    for measures, found in ((True, NoFault), (False, Finding)):
        ranks = [own(weight, measures=measures) for weight in (1, 2)]
        assert isinstance(equal_buffers(case(*ranks)), found)
