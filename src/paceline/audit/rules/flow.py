"""Rules about order and time: who enters which collective, schedules, and metrics over ranks."""

from __future__ import annotations

from typing import Any

from paceline.audit.evidence import SENDS_BUFFERS, Event, RankLog, Run
from paceline.audit.rules.data import evaluated_twice
from paceline.audit.rules.judgement import (
    Case,
    Fault,
    Judgement,
    Sound,
    Unknown,
    outliers,
)
from paceline.errors import name_ranks

_SAME = 1e-4
# Rates between steps are read off a straight line.
_SAME_RATE = 0.02
_METRIC_VALUES = 16
_MIN_EARLY = 3


def collectives(case: Case) -> Judgement:
    """A collective that some ranks enter and others do not."""
    everyone = list(range(case.world_size))
    cut = any(log.first("enough") for log in case.ranks)
    each = [
        _sequence(log, everyone, case.ordinary.plan.steps if cut else None) for log in case.ranks
    ]
    for place in range(max(map(len, each))):
        calls = [own[place] if place < len(own) else None for own in each]
        kinds = [_kind(call) for call in calls]
        if len(set(kinds)) == 1:
            continue
        absent = [log for log, kind in zip(case.ranks, kinds, strict=True) if kind is None]
        if case.ordinary.hung and any(_elsewhere(log) for log in absent):
            return Unknown("a rank was at work elsewhere when the run was stopped.")
        failed = [log for log in case.ranks if log.first("failed")]
        if None in kinds and failed and not all(_followed(log) for log in failed):
            return Unknown("the script failed before its end.")
        return _uneven(case, each, _first_astray(each, place))
    total = len(each[0])
    for place in range(total):
        calls_at = {own[place]["at"] for own in each}
        if len(calls_at) > 1 and each[0][place]["op"] == "all_reduce":
            return Unknown(
                f"ranks entered one all_reduce at {' and '.join(sorted(calls_at))}; whether they mean the "
                "same there cannot be seen."
            )
    return Sound(f"all ranks entered the same {total} collectives in the same order.")


def _sequence(log: RankLog, everyone: list[int], steps: int | None) -> list[Event]:
    """The collectives of all ranks that a rank entered, DDP's sums among them.

    With `steps`, up to the first pass after so many: we end each rank in one of those.
    """
    found = []
    forward_syncs = False
    for event in log.of("collective", "forward", "forward-end", "backward", "iter"):
        if event["k"] == "iter":
            if (
                steps is not None
                and event["s"] >= steps
                and event["loader"] in log.training_loaders
            ):
                break
        elif event["k"] == "forward":
            if event.get("sends_buffers"):
                found.append({**event, "op": SENDS_BUFFERS})
        elif event["k"] == "forward-end":
            forward_syncs = bool(event["trains"] and event["sync"])
        elif event["k"] == "collective" and event["group"] == everyone:
            found.append(event)
        elif event["k"] == "backward" and forward_syncs:
            forward_syncs = False
            found.append({**event, "op": "DDP's sum of gradients"})
    return found


def _kind(call: Event | None) -> tuple[str, str] | None:
    return None if call is None else (call["op"], call.get("reduce", ""))


def _elsewhere(log: RankLog) -> bool:
    """Whether a rank was neither done nor waiting: it may have come, with more time."""
    return not log.ended and log.open_span is None and log.first("failed") is None


def _followed(log: RankLog) -> bool:
    """Whether a rank failed inside a collective, which is what happens to who waits for another."""
    last = log.of("collective-end", "backward-end", "forward-end")[-1:]
    return bool(last and last[0].get("raised"))


def _first_astray(each: list[list[Event]], place: int) -> int:
    """Where the ranks began to be in different calls: an extra one may have met another of its kind."""
    while place and len({own[place - 1]["at"] for own in each}) > 1:
        place -= 1
    return place


def _call(call: Event | None) -> tuple[str, ...] | None:
    return None if call is None else (call["op"], call.get("reduce", ""), call["at"])


def _uneven(case: Case, each: list[list[Event]], place: int) -> Fault:
    calls = [own[place] if place < len(own) else None for own in each]
    keys = [_call(call) for call in calls]
    # Who made the extra call meets the others again with its next one.
    extra = [
        rank
        for rank, own in enumerate(each)
        if calls[rank] is not None
        and (place + 1 >= len(own) or _call(own[place + 1]) in keys)
        and keys.count(keys[rank]) < case.world_size
    ]
    # DDP adds up on every rank by itself; what stands against it was called by hand.
    by_hand = [rank for rank, call in enumerate(calls) if call and call["k"] == "collective"]
    if by_hand and any(call and call["k"] == "backward" for call in calls):
        extra = by_hand
    # And it sends buffers in a forward, which evaluations on one rank alone forget.
    sending = [rank for rank, call in enumerate(calls) if call and call["k"] == "forward"]
    if sending and len(sending) < case.world_size:
        extra = sending
    ranks = extra if 0 < len(extra) < case.world_size else outliers(keys)
    ranks = [rank for rank in ranks if calls[rank] is not None] or [
        rank for rank, call in enumerate(calls) if call is not None
    ]
    call = calls[ranks[0]]
    assert call is not None
    others = [rank for rank in range(case.world_size) if rank not in ranks]
    there = ", ".join(
        f"rank {rank} "
        + (f"was in {calls[rank]['op']} at {calls[rank]['at']}" if calls[rank] else "called none")  # type: ignore[index]
        for rank in others
    )
    return Fault(
        what=f"{call['op']} at {call['at']} is entered by {name_ranks(ranks, case.world_size)} only.",
        at=call["at"],
        ranks=ranks,
        step=call["s"] + 1,
        why="every rank must enter every collective, in one order; a branch such as `if rank == 0` "
        "kept the others out, so it waits for ever or meets another one's numbers.",
        fix="call it on every rank, and keep only what is not collective inside the branch.",
        evidence=f"collective number {place + 1}: {there}"
        + ("; the run hung" if case.ordinary.hung else ""),
    )


def schedule(case: Case) -> Judgement:
    """A schedule that is through its course N times too early."""
    solo, log = case.solo.ranks[0], case.ranks[0]
    if not log.of("schedule"):
        return Sound("no schedule was stepped.")
    calls = [_scheduled(each) / max(each.steps, 1) for each in (solo, log)]
    if calls[1] / max(calls[0], 1e-9) < 1.5:
        return Sound(
            f"the schedule was stepped {calls[1]:.3g} times for each update, and {calls[0]:.3g} times "
            "by one process."
        )
    length_of_one, length = _length(solo), _length(log)
    if not length_of_one or not length:
        return Unknown(
            "the length of an epoch is not known, and so how far the schedule should be."
        )
    one, many = (_rates(each) for each in (solo, log))
    per_step = length_of_one / length
    early = agree = 0
    for step, rate in enumerate(many):
        here = _at(one, step * per_step)
        ahead = _at(one, step * per_step * case.world_size)
        if here is not None and ahead is not None and not _close(here, ahead):
            agree += _close(here, rate)
            early += _close(ahead, rate) and not _close(here, rate)
    if early < _MIN_EARLY or agree >= early:
        return Sound("the learning rate is that of one process at the same part of an epoch.")
    first = log.of("schedule")[0]
    return Fault(
        what=f"the schedule runs {case.world_size} times too fast.",
        at=first["at"],
        ranks=range(case.world_size),
        step=1,
        why=f"it is stepped {calls[1]:.3g} times for each update, and {calls[0]:.3g} times by one "
        "process, while its length is counted in this rank's updates.",
        fix="step it once for each optimizer step.",
        evidence=f"in {early} steps the learning rate was that of one process {case.world_size} times "
        "further on",
    )


def _length(log: RankLog) -> int | None:
    lengths = [log.loaders[name]["batches"] for name in log.training_loaders]
    return lengths[0] if lengths else None


def _scheduled(log: RankLog) -> int:
    """How often the schedule was stepped up to the last update: empty passes come after it."""
    events = log.of("schedule", "step")
    last = max((place for place, event in enumerate(events) if event["k"] == "step"), default=0)
    return sum(event["k"] == "schedule" for event in events[:last])


def _rates(log: RankLog) -> list[float]:
    """The first learning rate of each step, over the one that the schedule starts from.

    That one may rightly depend on the number of processes (linear scaling).
    """
    found = {
        event["s"]: float(event["lrs"][0]) / (event.get("base") or 1.0) for event in log.of("step")
    }
    return [found[step] for step in sorted(found)]


def _at(rates: list[float], position: float) -> float | None:
    """The learning rate between two steps, on a straight line."""
    below = int(position)
    if below + 1 >= len(rates):
        return None
    return rates[below] + (position - below) * (rates[below + 1] - rates[below])


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= _SAME_RATE * max(abs(a), abs(b))


def metrics(case: Case) -> Judgement:
    """A metric that ranks average, each over its own samples, though they have unequally many."""
    if case.replay is None:
        return Unknown(case.why_no_replay)
    if isinstance(surplus(case), Fault):
        return Unknown("samples are evaluated twice, so no metric can be right.")
    alone, together = _reduced(case.solo.ranks[0]), _reduced(case.replay.ranks[0])
    judged = beside = 0
    unclear: Event | None = None
    for number in sorted(alone.keys() & together.keys()):
        if len(alone[number]) != len(together[number]):
            return Unknown("the runs reduced different numbers of values while evaluating.")
        pairs = list(zip(alone[number], together[number], strict=True))
        shown = _shown(case.replay, number)
        if any(_like(x, shown) for one, many in pairs for x in _counted(one, many)):
            beside += len(pairs)
            continue  # the number of samples is added up beside them, so sums are what is divided
        judged += len(pairs)
        for place, (one, many) in enumerate(pairs):
            if _differs(one, many, pairs, case.world_size):
                if _means_of_shares(case.replay, number, place, one["results"]):
                    return _metric_fault(case, one, many)
                unclear = many
    if unclear is not None:
        return Unknown(
            f"what is reduced at {unclear['at']} is not what one process has, and no mean of the ranks' "
            "samples either: a time, a random number, or a mean of batches' means."
        )
    if not judged and not beside:
        return Unknown("no small value was reduced over ranks while evaluating.")
    said = [f"{judged} values that were reduced while evaluating are those of one process"] * (
        judged > 0
    ) + [f"{beside} were added up beside their number of samples"] * (beside > 0)
    return Sound(f"{'; '.join(said)}.")


def _means_of_shares(run: Run, number: int, place: int, expected: list[float]) -> bool:
    """Whether the ranks brought the means of their own samples: weighed, they give one process's mean."""
    calls = [_reduced(log).get(number, [])[place : place + 1] for log in run.ranks]
    if not all(call and call[0]["values"] for call in calls):
        return False
    counts = [_shown_to(log, number) for log in run.ranks]
    for k, wanted in enumerate(expected):
        own = [call[0]["values"][k] for call in calls if k < len(call[0]["values"])]
        total = sum(counts)
        if len(own) == len(counts) and total:
            mean = sum(n * x for n, x in zip(counts, own, strict=True)) / total
            if _like(mean, wanted) and not _like(sum(own) / len(own), wanted):
                return True
    return False


def surplus(case: Case) -> Judgement:
    """Samples that fill up uneven shards are evaluated, and counted."""
    judgement = evaluated_twice(case)
    if not isinstance(judgement, Fault) or case.replay is None:
        return judgement
    alone, together = _reduced(case.solo.ranks[0]), _reduced(case.replay.ranks[0])
    pairs = [
        (one, many)
        for number in alone.keys() & together.keys()
        for one, many in zip(alone[number], together[number], strict=False)
    ]
    if pairs and all(
        _like(x, y)
        for one, many in pairs
        for x, y in zip(one["results"], _over_ranks(many, len(one["results"])), strict=False)
    ):
        return Sound("shards were filled up, and the surplus left out: the sums are one process's.")
    return judgement


def _reduced(log: RankLog) -> dict[int, list[Event]]:
    """The metrics that were reduced in each evaluation, with their results."""
    found: dict[int, list[Event]] = {}
    inside: Event | None = None
    for event in log.of("collective", "collective-end"):
        if event["k"] == "collective":
            inside = event
        elif inside is not None and inside["evaluation"] is not None and event.get("values"):
            small = inside["op"] in ("all_reduce", "reduce", "all_gather", "all_gather_into_tensor")
            if small and len(event["values"]) <= _METRIC_VALUES:
                found.setdefault(inside["evaluation"], []).append(
                    {**inside, "results": event["values"]}
                )
    return found


def _shown(run: Run, evaluation: int) -> int:
    """Samples that all ranks had evaluated when they first reduced something in that evaluation."""
    return sum(_shown_to(log, evaluation) for log in run.ranks)


def _shown_to(log: RankLog, evaluation: int) -> int:
    total = 0
    for event in log.of("forward-end", "collective"):
        if event["evaluation"] == evaluation:
            if event["k"] == "collective":
                break
            total += event["n"] or 0
    return total


def _differs(one: Event, many: Event, pairs: list[tuple[Event, Event]], world_size: int) -> bool:
    """Whether a reduced value depends on the number of ranks in a way that no division mends."""
    a, b = one["results"], _over_ranks(many, len(one["results"]))
    for x, y in zip(a, b, strict=False):
        if _like(x, y) or _like(x * world_size, y):
            continue
        # A sum and its count may both have grown; what matters is the one over the other.
        others = [
            (u, v)
            for p, q in pairs
            for u, v in zip(p["results"], _over_ranks(q, len(p["results"])), strict=False)
        ]
        if any(u and v and (u, v) != (x, y) and _like(x / u, y / v) for u, v in others):
            continue
        return True
    return False


def _counted(one: Event, many: Event) -> list[float]:
    """What may be a number of samples: the results, also those that a gather leaves to be added up."""
    results: list[float] = many["results"]
    return results + _over_ranks(many, len(one["results"]))


def _over_ranks(event: Event, length: int) -> list[float]:
    """The results; those of a gather are added up over ranks."""
    values: list[float] = event["results"]
    if "gather" not in event["op"] or not length:
        return values
    return [sum(values[k::length]) for k in range(length)]


def _like(a: Any, b: Any) -> bool:
    return bool(abs(a - b) <= _SAME * max(abs(a), abs(b), 1e-12))


def _metric_fault(case: Case, one: Event, many: Event) -> Fault:
    count = case.world_size
    expected = one["results"][0]
    got = _over_ranks(many, len(one["results"]))[0]
    mean = got if many["reduce"] == "AVG" else got / count
    return Fault(
        what="a metric depends on the number of processes: each rank takes the mean of its own samples.",
        at=many["at"],
        ranks=range(count),
        step=many["s"] or None,
        why="ranks have unequally many samples, and the mean of their means weighs them alike.",
        fix="all_reduce the sum and the number of samples, and divide afterwards.",
        evidence=f"with the same weights and samples: {expected:.6g} on one process, {mean:.6g} as the "
        f"mean over {count}",
    )


__all__ = ["collectives", "metrics", "outliers", "schedule"]
