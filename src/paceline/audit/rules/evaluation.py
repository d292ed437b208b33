"""Evaluations: samples that count twice, and metrics that depend on the number of processes."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import partial
from typing import Any

from paceline.audit.evaluations import Evaluation, Reduction
from paceline.audit.events import CollectiveBegun, ForwardEnded
from paceline.audit.evidence import RankLog
from paceline.audit.rules.rule import Case, FaultFound, Judgement, NoFault, NotJudged

# Equal values of a metric differ by rounding only.
_close = partial(math.isclose, rel_tol=1e-4, abs_tol=1e-16)
# Up to this number, float32 holds every integer.
_MAX_COUNT = 2**24
# Samples that count twice are a note up to this share: a metric with three digits hardly shows them.
_SMALL_SHARE = 1e-3
# A share of samples, or a mean, that changes by less is equal.
_LEAST_CHANGE = 1e-6
# A number of samples that was computed in float32 differs by less from an integer.
_ROUNDING = 1e-2
# A metric that changes by more is computed from predictions that do not belong to their labels.
_LARGE_CHANGE = 0.05

# A smaller value for each sample is no score: it may be a time.
_LEAST_SCORE = 0.05

# One call that reduces small values: in the run of one process, and in the replay.
Pair = tuple[Reduction, Reduction]


def evaluated_twice(case: Case) -> Judgement:
    """Samplers pad shards of different lengths, and the padding is evaluated and counted."""
    solo, ordinary = (_evaluated(run.ranks) for run in (case.solo, case.ordinary))
    if not solo or not ordinary:
        return NotJudged("no torch.nn.Module was called without gradient in the watched steps.")
    unclear = False
    for (number, loader, _), of_ranks in ordinary.items():
        parts = [rows for rows in of_ranks if rows]
        if all(Counter(rows) == Counter(parts[0]) for rows in parts):
            continue  # every rank evaluates all samples, or one rank does
        distinct, total = set[Any]().union(*parts), sum(map(len, parts))
        if total == len(distinct):
            continue
        # The data may contain equal samples, as the solo run shows.
        of_solo = [
            own[0] for key, own in solo.items() if key[1] == loader and {*own[0]} == distinct
        ]
        if not of_solo or not loader:  # inputs that the loop itself makes may be anything
            unclear = True
            continue
        surplus = total - len(of_solo[0])
        if surplus <= 0:
            continue
        gathers = case.ranks[0].evaluations.get(number, Evaluation()).gathers_samples
        gathered = _results_of_gathers(case)
        if gathers:
            equal = [result.is_equal and not result.counts_padding for result in gathered]
        else:
            pairs = [pair for one, ranks in _of_both_runs(case) for pair in _pairs(one, ranks)]
            equal = [_same(x, y) for pair in pairs for x, y in _results(pair)]
        if equal and all(equal):
            continue  # the script removes the surplus, or it does not matter
        if gathers and not any(result.counts_padding for result in gathered):
            return NotJudged(
                f"{total} samples were evaluated, {surplus} of them twice; the script gathers its "
                "predictions, and may remove the surplus.",
                is_open=bool(equal),
            )
        first = next(
            e for log in case.ranks for e in log.of(ForwardEnded) if e.evaluation == number
        )
        return FaultFound(
            what=f"{surplus} sample{' is' if surplus == 1 else 's are'} evaluated twice: {total} in place "
            f"of {total - surplus}.",
            at=first.at,
            step=first.steps_done or None,
            why="the sampler gives every rank the same number of samples, and repeats some to get there.",
            fix="evaluate the indices [rank::world_size] of the dataset without padding, or remove the "
            "surplus after gathering.",
            evidence=f"the ranks evaluated {' + '.join(str(len(rows)) for rows in parts)} samples, "
            f"{len(distinct)} of them different",
            effect=f"{100 * surplus / total:.2g}% of the evaluated samples count twice",
            is_note=surplus <= _SMALL_SHARE * total,
        )
    if unclear:
        return NotJudged("the evaluated samples are unknown, or others than on one process.")
    return NoFault("no sample was evaluated twice, or it does not change the results.")


def _same(solo: float, value: float) -> bool:
    """Whether two values are equal: exactly, if both may be counts."""
    if all(abs(x) <= _MAX_COUNT and x == round(x) for x in (solo, value)):
        return solo == value
    return _close(solo, value)


def _of_both_runs(case: Case) -> list[tuple[Evaluation, list[Evaluation]]]:
    """Each evaluation of one process that rank 0 made too with the same weights, and those of the ranks."""
    if case.with_solo_weights is None:
        return []
    solo = case.solo.ranks[0].evaluations
    evaluations = [log.evaluations for log in case.with_solo_weights.ranks]
    numbers = [number for number in evaluations[0] if number in solo]
    return [(solo[n], [found.get(n, Evaluation()) for found in evaluations]) for n in numbers]


def _pairs(one: Evaluation, ranks: list[Evaluation]) -> list[Pair]:
    return list(zip(one.reductions, ranks[0].reductions, strict=False))


def _evaluated(ranks: list[RankLog]) -> dict[tuple[int, str, int], list[list[Any]]]:
    """What each rank evaluated, by evaluation, loader and pass."""
    found: defaultdict[tuple[int, str, int], list[list[Any]]]
    found = defaultdict(lambda: [[] for _ in ranks])
    for log in ranks:
        for number, evaluation in log.evaluations.items():
            for key, rows in evaluation.rows.items():
                found[number, *key][log.rank] = rows
    return dict(sorted(found.items()))


@dataclass(frozen=True)
class _Result:
    """A number that all ranks computed from what they had gathered, and that of one process."""

    gather: CollectiveBegun  # the last gather of the evaluation
    at: str  # the line where the script took it
    # The number; if the script took several at this line, their sum.
    solo: float
    value: float
    is_sum: bool  # whether it is such a sum
    total: int  # how many samples were evaluated
    distinct: int  # how many of them were different

    @property
    def is_equal(self) -> bool:
        return _close(self.solo, self.value)

    @property
    def surplus_counted(self) -> float | None:
        """How many samples more than by one process it counts; None if it is not known to count samples.

        A share of the samples is such a number, and a sum of integers. A time is not, nor a mean loss.
        """
        counts = [self.value, self.solo]
        if not self.is_sum:
            counts = [self.value * self.total, self.solo * self.distinct]
        if any(not 0 <= x <= self.total or abs(x - round(x)) > _ROUNDING for x in counts):
            return None
        return counts[0] - counts[1]

    @property
    def counts_padding(self) -> bool:
        """Whether it counts samples twice that pad the shards."""
        counted, surplus = self.surplus_counted, self.total - self.distinct
        is_more = not math.isclose(self.value, self.solo, rel_tol=_LEAST_CHANGE)
        return is_more and counted is not None and -_ROUNDING <= counted <= surplus


def _results_of_gathers(case: Case) -> list[_Result]:
    """What all ranks computed in each evaluation of the replay after a gather."""
    results = []
    for one, evaluations in _of_both_runs(case):
        first = evaluations[0]
        rows = [row for every in evaluations for part in every.rows.values() for row in part]
        if not rows or not first.gathers or set(rows) != set().union(*one.rows.values()):
            continue  # another part of the data
        for at, numbers in first.numbers.items():
            if at in one.numbers and all(every.numbers.get(at) == numbers for every in evaluations):
                results.append(
                    _Result(
                        gather=first.gathers[-1],
                        at=at,
                        solo=sum(one.numbers[at]),
                        value=sum(numbers),
                        is_sum=max(len(one.numbers[at]), len(numbers)) > 1,
                        total=len(rows),
                        distinct=len(set(rows)),
                    )
                )
    return results


def misordered_gather(case: Case) -> Judgement:
    """Gathered predictions are compared with labels in another order."""
    if case.with_solo_weights is None:
        return NotJudged(case.why_no_replay)
    forwards = case.with_solo_weights.ranks[0].of(ForwardEnded)
    if any(event.drew for event in forwards if event.evaluation is not None):
        return NotJudged("the evaluation draws random numbers.")
    results = _results_of_gathers(case)
    for result in results:
        change = abs(result.value - result.solo)
        if result.is_sum or result.counts_padding or change <= _LARGE_CHANGE * abs(result.solo):
            continue
        if result.surplus_counted is None:
            if result.value == round(result.value):
                continue  # such as a number of batches
            return NotJudged(
                f"{result.at} reads {result.solo:.6g} on one process and {result.value:.6g} on "
                f"{case.world_size}, after a gather. It may be a time, or a metric that is wrong.",
                is_open=True,
            )
        return FaultFound(
            what="a metric of gathered predictions depends on the number of processes.",
            at=result.gather.at,
            step=result.gather.steps_done or None,
            why="a gather puts the values of rank 1 after those of rank 0. The order of the dataset is "
            "different: a DistributedSampler gives its samples to the ranks in turn.",
            fix="gather the labels, or the indices of the samples, together with the predictions.",
            evidence=f"with the same weights and samples, {result.at} reads {result.solo:.6g} on one process "
            f"and {result.value:.6g} on {case.world_size}",
            effect=f"the metric changes by {abs(result.value / result.solo - 1):.2%}"
            if result.solo
            else f"the metric is {result.value:.3g} instead of 0",
        )
    return NoFault(
        f"{len(results)} numbers were computed from gathered values while evaluating; they are those of one "
        f"process, or differ by at most {_LARGE_CHANGE:.0%}."
    )


def averaged_metric(case: Case) -> Judgement:
    """Ranks average a metric over their own samples, although they have different numbers of them."""
    if case.with_solo_weights is None:
        return NotJudged(case.why_no_replay)
    solo, replay = (run.ranks[0].evaluations for run in (case.solo, case.with_solo_weights))
    calls = [call for own in replay.values() for call in own.reductions]
    if calls and not any(own.reductions for own in solo.values()):
        return _reduced_by_ranks_only(case)
    judged = with_counts = 0
    unclear: Pair | None = None
    for one, ranks in _of_both_runs(case):
        pairs = _pairs(one, ranks)
        if pairs and len(one.reductions) != len(ranks[0].reductions):
            return NotJudged("the runs reduced different numbers of values.", is_open=True)
        samples = sum(own.num_samples for own in ranks)
        # After a gather the script computes the sums, so both its values and their sums count.
        results = [x for pair in pairs for x in pair[1].results + _sums(pair)]
        if any(_close(x, samples) for x in results):
            # Sums, which the script divides by the number of samples; another value may be a score.
            with_counts += len(pairs)
            scores = (p for p in pairs if _has_mean_of_scores(p, samples, case.world_size))
            unclear = unclear or next(scores, None)
            continue
        judged += len(pairs)
        for index, pair in enumerate(pairs):
            if _differs(pair, pairs, case.world_size):
                if _is_mean_of_own_samples(ranks, index, pair[0].results):
                    return _metric_fault(case, pair, is_mean=True)
                unclear = unclear or pair
    if unclear is not None:
        if case.replay is None or case.has_same_inputs:
            return _metric_fault(case, unclear, is_mean=False)
        return NotJudged(
            f"the value that is reduced at {unclear[1].call.at} may belong to the training, whose inputs "
            "change at random.",
            is_open=True,
        )
    if not judged + with_counts:
        return NotJudged("no small value was reduced over ranks while evaluating.")
    return NoFault(
        f"of {judged + with_counts} values that were reduced in evaluations, {with_counts} were summed with "
        "their number of samples, and the others are those of one process."
    )


def _reduced_by_ranks_only(case: Case) -> Judgement:
    """The judgement of reductions that one process does not enter, by the numbers that it reads."""
    assert case.with_solo_weights is not None
    logs, count = case.with_solo_weights.ranks, 0
    unclear: CollectiveBegun | None = None
    for number, own in logs[0].evaluations.items():
        ranks = [log.evaluations.get(number, Evaluation()) for log in logs]
        one = case.solo.ranks[0].evaluations.get(number, Evaluation())
        # Several numbers of one line belong to the batches.
        read = [numbers[0] for numbers in one.numbers.values() if len(numbers) == 1]
        samples = sum(each.num_samples for each in ranks)
        for index, reduction in enumerate(own.reductions):
            count += 1
            for x in read if len(reduction.results) == 1 else ():
                if _is_mean_of_own_samples(ranks, index, [x]):
                    pair = Reduction(reduction.call, [x]), reduction
                    return _metric_fault(case, pair, is_mean=True)
            results = [y / n for y in reduction.results for n in (1, case.world_size)]
            with_count = any(_close(y, samples) for y in reduction.results)
            if not with_count and not any(_close(x, y) for x in read for y in results):
                unclear = unclear or reduction.call
    if unclear is not None:
        return NotJudged(
            f"one process does not enter the reduction at {unclear.at}, and reads no number there that could "
            "be compared with the result.",
            is_open=True,
        )
    return NoFault(
        f"{count} values were reduced while evaluating, by several processes only; they are those that one "
        "process reads, or were summed together with their number of samples."
    )


def metric_of_one_rank(case: Case) -> Judgement:
    """Each rank evaluates a part of the samples, and rank 0 takes a metric of its own part."""
    evaluations = case.ranks[0].evaluations
    ops = [event.op for each in evaluations.values() for event in each.collectives]
    if any("reduce" in op or "gather" in op for op in ops):
        return NoFault("results of evaluations are reduced or gathered over the ranks.")
    for (number, _, _), of_ranks in _evaluated(case.ranks).items():
        numbers = evaluations[number].numbers if number in evaluations else {}
        own, others = set(of_ranks[0]), set().union(*map(set, of_ranks[1:]))
        if not numbers or not own or not others or own & others:
            continue
        return FaultFound(
            what="rank 0 takes a metric of its own part of the evaluated samples.",
            at=next(reversed(numbers)),
            ranks=[0],
            why="each rank evaluates a different part, and the script reduces no result.",
            fix="all_reduce the sum and the number of samples before the number is printed or compared.",
            evidence=f"the ranks evaluated {' + '.join(str(len(each)) for each in of_ranks)} samples",
            effect=f"{len(own) / (len(own) + len(others)):.0%} of the samples are in the metric",
            is_note=True,
        )
    return NoFault("no rank took a metric of its own part of the evaluated samples.")


def _is_mean_of_own_samples(
    evaluations: list[Evaluation], index: int, expected: list[float]
) -> bool:
    """Whether the ranks' values, weighted by their samples, give the mean of one process."""
    calls = [
        reduction.call for own in evaluations for reduction in own.reductions[index : index + 1]
    ]
    values = [call.values for call in calls if call.values]
    counts = [own.num_samples for own in evaluations]
    total = sum(counts)
    if not total or len(values) < len(counts):
        return False
    for wanted, *own in zip(expected, *values, strict=False):
        mean = sum(n * x for n, x in zip(counts, own, strict=True)) / total
        # Parts that differ by one sample have almost the same weight.
        is_close = math.isclose(mean, wanted, rel_tol=_LEAST_CHANGE)
        close = partial(math.isclose, rel_tol=10 * _LEAST_CHANGE) if is_close else _close
        if _close(mean, wanted) and not close(sum(own) / len(own), wanted):
            return True
    return False


def _differs(pair: Pair, pairs: list[Pair], world_size: int) -> bool:
    """Whether a value depends on the number of ranks, and no division by another value corrects it."""
    others = [values for each in pairs for values in _results(each)]
    return any(
        not _close(x, y)
        and not _close(x * world_size, y)
        and not any(u and v and (u, v) != (x, y) and _close(x / u, y / v) for u, v in others)
        for x, y in _results(pair)
    )


def _has_mean_of_scores(pair: Pair, samples: int, world_size: int) -> bool:
    """Whether a call that sums a number of samples also sums scores of the ranks, such as F1.

    A score may be multiplied by the rank's number of samples, for a weighted mean.
    """
    values = _results(pair)
    if not any(_close(y, samples) for _, y in values):
        return False
    scores = [(x, y / world_size) for x, y in values if not _close(x, y)]
    scores += [(x / samples, y / samples) for x, y in values if x > _LEAST_SCORE * samples]
    return any(0 < x < 1 and 0 < y < 1 and not _close(x, y) for x, y in scores)


def _results(pair: Pair) -> list[tuple[float, float]]:
    """The values of both runs, in pairs."""
    return list(zip(pair[0].results, _sums(pair), strict=False))


def _sums(pair: Pair) -> list[float]:
    """The results of the replay; those of a gather are summed over the ranks."""
    values: list[float] = pair[1].results
    length = len(pair[0].results)
    if "gather" not in pair[1].call.op or not length:
        return values
    return [sum(values[k::length]) for k in range(length)]


def _metric_fault(case: Case, pair: Pair, *, is_mean: bool) -> Judgement:
    """The judgement of a value that differs from that of one process.

    Args:
        is_mean: Whether it is a mean over each rank's samples; else it is a note, because it may be a time.
    """
    evidence, change = _largest_change(case, pair)
    call = pair[1].call
    if not is_mean and change < _SMALL_SHARE:
        return NotJudged(
            f"the value that is reduced at {call.at} is neither that of one process nor a mean over each "
            f"rank's samples. It differs by {change:.2%}."
        )
    what = "a value that is reduced while evaluating depends on the number of processes."
    why = "it is no mean over each rank's samples. The mean over ranks is wrong for an F1 score, a "
    why += "perplexity or an AUC, and for means of batches of different sizes."
    fix = "reduce the counts and sums from which the metric is computed, then compute it. If the value is a "
    fix += "time, it may differ."
    if is_mean:
        what = "a metric depends on the number of processes: each rank takes the mean of its own samples."
        why = "the ranks have different numbers of samples, and the mean of their means gives each rank the "
        why += "same weight."
        fix = "all_reduce the sum and the number of samples, then divide."
    return FaultFound(
        what=what,
        at=call.at,
        step=call.steps_done or None,
        why=why,
        fix=fix,
        evidence=evidence,
        effect=f"the metric changes by {change:.2%}",
        is_note=not is_mean,
    )


def _largest_change(case: Case, pair: Pair) -> tuple[str, float]:
    """The value of a reduction that changes most: a sentence with both values, and the relative change."""
    count = case.world_size
    changes = []
    for solo, value in _results(pair):
        means = [value] if pair[1].call.reduce == "AVG" else [value / count, value]
        mean = min(means, key=lambda each: abs(each - solo))
        changes.append((abs(mean / solo - 1) if solo else math.inf if mean else 0.0, solo, mean))
    change, solo, mean = max(changes)
    figures = f"{solo:.6g} on one process, {mean:.6g} as the mean over {count}"
    return f"with the same weights and samples: {figures}", change
