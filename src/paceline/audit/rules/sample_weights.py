"""The weight of each sample in the gradient of a step: all samples must have the same."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import combinations

from paceline.audit.events import BackwardBegun, BatchGiven
from paceline.audit.evidence import RankLog
from paceline.audit.rules.gradient import share_of_each_rank
from paceline.audit.rules.rule import Case, Finding, Judgement, NoFault, NotJudged

# Two losses are means if their totals differ by less than this part of what the total of one would change by
# if its terms had the weight of the other's. See sound/53_tokens_149_and_150.
_SAME_TOTAL = 0.1
# Weights of samples that differ by less are a note. Four times as much changes broken/06_mean_of_means.
_SMALL_FACTOR = 1.01
# The same between two ranks: their numbers of masked tokens, for one, differ by chance.
# See sound/69_tokens_weighted. A quarter changes sound/55_sequence_first, four times as much
# broken/23_tokens_sum_and_count.
_SMALL_CHANCE = 1.5


def mean_of_means(case: Case) -> Judgement:
    """Means over micro-batches of different sizes are added with equal weight."""
    known = steps = 0
    found: list[_Unequal] = []
    fix = "sum the losses, and divide by the number of terms of the whole step."
    logs = (*case.solo.ranks, *case.ranks)
    lasts = {event for log in logs for event in _lasts(log)}
    for log in logs:
        # Tasks with fixed weights have their sizes in every step, and samples beside those of the loader.
        # See sound/92_random_negatives.
        whole = [each.backwards for each in log.updates if lasts.isdisjoint(each.backwards)]
        sizes = {tuple(event.terms for event in backwards) for backwards in whole}
        by_design = len(sizes) == 1 and _makes_samples(log)
        for update in log.updates:
            known += sum(event.terms > 0 for event in update.backwards)
            steps += 1
            pair = None if by_design else _unequal(update.backwards)
            if pair is not None:
                rank = None if log is case.solo.ranks[0] else log.rank
                found.append(_Unequal(pair, update.step, _SMALL_FACTOR, rank))
    if not found and share_of_each_rank(case.ordinary) is not None:
        fix = "divide the sum of the losses by the number of terms on all ranks. With DDP, multiply by the "
        fix += "number of ranks, since it takes the mean."
        of_all = list(zip(*(log.updates for log in case.ranks), strict=False))
        steps = len(of_all)
        for updates in of_all:
            pair = _unequal([update.backwards[0] for update in updates], across_ranks=True)
            if pair is not None:
                found.append(_Unequal(pair, updates[0].step, _SMALL_CHANCE))
    if found:
        return _mean_fault(found, lasts, steps, fix)
    if not known:
        return NotJudged("the loss is not a scaled sum or mean whose weight its graph shows.")
    return NoFault(f"in {known} backwards, all samples of a step had the same weight.")


def _makes_samples(log: RankLog) -> bool:
    """Whether a model is trained on more samples than the loaders gave."""
    given = sum(e.samples or 0 for e in log.of(BatchGiven) if e.loader in log.training_loaders)
    used = Counter[int]()
    for event in log.training_forwards:
        used[event.model] += event.samples or 0
    return max(used.values(), default=0) > given


@dataclass(frozen=True)
class _Unequal:
    """Two backwards of a step whose samples have different weights."""

    pair: tuple[BackwardBegun, BackwardBegun]
    step: int
    limit: float  # of `factor`: below it this is a note
    rank: int | None = None  # that has both; None in the solo run, and if each is of another rank

    @property
    def factor(self) -> float:
        """The weight of a term of the shorter part, relative to one of the longer."""
        counts = [event.terms for event in self.pair]
        return max(counts) / min(counts)


def _lasts(log: RankLog) -> list[BackwardBegun]:
    """The backwards on the last batches of passes that ended by themselves."""
    ended = (each for each in log.passes.values() if each.ended and each.backwards)
    return [event for each in ended for event in each.backwards[-1]]


def _unequal(
    backwards: list[BackwardBegun], *, across_ranks: bool = False
) -> tuple[BackwardBegun, BackwardBegun] | None:
    """Two backwards with the same total weight and different numbers of terms."""
    if len({name for event in backwards for name in event.loaders}) > 1:
        return None  # tasks with data of their own, whose weights are the script's choice
    known = [event for event in backwards if event.terms]
    for one, other in combinations(known, 2):
        # 0 for means, whose totals are equal; and 0 for sums, whose terms have equal weights.
        of_totals = one.total_weight - other.total_weight
        of_terms = (one.term_weight - other.term_weight) * other.terms
        # Two losses of one forward belong to one micro-batch.
        apart = across_ranks or one.forwards != other.forwards
        # Two tasks may have one line, in a loop over them, but not the same parameters.
        # See sound/88_tasks_in_a_loop.
        same_loss = (one.kind, one.at, one.reached) == (other.kind, other.at, other.reached)
        if abs(of_totals) < _SAME_TOTAL * abs(of_terms) and same_loss and apart:
            return one, other
    return None


def _mean_fault(found: list[_Unequal], lasts: set[BackwardBegun], steps: int, fix: str) -> Finding:
    first = found[0]
    smaller, larger = sorted(first.pair, key=lambda event: event.terms)
    factor = max(each.factor for each in found)
    of_ranks = {each.rank for each in found}
    ranks = sorted(rank for rank in of_ranks if rank is not None) if None not in of_ranks else ()
    return Finding(
        what=f"a mean over {smaller.terms:g} terms has the same weight as one over "
        f"{larger.terms:g}.",
        at=first.pair[0].at,
        ranks=ranks,
        step=first.step,
        why="the mean of means is the mean only if all parts have the same length.",
        fix=fix,
        evidence=f"weights of one term in step {first.step}: {larger.term_weight:.4g} and "
        f"{smaller.term_weight:.4g}",
        effect=f"a sample of the shorter part has up to {factor:.3g} times the weight, in {len(found)} of "
        f"{steps} steps",
        is_note=all(each.factor < each.limit or not lasts.isdisjoint(each.pair) for each in found),
    )
