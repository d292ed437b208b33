"""Evaluations: samples that count twice, and metrics that depend on the number of processes."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from typing import Any

from paceline.audit.evidence import MAX_METRIC_VALUES, Event, RankLog, Run
from paceline.audit.rules.rule import Case, FaultFound, Judgement, NoFault, NotJudged

# Equal values of a metric differ by rounding only.
_close = partial(math.isclose, rel_tol=1e-4, abs_tol=1e-16)
# Samples that count twice are a note up to this share: a metric with three digits hardly shows them.
_SMALL_SHARE = 1e-3
_REDUCTIONS = ("all_reduce", "reduce", "all_gather", "all_gather_into_tensor")

# One call that reduces small values: in the run of one process, and in the replay.
Pair = tuple[Event, Event]


def evaluated_twice(case: Case) -> Judgement:
    """Samplers pad shards of different lengths, and the padding is evaluated and counted."""
    judgement = _padded(case)
    if not isinstance(judgement, FaultFound) or case.replay is None:
        return judgement
    solo, replay = _reductions(case.solo.ranks[0]), _reductions(case.replay.ranks[0])
    pairs = [
        pair
        for number in solo.keys() & replay.keys()
        for pair in zip(solo[number], replay[number], strict=False)
    ]
    if pairs and all(_close(x, y) for pair in pairs for x, y in _results(pair)):
        return NoFault(
            "shards were padded and the padding was removed: the sums are those of one process."
        )
    return judgement


def _padded(case: Case) -> Judgement:
    """Whether the ranks evaluated samples twice."""
    solo, ordinary = (_evaluated(run.ranks) for run in (case.solo, case.ordinary))
    if not solo or not ordinary:
        return NotJudged("the script evaluated nothing in the watched steps.")
    unclear = False
    for key in sorted(ordinary):
        number, loader, _ = key
        each = [rows for rows in ordinary[key] if rows]
        if all(Counter(rows) == Counter(each[0]) for rows in each):
            continue  # every rank evaluates all samples, or one rank does
        distinct = {row for rows in each for row in rows}
        total = sum(map(len, each))
        surplus = total - len(distinct)
        if not any(e["loader"] == loader and e["ids"] for e in case.ranks[0].of("batch")):
            # Known by content only: the data may contain equal samples, as the solo run shows.
            of_one = next(
                (r[0] for k, r in solo.items() if k[1] == loader and set(r[0]) == distinct), None
            )
            if of_one is None or not loader:  # inputs that the loop itself makes may be anything
                unclear = True
                continue
            surplus -= len(of_one) - len(distinct)
        if surplus <= 0:
            continue
        if _gathers(case.ranks[0], number):
            return NotJudged(
                f"{total} samples were evaluated, {surplus} of them twice; the script gathers its "
                "predictions, and may remove the surplus."
            )
        first = next(e for e in case.ranks[0].of("forward-end") if e["evaluation"] == number)
        return _padding_fault(first, list(map(len, each)), len(distinct), surplus)
    if unclear:
        return NotJudged(
            "the samples that the models were given without gradient cannot be identified."
        )
    return NoFault("the ranks together evaluated each sample once, or each rank all of them.")


def _padding_fault(first: Event, evaluated: list[int], distinct: int, surplus: int) -> FaultFound:
    """The fault of an evaluation whose first forward is given.

    Args:
        evaluated: How many samples each rank evaluated.
        distinct: How many of them were different.
        surplus: How many the padding added.
    """
    total = sum(evaluated)
    return FaultFound(
        what=f"{surplus} sample{' is' if surplus == 1 else 's are'} evaluated twice: {total} in place "
        f"of {total - surplus}.",
        at=first["at"],
        step=first["s"] or None,
        why="the sampler gives every rank the same number of samples, and repeats some to get there.",
        fix="evaluate the indices [rank::world_size] of the dataset without padding, or remove the "
        "surplus after gathering.",
        evidence=f"the ranks evaluated {' + '.join(map(str, evaluated))} samples, "
        f"{distinct} of them different",
        effect=f"{surplus / total:.2%} of the evaluated samples count twice",
        is_note=surplus <= _SMALL_SHARE * total,
    )


def _evaluated(ranks: list[RankLog]) -> dict[tuple[int, str, int], list[list[Any]]]:
    """What each rank evaluated, by evaluation, loader and pass: indices, or else contents.

    A batch that several models are given counts once.
    """
    found: dict[tuple[int, str, int], list[list[Any]]] = {}
    for rank, log in enumerate(ranks):
        batch: Event = {"loader": "", "pass_number": 0, "ids": None}
        model: int | None = None
        for event in log.of("batch", "forward-end"):
            if event["k"] == "batch":
                batch, model = event, None
            elif batch["loader"] in log.training_loaders:
                continue  # a teacher's forward, or a metric on training samples
            elif event["evaluation"] is not None and event.get("rows"):
                if batch["loader"] and model not in (None, event["model"]):
                    continue  # another model on the same batch
                if batch["ids"] and model is not None:
                    continue  # the next part of a batch that is given in parts
                model = event["model"] if batch["loader"] else None
                key = (event["evaluation"], batch["loader"], batch["pass_number"])
                found.setdefault(key, [[] for _ in ranks])[rank] += batch["ids"] or event["rows"]
    return found


def _gathers(log: RankLog, evaluation: int) -> bool:
    """Whether more was gathered in an evaluation than a metric has values."""
    return any(
        event["evaluation"] == evaluation
        and "gather" in event["op"]
        and max(event["items"], math.prod(event["shape"])) > MAX_METRIC_VALUES
        for event in log.of("collective")
    )


def averaged_metric(case: Case) -> Judgement:
    """Ranks average a metric over their own samples, although they have different numbers of them."""
    if case.replay is None:
        return NotJudged(case.why_no_replay)
    solo, replay = _reductions(case.solo.ranks[0]), _reductions(case.replay.ranks[0])
    if replay and not solo:
        at = next(iter(replay.values()))[0]["at"]
        return NotJudged(
            f"one process does not enter the reduction at {at}, so there is nothing to compare."
        )
    judged = with_counts = 0
    unclear: Event | None = None
    for number in sorted(solo.keys() & replay.keys()):
        if len(solo[number]) != len(replay[number]):
            return NotJudged("the runs reduced different numbers of values while evaluating.")
        pairs = list(zip(solo[number], replay[number], strict=True))
        samples = sum(_samples_given(log, number) for log in case.replay.ranks)
        # After a gather the script computes the sums, so both its values and their sums count.
        results = [x for pair in pairs for x in pair[1]["results"] + _sums(pair)]
        if any(_close(x, samples) for x in results):
            with_counts += len(pairs)  # sums, which the script divides by the number of samples
            continue
        judged += len(pairs)
        for index, pair in enumerate(pairs):
            if _differs(pair, pairs, case.world_size):
                if _is_mean_of_own_samples(case.replay, number, index, pair[0]["results"]):
                    return _metric_fault(case, pair)
                unclear = pair[1]
    if unclear is not None:
        return NotJudged(
            f"the value that is reduced at {unclear['at']} is neither that of one process nor a mean over "
            "each rank's samples. It may be a time, a random number, or a mean of the means of batches."
        )
    parts = []
    if judged:
        parts.append(f"{judged} values that were reduced while evaluating are those of one process")
    if with_counts:
        parts.append(f"{with_counts} were summed together with their number of samples")
    if not parts:
        return NotJudged("no small value was reduced over ranks while evaluating.")
    return NoFault(f"{'; '.join(parts)}.")


def _is_mean_of_own_samples(run: Run, number: int, index: int, expected: list[float]) -> bool:
    """Whether the ranks' values, weighted by their samples, give the mean of one process."""
    calls = [_reductions(log).get(number, [])[index : index + 1] for log in run.ranks]
    if not all(call and call[0]["values"] for call in calls):
        return False
    counts = [_samples_given(log, number) for log in run.ranks]
    total = sum(counts)
    for k, wanted in enumerate(expected if total else []):
        own = [call[0]["values"][k] for call in calls if k < len(call[0]["values"])]
        if len(own) == len(counts):
            mean = sum(n * x for n, x in zip(counts, own, strict=True)) / total
            if _close(mean, wanted) and not _close(sum(own) / len(own), wanted):
                return True
    return False


def _reductions(log: RankLog) -> dict[int, list[Event]]:
    """The small values that were reduced in each evaluation, with their results."""
    found: dict[int, list[Event]] = {}
    call: Event | None = None
    for event in log.of("collective", "collective-end"):
        if event["k"] == "collective":
            call = event
            continue
        results = event.get("values") or ()
        if call is None or call["evaluation"] is None or call["op"] not in _REDUCTIONS:
            continue
        if 0 < len(results) <= MAX_METRIC_VALUES:
            found.setdefault(call["evaluation"], []).append({**call, "results": results})
    return found


def _samples_given(log: RankLog, evaluation: int) -> int:
    """The samples that a rank had evaluated before its first collective in that evaluation."""
    total = 0
    for event in log.of("forward-end", "collective"):
        if event["evaluation"] == evaluation:
            if event["k"] == "collective":
                break
            total += event["samples"] or 0
    return total


def _differs(pair: Pair, pairs: list[Pair], world_size: int) -> bool:
    """Whether a value depends on the number of ranks, and no division by another value corrects it."""
    others = [values for each in pairs for values in _results(each)]
    return any(
        not _close(x, y)
        and not _close(x * world_size, y)
        and not any(u and v and (u, v) != (x, y) and _close(x / u, y / v) for u, v in others)
        for x, y in _results(pair)
    )


def _results(pair: Pair) -> list[tuple[float, float]]:
    """The values of both runs, in pairs."""
    return list(zip(pair[0]["results"], _sums(pair), strict=False))


def _sums(pair: Pair) -> list[float]:
    """The results of the replay; those of a gather are summed over the ranks."""
    values: list[float] = pair[1]["results"]
    length = len(pair[0]["results"])
    if "gather" not in pair[1]["op"] or not length:
        return values
    return [sum(values[k::length]) for k in range(length)]


def _metric_fault(case: Case, pair: Pair) -> FaultFound:
    count, value = case.world_size, _sums(pair)[0]
    solo, replay = pair
    mean = value if replay["reduce"] == "AVG" else value / count
    change = abs(mean / solo["results"][0] - 1) if solo["results"][0] else math.inf
    return FaultFound(
        what="a metric depends on the number of processes: each rank takes the mean of its own samples.",
        at=replay["at"],
        step=replay["s"] or None,
        why="the ranks have different numbers of samples, and the mean of their means gives each rank the "
        "same weight.",
        fix="all_reduce the sum and the number of samples, then divide.",
        evidence=f"with the same weights and samples: {solo['results'][0]:.6g} on one process, {mean:.6g} "
        f"as the mean over {count}",
        effect=f"the metric changes by {change:.2%}",
    )
