"""Rules about samples: in what order, with what randomness, and how often in an evaluation."""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations, pairwise
from typing import Any

from paceline.audit.evidence import Event, RankLog
from paceline.audit.rules.judgement import Case, Fault, Judgement, Sound, Unknown

_METRIC_VALUES = 16


def set_epoch(case: Case) -> Judgement:
    """Each epoch has the order of the first: `sampler.set_epoch` was not called."""
    log = case.ranks[0]
    judged = False
    for name in log.training_loaders:
        passes = _passes(log, name)
        told = log.loaders[name]["sharding"]
        has_epoch = "epoch" in told and told.get("shuffle", True)
        if told.get("shuffle") is False or not (has_epoch or log.loaders[name].get("takes_epoch")):
            continue
        if len(passes) < 2:
            return Unknown("the script made one pass over its training data.")
        judged = True
        for before, after in pairwise(passes):
            same = _same_order(log, name, before["lap"], after["lap"])
            if same or (same is None and has_epoch and before["epoch"] == after["epoch"]):
                return Fault(
                    what="every epoch has the same order"
                    + (f": the sampler's epoch stays {after['epoch']}." if has_epoch else "."),
                    at=after["at"],
                    ranks=range(case.world_size),
                    step=after["s"] + 1,
                    why=f"{log.loaders[name]['sampler' if has_epoch else 'dataset']} shuffles by (seed, "
                    "epoch), and was not told the new one.",
                    fix=f"call {'sampler' if has_epoch else 'dataset'}.set_epoch(epoch) before each pass "
                    "over the loader.",
                    evidence=f"passes {before['lap'] + 1} and {after['lap'] + 1} gave the same samples in "
                    "the same order"
                    if same
                    else f"passes {before['lap'] + 1} and {after['lap'] + 1} both began with epoch "
                    f"{after['epoch']}",
                )
    if judged:
        return Sound("each pass had an order of its own.")
    return Sound("no sampler of the training data needs to be told the epoch.")


def _same_order(log: RankLog, name: str, one: int, other: int) -> bool | None:
    """Whether two passes began with the same samples in the same order; None if that was not seen."""
    laps = log.laps(name)
    a, b = (
        [event["ids"] or event.get("content") for event in laps.get(lap, [])]
        for lap in (one, other)
    )
    common = min(len(a), len(b))
    if common < 2:
        return None
    places = [i for ids in a if isinstance(ids, list) for i in ids]
    # Not shuffled at all is no epoch that was forgotten.
    return a[:common] == b[:common] and (not places or places != sorted(places))


def _passes(log: RankLog, name: str) -> list[Event]:
    """The passes over a loader that were trained on, and more than a look at the first batch."""
    given: Counter[int] = Counter()
    trained: set[int] = set()
    last: Event | None = None
    for event in log.of("batch", "backward"):
        if event["k"] == "batch":
            last = event
            given[event["lap"]] += event["loader"] == name
        elif last is not None and last["loader"] == name:
            trained.add(last["lap"])
    ended = {event["lap"] for event in log.of("pass-end") if event["loader"] == name}
    begun = [event for event in log.of("iter") if event["loader"] == name]
    return [
        event
        for event in begun
        if event["lap"] in trained and (given[event["lap"]] > 1 or event["lap"] in ended)
    ]


def evaluated_twice(case: Case) -> Judgement:
    """Samplers fill up uneven shards; in an evaluation some samples then count twice."""
    alone, together = (_evaluated(run.ranks) for run in (case.solo, case.ordinary))
    if not alone or not together:
        return Unknown("the script evaluated nothing in the watched steps.")
    unlike = False
    for key in sorted(together):
        number, loader, _ = key
        each = [rows for rows in together[key] if rows]
        if all(Counter(rows) == Counter(each[0]) for rows in each):
            continue  # every rank evaluates all of it, or one does
        shown = {row for rows in each for row in rows}
        total, surplus = sum(map(len, each)), sum(map(len, each)) - len(shown)
        if not _known_by_place(case.ranks[0], loader):
            # By their content: equal ones may be in the data, as the run of one process shows.
            of_one = next(
                (r[0] for k, r in alone.items() if k[1] == loader and set(r[0]) == shown), None
            )
            of_one = of_one if loader else None  # what was made in the loop may be anything
            unlike = unlike or of_one is None
            surplus -= len(of_one) - len(shown) if of_one is not None else surplus
        if surplus <= 0:
            continue
        if _gathers(case.ranks[0], number):
            return Unknown(
                f"{total} samples were evaluated, {surplus} of them twice; the script gathers its "
                "predictions, and may cut off the surplus."
            )
        first = next(e for e in case.ranks[0].of("forward-end") if e["evaluation"] == number)
        return Fault(
            what=f"{_samples(surplus)} evaluated twice: {total} in place of {total - surplus}.",
            at=first["at"],
            ranks=range(case.world_size),
            step=first["s"] or None,
            why="the sampler gives every rank equally many, and repeats samples to get there.",
            fix="evaluate the indices [rank::world_size] of the dataset, unpadded, or cut off the surplus "
            "after gathering.",
            evidence=f"the ranks evaluated {' + '.join(str(len(rows)) for rows in each)} samples, "
            f"{len(shown)} different ones",
        )
    if unlike:
        return Unknown("which samples the models were shown without gradient cannot be told apart.")
    return Sound("the ranks together evaluated each sample once, or each all of them.")


def _samples(count: int) -> str:
    return "1 sample is" if count == 1 else f"{count} samples are"


def _known_by_place(log: RankLog, loader: str) -> bool:
    return any(event["loader"] == loader and event["ids"] for event in log.of("batch"))


def _evaluated(ranks: list[RankLog]) -> dict[tuple[int, str, int], list[list[Any]]]:
    """What each rank evaluated, for each evaluation, loader and pass of it: places, or else contents.

    A batch that several models are shown counts once.
    """
    found: dict[tuple[int, str, int], list[list[Any]]] = {}
    for place, log in enumerate(ranks):
        batch: Event = {"loader": "", "lap": 0, "ids": None}
        counted: dict[Any, int] = {}
        for event in log.of("batch", "forward-end"):
            if event["k"] == "batch":
                batch = event
                counted.clear()
            elif batch["loader"] in log.training_loaders:
                continue  # a teacher's forward, or a look at how training does
            elif event["evaluation"] is not None and event.get("rows"):
                if batch["loader"] and counted.setdefault("first", event["m"]) != event["m"]:
                    continue
                if batch["ids"] and "ids" in counted:
                    continue  # the rest of a batch that is shown in parts
                counted["ids"] = 1
                key = (event["evaluation"], batch["loader"], batch["lap"])
                rows = batch["ids"] or event["rows"]
                found.setdefault(key, [[] for _ in ranks])[place] += rows
    return found


def _gathers(log: RankLog, evaluation: int) -> bool:
    return any(
        event["evaluation"] == evaluation
        and "gather" in event["op"]
        and max(event.get("items", 0), math.prod(event["shape"])) > _METRIC_VALUES
        for event in log.of("collective")
    )


def same_augmentation(case: Case) -> Judgement:
    """Workers, or ranks, that draw the same random numbers for their samples."""
    training = set(case.ranks[0].training_loaders)
    firsts: dict[tuple[int, int | None], Event] = {}
    for log in case.ranks:
        for event in log.fetches:
            if event["loader"] in training and event["drew"]:
                firsts.setdefault((log.rank, event["worker"]), event)
    if not firsts:
        if not all(log.fetches for log in case.ranks):
            return Unknown("no sample was seen while it was loaded.")
        return Sound("loading a sample draws no random numbers from a shared stream.")
    for (one, first), (other, second) in combinations(firsts.items(), 2):
        streams = [
            stream
            for stream, after in first["drew"].items()
            if second["drew"].get(stream) == after
            and second["random"].get(stream) == first["random"].get(stream)
        ]
        if streams:
            return Fault(
                what=f"{_worker(one)} and {_worker(other)} augment with the same random numbers.",
                at=case.ranks[0].loaders[first["loader"]]["at"],
                ranks=sorted({one[0], other[0]}),
                step=1,
                why=f"the stream '{streams[0]}' had the same state in both when their first samples "
                "were made.",
                fix="seed by rank and worker: torch.manual_seed(seed + rank) before the loader, and in "
                "a dataset's own generator torch.utils.data.get_worker_info().seed.",
                evidence=f"{streams[0]} state {first['random'][streams[0]][:8]} in both",
            )
    return Sound(f"{say_count(len(firsts))} drew from different random states.")


def say_count(count: int) -> str:
    """ "1 worker", "4 workers"."""
    return f"{count} worker{'s' if count != 1 else ''}"


def _worker(which: tuple[int, int | None]) -> str:
    rank, worker = which
    return f"rank {rank}" if worker is None else f"worker {worker} of rank {rank}"


__all__ = [
    "evaluated_twice",
    "same_augmentation",
    "set_epoch",
]
