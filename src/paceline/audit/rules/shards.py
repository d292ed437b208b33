"""Rules about shards: whether each rank is given a part of the samples, and parts that do not overlap."""

from __future__ import annotations

from collections import Counter
from typing import Any

from paceline.audit.evidence import Event, RankLog
from paceline.audit.rules.judgement import Case, Fault, Judgement, Sound, Unknown

# Above what a sampler's padding at the end of an epoch can give.
_OVERLAP = 0.1
_MIN_HAND_STEPS = 3
_MIN_COMMON = 3


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
        if any(map(_indistinct, fetched)):
            return Unknown("random changes of the samples hide which of them the ranks read.")
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
        if is_shard == sharded and (shared or (sharded and _other_seeds(case, name))):
            return _overlap_fault(case, name, len(common), len(seen), sharded=sharded)
        if not sharded and not is_shard and _whole(case, name):
            # Of many samples few are seen, and fewer come twice; those that do tell.
            if len(common) >= _MIN_COMMON:
                return _overlap_fault(case, name, len(common), len(seen), sharded=sharded)
            return Unknown(
                f"each rank goes through all {case.ranks[0].loaders[name]['samples']} samples of its "
                "dataset; whether they are the same ones was not seen in these steps."
            )
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


def _other_seeds(case: Case, name: str) -> bool:
    """Whether a sampler that cuts shards from a shuffled order has another seed on another rank."""
    told = [log.loaders[name]["sharding"] for log in case.ranks]
    shuffled = all(each.get("num_replicas", 1) > 1 and each.get("shuffle") for each in told)
    return shuffled and len({each.get("seed") for each in told}) > 1


def _whole(case: Case, name: str) -> bool:
    """Whether each rank's pass over a loader is one over its whole dataset."""
    for log in case.ranks:
        told = log.loaders[name]
        sizes = (told["samples"], told["batches"], told["batch_size"])
        if told["iterable"] or told["samples"] != told["root_samples"] or None in sizes:
            return False
        if told["sampler"] not in ("RandomSampler", "SequentialSampler"):
            return False
        if told["batches"] * told["batch_size"] <= told["samples"] - told["batch_size"]:
            return False
    return True


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
    drew = any(event["drew"] for event in of_loader)
    parts = [event["labels"] if drew else event["contents"] for event in of_loader]
    if log.loaders[name]["iterable"]:
        first = [p for event, p in zip(of_loader, parts, strict=True) if event["lap"] == 0]
        found = [part for each in first for part in each if part]
        return found if drew else _up_to_first_repeated(found)
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
    seen: set[str] = set()
    for place, part in enumerate(parts):
        if part in seen:
            return parts[:place]
        seen.add(part)
    return parts


def _indistinct(fetched: list[Any]) -> bool:
    """Whether samples are known by labels alone, and many share one."""
    return isinstance(fetched[0], str) and 2 * len(set(fetched)) < len(fetched)


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
