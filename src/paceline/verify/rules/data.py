"""Rules about samples: who is given which, how often, in what order, with what randomness."""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations, pairwise
from typing import Any

from paceline.verify.evidence import Event, RankLog
from paceline.verify.rules.judgement import (
    Case,
    Fault,
    Judgement,
    Sound,
    Unknown,
    say_ranks,
)

# Above what a sampler's padding at the end of an epoch can give.
_OVERLAP = 0.1
_MIN_HAND_STEPS = 3
_METRIC_VALUES = 16


def set_epoch(case: Case) -> Judgement:
    """Each epoch has the order of the first: `sampler.set_epoch` was not called."""
    log = case.ranks[0]
    judged = False
    for name in log.training_loaders:
        passes = _passes(log, name)
        told = log.loaders[name]["sharding"]
        if "epoch" not in told or not told.get("shuffle", True):
            continue
        if len(passes) < 2:
            return Unknown("the script made one pass over its training data.")
        judged = True
        for before, after in pairwise(passes):
            if before["epoch"] == after["epoch"]:
                return Fault(
                    what=f"every epoch has the same order: the sampler's epoch stays {after['epoch']}.",
                    at=after["at"],
                    ranks=range(case.world_size),
                    step=after["s"] + 1,
                    why=f"{log.loaders[name]['sampler']} shuffles by (seed, epoch), and was not told "
                    "the new one.",
                    fix="call sampler.set_epoch(epoch) before each pass over the loader.",
                    evidence=f"passes {before['lap'] + 1} and {after['lap'] + 1} both began with epoch "
                    f"{after['epoch']}",
                )
    if judged:
        return Sound("the sampler's epoch was new in each pass.")
    return Sound("no sampler of the training data needs to be told the epoch.")


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


def same_samples(case: Case) -> Judgement:
    """All ranks draw from the whole dataset: the work is done N times, not divided."""
    return _overlap(case, sharded=False)


def overlapping_shards(case: Case) -> Judgement:
    """Each rank has a shard, and the shards overlap, since they were cut from different orders."""
    return _overlap(case, sharded=True)


def _overlap(case: Case, *, sharded: bool) -> Judgement:
    loaders = [name for name in case.ranks[0].training_loaders if _everywhere(case, name)]
    if not loaders:
        return Sound("no loader gives shards.") if sharded else _by_hand(case)
    evidence = []
    for name in loaders:
        fetched = [_fetched(log, name, case.world_size) for log in case.ranks]
        if not all(fetched):
            return Unknown("the loader's workers were not forked, so their samples are not seen.")
        repeated = sum(len(each) - len(set(each)) for each in fetched)
        if repeated > case.world_size and any(each != fetched[0] for each in fetched):
            return Unknown(
                f"samples are drawn with replacement: {repeated} came to one rank twice."
            )
        if _other_data(fetched):
            evidence.append("the ranks read data of their own")
            continue
        is_shard = all(_is_sharded(log.loaders[name], case.world_size) for log in case.ranks)
        seen = Counter(key for each in fetched for key in set(each))
        common = [key for key, times in seen.items() if times > 1]
        # The pass may have ended, and samplers fill up its end with samples of its beginning.
        padding = case.world_size * 2
        shared = len(common) > max(padding, _OVERLAP * len(seen))
        if is_shard == sharded and shared:
            return _overlap_fault(case, name, len(common), len(seen), sharded=sharded)
        evidence.append(f"{len(seen)} samples of {len(case.ranks)} ranks, {len(common)} in common")
    return Sound("; ".join(evidence) + ".")


def _overlap_fault(case: Case, name: str, common: int, seen: int, *, sharded: bool) -> Fault:
    told = [log.loaders[name] for log in case.ranks]
    step = next((e["s"] + 1 for e in case.ranks[0].of("batch") if e["loader"] == name), 1)
    evidence = f"{common} of {seen} samples of the first pass were given to more than one rank"
    if sharded:
        seeds = [str(each["sharding"].get("seed")) for each in told]
        differ = len(set(seeds)) > 1
        return Fault(
            what="the ranks' shards overlap"
            + (f": their seeds are {', '.join(seeds)}." if differ else "."),
            at=told[0]["at"],
            ranks=range(case.world_size),
            step=step,
            why="each rank cuts its shard from an order of its own, so some samples are trained on "
            "twice and others never.",
            fix="give the sampler the same seed on every rank; the rank makes the difference.",
            evidence=evidence,
        )
    iterable = told[0]["iterable"]
    source = told[0]["dataset"] if iterable else told[0]["sampler"]
    return Fault(
        what=f"every rank trains on the whole dataset ({source}, no shards).",
        at=told[0]["at"],
        ranks=range(case.world_size),
        step=step,
        why=f"{case.world_size} processes do the work of one, {case.world_size} times.",
        fix="give each rank its part in __iter__, such as islice(samples, rank, None, world_size)."
        if iterable
        else "give the DataLoader sampler=DistributedSampler(dataset), and call set_epoch.",
        evidence=evidence,
    )


def _everywhere(case: Case, name: str) -> bool:
    return all(name in log.loaders for log in case.ranks)


def _is_sharded(told: Event, world_size: int) -> bool:
    if told["sharding"].get("num_replicas", 1) > 1:
        return True
    samples, root = told["samples"], told["root_samples"]
    return bool(samples and root and samples * world_size <= root + world_size)


def _other_data(fetched: list[list[Any]]) -> bool:
    """Whether one place holds different samples on different ranks, so that the data are not the same."""
    contents: dict[Any, set[str]] = {}
    for key in {key for each in fetched for key in each}:
        if isinstance(key, tuple):
            contents.setdefault(key[0], set()).add(key[1])
    return any(len(each) > 1 for each in contents.values())


def _fetched(log: RankLog, name: str, world_size: int) -> list[Any]:
    """The samples of the first pass, in order: place and content of each.

    Of a pass without an end, so many as a rank is given of the dataset: what follows may be another's.
    """
    # What was drawn at random differs from rank to rank; the label does not.
    of_loader = [event for event in log.fetches if event["loader"] == name]
    parts = [event["labels"] if event["drew"] else event["contents"] for event in of_loader]
    if log.loaders[name]["iterable"]:
        first = [p for event, p in zip(of_loader, parts, strict=True) if event["lap"] == 0]
        return _up_to_first_repeated([part for each in first for part in each if part])
    contents: dict[Any, str] = {}
    for event, each in zip(of_loader, parts, strict=True):
        if event["ids"] and len(event["ids"]) == len(each):
            contents.update(zip(event["ids"], each, strict=True))
    # A worker that outlives a pass does not know which one it is in; this process does.
    given = [e["ids"] or [] for e in log.of("batch") if e["loader"] == name and e["lap"] == 0]
    whole = log.loaders[name]["root_samples"]
    most = None if whole is None else -(-whole // world_size)
    return [(i, contents[i]) for ids in given for i in ids if i in contents][:most]


def _up_to_first_repeated(parts: list[str]) -> list[str]:
    """An iterable without an end begins anew where it gives what it gave."""
    return list(dict.fromkeys(parts))


def _by_hand(case: Case) -> Judgement:
    """A loop without loaders: the rows that went into the model."""
    rows = [
        [e["rows"] for e in log.of("forward-end") if e["trains"] and "rows" in e]
        for log in case.ranks
    ]
    count = min(map(len, rows))
    if count < _MIN_HAND_STEPS:
        return Unknown("no DataLoader gave the samples, and too few inputs of the model were seen.")
    distinct = {row for each in rows[0] for row in each}
    if all(each[:count] == rows[0][:count] for each in rows) and len(distinct) > _MIN_HAND_STEPS:
        first = next(e for e in case.ranks[0].of("forward-end") if e["trains"])
        return Fault(
            what="every rank trains on the same samples.",
            at=first["at"],
            ranks=range(case.world_size),
            step=1,
            why=f"{case.world_size} processes do the work of one, {case.world_size} times.",
            fix="give each rank its own part, such as indices[rank::world_size].",
            evidence=f"the model's inputs were equal on all ranks in {count} forwards",
        )
    return Sound(f"the model's inputs differed between ranks in {count} forwards.")


def evaluated_twice(case: Case) -> Judgement:
    """Samplers fill up uneven shards; in an evaluation some samples then count twice."""
    alone, together = (_evaluated(run.ranks) for run in (case.solo, case.ordinary))
    if not alone or not together:
        return Unknown("the script evaluated nothing in the watched steps.")
    for key in sorted(together):
        number, _ = key
        each = [rows for rows in together[key] if rows]
        if all(Counter(rows) == Counter(each[0]) for rows in each):
            continue  # every rank evaluates all of it, or one does
        total, distinct = sum(map(len, each)), len({row for rows in each for row in rows})
        of_one = [row for (n, _), ranks in alone.items() if n == number for row in ranks[0]]
        surplus = total - distinct - (len(of_one) - len(set(of_one)))
        if surplus <= 0:
            continue
        if _gathers(case.ranks[0], number):
            return Unknown(
                f"{total} samples were evaluated, {surplus} of them twice; the script gathers its "
                "predictions, and may cut off the surplus."
            )
        first = next(e for e in case.ranks[0].of("forward-end") if e["evaluation"] == number)
        return Fault(
            what=f"{surplus} samples are evaluated twice: {total} in place of {total - surplus}.",
            at=first["at"],
            ranks=range(case.world_size),
            step=first["s"] or None,
            why="the sampler gives every rank equally many, and repeats samples to get there.",
            fix="evaluate the indices [rank::world_size] of the dataset, unpadded, or cut off the surplus "
            "after gathering.",
            evidence=f"the ranks evaluated {' + '.join(str(len(rows)) for rows in each)} samples, "
            f"{distinct} different ones",
        )
    return Sound("the ranks together evaluated each sample once, or each all of them.")


def _evaluated(ranks: list[RankLog]) -> dict[tuple[int, str], list[list[str]]]:
    """What each rank showed to a model, for each evaluation and the loader that it came from."""
    found: dict[tuple[int, str], list[list[str]]] = {}
    for place, log in enumerate(ranks):
        loader = ""
        for event in log.of("batch", "forward-end"):
            if event["k"] == "batch":
                loader = event["loader"]
            elif loader in log.training_loaders:
                continue  # a teacher's forward, or a look at how training does
            elif event["evaluation"] is not None and event.get("rows"):
                key = (event["evaluation"], loader)
                found.setdefault(key, [[] for _ in ranks])[place] += event["rows"]
    return found


def _gathers(log: RankLog, evaluation: int) -> bool:
    return any(
        event["evaluation"] == evaluation
        and "gather" in event["op"]
        and (event["op"].endswith("object") or math.prod(event["shape"]) > _METRIC_VALUES)
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
    """ "1 worker", "4 workers". Collective: none."""
    return f"{count} worker{'s' if count != 1 else ''}"


def _worker(which: tuple[int, int | None]) -> str:
    rank, worker = which
    return f"rank {rank}" if worker is None else f"worker {worker} of rank {rank}"


__all__ = [
    "evaluated_twice",
    "overlapping_shards",
    "same_augmentation",
    "same_samples",
    "say_ranks",
    "set_epoch",
]
