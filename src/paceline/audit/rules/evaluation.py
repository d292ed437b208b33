"""Evaluations: samples that count twice, and metrics that depend on the number of processes."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

from paceline.audit.evaluations import Evaluation, MetricCall, first_evaluation
from paceline.audit.events import CollectiveBegun, ForwardEnded
from paceline.audit.evidence import RankLog
from paceline.audit.rules.rule import Case, Finding, Judgement, NoFault, NotJudged

# Equal values of a metric differ by rounding only.
_close = partial(math.isclose, rel_tol=1e-4, abs_tol=1e-16)
# Up to this number, float32 holds every integer; larger sums are whole numbers, rounded.
_MAX_COUNT = 2**24
# Samples that count twice are a note up to this share: a metric with three digits hardly shows them. A metric
# for which no cause is known, and that changes by less, is not judged.
# A quarter changes broken/04_two_validation_sets and sound/30_metric_gathered_with_counts.
_SMALL_SHARE = 1e-3
# A share of samples, or a mean, that changes by less is equal. See broken/04_gathered_with_surplus.
_LEAST_CHANGE = 1e-6
# A sum in float32 is a number of samples if it is closer than this to an integer.
# See broken/04_gathered_with_surplus.
_ROUNDING = 1e-2
# A metric that changes by more is computed from predictions that do not belong to their labels.
# See broken/65_gathered_with_labels.
_LARGE_CHANGE = 0.05
# A smaller value for each sample is no score: it may be a time. See broken/67_normalised.
_LEAST_SCORE = 0.05


_UNKNOWN = NotJudged("it is unknown which samples were evaluated, or which of them count.")
_NOT_TWICE = NoFault("no sample was evaluated twice, or it does not change the results.")


def evaluated_twice(case: Case) -> Judgement:
    """Samplers pad shards of different lengths, and what is evaluated may count the padding."""
    solo, ordinary = (_evaluated(run.ranks) for run in (case.solo, case.ordinary))
    if not solo or not ordinary:
        return NotJudged("no torch.nn.Module was called without gradient in the watched steps.")
    compared = _compare(case)
    judgements: list[Judgement] = []
    for (number, loader, _), of_ranks in ordinary.items():
        parts = [rows for rows in of_ranks if rows]
        of_loader = [own[0] for key, own in solo.items() if key[1] == loader]
        judgements.append(
            _judge_padding(case, number, parts, of_loader if loader else [], compared)
        )
    faults = [each for each in judgements if isinstance(each, Finding)]
    if faults:
        return min(faults, key=lambda fault: fault.is_note)  # a fault rather than a note
    unknown = [each for each in judgements if isinstance(each, NotJudged)]
    if unknown:
        return max(unknown, key=lambda each: each.is_open)
    return _NOT_TWICE


def _judge_padding(
    case: Case,
    number: int,
    parts: list[list[Any]],
    solo: list[list[Any]],
    compared: list[_Comparison],
) -> Judgement:
    """Whether an evaluation of several ranks counts samples twice.

    Args:
        number: The number of the evaluation.
        parts: The samples of the loader that each rank evaluated, without ranks that evaluated none.
        solo: The samples of the loader in each evaluation of one process; empty if not known.
        compared: Evaluations with the same weights.
    """
    distinct, total = set[Any]().union(*parts), sum(map(len, parts))
    if all(Counter(rows) == Counter(parts[0]) for rows in parts) or total == len(distinct):
        return _NOT_TWICE  # every rank evaluates all samples, or one rank does
    # The data may contain equal samples, as the solo run shows. Inputs that the loop itself makes may be
    # anything.
    of_solo = [rows for rows in solo if {*rows} == distinct]
    if not of_solo:
        return _UNKNOWN
    surplus = total - len(of_solo[0])
    if surplus <= 0:
        return _NOT_TWICE
    of_ranks = [log.evaluations.get(number, Evaluation()) for log in case.ranks]
    gathers = of_ranks[0].gathers_samples
    if not any(each.gathers or each.metric_calls or each.numbers for each in of_ranks):
        # The script may join files, and leave out the surplus. See sound/04_predictions_by_index.
        return _UNKNOWN
    results = [r for each in compared for r in (each.computed if gathers else each.reduced)]
    counts_padding = any(each.counts_padding(r) for each in compared for r in each.computed)
    if results and all(r.is_same for r in results) and not (gathers and counts_padding):
        return _NOT_TWICE  # the script removes the surplus, or it does not matter
    if gathers and not counts_padding:
        return NotJudged(
            f"{total} samples were evaluated, {surplus} of them twice; the script gathers its "
            "predictions, and may remove the surplus.",
            is_open=bool(results),
        )
    forwards = (e for log in case.ranks for e in log.of(ForwardEnded))
    first = next(e for e in forwards if e.evaluation == number)
    return Finding(
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
    """A number that the ranks computed together in an evaluation, and that of one process."""

    call: CollectiveBegun  # the reduction, or the last gather of the evaluation
    at: str  # the line of the reduction, or where the script took the number
    # The numbers; if the script took several at this line, their sums. nan if one process has none.
    solo: float
    value: float
    mean: float  # the value, or its mean over the ranks if that is closer to the one of one process
    given: Sequence[float] = ()  # by rank, what was reduced
    is_of_several: bool = False  # whether the script took several numbers at this line

    @property
    def is_size(self) -> bool:
        """Whether the ranks gathered whole numbers, such as sizes of tensors to pad: nobody adds them up."""
        return "gather" in self.call.op and all(each == round(each) for each in self.given)

    @property
    def is_same(self) -> bool:
        """Whether both numbers are equal: exactly, if both may be counts."""
        if all(abs(x) <= _MAX_COUNT and x == round(x) for x in (self.solo, self.value)):
            return self.solo == self.value
        return _close(self.solo, self.value)


@dataclass(frozen=True)
class _Comparison:
    """An evaluation of one process, and the same one of several ranks with the same weights."""

    solo: Evaluation
    ranks: list[Evaluation]
    null: Evaluation | None  # that of one process once more: times and random numbers differ
    only_ranks_reduce: bool  # whether one process enters no reduction in any evaluation
    may_be_cut: bool  # whether the watched steps are over, so that verification may end it early

    @cached_property
    def samples(self) -> int:
        """How many samples the ranks evaluated before the first collective."""
        return sum(evaluation.num_samples for evaluation in self.ranks)

    @cached_property
    def rows(self) -> list[Any]:
        """What the ranks evaluated."""
        passes = (rows for evaluation in self.ranks for rows in evaluation.rows.values())
        return [row for rows in passes for row in rows]

    @cached_property
    def reduced(self) -> list[_Result]:
        """The results of reductions.

        If only the ranks reduce, each is compared with the closest number that one process took.
        """
        # Several numbers of one line belong to the batches.
        taken = [numbers[0] for numbers in self.solo.numbers.values() if len(numbers) == 1]
        found = []
        for index, first in enumerate(self.ranks[0].metric_calls):
            same = slice(index, index + 1)
            of_ranks = [r for evaluation in self.ranks for r in evaluation.metric_calls[same]]
            for k, value in enumerate(first.results):
                if self.null and not self._is_repeated(self.null, index, k):
                    continue
                expected = [
                    r.results[k] for r in self.solo.metric_calls[same] if len(r.results) > k
                ]
                if self.only_ranks_reduce:
                    expected = taken or [math.nan]
                is_mean = first.call.reduce == "AVG"
                means = [value] if is_mean else [value, value / len(self.ranks)]
                pairs = [(x, mean) for x in expected for mean in means]
                if not pairs:
                    continue
                solo, mean = min(pairs, key=lambda pair: abs(pair[0] - pair[1]))
                given = [x for r in of_ranks for x in (r.call.values or [])[k : k + 1]]
                found.append(_Result(first.call, first.call.at, solo, value, mean, given))
        return found

    @cached_property
    def computed(self) -> list[_Result]:
        """What all ranks computed alike after a gather, from the samples of one process."""
        first, rows = self.ranks[0], set().union(*self.solo.rows.values())
        if not rows or not first.gathers or set(self.rows) != rows:
            return []
        return [
            _Result(
                first.gathers[-1],
                at,
                solo=sum(self.solo.numbers[at]),
                value=sum(numbers),
                mean=sum(numbers),
                is_of_several=max(len(self.solo.numbers[at]), len(numbers)) > 1,
            )
            for at, numbers in first.numbers.items()
            if at in self.solo.numbers
            and all(e.numbers.get(at) == numbers for e in self.ranks)
            and (
                self.null is None
                or _all_close(self.solo.numbers[at], self.null.numbers.get(at, []))
            )
        ]

    def _is_repeated(self, null: Evaluation, index: int, k: int) -> bool:
        """Whether one process reduced the same value twice, and in only-ranks reductions, took it twice."""
        if self.only_ranks_reduce:
            return all(
                _all_close(own, null.numbers.get(at, [])) for at, own in self.solo.numbers.items()
            )
        calls = [each.metric_calls[index : index + 1] for each in (self.solo, null)]
        values = [own[0].results[k : k + 1] if own else [] for own in calls]
        return _all_close(*values)

    def differs(self, result: _Result) -> bool:
        """Whether a reduced value differs, and no division by another value corrects it."""
        x, y = result.solo, result.value
        return not _close(x, result.mean) and not any(
            other.solo and other.value and _close(x / other.solo, y / other.value)
            for other in self.reduced
            if other is not result
        )

    def is_mean_of_own_samples(self, result: _Result) -> bool:
        """Whether the values of the ranks, weighted by their samples, give that of one process."""
        counts, given = [e.num_samples for e in self.ranks], result.given
        if not self.samples or len(given) < len(counts):
            return False
        mean = sum(n * x for n, x in zip(counts, given, strict=True)) / self.samples
        return _close(mean, result.solo) and not _close(sum(given) / len(given), result.solo)

    def has_wrong_score(self, result: _Result) -> bool:
        """Whether the ranks added up scores such as F1, and the result is not that of one process.

        A score may be multiplied by the rank's number of samples, for a weighted mean.
        """
        x, y, samples = result.solo, result.value, self.samples
        scores = [] if _close(x, y) else [(x, y / len(self.ranks))]
        scores += [(x / samples, y / samples)] if x > _LEAST_SCORE * samples else []
        return any(0 < a < 1 and 0 < b < 1 and not _close(a, b) for a, b in scores)

    def surplus_counted(self, result: _Result) -> float | None:
        """How many samples more than by one process it counts; None if it is not known to count samples.

        A share of the samples is such a number, and a sum of integers. A time is not, nor a mean loss.
        """
        total, distinct = (1, 1) if result.is_of_several else (len(self.rows), len(set(self.rows)))
        counts = [result.value * total, result.solo * distinct]
        if any(not 0 <= x <= len(self.rows) or abs(x - round(x)) > _ROUNDING for x in counts):
            return None
        return counts[0] - counts[1]

    def counts_padding(self, result: _Result) -> bool:
        """Whether it counts samples twice that pad the shards."""
        counted, surplus = self.surplus_counted(result), len(self.rows) - len(set(self.rows))
        is_more = not math.isclose(result.value, result.solo, rel_tol=_LEAST_CHANGE)
        return is_more and counted is not None and -_ROUNDING <= counted <= surplus


def _all_close(values: Sequence[float], others: Sequence[float]) -> bool:
    return len(values) == len(others) and all(map(_close, values, others))


def _compare(case: Case) -> list[_Comparison]:
    """The evaluations of rank 0 that one process made too with the same weights.

    If one process enters no reduction, also those that it did not make.
    """
    if case.union is None:
        return []
    solo = case.union.ranks[0].evaluations
    evaluations = [log.evaluations for log in case.ranks]
    null = case.null.ranks[0].evaluations if case.null else None
    alone = not any(own.metric_calls for own in solo.values())
    first_after_all_steps = first_evaluation(case.ordinary.plan.steps)
    return [
        _Comparison(
            solo.get(n, Evaluation()),
            [own.get(n, Evaluation()) for own in evaluations],
            None if null is None else null.get(n, Evaluation()),
            alone,
            may_be_cut=n >= first_after_all_steps,
        )
        for n in evaluations[0]
        if n in solo or alone
    ]


def misordered_gather(case: Case) -> Judgement:
    """Gathered predictions are compared with labels in a different order."""
    if case.union is None:
        return NotJudged(case.why_no_union)
    forwards = case.ranks[0].of(ForwardEnded)
    if any(event.drew for event in forwards if event.evaluation is not None):
        return NotJudged("the evaluation draws random numbers.")
    compared = _compare(case)
    results = [(each, result) for each in compared for result in each.computed]
    for each, result in results:
        if result.is_of_several or each.counts_padding(result) or _change(result) <= _LARGE_CHANGE:
            continue
        if each.surplus_counted(result) is None:
            if result.value == round(result.value):
                continue  # such as a number of batches
            return NotJudged(
                f"{result.at} reads {result.solo:.6g} on one process and {result.value:.6g} on "
                f"{case.world_size}, after a gather. It may be a time, or a metric that is wrong.",
                is_open=True,
            )
        return Finding(
            what="a metric of gathered predictions depends on the number of processes.",
            at=result.call.at,
            step=result.call.steps_done or None,
            why="a gather puts the values of rank 1 after those of rank 0. The order of the dataset is "
            "different: a DistributedSampler gives its samples to the ranks in turn.",
            fix="gather the labels, or the indices of the samples, together with the predictions.",
            evidence=f"with the same weights and samples, {result.at} reads {result.solo:.6g} on one process "
            f"and {result.value:.6g} on {case.world_size}",
            effect=f"the metric changes by {_change(result):.2%}"
            if result.solo
            else f"the metric is {result.value:.3g} instead of 0",
        )
    if not any(each.ranks[0].gathers for each in compared):
        return NoFault("no values were gathered while evaluating.")
    if not results:
        return NotJudged("no number was seen that all ranks computed from gathered values.")
    return NoFault(
        f"{len(results)} numbers were computed from gathered values while evaluating; they are those of one "
        f"process, or differ by at most {_LARGE_CHANGE:.0%}."
    )


def _change(result: _Result) -> float:
    """The relative change of the mean."""
    if result.solo:
        return abs(result.mean / result.solo - 1)
    return math.inf if result.mean else 0.0


def averaged_metric(case: Case) -> Judgement:
    """Ranks average a metric over their own samples, although they have different numbers of them."""
    if case.union is None:
        return NotJudged(case.why_no_union)
    judged = with_counts = 0
    unclear: _Result | None = None
    compared = _compare(case)
    if (divided := _divided_sum(case, compared)) is not None:
        return divided
    for each in compared:
        of_one, of_rank = len(each.solo.metric_calls), len(each.ranks[0].metric_calls)
        if of_one and of_rank and of_one != of_rank:
            if each.may_be_cut:
                continue
            return NotJudged("the runs reduced different numbers of values.", is_open=True)
        counts = [result.call for result in each.reduced if _close(result.value, each.samples)]
        if counts:
            # Sums, which the script divides by the number of samples; another value may be a score.
            with_counts += len(each.reduced)
            beside = [r for r in each.reduced if r.call in counts and not r.is_size]
            beside = [] if each.only_ranks_reduce else beside
            differing = [result for result in beside if each.has_wrong_score(result)]
        else:
            judged += len(each.reduced)
            differing = [r for r in each.reduced if each.differs(r) and not r.is_size]
            means = [result for result in differing if each.is_mean_of_own_samples(result)]
            if means:
                return _judge_metric(case, max(means, key=_change), is_mean=True)
        unclear = unclear or max(differing, key=lambda r: _change(r) >= _SMALL_SHARE, default=None)
    if unclear is not None:
        if any(each.only_ranks_reduce for each in compared):
            return NotJudged(
                f"one process does not enter the reduction at {unclear.at}, and reads no number there that "
                "could be compared with the result.",
                is_open=True,
            )
        return _judge_metric(case, unclear, is_mean=False)
    if not judged + with_counts:
        return NotJudged("no small value was reduced over ranks while evaluating.")
    return NoFault(
        f"of {judged + with_counts} values that were reduced in evaluations, {with_counts} were summed with "
        "their number of samples, and the others are those of one process."
    )


def _judge_metric(case: Case, result: _Result, *, is_mean: bool) -> Judgement:
    """The judgement of a value that differs from that of one process.

    Args:
        is_mean: Whether it is a mean over each rank's samples; else it is a note, because it may be a time.
    """
    if not is_mean and _change(result) < _SMALL_SHARE:
        return NotJudged(
            f"the value that is reduced at {result.at} is neither that of one process nor a mean over each "
            f"rank's samples. It differs by {_change(result):.2%}."
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
    return Finding(
        what=what,
        at=result.at,
        step=result.call.steps_done or None,
        why=why,
        fix=fix,
        evidence=f"with the same weights and samples: {result.solo:.6g} on one process, {result.mean:.6g} as "
        f"the mean over {case.world_size}",
        effect=f"the metric changes by {_change(result):.2%}",
        is_note=not is_mean,
    )


def _divided_sum(case: Case, compared: Sequence[_Comparison]) -> Finding | None:
    """The ranks reduce a sum over all samples, and then read it divided by their number."""
    sums = [
        (reduction.call, x)
        for each in compared
        for reduction in each.ranks[0].metric_calls
        for x in reduction.results
        if x and reduction.call.reduce == "SUM"
    ]
    for each in compared:
        for at, numbers in each.ranks[0].numbers.items():
            for solo, value in zip(each.solo.numbers.get(at, ()), numbers, strict=False):
                # A library may read in this evaluation what it reduced in the one before.
                # See broken/91_total_cost.
                call = next((call for call, x in sums if _close(solo, x)), None)
                if call is None or not _close(value * case.world_size, solo):
                    continue
                return Finding(
                    what="a sum over the samples is averaged over the ranks, and not added up.",
                    at=at,
                    step=call.steps_done or None,
                    why="each rank has the sum over its own samples; their mean depends on the number of "
                    "ranks.",
                    fix="reduce a sum with a sum. In Lightning: log(..., sync_dist=True, reduce_fx='sum').",
                    evidence=f"with the same weights and samples, {at} reads {solo:.6g} on one process and "
                    f"{value:.6g} on {case.world_size}",
                    effect=f"the value is {case.world_size} times too small",
                    # Such as the samples of each rank.
                    is_note=solo == round(solo),
                )
    return None


def reduced_again(case: Case) -> Judgement:
    """Some ranks keep a reduced sum, go on counting from it, and reduce it again."""
    if case.union is None:
        return NotJudged(case.why_no_union)
    for old_solo, old, solo, new in _successive_reductions(_compare(case)):
        if old.call.at != new.call.at or new.call.reduce != "SUM" or not any(old.results):
            continue
        # A number of steps so far is no sum over the samples: the first one differs too.
        if not all(map(_close, old_solo.results, old.results)):
            continue
        for kept in range(1, case.world_size + 1):
            values = zip(solo.results, old.results, new.results, strict=False)
            if not all(_close(x + kept * y, z) for x, y, z in values):
                continue
            return Finding(
                what="a sum over the ranks is reduced again.",
                at=new.call.at,
                step=new.call.steps_done or None,
                why="all_reduce writes the sum over the ranks into the tensor, and ranks count on from it.",
                fix="reduce a copy; or set the tensor to 0 on all ranks after each evaluation.",
                evidence="with the same weights and samples, its values add up to "
                f"{sum(solo.results):.6g} on one process and to {sum(new.results):.6g} on "
                f"{case.world_size}",
                effect=f"the sum before is in it {kept} time{'s' * (kept > 1)} too often",
            )
    return NoFault("no sum of an evaluation was in a later one.")


def _successive_reductions(
    compared: list[_Comparison],
) -> Iterator[tuple[MetricCall, MetricCall, MetricCall, MetricCall]]:
    """Pairs of reductions of the solo run and of rank 0, an earlier one and a later one.

    They have the same place in two evaluations, one after the other; or the same line in one evaluation.
    """
    for before, each in pairwise(compared):
        yield from zip(
            before.solo.metric_calls,
            before.ranks[0].metric_calls,
            each.solo.metric_calls,
            each.ranks[0].metric_calls,
            strict=False,
        )
    for each in compared:
        latest: dict[str, tuple[MetricCall, MetricCall]] = {}
        for solo, own in zip(each.solo.metric_calls, each.ranks[0].metric_calls, strict=False):
            if own.call.at in latest:
                yield (*latest[own.call.at], solo, own)
            latest[own.call.at] = solo, own


def metric_of_one_rank(case: Case) -> Judgement:
    """Each rank evaluates a part of the samples, and rank 0 takes a metric of its own part."""
    evaluations, trained = case.ranks[0].evaluations, case.ranks[0].training_loaders
    ops = [event.op for each in evaluations.values() for event in each.collectives]
    if any("reduce" in op or "gather" in op for op in ops):
        return NoFault("results of evaluations are reduced or gathered over the ranks.")
    is_unseen = False
    for (number, loader, _), (own, *others) in _evaluated(case.ranks).items():
        if not loader or loader in trained:
            # A training may play games, or sample, without gradient.
            is_unseen |= not {*own}.issuperset(set().union(*others))
            continue
        of_others = set().union(*others)
        if not own or not of_others or of_others.intersection(own):
            continue
        numbers = evaluations[number].numbers
        if not numbers:
            is_unseen = True
            continue
        sizes = [len(rows) for rows in (own, *others)]
        return Finding(
            what="rank 0 takes a metric of its own part of the evaluated samples.",
            at=next(reversed(numbers)),
            ranks=[0],
            why="each rank evaluates a different part, and the script reduces no result.",
            fix="all_reduce the sum and the number of samples before the number is printed or compared.",
            evidence=f"the ranks evaluated {' + '.join(map(str, sizes))} samples",
            effect=f"{sizes[0] / sum(sizes):.0%} of the samples are in the metric",
            is_note=True,
        )
    if is_unseen:
        return NotJudged(
            "each rank called a model without gradient on its own samples, and no metric of samples of an "
            "evaluation loader was seen: `.tolist()` and `.numpy()` are not recorded."
        )
    return NoFault("no evaluation was divided over the ranks.")
