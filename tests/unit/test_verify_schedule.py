"""Learning rates beside those of one process, and the lints, on made-up logs of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.audit.events import (
    BackwardBegun,
    Clipped,
    Event,
    ForwardEnded,
    GradientsCleared,
    OptimizerStepBegun,
    OptimizerStepEnded,
    RankStarted,
    ScalerStepped,
    ScheduleStepped,
    TrainingContinues,
    Unscaled,
)
from paceline.audit.evidence import RankLog, Run
from paceline.audit.rules.lints import clip_before_unscale, no_sync_around_backward, shared_device
from paceline.audit.rules.rule import Case, Finding, Judgement, NoFault, NotJudged
from paceline.audit.rules.schedule import schedule
from paceline.audit.run_plan import RunPlan

NOTE = "a note"
Rate = Callable[[int], float]  # of a step, from 0


def run(mode: Any, *ranks: list[Event]) -> Run:
    logs = [RankLog(rank, events, []) for rank, events in enumerate(ranks)]
    return Run(RunPlan(Path("x"), mode, len(ranks), 20), logs, 0)


def case(*ranks: list[Event]) -> Case:
    return Case(run("solo", ranks[0]), run("ordinary", *ranks), why_no_union="no union.")


def kind(judged: Judgement) -> Any:
    """The type of a judgement, or `NOTE`."""
    return NOTE if isinstance(judged, Finding) and judged.is_note else type(judged)


def trains(
    steps: int,
    rate: Rate,
    *,
    samples: int = 12,
    base: float = 1.0,
    ends: bool = False,
    calls: int = 1,
) -> list[Event]:
    """A rank that takes so many steps with these learning rates, and this many samples in each."""
    events: list[Event] = []
    for step in range(steps):
        events += [
            ForwardEnded(trains=True, sync=True, steps_done=step, samples=samples),
            OptimizerStepBegun(step=step + 1, lrs=[rate(step)], base=base, at="t.py:1"),
            OptimizerStepEnded(step=step + 1),
            *[ScheduleStepped(at="t.py:2", steps_done=step + 1)] * calls,
        ]
    return [*events, *[TrainingContinues()] * (not ends)]


def cosine(length: float) -> Rate:
    return lambda step: (1 + math.cos(math.pi * min(1.0, step / length))) / 2


def judge(
    count: int,
    ranks: Rate,
    union: Rate,
    solo: Rate,
    *,
    base: float = 1.0,
    share: int = 1,
    ends: bool = False,
    calls: int = 1,
) -> Judgement:
    """Judge these rates of 40 steps. The batch of one process is divided by `share` on a rank."""
    own = trains(40, ranks, samples=12 // share, base=base, ends=ends, calls=calls)
    one = trains(40, union, samples=12 * count // share)
    alone = trains(40 * count // share, solo, ends=ends)
    return schedule(Case(run("solo", alone), run("ordinary", *[own] * count), run("union", one)))


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("total", [60, 1000])
def test_the_speed_of_a_schedule(count: int, total: int) -> None:
    right, fast, slow = cosine(total), cosine(total / count), cosine(total * count)
    assert kind(judge(count, right, right, right)) == NoFault
    # A schedule that counts samples: one process on the same batch size has 1/N of the speed.
    assert kind(judge(count, right, slow, slow)) == NoFault
    for share, solo in ((1, slow), (count, right)):
        judged = judge(count, fast, right, solo, share=share)
        assert isinstance(judged, Finding)
        assert judged.what == f"the schedule runs {count} times too fast."
        assert (judged.at, judged.step, judged.is_note) == ("t.py:2", 2, False)
        judged = judge(
            count, slow, right, solo if share > 1 else cosine(total * count), share=share
        )
        assert isinstance(judged, Finding), (share, judged)
        assert judged.what == f"the schedule runs {count} times too slowly."
    other = judge(count, lambda step: 0.9**step, right, slow)
    assert isinstance(other, Finding)
    assert other.is_note
    assert "0.9 on the ranks" in other.evidence


def test_the_length_of_a_schedule_in_samples_is_rounded() -> None:
    """201 steps of one process, and 100 or 101 of two ranks."""
    for length in (100, 101):
        assert kind(judge(2, cosine(length), cosine(201), cosine(201))) == NoFault


def test_few_steps_do_not_tell_the_speed_of_a_schedule() -> None:
    one = trains(4, lambda step: 1 - 0.05 * step)
    own = trains(4, lambda step: 1 - 0.1 * step, samples=6)
    judged = schedule(Case(run("solo", one), run("ordinary", own, own), run("union", one)))
    assert kind(judged) == NOTE


def test_without_the_number_of_samples_another_speed_is_a_note() -> None:
    fast = [e for e in trains(40, cosine(30)) if not isinstance(e, ForwardEnded)]
    one = trains(40, cosine(60))
    runs = run("solo", one), run("ordinary", fast, fast), run("union", one)
    assert kind(schedule(Case(*runs))) == NOTE


def test_a_warm_up_to_n_times_the_rate() -> None:
    def warms_up(peak: float) -> Rate:
        return lambda step: 0.25 + (peak - 0.25) * min(1.0, step / 30)

    assert kind(judge(2, warms_up(1.0), warms_up(0.5), warms_up(0.5))) == NoFault
    assert kind(judge(2, warms_up(1.5), warms_up(0.5), warms_up(0.5))) == NOTE


def test_without_the_steps_of_one_process_a_schedule_is_not_judged() -> None:
    assert kind(schedule(case(*[trains(3, cosine(9))] * 2))) == NotJudged
    assert (
        kind(schedule(Case(run("solo", []), run("ordinary", [], []), run("union", [])))) == NoFault
    )


@pytest.mark.parametrize(
    ("metrics", "found"),
    [
        ((0.5, 0.5), NoFault),
        ((0.5, 0.6), NOTE),  # no rate differs yet
        ((0.5, 0.5 + 1e-8), NoFault),
        ((0.1, 0.2, 0.1), Finding),
    ],
)
def test_a_schedule_that_follows_a_metric_of_each_rank(metrics: Any, found: Any) -> None:
    calls: list[list[Event]] = [
        [
            ForwardEnded(trains=True, sync=True),
            ScheduleStepped(at="t.py:8", steps_done=4, metric=metric),
            OptimizerStepBegun(step=5, lrs=[0.1 if len(metrics) == 2 else metric]),
        ]
        for metric in metrics
    ]
    judged = schedule(case(*calls))
    assert kind(judged) == found
    if isinstance(judged, Finding):
        assert (judged.at, judged.step) == ("t.py:8", 4)
        assert judged.effect == "the metric differs by 0.1 between ranks"


# Lints


def _updates(*calls: list[Event]) -> list[Event]:
    """A rank that makes these calls after its backwards."""
    events: list[Event] = []
    for number, own in enumerate(calls, 1):
        events += [GradientsCleared(), BackwardBegun(steps_done=number - 1), *own]
        events.append(OptimizerStepBegun(step=number, at="t.py:8"))
    return events


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
        ("ab", "", "ab", 6553.6, False),
        ("ab", "", "ab", 5.0, True),
        ("ab", "", "ab", None, False),  # clip_grad_value_, whose bound is not known
    ],
)
def test_a_clip_beside_the_scaler_of_another_optimizer(
    clipped: str, unscaled: str, stepped: str, bound: float | None, found: bool
) -> None:
    calls: list[Event] = [
        *[Unscaled(names=[name]) for name in unscaled],
        Clipped(norm=2.0, max_norm=bound, scale=65536.0, names=[*clipped]),
        *[ScalerStepped(names=[name]) for name in stepped],
    ]
    judged = clip_before_unscale(case(*[_updates([], calls)] * 2))
    assert isinstance(judged, Finding) == found
    if isinstance(judged, Finding):
        assert judged.step == 2


@pytest.mark.parametrize(("of_forward", "found"), [(True, NOTE), (False, NoFault)])
def test_no_sync_around_the_backward_only(of_forward: bool, found: Any) -> None:
    forward = ForwardEnded(trains=True, sync=of_forward)
    events = [forward, BackwardBegun(at="t.py:4", sync=[False])]
    assert kind(no_sync_around_backward(case(events, events))) == found


@pytest.mark.parametrize(
    ("devices", "gpus", "cores", "message"),
    [
        (["cuda:0", "cuda:0"], 2, [[0, 1], [0, 1]], "all ranks use one device, cuda:0"),
        (["cuda:0", "cuda:0"], 1, [[0, 1], [0, 1]], "all ranks use one device, cuda:0"),
        (["cuda:0", "cuda:1"], 2, [[0, 1], [0, 1]], None),
        (["cpu", "cpu"], 2, [[0, 1], [0, 1]], "2 GPUs are idle"),
        (["cpu", "cpu"], 0, [[0, 1], [0, 1]], None),
        (["cpu", "cpu"], 0, [[1], [1]], "all ranks run on core 1, of 2"),
        (["cpu", "cpu"], 0, [[0], [1]], None),
    ],
)
def test_devices(
    devices: list[str], gpus: int, cores: list[list[int]], message: str | None
) -> None:
    ranks: list[list[Event]] = [
        [
            RankStarted(cuda_devices=gpus, cores=[0, 1]),
            ForwardEnded(devices=[device], cores=own, at="t.py:1", trains=True),
        ]
        for device, own in zip(devices, cores, strict=True)
    ]
    judged = shared_device(case(*ranks))
    if message is None:
        assert isinstance(judged, NoFault)
    else:
        assert isinstance(judged, Finding)
        assert message in judged.what
        assert judged.is_note == ("idle" in message or gpus == 1)


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


@pytest.mark.parametrize(
    ("length", "ends", "found"), [(40, True, NoFault), (80, True, NOTE), (80, False, NoFault)]
)
def test_the_end_of_a_schedule(length: int, ends: bool, found: Any) -> None:
    """One process takes 80 steps, and two take 40."""
    judged = judge(2, cosine(length), cosine(length), cosine(80), ends=ends)
    assert kind(judged) == found
    if isinstance(judged, Finding):
        assert "0.0003855 on one process and 0.5196 on 2" in judged.evidence


def test_a_schedule_that_is_stepped_for_each_rank_may_end_a_little_early() -> None:
    """As that of Accelerate, whose steps of all ranks leave out some batches."""
    solo = cosine(90)

    def of_ranks(step: int) -> float:
        return solo(2 * step)

    judged = judge(2, of_ranks, of_ranks, solo, ends=True, calls=2)
    assert isinstance(judged, NoFault), judged
