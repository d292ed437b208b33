"""Learning rate schedules that run N times too fast, or differ between ranks."""

from __future__ import annotations

import math
from functools import partial

from paceline.audit.evidence import RankLog
from paceline.audit.rules.rule import Case, FaultFound, Judgement, NoFault, NotJudged

# Rates between two steps are interpolated linearly, so equal rates differ by up to 2 %.
_close = partial(math.isclose, rel_tol=0.02)
# A rate is the expected one if it is this much nearer to it than to the other one.
_NEAR = 0.25
# Metrics that differ by less differ by rounding.
_SAME_METRIC = 1e-6
# A fault needs at least this many steps with the rate of a later part of the epoch.
_MIN_EARLY = 3
# And this part of the steps whose rate is not the expected one.
_MIN_SHARE = 0.8
# A fault needs at least this many times the calls per update of one process.
_MORE_CALLS = 1.5
# The end of a schedule has less than the first part of the largest rate; above the second it is not reached.
_END, _NOT_END = 0.01, 0.1
# After three quarters of a schedule that ends with the training, the rate is above this part.
_STILL = 0.05


def fast_schedule(case: Case) -> Judgement:
    """The learning rate of N ranks at step s is that of one process at step N * s."""
    solo, log = case.solo.ranks[0], case.ranks[0]
    if any(event["metric"] is not None for event in solo.of("schedule")):
        return NotJudged("the schedule follows a metric.")
    solo_calls, calls = (_calls(each) / max(each.steps, 1) for each in (solo, log))
    lengths = [
        next((each.loaders[name]["batches"] for name in each.training_loaders), None)
        for each in (solo, log)
    ]
    if not lengths[0] or not lengths[1]:
        return NotJudged(
            "the length of an epoch is unknown, and with it the expected learning rate."
        )
    sizes = {
        each.loaders[name]["batch_size"] for each in (solo, log) for name in each.training_loaders
    }
    if lengths[0] == lengths[1] and len(sizes) == 1:
        return NotJudged("the ranks get no shards, so their part of an epoch is unknown.")
    solo_rates = _rates(solo)
    if len(set(solo_rates)) < 2:
        return NoFault("the learning rate of one process did not change in the watched steps.")
    early = late = agree = other = 0
    for step, rate in enumerate(_rates(log)):
        position = step * lengths[0] / lengths[1]
        here, ahead, behind = (
            _interpolate(solo_rates, position * factor)
            for factor in (1, case.world_size, 1 / case.world_size)
        )
        reach = max(1, lengths[0] / lengths[1])
        is_other = not any(_is_near(solo_rates, each, rate, reach) for each in (position, step))
        other += is_other
        if here is not None and ahead is not None and not _close(here, ahead):
            agree += abs(rate - here) < _NEAR * abs(ahead - here)
            early += is_other and abs(rate - ahead) < _NEAR * abs(ahead - here)
        if here is not None and behind is not None and not _close(here, behind):
            late += is_other and abs(rate - behind) < _NEAR * abs(behind - here)
    as_many_steps = lengths[0] < _MORE_CALLS * lengths[1]
    if as_many_steps and late >= max(_MIN_EARLY, _MIN_SHARE * other) and late > agree:
        return _slow_schedule(case, late)
    if early < _MIN_EARLY or agree >= early:
        if other >= _MIN_EARLY and calls > _MORE_CALLS * solo_calls > 0:
            return _fast_length(case, calls, solo_calls, other)
        if other >= _MIN_EARLY:
            return NotJudged(
                f"in {other} steps the learning rate was neither that of one process at the same step nor "
                "at the same part of an epoch.",
                differs=True,
            )
        return NoFault("the learning rate is that of one process at the same part of an epoch.")
    if calls > _MORE_CALLS * solo_calls > 0:
        why = f"it is stepped {calls:.3g} times per update, and {solo_calls:.3g} times with one process."
        fix = "step it once for each optimizer step."
    elif _MORE_CALLS * lengths[1] < lengths[0]:
        why, fix = "its length is divided by the number of ranks twice.", "divide it once."
    else:
        why = "its length is divided by the number of ranks, but each rank makes as many updates as one "
        why, fix = why + "process.", "compute its length from the number of optimizer steps."
    return FaultFound(
        what=f"the schedule runs {case.world_size} times too fast.",
        at=(log.first("schedule") or log.of("step")[0])["at"],
        step=1,
        why=why,
        fix=fix,
        evidence=f"in {early} steps the learning rate was that of one process at {case.world_size} times "
        "the position in the epoch",
        effect=f"the learning rate changes {case.world_size} times too fast",
    )


def _slow_schedule(case: Case, late: int) -> FaultFound:
    log, count = case.ranks[0], case.world_size
    return FaultFound(
        what=f"the schedule runs {count} times too slowly.",
        at=(log.first("schedule") or log.of("step")[0])["at"],
        step=1,
        why="it counts the samples or tokens of one rank, and its length those of all ranks.",
        fix=f"count the samples of all ranks: multiply those of one rank by {count}, or all_reduce them.",
        evidence=f"in {late} steps the learning rate was that of one process at 1/{count} of the position in "
        "the epoch",
        effect=f"the learning rate changes {count} times too slowly",
    )


def unfinished_schedule(case: Case) -> Judgement:
    """The rate of one process ends near 0, and that of N processes, which take fewer steps, does not."""
    solo, log = case.solo.ranks[0], case.ranks[0]
    if any(each.of("trains-on") for each in (solo, *case.ranks)):
        return NotJudged("the script trains on after the watched steps.")
    if case.ordinary.hung or case.ordinary.returncode or case.updates_apart:
        return NotJudged("not every rank trained to the end of the script.")
    if any(event["metric"] is not None for event in solo.of("schedule")):
        return NotJudged("the schedule follows a metric.")
    rates, others = _rates(solo), _rates(log)
    if (
        not rates
        or rates[-1] > _END * max(rates)
        or rates[3 * len(rates) // 4] < _STILL * max(rates)
    ):
        return NoFault(
            "the learning rate of one process does not reach 0 at the end of the training."
        )
    share = len(others) * case.world_size / len(rates)
    if not 1 / _MORE_CALLS < share < _MORE_CALLS or not all(map(_close, rates, others)):
        return NoFault("the learning rate is not that of one process at the same step.")
    if others[-1] < _NOT_END * max(others):
        return NoFault("the learning rate ends near 0, as that of one process.")
    return FaultFound(
        what="the schedule does not reach its end.",
        at=(log.first("schedule") or log.of("step")[-1])["at"],
        step=len(others),
        why=f"{case.world_size} processes take {len(others)} steps, and one takes {len(rates)}: the length "
        "of the schedule counts the steps of one process.",
        fix="compute its length from the number of batches of one rank, such as len(loader).",
        evidence=f"relative to the largest, the last learning rate is {rates[-1] / max(rates):.2g} on one "
        f"process and {others[-1] / max(others):.2g} on {case.world_size}",
        effect=f"{1 - len(others) / len(rates):.0%} of the schedule is left out",
    )


def schedule_of_rank(case: Case) -> Judgement:
    """`ReduceLROnPlateau` is stepped with a metric of each rank, so it lowers the rates at other times."""
    each = [[e for e in log.of("schedule") if e["metric"] is not None] for log in case.ranks]
    for events in zip(*each, strict=False):
        metrics = [float(event["metric"]) for event in events]
        least, most = min(metrics), max(metrics)
        if not all(map(math.isfinite, metrics)) or math.isclose(least, most, rel_tol=_SAME_METRIC):
            continue
        return FaultFound(
            what="ReduceLROnPlateau is given another metric on each rank.",
            at=events[0]["at"],
            step=events[0]["s"] or None,
            why="each rank decides by its own metric when to lower the learning rate. From then on the "
            "ranks make different updates, and their weights drift apart.",
            fix="reduce the metric over all ranks before the step of the schedule.",
            evidence=f"metrics of the ranks: {', '.join(f'{metric:.6g}' for metric in metrics)}",
            effect=f"the metric differs between ranks by {(most - least) / max(abs(least), abs(most)):.2%}",
        )
    if not any(each):
        return NoFault("no schedule follows a metric.")
    return NoFault("schedules that follow a metric were given the same one on all ranks.")


def _fast_length(case: Case, calls: float, solo_calls: float, other: int) -> FaultFound:
    """The calls of the schedule follow the samples, as with Accelerate, and its length does not."""
    log = case.ranks[0]
    return FaultFound(
        what="the length of the schedule is divided by the number of ranks, and its steps are not.",
        at=(log.first("schedule") or log.of("step")[0])["at"],
        step=1,
        why=f"it is stepped {calls:.3g} times per update, and {solo_calls:.3g} times with one process, so "
        "its length must count the batches of all ranks.",
        fix="compute its length before the loader is prepared or sharded, or multiply it by the number of "
        "ranks.",
        evidence=f"in {other} steps the learning rate was neither that of one process at the same step nor "
        "at the same part of an epoch",
        effect=f"the schedule ends {case.world_size} times too early",
    )


def _calls(log: RankLog) -> int:
    """The calls of the schedule before the last update, because empty passes follow it."""
    events = log.of("schedule", "step")
    last = max((number for number, event in enumerate(events) if event["k"] == "step"), default=0)
    return sum(event["k"] == "schedule" for event in events[:last])


def _rates(log: RankLog) -> list[float]:
    """The learning rate of each step, relative to the one that the schedule starts from.

    The absolute rate may depend on the number of processes (linear scaling).
    """
    first = next((event["lrs"][0] for event in log.of("step")), 0.0)
    rates = {
        event["s"]: float(event["lrs"][0]) / (event["base"] or first or 1.0)
        for event in log.of("step")
    }
    return [rates[step] for step in sorted(rates)]


def _is_near(rates: list[float], position: float, rate: float, reach: float) -> bool:
    """Whether a rate is that of a position or of those beside it, or the position is unknown.

    A schedule with fewer steps reaches its turning points up to one of its steps earlier or later.

    Args:
        reach: The steps of one process in a step of the N ranks.
    """
    around = [_interpolate(rates, max(0, position + shift * reach)) for shift in (-1, 0, 1)]
    known = [each for each in around if each is not None]
    if len(known) < len(around):
        return True
    return min(known) <= rate <= max(known) or any(_close(rate, each) for each in known)


def _interpolate(rates: list[float], position: float) -> float | None:
    below = int(position)
    if below + 1 >= len(rates):
        return None
    return rates[below] + (position - below) * (rates[below + 1] - rates[below])
