"""Evaluations: the samples and the numbers of the ranks, against those of one process with their weights.

Each number of the ranks is compared with the number that one process has at the same line. A number that
differs between two runs of one process is a time, or comes from random numbers: it is left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import mul
from typing import Any

import torch

from paceline.audit.evaluations import Evaluation, MetricCall
from paceline.audit.rules.rule import Case, Finding, Judgement, NoFault, NotJudged

_EPS = torch.finfo(torch.float32).eps
# A sum or mean of many numbers in another order is rounded by less than so many units of float32.
_close = partial(math.isclose, rel_tol=1024 * _EPS)
# Samples that count twice are a note up to this share: a metric with three digits does not show them.
_SMALL_SHARE = 1e-3


@dataclass(frozen=True)
class _Number:
    """A number that the ranks and one process have at the same place of an evaluation."""

    at: str
    value: float  # that of rank 0; the other ranks have the same, or none
    one: float

    @property
    def is_equal(self) -> bool:
        """Whether both are equal: exactly, if they may be counts."""
        if all(abs(x) < 1 / _EPS and x == round(x) for x in (self.value, self.one)):
            return self.value == self.one
        return _close(self.value, self.one)

    @property
    def ratio(self) -> float:
        """The number of the ranks divided by that of one process; nan if one is 0."""
        return self.value / self.one if self.value and self.one else math.nan

    @property
    def effect(self) -> str:
        """The difference in words."""
        return f"the number changes by {_change(self.value, self.one)}"

    def __str__(self) -> str:
        return f"{self.at} has {self.value:.6g} on the ranks and {self.one:.6g} on one process"


@dataclass(frozen=True)
class _Compared:
    """An evaluation of the ranks, and the same one of one process with the same weights."""

    ranks: list[Evaluation]
    one: Evaluation
    null: Evaluation  # that of one process once more

    @cached_property
    def joint(self) -> Counter[Any]:
        """How often the ranks together evaluate each sample."""
        return Counter(sample for each in self.ranks for sample in each.samples)

    @property
    def has_same_samples(self) -> bool:
        """Whether the ranks evaluate the samples of one process: together, or each rank all of them."""
        one = Counter(self.one.samples)
        own = [Counter(each.samples) for each in self.ranks]
        return self.joint == one or all(each in (one, Counter()) for each in own)

    @property
    def is_comparable(self) -> bool:
        """Whether the ranks evaluate no other samples. If each draws its own, other numbers are no fault."""
        return self.joint.keys() <= set(self.one.samples) and bool(self.joint)

    @cached_property
    def numbers(self) -> list[_Number]:
        """The numbers that one process repeats."""
        found = []
        for at, own in self.ranks[0].numbers.items():
            others = [each.numbers[at] for each in self.ranks if at in each.numbers]
            of_one, of_null = (each.numbers.get(at, []) for each in (self.one, self.null))
            # Numbers of each batch have no counterpart; those that differ between ranks are no result.
            if len(own) == len(of_one) == len(of_null) and all(own == other for other in others):
                found += [(at, *each) for each in zip(own, of_one, of_null, strict=True)]
        for call, *_, one, null in _calls([*self.ranks, self.one, self.null]):
            if call.begun.op == "all_reduce":
                results = zip(call.results, one.results, null.results, strict=False)
                found += [(call.begun.at, *each) for each in results]
        return [
            _Number(at, x, y)
            for at, x, y, z in found
            if math.isfinite(x) and math.isfinite(y) and _close(y, z)
        ]

    @cached_property
    def differing(self) -> list[_Number]:
        """The numbers that are not those of one process.

        A sum over the ranks may be divided by their number later, and any two numbers by each other.
        """
        wrong = [
            number
            for number in self.numbers
            if not number.is_equal
            and not _close(number.value, len(self.ranks) * number.one)
            and not self._is_no_result(number)
        ]
        return [
            number
            for number in wrong
            if not any(_close(number.ratio, x.ratio) for x in wrong if x.value != number.value)
        ]

    def _is_no_result(self, number: _Number) -> bool:
        """Whether it is a number of batches, or a value of one rank, such as a size to which others pad."""
        forwards = [each.forwards for each in self.ranks]
        is_one = number.value in (
            value
            for calls in _calls(self.ranks)
            for call in calls
            if "gather" in call.begun.op or call.begun.reduce in ("MAX", "MIN")
            for value in call.begun.values or ()
        )
        counts_batches = number.one == self.one.forwards
        return is_one or (counts_batches and number.value in (*forwards, sum(forwards)))


def _calls(evaluations: Sequence[Evaluation]) -> Iterator[tuple[MetricCall, ...]]:
    """The calls at the same places of several evaluations: at lines that all call equally often."""
    for at in evaluations[0].calls:
        lists = [each.calls.get(at, []) for each in evaluations]
        if len({len(calls) for calls in lists}) == 1:
            yield from zip(*lists, strict=True)


def _compare(case: Case) -> list[_Compared]:
    """The evaluations of rank 0 that one process made too."""
    if case.union is None:
        return []
    ones = case.union.ranks[0].evaluations
    nulls = ones if case.null is None else case.null.ranks[0].evaluations
    of_ranks = [log.evaluations for log in case.ranks]
    return [
        _Compared([own.get(n, Evaluation()) for own in of_ranks], ones[n], nulls[n])
        for n in sorted(of_ranks[0].keys() & ones.keys() & nulls.keys())
    ]


def evaluated_samples(case: Case) -> Judgement:
    """The ranks evaluate the samples of one process, together or each; or it changes no number."""
    compared = _compare(case)
    if not compared:
        return NotJudged(
            case.why_no_union or "the ranks and one process have no common evaluation."
        )
    others = [each for each in compared if not each.has_same_samples]
    comparable = [each for each in others if each.is_comparable]
    findings = [_samples_differ(case, each) for each in comparable if each.differing]
    if findings:
        return min(findings, key=lambda finding: finding.is_note)
    if len(comparable) < len(others) or not all(each.numbers for each in others):
        return NotJudged(
            f"in {len(others)} of {len(compared)} evaluations the ranks have other samples than one process, "
            "and no number shows which of them count."
        )
    if others:
        return NoFault(
            f"in {len(others)} of {len(compared)} evaluations the ranks have some samples more or less often "
            "than one process, which changes no number."
        )
    return NoFault(f"{len(compared)} evaluations are of the same samples as those of one process.")


def _samples_differ(case: Case, each: _Compared) -> Finding:
    """The ranks evaluate samples more or less often than one process, and a number differs."""
    share, twice, never, joint, one, loader = max(_of_loader(each, name) for name in each.one.rows)
    totals = [(joint, one), (each.joint.total(), len(each.one.samples))]
    # A count of the samples alone may be one of the work, such as for a speed.
    is_metric = any((n.value, n.one) not in totals for n in each.differing)
    proofs = [n for n in each.differing if is_metric and _counts_samples(n, totals)]
    proof = next(iter(proofs), None)
    what = [f"{twice} of them several times"] * bool(twice) + [f"{never} never"] * bool(never)
    number = proof or each.differing[0]
    # One process may leave some out too, such as those of the last batch; or rank 0 estimates it on a part.
    seen = case.solo.ranks[0].loaders.get(loader)
    leaves_out = seen is None or seen.samples != one or not each.ranks[0].exchanges
    return Finding(
        what=f"the ranks evaluate {joint} samples in place of {one}: {' and '.join(what)}.",
        at=each.ranks[0].at,
        step=each.ranks[0].steps_done or None,
        why="a sampler gives all ranks the same number of samples: it repeats some, or leaves some out.",
        fix="evaluate the indices [rank::world_size] of the dataset, or remove the surplus after a gather.",
        evidence=f"with the same weights, {number}{', a count or a share of the samples' * bool(proof)}",
        effect=f"{share:.2%} of the evaluated samples; {number.effect}",
        is_note=proof is None or share <= _SMALL_SHARE or (leaves_out and not twice),
    )


def _of_loader(each: _Compared, loader: str) -> tuple[float, int, int, int, int, str]:
    """The share of its samples that are evaluated too often or too seldom; their numbers, and all numbers."""
    joint = Counter(row for own in each.ranks for row in own.rows.get(loader, ()))
    one = Counter(each.one.rows[loader])
    twice, never = (joint - one).total(), (one - joint).total()
    share = (twice + never) / max(joint.total(), 1)
    return share, twice, never, joint.total(), one.total(), loader


def _counts_samples(number: _Number, totals: Sequence[tuple[int, int]]) -> bool:
    """Whether it is one of these numbers of samples; or a share of one, as an accuracy."""
    return (number.value, number.one) in totals or any(
        _is_count(number.value * x)
        and _is_count(number.one * y)
        and not _is_count(number.value * y)
        for x, y in totals
        if 0 < number.value < 1
    )


def _is_count(value: float) -> bool:
    """Whether a share, which is a quotient in float32, times a number of samples is a count."""
    return value > 0.5 and abs(value - round(value)) <= 4 * _EPS * value


def reported_numbers(case: Case) -> Judgement:
    """What the script reads or reduces in an evaluation is what one process has there."""
    part = _own_part(case)
    if case.union is None:
        return part or NotJudged(case.why_no_union)
    samples = evaluated_samples(case)
    if isinstance(samples, Finding) and not samples.is_note:
        return NotJudged("it may be a consequence of: evaluated samples.")
    compared = [e for e in _compare(case) if e.has_same_samples or e.is_comparable]
    findings = [_explain(each, number) for each in compared for number in each.differing]
    equal = {number.at for each in compared for number in each.numbers if number.is_equal}
    if part is not None and part.at not in equal:
        findings.insert(0, part)
    if findings:
        return min(findings, key=lambda finding: finding.is_note)
    count = sum(len(each.numbers) for each in compared)
    if not count:
        return NotJudged(
            "the ranks and one process read or reduce no number at the same place of an evaluation of the "
            "same samples: `.tolist()` and `.numpy()` are not recorded."
        )
    return NoFault(f"{count} numbers of {len(compared)} evaluations are those of one process.")


def _explain(each: _Compared, number: _Number) -> Finding:
    """Why a number differs, if the values that the ranks give prove it."""
    count = len(each.ranks)
    finding = Finding(
        what="a number of an evaluation is not that of one process; the cause is not known.",
        at=number.at,
        step=each.ranks[0].steps_done or None,
        why="a mean over ranks is wrong for an F1 score, a perplexity or an AUC, and for means of batches of "
        "different sizes. A gather has the order of the ranks, and not that of the dataset. A tensor that "
        "all_reduce has written contains all ranks already: counted on and reduced again, it is too large.",
        fix="reduce the sums and counts from which it is computed; gather labels together with predictions; "
        "reduce a copy of sums that are kept.",
        evidence=f"with the same weights and samples, {number}",
        effect=number.effect,
        is_note=True,
    )
    for calls in _calls(each.ranks):
        samples = [call.samples for call in calls]
        for given in zip(*(call.begun.values or () for call in calls), strict=False):
            total, mean = sum(given), sum(given) / count
            weighted = sum(map(mul, given, samples)) / max(sum(samples), 1)
            evidence = f"{finding.evidence}. The ranks give {_listed(given)} for {_listed(samples)} samples"
            is_exact = 10 * abs(weighted - number.one) <= abs(mean - number.one)
            if is_exact and any(_close(number.value, x) for x in (total, mean)):
                return replace(
                    finding,
                    what="a mean of means: each rank takes the mean of its own samples.",
                    why="the ranks have other numbers of samples, and their means get the same weight.",
                    fix="all_reduce the sum and the number of samples, then divide.",
                    evidence=evidence,
                    effect=f"the mean changes by {_change(mean, weighted)}",
                    is_note=False,
                )
            if _close(total, number.one) and _close(number.value, mean):
                return replace(
                    finding,
                    what="a sum is averaged over the ranks, and not added up.",
                    why="each rank gives a sum over its own samples. Their mean is right only if it is "
                    "divided by the samples or batches of one rank later.",
                    fix="reduce a sum with a sum. In Lightning: log(..., sync_dist=True, reduce_fx='sum').",
                    evidence=evidence,
                    effect=f"the number is {count} times too small",
                )
    return finding


def _own_part(case: Case) -> Finding | None:
    """A number that rank 0 takes of its own part of the samples, if no evaluation exchanges anything."""
    first, *others = (log.evaluations for log in case.ranks)
    if any(each.exchanges for each in first.values()):
        return None
    for number, own in first.items():
        sizes = [
            len(own.samples),
            *(len(each[number].samples) for each in others if number in each),
        ]
        rest = {sample for each in others if number in each for sample in each[number].samples}
        if own.numbers and own.samples and rest and rest.isdisjoint(own.samples):
            return Finding(
                what="rank 0 takes a number of its own part of the evaluated samples.",
                at=next(reversed(own.numbers)),
                ranks=[0],
                step=own.steps_done or None,
                why="each rank evaluates a different part, and the script reduces no result.",
                fix="all_reduce the sum and the number of samples before the number is printed or compared.",
                evidence=f"the ranks evaluate {' + '.join(map(str, sizes))} samples",
                effect=f"{sizes[0] / sum(sizes):.0%} of the samples are in the number",
                is_note=True,
            )
    return None


def _change(value: float, other: float) -> str:
    """The difference of two unequal numbers, as a part of the larger one."""
    return f"{abs(value - other) / max(abs(value), abs(other)):.2%}"


def _listed(numbers: Sequence[float]) -> str:
    return " and ".join(f"{x:.6g}" for x in numbers)
