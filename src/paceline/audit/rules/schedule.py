"""Learning rate schedules: too fast, too slow, without an end, or different on the ranks."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.audit.events import OptimizerStepBegun, ScheduleStepped, TrainingContinues
from paceline.audit.evidence import RankLog
from paceline.audit.rules.rule import Case, Finding, Judgement, NoFault, NotJudged

Array = NDArray[Any]

# Rates between two steps are interpolated linearly, so equal rates differ by up to this part.
# See broken/13_hand_schedule.
_SAME_RATE = 0.02
# Metrics that differ by less differ by rounding (broken/70_plateau).
_SAME_METRIC = 1e-6
# A fault needs at least this many steps with an unexpected rate. Four times as many change
# broken/13_schedule_too_fast.
_MIN_STEPS = 3
# This part of these steps must have the rate of the wrong speed. See broken/13_lambda_budget.
_MIN_SHARE = 0.8
# Numbers of calls or steps are about equal if they differ by less than this factor.
# See broken/13_schedule_of_all_batches; a quarter changes broken/73_one_cycle.
_MORE_CALLS = 1.5
# The end of a schedule has less than the first part of the largest rate; above the second it is not reached.
# See broken/73_one_cycle.
_END, _NOT_END = 0.01, 0.1
# After three quarters of a schedule that ends with the training, the rate is above this part.
# See broken/73_one_cycle.
_STILL = 0.05


def schedule_speed(case: Case) -> Judgement:
    """The learning rate of N ranks at step s is that of one process at step N * s, or at step s / N."""
    solo, log, count = case.solo.ranks[0], case.ranks[0], case.world_size
    if _follows_metric(case):
        return NotJudged("the schedule follows a metric.")
    loaders = [[each.loaders[name] for name in each.training_loaders] for each in (solo, log)]
    lengths = [own[0].batches if own else None for own in loaders]
    if not lengths[0] or not lengths[1]:
        return NotJudged("the length of an epoch is unknown.")
    if lengths[0] == lengths[1] and len({e.batch_size for own in loaders for e in own}) == 1:
        return NotJudged("the ranks get no shards, so their part of an epoch is unknown.")
    of_pass = _steps_of_pass(solo), _steps_of_pass(log)
    solo_steps_per_step = lengths[0] / lengths[1]
    if of_pass[0] and of_pass[1]:
        solo_steps_per_step = of_pass[0] / of_pass[1]  # a short last step counts too
    # Two speeds are right: that of a schedule that counts steps, and that of one that counts epochs. With
    # fewer steps, a schedule reaches its turning points up to one of its steps earlier or later.
    fits = [_fit(case, speed, shift=max(1, speed)) for speed in (1, solo_steps_per_step)]
    is_unexpected = (fits[0] == 0) & (fits[1] == 0)
    if is_unexpected.sum() < _MIN_STEPS:
        return NoFault("the learning rate is that of one process at the same part of an epoch.")
    for is_fast in (True, False):
        speed = solo_steps_per_step * (count if is_fast else 1 / count)
        fit = _fit(case, speed, shift=count)[is_unexpected]
        if np.nansum(fit) >= _MIN_STEPS and np.nanmean(fit) >= _MIN_SHARE:
            break
    else:
        between = partial(_is_between, case, is_unexpected, solo_steps_per_step)
        # The relative ones of a schedule from N times the rate may be in a warm-up too.
        if between(relative=False) or between(relative=True):
            return NoFault(
                f"the rate, absolute or relative, is 1 to {count} times that of one process."
            )
        return NotJudged(
            f"in {is_unexpected.sum()} steps the learning rate was neither that of one process at the same "
            "step nor at the same part of an epoch.",
            is_open=True,
        )
    part, how = (f"{count} times", "fast") if is_fast else (f"1/{count} of", "slowly")
    why, fix = _cause_of_fast(case, solo_steps_per_step) if is_fast else _cause_of_slow(count)
    return Finding(
        at=_place(log),
        step=1,
        what=f"the schedule runs {count} times too {how}.",
        why=why,
        fix=fix,
        evidence=f"in {np.nansum(fit):.0f} steps the learning rate was that of one process at {part} the "
        "position in the epoch",
        effect=f"the learning rate changes {count} times too {how}",
    )


def _cause_of_fast(case: Case, solo_steps_per_step: float) -> tuple[str, str]:
    """Why a schedule runs too fast, and the fix."""
    calls, solo_calls = (_calls_per_step(run.ranks[0]) for run in (case.ordinary, case.solo))
    # A schedule that is stepped once an epoch has more calls per update where an epoch is shorter.
    if calls > _MORE_CALLS * solo_calls and solo_calls > 1 / _MORE_CALLS:
        return (
            f"it is stepped {calls:.1f} times for each update, and {solo_calls:.1f} times on one process.",
            "step it once for each optimizer step. If a library steps it once for each rank, as Accelerate "
            f"does, multiply its length by {case.world_size}.",
        )
    if solo_steps_per_step > _MORE_CALLS:
        return "its length is divided by the number of ranks twice.", "divide it once."
    return (
        "its length is divided by the number of ranks, but each rank makes as many updates as one process.",
        "compute its length from the number of optimizer steps.",
    )


def _cause_of_slow(world_size: int) -> tuple[str, str]:
    """Why a schedule runs too slowly, and the fix."""
    return (
        "it counts the samples or tokens of one rank, and its length those of all ranks.",
        f"count the samples of all ranks: multiply those of one rank by {world_size}, or all_reduce them.",
    )


def _is_between(case: Case, steps: Array, speed: float, *, relative: bool) -> bool:
    """Whether the rates of these steps are 1 to N times those of one process, as in a warm-up to N times."""
    runs = case.solo, case.ordinary
    expected, rates = (np.array(_rates(run.ranks[0], relative=relative)) for run in runs)
    least = _interpolated(expected, np.arange(len(rates)) * speed)  # no comparison with NaN is true
    most = case.world_size * least
    is_outside = (rates < (1 - _SAME_RATE) * least) | (rates > (1 + _SAME_RATE) * most)
    return not is_outside[steps].any()


def _steps_of_pass(log: RankLog) -> int | None:
    """The optimizer steps in the first pass over the training data; None if its end was not seen."""
    name = log.training_loaders[0]
    first, second = (log.passes.get((name, number)) for number in (0, 1))
    if first is None or second is None or not first.ended:
        return None
    return second.begin.steps_done - first.begin.steps_done


def _follows_metric(case: Case) -> bool:
    return any(event.metric is not None for event in case.solo.ranks[0].of(ScheduleStepped))


def _place(log: RankLog) -> str:
    """The line of the schedule's step, else that of the optimizer's."""
    stepped = log.first(ScheduleStepped)
    return stepped.at if stepped else log.of(OptimizerStepBegun)[0].at


def unfinished_schedule(case: Case) -> Judgement:
    """The rate of one process ends near 0, and that of N processes, which take fewer steps, does not."""
    solo, log = case.solo.ranks[0], case.ranks[0]
    if any(each.of(TrainingContinues) for each in (solo, *case.ranks)):
        return NotJudged("the script may train on after the watched steps.")
    if case.ordinary.hung or case.ordinary.returncode or case.updates_differ:
        return NotJudged("not every rank trained to the end of the script.")
    if _follows_metric(case):
        return NotJudged("the schedule follows a metric.")
    rates, others = _rates(solo), _rates(log)
    largest = max(rates, default=0.0)
    if not rates or rates[-1] > _END * largest or rates[3 * len(rates) // 4] < _STILL * largest:
        return NoFault("the learning rate of one process does not end near 0 with the training.")
    share = len(others) * case.world_size / len(rates)
    is_same = not (_fit(case, 1, shift=0) == 0).any()
    # With fewer steps, the schedule of one process is cut off before its end.
    is_cut = 1 / _MORE_CALLS < share < _MORE_CALLS and is_same
    if not is_cut or others[-1] < _NOT_END * max(others):
        return NoFault("the schedule of one process is not cut off before its end.")
    return Finding(
        what="the schedule does not reach its end.",
        at=_place(log),
        step=len(others),
        why=f"{case.world_size} processes take {len(others)} steps, and one takes {len(rates)}: the length "
        "of the schedule counts the steps of one process.",
        fix="compute its length from the number of batches of one rank, such as len(loader).",
        evidence=f"relative to the largest, the last learning rate is {rates[-1] / max(rates):.2g} on one "
        f"process and {others[-1] / max(others):.2g} on {case.world_size}",
        effect=f"{1 - len(others) / len(rates):.0%} of the schedule is left out",
    )


def schedule_of_rank(case: Case) -> Judgement:
    """`ReduceLROnPlateau` follows a metric of each rank, so ranks lower their rates at different times."""
    steps_of_ranks = [
        [e for e in log.of(ScheduleStepped) if e.metric is not None] for log in case.ranks
    ]
    for events in zip(*steps_of_ranks, strict=False):
        metrics = [float(event.metric) for event in events]
        least, most = min(metrics), max(metrics)
        if not all(map(math.isfinite, metrics)) or math.isclose(least, most, rel_tol=_SAME_METRIC):
            continue
        return Finding(
            what="ReduceLROnPlateau gets a different metric on each rank.",
            at=events[0].at,
            step=events[0].steps_done or None,
            why="each rank decides by its own metric when to lower the learning rate. From then on the "
            "ranks make different updates, and their weights drift apart.",
            fix="reduce the metric over all ranks before the step of the schedule.",
            evidence=f"metrics of the ranks: {', '.join(f'{metric:.6g}' for metric in metrics)}",
            effect=f"the metric differs between ranks by {(most - least) / max(abs(least), abs(most)):.2%}",
        )
    return NoFault("no schedule follows a metric that differs between ranks.")


def _calls_per_step(log: RankLog) -> float:
    """The calls of the schedule for each step, before the last one: empty passes follow it."""
    calls = sum(event.steps_done < log.steps for event in log.of(ScheduleStepped))
    return calls / max(log.steps, 1)


def _rates(log: RankLog, *, relative: bool = True) -> list[float]:
    """The learning rate of each step, relative to the one that the schedule starts from.

    The absolute rate may depend on the number of processes (linear scaling).
    """
    first = next((event.lrs[0] for event in log.of(OptimizerStepBegun)), 0.0)
    rates = {
        event.step: event.lrs[0] / (event.base or first or 1.0) if relative else event.lrs[0]
        for event in log.of(OptimizerStepBegun)
    }
    return [rates[step] for step in sorted(rates)]


def _interpolated(rates: Array, steps: Array) -> Array:
    """The rates at steps of one process, between two of them by interpolation; NaN where it took none."""
    found = np.interp(steps, np.arange(len(rates)), rates)
    return np.where(steps < len(rates) - 1, found, np.nan)


def _fit(case: Case, speed: float, *, shift: float) -> Array:
    """For each step s: 1 if its rate is that of one process at `speed` * s, 0 if not, NaN if unknown.

    It may also be a rate between those of one process `shift` steps before and after that step.
    """
    expected, rates = (np.array(_rates(run.ranks[0])) for run in (case.solo, case.ordinary))
    steps = np.arange(len(rates)) * speed
    around = np.stack(
        [_interpolated(expected, np.maximum(0, steps + by)) for by in (-shift, 0, shift)]
    )
    close = np.abs(around - rates) <= _SAME_RATE * np.maximum(np.abs(around), np.abs(rates))
    between = (around.min(0) <= rates) & (rates <= around.max(0))
    fit: Array = np.where(np.isnan(around).any(0), np.nan, between | close.any(0))
    return fit
