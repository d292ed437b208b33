"""Shards: whether the ranks divide the samples of each pass, as sets of samples.

A sample is known by its index, if it has the same content on all ranks that read it; in a stream by its
content; without a DataLoader by the rows that the models are given. Samples that are augmented at random are
compared by their labels.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from paceline.audit.events import LoaderSeen, SeedSet
from paceline.audit.evidence import RankLog
from paceline.audit.rules.rule import Case, Finding, Judgement, NoFault, NotJudged

# Each of them gives a sample once in a pass, but for the padding of `DistributedSampler`: fewer than one
# sample for each rank. All others may pad the last batch of each rank.
_OF_TORCH = ("DistributedSampler", "RandomSampler", "SequentialSampler")
# Values that are computed in 16 bits or TF32 are rounded by less than this part.
_ROUNDING = torch.finfo(torch.float16).eps

_TWICE = "some samples are trained on twice, and others may never be."
_CUT_STREAM = (
    "give each rank its part of the stream before it is shuffled, such as "
    "islice(samples, rank, None, world_size)."
)


def shards(case: Case) -> Judgement:
    """Whether the ranks read the same samples in a pass, or leave out some of them."""
    names = [
        name
        for name in case.ranks[0].training_loaders
        if all(name in log.loaders for log in case.ranks)
    ]
    found = [_judge_loader(case, name) for name in names]
    if not found or not all(log.fetches for log in case.ranks):
        by_inputs = _judge_inputs(case)
        found = [by_inputs] if isinstance(by_inputs, Finding) or not found else found
    if all(isinstance(each, NoFault) for each in found):
        return NoFault(
            "; ".join(each.evidence for each in found if isinstance(each, NoFault)) + "."
        )
    if case.divides_equal_batches:
        return NoFault("each rank gives the model its own part of each batch.")
    findings = [each for each in found if isinstance(each, Finding)]
    if not findings:
        return next(each for each in found if isinstance(each, NotJudged))
    if case.parts_of_equal_batches:
        return NotJudged("from equal batches, the ranks compute different inputs or losses.")
    if not case.trains_together:
        return NotJudged("no exchange between the ranks was seen: each may train a model alone.")
    return min(findings, key=lambda each: each.is_note)


def _has_own_inputs(case: Case) -> bool:
    """Whether no two ranks have given their models the same row."""
    of_ranks = [{row for e in log.training_forwards for row in e.rows or ()} for log in case.ranks]
    return all(of_ranks) and len(set().union(*of_ranks)) == sum(map(len, of_ranks))


class _Read(NamedTuple):
    """What a rank has read with a loader of indexed samples.

    Attributes:
        contents: The digest of each sample, by its index.
        again: Whether a sample was read twice.
        changes: Whether a sample had other content when it was read again.
        magnitudes: See `SamplesLoaded`.
    """

    contents: dict[Any, int]
    again: bool
    changes: bool
    magnitudes: dict[Any, float]


def _read(log: RankLog, name: str, kind: str) -> _Read:
    contents: dict[Any, int] = {}
    magnitudes: dict[Any, float] = {}
    again = changes = False
    for event in log.fetches:
        digests = event.labels if kind == "labels" else event.contents
        ids = event.ids or []
        if event.loader != name or len(ids) != len(digests):
            continue
        for index, digest in zip(ids, digests, strict=True):
            again |= index in contents
            changes |= contents.setdefault(index, digest) != digest
        magnitudes.update(zip(ids, event.magnitudes, strict=False))
    return _Read(contents, again, changes, magnitudes)


def _judge_loader(case: Case, name: str) -> Judgement:
    loaders = [log.loaders[name] for log in case.ranks]
    replicas = {each.sharding.get("num_replicas", 1) for each in loaders}
    if not replicas <= {1, case.world_size}:
        return NotJudged("the sampler divides the samples over groups of ranks.")
    if loaders[0].iterable:
        streams = [_stream(log, name) for log in case.ranks]
        if not all(streams):
            return NotJudged("the loading of the samples was not recorded.")
        return _judge_pass(case, name, 0, streams, _stream(case.solo.ranks[0], name))
    is_random = any(
        event.drew for log in case.ranks for event in log.fetches if event.loader == name
    )
    is_random |= any(_read(log, name, "contents").changes for log in case.ranks)
    kind = "labels" if is_random else "contents"
    of_ranks = [_read(log, name, kind) for log in case.ranks]
    if not all(each.contents for each in of_ranks):
        return NotJudged("the loading of the samples was not recorded.")
    is_divided = replicas == {case.world_size}
    if is_random and not is_divided and not any(any(own.contents.values()) for own in of_ranks):
        return NotJudged("the samples change at random, and cannot be told apart.")
    other = _judge_contents(case, name, of_ranks, is_divided=is_divided)
    if other is not None:
        return other
    if is_divided and not is_random and (note := _judge_values(case, name, of_ranks)) is not None:
        return note
    solo = case.solo.ranks[0]
    first: Judgement = NotJudged("no pass was seen on all ranks.")
    for number in range(len(case.ranks[0].passes)):
        passes = [log.passes.get((name, number)) for log in case.ranks]
        begun = [each for each in passes if each]
        # A later pass that one rank did not end may be shorter on it.
        is_seen = len(begun) == len(passes) and (number == 0 or all(p.ended for p in begun))
        if not is_seen or len({each.begin.epoch for each in begun}) > 1:
            continue  # other epochs are judged by "order of passes"
        samples = [_samples(log, name, number, case.world_size) for log in case.ranks]
        judged = _judge_pass(case, name, number, samples, _samples(solo, name, number, 1))
        if isinstance(judged, Finding):
            return judged
        first = judged if number == 0 else first
    return first


def _samples(log: RankLog, name: str, number: int, world_size: int) -> list[Any]:
    """The indices of a pass, in order; of one without an end, at most the rank's share of the dataset."""
    given = log.passes.get((name, number))
    if given is None:
        return []
    whole = log.loaders[name].root_samples
    share = None if given.ended or whole is None else -(-whole // world_size)
    return given.ids[:share]


def _stream(log: RankLog, name: str) -> list[Any]:
    """The digests of the samples of the first pass."""
    events = (event for event in log.fetches if event.loader == name and event.pass_number == 0)
    return [content for event in events for content in event.contents]


def _judge_contents(
    case: Case, name: str, of_ranks: Sequence[_Read], *, is_divided: bool
) -> Judgement | None:
    """The judgement if an index gives different samples on different ranks; None if it does not."""
    known = Counter(index for own in of_ranks for index in own.contents)
    shared = [index for index, times in known.items() if times > 1]
    differing = [
        i for i in shared if len({own.contents[i] for own in of_ranks if i in own.contents}) > 1
    ]
    if not differing:
        return None
    # A sample that no rank has read again may change at random.
    is_stable = all(own.again for own in of_ranks)
    if not (is_divided and is_stable and all(log.of(SeedSet) for log in case.ranks)):
        if len(differing) == len(shared):
            return NoFault("each rank reads data of its own")
        return NotJudged("one index gives different samples on different ranks.")
    return Finding(
        what="the ranks have different datasets, which one sampler divides.",
        at=case.ranks[0].loaders[name].at,
        why="the sampler gives each index to one rank. If the ranks number, select or normalise the samples "
        "in different ways, some samples are never used, or are used with other values.",
        fix="build the dataset alike on all ranks, with one seed and from all samples; the sampler then "
        "divides it.",
        evidence=f"sample {differing[0]} is not the same on all ranks that read it",
        effect=f"{len(differing)} of {len(shared)} samples that several ranks read differ",
    )


def _judge_values(case: Case, name: str, of_ranks: Sequence[_Read]) -> Finding | None:
    """A note if no sample of the ranks is one of one process, and their values differ."""
    solo = _read(case.solo.ranks[0], name, "contents")
    contents = {content for own in of_ranks for content in own.contents.values()}
    values = {i: value for own in of_ranks for i, value in own.magnitudes.items()}
    both = [i for i in values if i in solo.magnitudes]
    changed = [
        i for i in both if not math.isclose(values[i], solo.magnitudes[i], rel_tol=_ROUNDING)
    ]
    is_stable = solo.again and not solo.changes
    if not changed or not is_stable or contents.intersection(solo.contents.values()):
        return None
    i = changed[0]
    return Finding(
        what="the values of the samples depend on the number of processes.",
        at=case.ranks[0].loaders[name].at,
        why="the ranks have one dataset, but not that of one process. Often a statistic of the ranks' parts, "
        "such as the deviation of a normaliser, is averaged, or gathered values are in a wrong order.",
        fix="compute from the whole dataset, or from sums and counts; put gathered parts at the indices that "
        "they were computed from.",
        evidence=f"sample {i}: the absolute values of its floats sum up to {solo.magnitudes[i]:.6g} on one "
        f"process, and to {values[i]:.6g} on {case.world_size}",
        effect=f"{len(changed)} of {len(both)} samples have other values",
        is_note=True,
    )


def _judge_pass(
    case: Case, name: str, number: int, samples: list[list[Any]], solo: list[Any]
) -> Judgement:
    """Whether the ranks have read the same samples in a pass, or one process has read others."""
    loaders = [log.loaders[name] for log in case.ranks]
    loader, world_size = loaders[0], case.world_size
    of_torch = loader.sampler in _OF_TORCH and not loader.iterable
    is_divided = all(each.sharding.get("num_replicas") == world_size for each in loaders)
    draws_again = loader.sharding.get("replacement") or any(map(_is_resampled, samples))
    if _is_resampled(solo) or (draws_again and any(own != samples[0] for own in samples)):
        return NotJudged("samples are drawn with replacement, or repeated on purpose.")
    if loader.iterable:
        samples = [_up_to_first_repeated(own) for own in samples]
    seen = Counter(key for own in samples for key in set(own))
    shared = sum(times > 1 for times in seen.values())
    padding = world_size if of_torch else world_size * (loader.batch_size or 1)
    # Of the same samples, each rank may train on another part, or at another level of noise.
    is_repeated = not _has_own_inputs(case)
    cause = _cause(loaders, samples, shared, is_divided=is_divided, is_repeated=is_repeated)
    if shared >= padding or cause.is_certain:
        return Finding(
            what=cause.what,
            at=loader.at,
            step=_step(case.ranks[0], name, number),
            why=cause.why,
            fix=_CUT_STREAM if loader.iterable else cause.fix,
            evidence=f"{shared} of {len(seen)} samples of pass {number + 1} were read by more than one rank",
            effect=f"{shared / max(len(seen), 1):.0%} of the samples are seen by more than one rank",
            # Without a cause, the ranks may share samples on purpose, or draw them at random.
            is_note=not cause.is_proven,
        )
    if of_torch and _reads_whole(loader):
        return NotJudged(
            f"each rank iterates over all {loader.samples} samples of its dataset; these steps do not show "
            "whether they are the same samples."
        )
    logs = (case.solo.ranks[0], *case.ranks)
    passes = [log.passes.get((name, number)) for log in logs]
    missing = set(solo) - seen.keys()
    # `drop_last` leaves out less than one batch of each rank.
    if (
        len(missing) >= world_size * (loader.batch_size or 1)
        and seen.keys() <= set(solo)
        and all(each and each.ended for each in passes)
    ):
        return _missing(case, name, number, missing=len(missing), whole=len(set(solo)))
    return NoFault(f"{len(seen)} samples of {world_size} ranks, {shared} in common")


class _Cause(NamedTuple):
    """Why ranks read the same samples.

    Attributes:
        is_certain: Whether it is a fault, even if few common samples were seen.
        is_proven: Whether it is one, if the common samples are more than padding.
    """

    what: str
    why: str
    fix: str
    is_certain: bool = False
    is_proven: bool = True


def _cause(
    loaders: Sequence[LoaderSeen],
    samples: list[list[Any]],
    shared: int,
    *,
    is_divided: bool,
    is_repeated: bool,
) -> _Cause:
    loader = loaders[0]
    seeds = [each.sharding.get("seed") for each in loaders]
    if is_divided and len(set(seeds)) > 1 and all(each.sharding.get("shuffle") for each in loaders):
        return _Cause(
            f"the ranks' shards overlap: their seeds are {', '.join(map(str, seeds))}.",
            f"each rank cuts its shard from a different order: {_TWICE}",
            "give the sampler the same seed on every rank; only its rank must differ.",
            is_certain=True,
        )
    if is_divided and len({each.split for each in loaders}) > 1:
        return _Cause(
            "the ranks' shards overlap: each rank has split the dataset in a different way.",
            f"one sampler divides the parts of different splits: {_TWICE}",
            "random_split(..., generator=torch.Generator().manual_seed(0)) on all ranks.",
            is_certain=shared > 0,
        )
    sets = list(map(set, samples))
    reads_whole = loader.sampler in _OF_TORCH and not is_divided and _reads_whole(loader)
    if reads_whole or all(own == sets[0] for own in sets):
        source = loader.dataset if loader.iterable else loader.sampler
        return _Cause(
            f"every rank trains on the whole dataset ({source}, no shards).",
            f"{len(loaders)} processes repeat the work of one.",
            "give the DataLoader sampler=DistributedSampler(dataset), and call set_epoch.",
            is_proven=is_repeated,
        )
    return _Cause(
        "the ranks' shards overlap.",
        f"the ranks choose their samples in different ways: {_TWICE}",
        "cut the shards from one order: the same seed, and the same values, on every rank.",
        is_proven=False,
    )


def _missing(case: Case, name: str, number: int, *, missing: int, whole: int) -> Finding:
    return Finding(
        what="the ranks together leave out samples.",
        at=case.ranks[0].loaders[name].at,
        step=_step(case.ranks[0], name, number),
        why="often the samples are divided twice, or a position that counts the samples of all ranks is used "
        "for those of one rank.",
        fix="give each rank its part once, and compute positions in the order of all samples before.",
        evidence=f"in pass {number + 1}, {missing} of {whole} samples of one process were read by no rank",
        effect=f"{missing / whole:.0%} of the samples are not used in this pass",
        is_note=True,
    )


def _step(log: RankLog, name: str, number: int) -> int:
    """The first step that gets a batch of a pass."""
    given = log.passes.get((name, number))
    return given.begin.steps_done + 1 if given else 1


def _reads_whole(loader: LoaderSeen) -> bool:
    """Whether a pass over the loader reads its whole dataset."""
    samples, batches, size = loader.samples, loader.batches, loader.batch_size
    if samples is None or batches is None or size is None or samples != loader.root_samples:
        return False
    return batches * size > samples - size


def _is_resampled(samples: list[Any]) -> bool:
    """Whether new samples follow a repeated one. A pass that begins again has read all before."""
    return len(set(samples)) > len(_up_to_first_repeated(samples))


def _up_to_first_repeated(samples: list[Any]) -> list[Any]:
    seen: set[Any] = set()
    for number, key in enumerate(samples):
        if key in seen:
            return samples[:number]
        seen.add(key)
    return samples


def _judge_inputs(case: Case) -> Judgement:
    """Where the loading of samples is not known: whether all ranks give their models the same rows."""
    rows = [_changing_rows(log) for log in case.ranks]
    count = min(map(len, rows))
    if count < 2:
        return NotJudged("without a DataLoader, too few inputs of the model were seen.")
    same = all(own[:count] == rows[0][:count] for own in rows)
    # One pass only: over several shuffled passes, one rank's shards add up to the whole dataset.
    passes = [{row for each in _first_pass(own) for row in each} for own in rows]
    # Of few different rows, each batch may have all.
    repeats = any(len(set(batch)) < len(batch) for own in rows for batch in own)
    if not same and (repeats or any(own != passes[0] for own in passes)):
        return NoFault(f"the model's inputs differed between ranks in {count} forwards")
    return Finding(
        what="every rank trains on the same samples.",
        at=case.ranks[0].training_forwards[0].at,
        step=1,
        why=f"{case.world_size} processes repeat the work of one.",
        fix="give each rank its own part, such as indices[rank::world_size].",
        evidence=f"all ranks gave the model the same {len(passes[0])} rows in {count} forwards",
        effect="100 % of the samples are seen by all ranks",
    )


def _changing_rows(log: RankLog) -> list[list[int]]:
    """The inputs of the models whose input changes. Others are given a constant first, such as a grid.

    A single row may be computed, such as the time of a schedule.
    """
    of_models: dict[int, set[tuple[int, ...]]] = {}
    for event in log.training_forwards:
        of_models.setdefault(event.model, set()).add(tuple(event.rows or ()))
    return [
        e.rows
        for e in log.training_forwards
        if e.rows and len(e.rows) > 1 and len(of_models[e.model]) > 1
    ]


def _first_pass(forwards: list[list[int]]) -> list[list[int]]:
    """The inputs up to the first repeated row. A batch that is given again as a whole is left out."""
    kept: list[list[int]] = []
    seen: set[int] = set()
    for batch in forwards:
        if batch in kept:
            continue
        if not seen.isdisjoint(batch):
            break
        kept.append(batch)
        seen.update(batch)
    return kept
