"""Learning rate schedules: too fast, too slow, without an end, or different on the ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.audit.events import OptimizerStepBegun, ScheduleStepped, TrainingContinues
from paceline.audit.evidence import RankLog
from paceline.audit.rules.rule import Case, Finding, Judgement, NoFault, NotJudged

# Equal rates differ by less, relative to the one that the schedule starts from: the rounding of a few
# operations in float32. Equal metrics do so too.
_ROUNDING = 1e-6


def schedule(case: Case) -> Judgement:
    """Each step of the ranks has the learning rate of the same step of one process, on the same samples.

    A schedule that counts samples has the rate of one process after as many samples. Rates are relative to
    the one that the schedule starts from: that may depend on the number of processes (linear scaling).
    """
    log, count = case.ranks[0], case.world_size
    if any(event.metric is not None for event in log.of(ScheduleStepped)):
        return _metric_of_rank(case)
    if case.union is None or case.why_no_steps:
        return NotJudged(case.why_no_union or case.why_no_steps)
    one = case.union.ranks[0]
    rates, of_one, solo = map(_rates, (log, one, case.solo.ranks[0]))
    steps = range(min(len(rates), len(of_one)))
    wrong = [step for step in steps if abs(rates[step] - of_one[step]) > _ROUNDING]
    for others, speed, when in (
        (of_one, 1, "in the same step"),
        (solo, _solo_steps_per_step(case), "after as many samples"),
    ):
        near = _near(others, speed, len(rates))
        if not wrong or (len(near) > wrong[0] and _are_in(rates, near)):
            passed = NoFault(f"the learning rate is that of one process {when}.")
            return _end(case, rates, solo) or passed
    absolute = zip(*(_rates(each, relative=False) for each in (log, one)), strict=False)
    both = [_near(of_one, speed, len(rates)) for speed in (count, 1 / count)]
    is_fast, is_slow = (_are_in(rates, near) and not _are_in(of_one, near) for near in both)
    if is_fast or is_slow:
        calls = [len(each.of(ScheduleStepped)) / max(each.steps, 1) for each in (log, one)]
        what = f"the schedule runs {count} times too {'fast' if is_fast else 'slowly'}."
        why = "its length, or what it counts, is multiplied or divided by the number of ranks. It is stepped "
        why += f"{calls[0]:.1f} times for each update, and {calls[1]:.1f} times on one process."
    elif all(b * (1 - _ROUNDING) <= a <= b * (count + _ROUNDING) for a, b in absolute):
        return NoFault(f"the learning rate is 1 to {count} times that of one process.")
    else:
        what = (
            f"step {wrong[0] + 1} has another learning rate than one process with the same samples."
        )
        why = "the schedule depends on the number of processes."
    return Finding(
        what=what,
        at=_place(log),
        step=wrong[0] + 1,
        why=why,
        fix="count optimizer steps, in the length of the schedule and in its steps; or count the samples or "
        "tokens of all ranks in both.",
        evidence=f"relative to the one that the schedule starts from, the learning rate is "
        f"{rates[wrong[0]]:.4g} on the ranks, and {of_one[wrong[0]]:.4g} on one process",
        effect=f"{len(wrong)} of {len(steps)} steps have another learning rate",
        # If it is not known what one process has after as many samples, the schedule may count samples.
        is_note=not (is_fast or is_slow) or not _solo_steps_per_step(case),
    )


def _solo_steps_per_step(case: Case) -> float:
    """How many steps one process takes for the samples of a step of the ranks; 0 if it is not known."""
    ranks, one = (
        sum(e.samples or 0 for log in run.ranks for e in log.training_forwards if not e.steps_done)
        for run in (case.ordinary, case.solo)
    )
    return ranks / one if one else 0.0


def _near(others: Sequence[float], speed: float, steps: int) -> list[Sequence[float]]:
    """For each step s, as far as it is known, the rates of another run at step `speed * s`.

    At most one step of so many earlier or later, since the length of a schedule is a whole number.
    """
    bounds = [
        (math.floor(speed * (step - step / steps)), math.ceil(speed * (step + step / steps)))
        for step in range(steps if speed else 0)
    ]
    return [others[first : last + 1] for first, last in bounds if last < len(others)]


def _are_in(rates: Sequence[float], near: Sequence[Sequence[float]]) -> bool:
    return all(
        min(each) - _ROUNDING <= rate <= max(each) + _ROUNDING
        for rate, each in zip(rates, near, strict=False)
    )


def _end(case: Case, rates: Sequence[float], solo: Sequence[float]) -> Finding | None:
    """The schedule of the ranks ends at a rate that one process has not near its end."""
    runs = (case.solo, case.ordinary)
    if any(run.returncode or log.of(TrainingContinues) for run in runs for log in run.ranks):
        return None
    near_end = solo[-case.world_size - 1 :]  # a step of the ranks may be N steps of one process
    calls = [len(run.ranks[0].of(ScheduleStepped)) / max(run.steps, 1) for run in runs]
    if calls[1] >= case.world_size * calls[0] > 0:
        return None  # it is stepped once for each rank, as by Accelerate, and reaches its end
    if not rates or min(near_end) - _ROUNDING <= rates[-1] <= max(near_end) + _ROUNDING:
        return None
    return Finding(
        what="the schedule ends at another learning rate than that of one process.",
        at=_place(case.ranks[0]),
        step=len(rates),
        why=f"{case.world_size} processes take {len(rates)} steps, and one takes {len(solo)}: a schedule "
        "whose length counts the steps of one process does not reach its end.",
        fix="compute its length from the number of batches of one rank, such as len(loader).",
        evidence=f"relative to the one that the schedule starts from, the last rate is {solo[-1]:.4g} on one "
        f"process and {rates[-1]:.4g} on {case.world_size}",
        effect=f"the training ends after {len(rates)} of {len(solo)} steps",
        is_note=True,
    )


def _metric_of_rank(case: Case) -> Judgement:
    """`ReduceLROnPlateau` gets a metric of each rank, so ranks lower their rates at different times."""
    of_ranks = [[e for e in log.of(ScheduleStepped) if e.metric is not None] for log in case.ranks]
    for events in zip(*of_ranks, strict=False):
        metrics = [event.metric or 0.0 for event in events]
        if all(math.isclose(each, metrics[0], rel_tol=_ROUNDING) for each in metrics):
            continue
        if not all(map(math.isfinite, metrics)) or not case.trains_together:
            continue
        rates = [[e.lrs for e in log.of(OptimizerStepBegun)] for log in case.ranks]
        return Finding(
            what="ReduceLROnPlateau gets a different metric on each rank.",
            at=events[0].at,
            step=events[0].steps_done or None,
            why="each rank decides by its own metric when to lower the learning rate. From then on the "
            "ranks make different updates, and their weights drift apart.",
            fix="reduce the metric over all ranks before the step of the schedule.",
            evidence=f"metrics of the ranks: {', '.join(f'{metric:.6g}' for metric in metrics)}",
            effect=f"the metric differs by {max(metrics) - min(metrics):.3g} between ranks",
            is_note=all(own == rates[0] for own in rates),
        )
    return NoFault("the schedule follows a metric, which is equal on all ranks.")


def _place(log: RankLog) -> str:
    """The line of the schedule's step, else that of the optimizer's."""
    calls = [*log.of(ScheduleStepped), *log.of(OptimizerStepBegun)]
    return calls[0].at if calls else ""


def _rates(log: RankLog, *, relative: bool = True) -> list[float]:
    """The learning rate of each step, relative to the one that the schedule starts from."""
    events = [event for event in log.of(OptimizerStepBegun) if event.lrs]
    first = next((event.lrs[0] for event in events), 0.0)
    rates = {e.step: e.lrs[0] / ((e.base or first or 1.0) if relative else 1.0) for e in events}
    return [rates[step] for step in sorted(rates)]
