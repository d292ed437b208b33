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
    BatchGiven,
    Clipped,
    CollectiveBegun,
    CollectiveEnded,
    DDPBuilt,
    Evaluated,
    Event,
    ForwardEnded,
    GradientsCleared,
    LoaderSeen,
    OptimizerStepBegun,
    OptimizerStepEnded,
    PassBegun,
    PassExhausted,
    PassStopped,
    RankEnded,
    RankStarted,
    ScalerStepped,
    ScheduleStepped,
    TrainingBuilt,
    TrainingContinues,
    Unscaled,
    full_name,
)
from paceline.audit.evidence import RankLog, Run
from paceline.audit.progress import Progress
from paceline.audit.rules.collectives import unmatched_collective
from paceline.audit.rules.devices import shared_device
from paceline.audit.rules.rule import Case, Finding, NoFault, NotJudged, Rule
from paceline.audit.rules.schedule import schedule_speed
from paceline.audit.rules.statistics import different_buffers, different_untrained_models
from paceline.audit.rules.update import clip_before_unscale, update_on_one_rank
from paceline.audit.rules.weights import drifting_weights
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


def _epochs(steps: int, batches: int, rates: list[float]) -> list[Event]:
    """A rank that takes so many steps a pass; its schedule is stepped once a pass."""
    events: list[Event] = [LoaderSeen(loader="a", batches=batches, batch_size=4)]
    number = 0
    for epoch, rate in enumerate(rates):
        events.append(PassBegun(loader="a", pass_number=epoch, steps_done=number))
        for _ in range(steps):
            number += 1
            events += [
                BatchGiven(loader="a", pass_number=epoch, steps_done=number - 1),
                BackwardBegun(),
                OptimizerStepBegun(step=number, lrs=[rate], base=1.0, at="t.py:1"),
                OptimizerStepEnded(step=number),
            ]
        events.append(PassExhausted(loader="a", pass_number=epoch, steps_done=number))
        events.append(ScheduleStepped(at="t.py:2"))
    return events


def test_a_schedule_that_is_stepped_once_an_epoch_has_no_length_to_divide() -> None:
    solo = _epochs(40, 40, [1.0, 0.5, 0.25])
    shifted = _epochs(20, 20, [1.0, 0.7, 0.4])
    judged = schedule_speed(case(shifted, shifted, solo=solo))
    assert not isinstance(judged, Finding)


def _with_rates(events: list[Event], rates: list[float], base: float = 1.0) -> list[Event]:
    numbered = iter(rates)
    return [
        replace(e, lrs=[next(numbered)], base=base) if isinstance(e, OptimizerStepBegun) else e
        for e in events
    ]


def test_a_short_last_step_of_an_epoch_counts() -> None:
    """Three batches make a step: 120 of one process make 40, and 40 of a rank make 14."""

    def decays(steps: int, batches: int) -> list[Event]:
        total = 12 * steps
        rates = [(1 + math.cos(math.pi * s / total)) / 2 for s in range(total)]
        return _with_rates(_epochs(steps, batches, [0.0] * 12), rates)

    judged = schedule_speed(case(*[decays(14, 40)] * 3, solo=decays(40, 120)))
    assert isinstance(judged, NoFault), judged


@pytest.mark.parametrize(("speed", "found"), [(1, ""), (2, "fast"), (0.5, "slowly")])
def test_the_speed_of_a_schedule(speed: float, found: str) -> None:
    def decays(speed: float, batch_size: int) -> list[Event]:
        rates = [(1 + math.cos(math.pi * min(1.0, speed * s / 120))) / 2 for s in range(80)]
        (loader, *events) = _with_rates(_epochs(40, 40, [0.0] * 2), rates)
        return [replace(cast(LoaderSeen, loader), batch_size=batch_size), *events]

    judged = schedule_speed(case(*[decays(speed, 2)] * 2, solo=decays(1, 4)))
    assert isinstance(judged, Finding) == bool(found), judged
    if isinstance(judged, Finding):
        assert judged.what == f"the schedule runs 2 times too {found}."


def test_a_warm_up_to_n_times_the_rate() -> None:
    def warms_up(steps: int, last: float) -> list[Event]:
        rates = [0.25 + (last - 0.25) * min(1.0, 2 * s / steps) for s in range(steps)]
        return _with_rates(_epochs(steps, steps, [0.0]), rates, last)

    judged = schedule_speed(case(*[warms_up(60, 2.0)] * 2, solo=warms_up(120, 1.0)))
    assert isinstance(judged, NoFault), judged


def test_a_schedule_of_n_times_the_rate_with_a_warm_up_of_fixed_length() -> None:
    def decays(steps: int, lr: float) -> list[Event]:
        factors = [min(s / 20, (steps - s) / (steps - 20)) for s in range(steps)]
        return _with_rates(_epochs(steps, steps, [0.0]), [lr * each for each in factors], lr)

    judged = schedule_speed(case(*[decays(100, 0.1)] * 2, solo=decays(200, 0.05)))
    assert isinstance(judged, NoFault), judged


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


def test_a_forward_that_measures_a_layer_before_the_weights_are_equal() -> None:
    def rank(weight: int, *, measures: bool) -> list[Event]:
        use = ForwardEnded(evaluation=1, model=100, params={"w": weight})
        wrapped = DDPBuilt(group_size=2)
        return [use, wrapped] if measures else [wrapped, use]

    for measures, found in ((True, NoFault), (False, Finding)):
        ranks = [rank(weight, measures=measures) for weight in (1, 2)]
        assert isinstance(different_untrained_models(case(*ranks)), found)


@pytest.mark.parametrize(
    ("evaluates_after", "end", "found"),
    [([3], 9, NoFault), ([3], 0, Finding), ([], 9, Finding), ([0], 9, Finding),
     ([2], 0, NoFault), ([1, 2], 0, Finding), ([2, 3], 0, Finding), ([2, 3], 9, NoFault)],
)  # fmt: skip
def test_buffers_that_are_made_equal_before_one_rank_evaluates(
    evaluates_after: list[int], end: int, found: type
) -> None:
    """They differ after step 1, and are equal after step 2."""

    def rank(number: int) -> list[Event]:
        events: list[Event] = [DDPBuilt(group_size=2)]
        for step, buffer in enumerate([5, 5 + number, 6, 7]):
            if number == 0 and step in evaluates_after:
                events.append(ForwardEnded(evaluation=1, steps_done=step, buffers={"m": buffer}))
            events += [ForwardEnded(trains=True, steps_done=step, buffers={"m": buffer})] * (
                step < 3
            )
        return [*events, RankEnded(buffers={"0": {"m": end or number}})]

    assert isinstance(different_buffers(case(rank(0), rank(1))), found)


@pytest.mark.parametrize(("visible", "found"), [(["0", "0"], Finding), (["0", "1"], NoFault)])
def test_ranks_that_see_other_gpus(visible: list[str], found: type) -> None:
    ranks: list[list[Event]] = [
        [
            RankStarted(cuda_devices=2),
            ForwardEnded(trains=True, devices=["cuda:0"], visible_devices=each),
        ]
        for each in visible
    ]
    assert isinstance(shared_device(case(*ranks)), found)


# Updates


def _updates(params: list[int], calls: list[list[Event]], grads: int = 5) -> list[Event]:
    events: list[Event] = []
    for number, (digest, own) in enumerate(zip(params, calls, strict=True), 1):
        events += [
            ForwardEnded(trains=True, sync=True, steps_done=number - 1, params={"w": digest})
        ]
        events += [BackwardBegun(), *own]
        if any(isinstance(call, OptimizerStepBegun) for call in own):
            events.append(OptimizerStepEnded(step=number, params={"w": digest + 1}))
    return events


def _step(number: int, grads: int = 5) -> OptimizerStepBegun:
    return OptimizerStepBegun(step=number, at="t.py:8", grads={"w": grads}, lrs=[0.1])


def test_a_rank_that_clips_alone_and_changes_nothing() -> None:
    steps = [[_step(number)] for number in (1, 2, 3)]
    clips = [[Clipped(norm=1.0), *own] for own in steps]
    usual = _updates([1, 2, 3], steps)
    assert isinstance(update_on_one_rank(case(_updates([1, 2, 3], clips), usual)), NoFault)
    assert isinstance(update_on_one_rank(case(_updates([1, 7, 8], clips), usual)), Finding)
    idle = _updates([1, 1, 1], [[], [], []])
    assert isinstance(update_on_one_rank(case(usual, idle)), Finding)


@pytest.mark.parametrize(
    ("clipped", "unscaled", "stepped", "bound", "found"),
    [
        ("ab", "", "ab", 1.0, True),
        ("ab", "a", "ab", 1.0, True),
        ("ab", "ab", "ab", 1.0, False),
        ("ab", "", "", 1.0, False),
        ("b", "a", "a", 1.0, False),  # b has an optimizer without the scaler
        ("ab", "a", "a", 1.0, False),
        ("ab", "", "ab", 65536.0, False),  # the bound has the scale too
    ],
)
def test_a_clip_beside_the_scaler_of_another_optimizer(
    clipped: str, unscaled: str, stepped: str, bound: float, found: bool
) -> None:
    calls: list[Event] = [
        *[Unscaled(names=[name]) for name in unscaled],
        Clipped(norm=2.0, max_norm=bound, scale=65536.0, names=[*clipped]),
        *[ScalerStepped(names=[name]) for name in stepped],
        _step(1),
    ]
    judged = clip_before_unscale(case(_updates([1], [calls]), _updates([1], [calls])))
    assert isinstance(judged, Finding) == found


@pytest.mark.parametrize(("copies", "found"), [(True, NotJudged), (False, Finding)])
def test_a_model_for_one_batch_is_that_of_a_rank(copies: bool, found: type) -> None:
    def rank(own: int) -> list[Event]:
        events: list[Event] = []
        for batch in range(3):
            events.append(BatchGiven(loader="a"))
            number = batch if copies else 0
            for step in (1, 2):
                done = 2 * batch + step - 1
                value = own if (step > 1 if copies else done) else 0
                use = ForwardEnded(trains=True, model=number, steps_done=done, params={"w": value})
                ended = {full_name(number, "w"): own, "outer": batch}
                events += [use, BackwardBegun(), _step(done + 1, own)]
                events.append(OptimizerStepEnded(step=done + 1, params=ended))
        return events

    assert isinstance(drifting_weights(case(rank(2), rank(3))), found)


def test_the_steps_of_two_optimizers_are_counted_once() -> None:
    def trains(*, clips_in: int | None) -> list[Event]:
        events: list[Event] = []
        for step in range(1, 7):
            for name, done in (("discriminator", step - 1), ("generator", step)):
                events += [GradientsCleared(), BackwardBegun(steps_done=done)]
                events += [CollectiveBegun(op="all_reduce"), CollectiveEnded()]
                if step == clips_in and name == "generator":
                    events.append(Clipped(norm=2.0, scale=65536.0, names=[name]))
                events += [
                    ScalerStepped(names=[name]),
                    OptimizerStepBegun(step=step, grads={name: 1}),
                ]
                events.append(OptimizerStepEnded(step=step, params={name: clips_in or 0}))
        return events

    judged = clip_before_unscale(case(*[trains(clips_in=5)] * 2))
    assert isinstance(judged, Finding)
    assert judged.step == 5
    judged = update_on_one_rank(
        case(trains(clips_in=5), [*trains(clips_in=None), OptimizerStepEnded(step=7)])
    )
    assert isinstance(judged, Finding)
    assert judged.step == 5


@pytest.mark.parametrize(
    ("sends", "continues", "found"),
    [(True, True, NotJudged), (False, True, Finding), (True, False, Finding)],
)
def test_weights_that_may_be_averaged_after_the_watched_steps(
    sends: bool, continues: bool, found: type
) -> None:
    def rank(own: int) -> list[Event]:
        events: list[Event] = [CollectiveBegun(op="broadcast", group=[0, 1])] * sends
        for number, digest in enumerate([1, own, 10 * own], 1):
            forward = ForwardEnded(trains=True, steps_done=number - 1, params={"w": digest})
            ended = OptimizerStepEnded(step=number, params={"w": 100 * digest + own})
            events += [forward, BackwardBegun(), _step(number, own), ended]
        return [*events, *[TrainingContinues()] * continues]

    judged = drifting_weights(case(rank(2), rank(3)))
    assert isinstance(judged, found), judged
    assert not isinstance(judged, NotJudged) or judged.is_open


def _trains_without_ddp(weights: list[int], *, exchanges: bool, steps: bool = True) -> list[Event]:
    """A rank that has these weights in its steps, and may exchange gradients and send weights."""
    events: list[Event] = []
    for number, digest in enumerate(weights, 1):
        done = number - 1 if steps else 0
        events += [
            ForwardEnded(
                trains=True,
                steps_done=done,
                params={"w": digest},
                rows=[digest + 99 * steps, 200 + number],
            ),
            BackwardBegun(at="t.py:5", steps_done=done),
        ]
        reduced = CollectiveBegun(op="reduce", group=[0, 1], steps_done=done, at="t.py:6")
        sent = CollectiveBegun(op="broadcast", group=[0, 1], steps_done=done, at="t.py:9")
        ended = OptimizerStepEnded(step=number, params={"w": digest + 1})
        events += [reduced] * exchanges + [_step(number), ended] * steps + [sent] * exchanges
    return events


def _faults(*ranks: list[Event]) -> list[str]:
    judged = judge(case(*ranks))
    return [name for name, each in judged.items() if isinstance(each, Finding)]


def test_one_rank_updates_and_sends_the_weights() -> None:
    chief = _trains_without_ddp([1, 2, 3], exchanges=True)
    # Verification ends the chief, and not the rank that never steps.
    other = _trains_without_ddp([1, 2, 3, 4], exchanges=True, steps=False)
    assert not _faults(chief, other)
    assert not _faults(other, chief)


def test_each_rank_trains_a_model_of_its_own_against_that_of_the_other() -> None:
    def players(*, exchanges: bool) -> list[list[Event]]:
        return [
            [
                ForwardEnded(evaluation=1, model=100, params={"w": other}),
                *_trains_without_ddp([own, own + 1, own + 2], exchanges=exchanges),
            ]
            for own, other in ((1, 7), (7, 1))
        ]

    assert not _faults(*players(exchanges=False))
    assert "weights differ without an optimizer step" in _faults(*players(exchanges=True))


def test_a_model_that_only_one_rank_trains_beside_the_shared_one() -> None:
    def rank(*, trains_more: bool) -> list[Event]:
        events: list[Event] = []
        done = 0
        for digest in range(1, 5):
            forward = ForwardEnded(trains=True, sync=True, steps_done=done, params={"w": digest})
            done += 1
            ended = OptimizerStepEnded(step=done, params={"w": digest + 1})
            events += [forward, BackwardBegun(steps_done=done - 1), _step(done), ended]
            if trains_more:
                done += 1
                own = OptimizerStepBegun(step=done, at="t.py:9", grads={"model 1: w": 8}, lrs=[0.1])
                events += [own, OptimizerStepEnded(step=done, params={"model 1: w": digest})]
        return events

    assert not _faults(rank(trains_more=True), rank(trains_more=False))


def _generator_beside_a_critic(
    own: list[int], *, changes: bool, rows: list[int] | None = None
) -> list[Event]:
    """A rank that trains a shared critic in each step, and a generator (model 1) after each fifth."""
    events: list[Event] = [DDPBuilt(group_size=2)]  # of the critic
    for done in range(16):
        if done % 5 == 0:
            weights = own[done // 5]
            events.append(
                ForwardEnded(
                    model=1,
                    trains=True,
                    steps_done=done,
                    params={"w": weights},
                    rows=rows,
                    at="t.py:3",
                )
            )
            after = ([1, 2, 3, 4, 5] if changes else own)[done // 5 + 1]
            ended = OptimizerStepEnded(step=done + 1, params={"model 1: w": after})
            step = OptimizerStepBegun(step=done + 1, at="t.py:9", grads={"model 1: w": after})
            events += [step, ended]
        critic = ForwardEnded(trains=True, sync=True, steps_done=done, params={"w": 100 + done})
        ended = OptimizerStepEnded(step=done + 1, params={"w": 101 + done})
        events += [critic, BackwardBegun(steps_done=done), _step(done + 1), ended]
    return events


@pytest.mark.parametrize(
    ("other", "changes", "found"),
    [
        ([1, 2, 3, 4, 5], False, None),
        ([1, 12, 13, 14, 15], False, "the ranks' weights differ after step 1: model 1: w."),
        ([1, 2, 3, 14, 15], False, "the ranks' weights differ after step 11: model 1: w."),
        ([11, 12, 13, 14, 15], False, "the ranks start with different weights."),
        ([1, 2, 13, 4, 5], True, "model 1: w was changed outside the optimizer on rank 1."),
        ([1, 2, 13, 4, 5], False, "are equal again some steps later"),
    ],
)
def test_a_model_that_is_not_used_in_each_step(
    other: list[int], changes: bool, found: str | None
) -> None:
    """The steps between two uses of a model say nothing of its weights."""
    ranks = [_generator_beside_a_critic(own, changes=changes) for own in ([1, 2, 3, 4, 5], other)]
    judged = judge(case(*ranks))
    faults = [each.what for each in judged.values() if isinstance(each, Finding)]
    if changes:
        outside = judged["weights differ without an optimizer step"]
        assert isinstance(outside, Finding)
        assert (outside.at, outside.step) == ("t.py:3", 11)
        assert outside.evidence.startswith(
            "equal on all ranks after step 6, different before step 11"
        )
        assert "the line is that of the next forward or step" in outside.evidence
    drift = judged["weights drift apart"] if not faults else None
    if found is None or found in faults:
        assert faults == [found] * bool(found)
    else:
        assert isinstance(drift, NotJudged)
        assert found in drift.why


@pytest.mark.parametrize(
    ("rows", "found"),
    [(([7, 8], [7, 8]), NotJudged), (([7, 8], [8, 9]), Finding), ((None, None), Finding)],
)
def test_each_rank_trains_a_probe_beside_the_shared_model(rows: Any, found: type) -> None:
    """A model that has other weights on each rank is its own if its samples are those of all ranks."""
    own = ([1, 2, 3, 4, 5], [11, 12, 13, 14, 15])
    ranks = [
        _generator_beside_a_critic(values, changes=False, rows=given)
        for values, given in zip(own, rows, strict=True)
    ]
    judged = judge(case(*ranks))["weights differ without an optimizer step"]
    assert isinstance(judged, found)


def _learns_a_temperature(own: list[int]) -> list[Event]:
    """A rank that trains a shared model, and a parameter that no forward shows."""
    events: list[Event] = [DDPBuilt(group_size=2)]
    for number, value in enumerate(own, 1):
        others = {"t": own[number - 2]} if number > 1 else {}
        grads = {"w": 5, "t": value}
        events += [
            ForwardEnded(trains=True, sync=True, steps_done=number - 1, params={"w": number}),
            BackwardBegun(steps_done=number - 1),
            OptimizerStepBegun(
                step=number, at="t.py:8", grads=grads, lrs=[0.1], outside_models=others
            ),
            OptimizerStepEnded(step=number, params={"w": number + 1, "t": value}),
        ]
    return events


@pytest.mark.parametrize(
    ("own", "found"), [([1, 2, 3], []), ([1, 12, 13], ["weights drift apart"])]
)
def test_a_parameter_that_no_forward_shows(own: list[int], found: list[str]) -> None:
    assert _faults(_learns_a_temperature([1, 2, 3]), _learns_a_temperature(own)) == found


def test_the_collectives_of_a_ddp_of_some_ranks_are_not_those_of_all() -> None:
    barrier = CollectiveBegun(op="barrier", group=[0, 1, 2], at="t.py:9")
    trainer: list[Event] = [
        DDPBuilt(group_size=2), ForwardEnded(trains=True, sync=True), BackwardBegun(at="t.py:3"), barrier,
    ]  # fmt: skip
    assert isinstance(unmatched_collective(case(trainer, trainer, [barrier])), NoFault)


def test_a_network_that_measures_between_the_forward_of_ddp_and_its_backward() -> None:
    def rank(*own: Event, weights: int = 2, measures: bool = True) -> list[Event]:
        events: list[Event] = [DDPBuilt(group_size=2)]
        for event in _updates([1, weights, weights], [[*own, _step(n)] for n in (1, 2, 3)]):
            metric = measures and isinstance(event, ForwardEnded)
            events += [event, *[ForwardEnded(model=100)] * metric]
        return events

    assert isinstance(unmatched_collective(case(rank(), rank(measures=False))), NoFault)
    assert isinstance(unmatched_collective(case(rank(), rank()[:-6])), Finding)
    assert isinstance(update_on_one_rank(case(rank(Clipped(), weights=7), rank())), Finding)


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
