"""Shards: whether each rank gets its own part of the samples."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from paceline.audit.events import BatchGiven, LoaderSeen, SeedSet
from paceline.audit.evidence import RankLog
from paceline.audit.rules.rule import Case, Finding, Judgement, NoFault, NotJudged

# The padding of a sampler causes a smaller share of common samples. See broken/03_stream_overlaps.
_OVERLAP = 0.1
# The first passes of a sampler of the script that divides the dataset may together be larger than it by this
# part.
_SLACK = 0.1
# Of the samples that two runs read, more than this part with equal values: the same samples, at other
# indices.
_FOUND_AGAIN = 0.1
# Ranks that read the same stream have at least this share of their samples in common.
# A quarter changes broken/03_stream_overlaps. See broken/02_batches_shifted.
_WHOLE = 0.9
# Fewer common samples may be due to chance or to padding. See broken/02_many_samples.
_MIN_COMMON = 3
# A loop without loaders is judged only if each rank ran at least this many forwards.
# See broken/85_spawned_workers.
_MIN_FORWARDS = 3
# Values of one sample that differ by less differ by rounding.
_close = partial(math.isclose, rel_tol=1e-3)
# So many samples with other values are no accident (broken/90_normalised_parts).
_MIN_CHANGED = 16
_CUT_STREAM = (
    "give each rank its part of the stream, such as islice(samples, rank, None, world_size)"
)


_PARTS = NotJudged(
    "from equal batches, the ranks compute different inputs or losses: each may train on its own part "
    "of each sample, such as a part of each sequence."
)


def whole_dataset(case: Case) -> Judgement:
    """Every rank draws from the whole dataset: N ranks repeat the work of one."""
    judgement = _judge_loaders(case, in_shards=False)
    if judgement is None:
        judgement = _inputs_of_models(case)
    elif isinstance(judgement, NotJudged) and not all(log.fetches for log in case.ranks):
        by_inputs = _inputs_of_models(case)
        judgement = by_inputs if isinstance(by_inputs, Finding) else judgement
    if not isinstance(judgement, Finding):
        return judgement
    if case.divides_equal_batches:
        return NoFault("each rank gives the model its own part of each batch.")
    if case.parts_of_equal_batches:
        return _PARTS
    if not case.trains_together:
        return NotJudged(
            "each rank trained alone on the same samples: the reduction of the gradients was forgotten, or "
            "all ranks prepare something alike, such as a teacher. To watch what follows, give more --steps.",
            is_open=True,
        )
    return judgement


def overlapping_shards(case: Case) -> Judgement:
    """Each rank has a shard, but the shards were cut from different orders."""
    judgement = _judge_loaders(case, in_shards=True) or NoFault("no loader gives shards.")
    return _PARTS if isinstance(judgement, Finding) and case.parts_of_equal_batches else judgement


def _judge_loaders(case: Case, *, in_shards: bool) -> Judgement | None:
    """The judgement of the loaders that give shards, or of the others; None without a loader of all ranks."""
    figures = []
    not_judged: NotJudged | None = None
    for name in case.ranks[0].training_loaders:
        if all(name in log.loaders for log in case.ranks):
            shards, judgement = _judge_loader(case, name)
            if isinstance(judgement, NoFault):
                figures.append(judgement.evidence)
            elif shards not in (None, in_shards):
                figures.append("the samples of a loader are judged by another rule")
            elif isinstance(judgement, Finding):
                return judgement
            else:
                not_judged = not_judged or judgement
    return not_judged or (NoFault("; ".join(figures) + ".") if figures else None)


def _judge_loader(case: Case, name: str) -> tuple[bool | None, Judgement]:
    """Whether a loader gives shards, None if unknown; and whether the ranks share too many samples."""
    loaders = [log.loaders[name] for log in case.ranks]
    samples = [_samples_read(log, name, case.world_size) for log in case.ranks]
    if not all(samples):
        why = "the workers are not forked, or torch lacks a private name."
        return None, NotJudged(f"the loading of the samples was not recorded: {why}")
    if any(map(_known_by_few_labels, samples)):
        return None, NotJudged("the samples change at random, and cannot be told apart.")
    if any(map(_is_resampled, samples)) and any(each != samples[0] for each in samples):
        why = "samples are drawn with replacement, so the ranks share some by chance."
        return None, NotJudged(why)
    if loaders[0].iterable:
        samples = [_up_to_first_repeated(each) for each in samples]
    if _is_different_data(samples):
        return True, NoFault("each rank reads its own data")
    overlap = _overlap(case, name, samples)
    if not _gives_shards(case, name, samples):
        return False, _judge_whole(loaders, overlap)
    fault = _fault_of_shards(loaders, overlap) or _fault_of_later_pass(case, name)
    if fault is not None and _repeats_samples(case, name):
        return True, NotJudged(
            "a pass of one process repeats samples, so the ranks may share samples on purpose."
        )
    return True, fault or overlap.no_fault()


@dataclass(frozen=True)
class _Overlap:
    """How many samples of the first pass the ranks have in common."""

    world_size: int
    common: int
    seen: int  # by any rank
    step: int  # the first that got a batch of the loader, from 1

    @property
    def is_large(self) -> bool:
        """Whether more samples are common than the padding of samplers explains."""
        return _is_large(self.common, self.seen, self.world_size)

    def no_fault(self) -> NoFault:
        return NoFault(f"{self.seen} samples of {self.world_size} ranks, {self.common} in common")

    def fault(self, *, what: str, at: str, why: str, fix: str, effect: str = "") -> Finding:
        return Finding(
            what=what,
            at=at,
            why=why,
            fix=fix,
            step=self.step,
            evidence=f"{self.common} of {self.seen} samples of the first pass were read by more than one "
            "rank",
            effect=effect
            or f"{self.common / self.seen:.0%} of the samples are seen by more than one rank",
        )


def _is_large(common: int, seen: int, world_size: int) -> bool:
    """Samplers pad the end of a pass with samples of its beginning, which are then read twice."""
    return common > max(world_size * 2, _OVERLAP * seen)


def _overlap(case: Case, name: str, samples: list[list[Any]]) -> _Overlap:
    seen = Counter(key for each in samples for key in set(each))
    common = sum(times > 1 for times in seen.values())
    batches = (e.steps_done + 1 for e in case.ranks[0].of(BatchGiven) if e.loader == name)
    return _Overlap(case.world_size, common, len(seen), next(batches, 1))


def _repeats_samples(case: Case, name: str) -> bool:
    """Whether one process reads a sample several times in its first pass, as with repeated augmentation.

    See sound/03_repeated_augmentation.
    """
    solo = case.solo.ranks[0]
    samples = _samples_read(solo, name, 1) if name in solo.loaders else []
    again = len(samples) - len(set(samples))
    return _is_resampled(samples) and _is_large(again, len(set(samples)), case.world_size)


def _gives_shards(case: Case, name: str, samples: list[list[Any]]) -> bool:
    """Whether the loader is meant to give each rank a part of the dataset or stream."""
    loaders = [log.loaders[name] for log in case.ranks]
    if loaders[0].iterable:  # of three ranks, each may share all its samples with one of the others
        of_all = set[Any].intersection(*map(set, samples))
        return len(of_all) < _WHOLE * min(len(set(each)) for each in samples)
    return all(_is_sharded(each, case.world_size) for each in loaders) or _reads_a_part(case, name)


def _fault_of_shards(loaders: list[LoaderSeen], overlap: _Overlap) -> Finding | None:
    """The fault if the shards of the first pass were cut from different orders of the samples."""
    samplers = [each.sharding for each in loaders]
    seeds = [each.get("seed") for each in samplers]
    seeds_differ = len(set(seeds)) > 1
    splits_differ = len({each.split for each in loaders}) > 1
    # Not within groups of ranks, each of which may have its own subset and seed.
    is_cut = all(each.get("num_replicas") == overlap.world_size for each in samplers)
    # Few steps may show few common samples, or none.
    other_orders = seeds_differ and all(each.get("shuffle") for each in samplers)
    other_subsets = splits_differ and overlap.common > 0
    if not (overlap.is_large or (is_cut and (other_orders or other_subsets))):
        return None
    cause, why = "", "each rank cuts its shard from a different order: "
    fix = "give the sampler the same seed on every rank; only its rank must differ."
    if loaders[0].iterable:
        why = "often each rank divides the stream after it has shuffled it with a seed of its own: "
        fix = f"{_CUT_STREAM}, before it is shuffled, or shuffle it alike on all ranks."
    elif seeds_differ:
        cause = f": their seeds are {', '.join(map(str, seeds))}"
    elif splits_differ:
        cause = ": each rank has split the dataset in a different way"
        fix = "random_split(..., generator=torch.Generator().manual_seed(0)) on all ranks."
    return overlap.fault(
        what=f"the ranks' shards overlap{cause}.",
        at=loaders[0].at,
        why=f"{why}some samples are trained on twice, and others may never be.",
        fix=fix,
    )


def _judge_whole(loaders: list[LoaderSeen], overlap: _Overlap) -> Judgement:
    """Whether loaders that give no shards give all ranks the same samples."""
    loader = loaders[0]
    # If the dataset is large, few samples are read in these steps, and still fewer by two ranks.
    reads_all = all(map(_is_read_whole, loaders))
    if overlap.is_large or (reads_all and overlap.common >= _MIN_COMMON):
        source = loader.dataset if loader.iterable else loader.sampler
        sampler = "give the DataLoader sampler=DistributedSampler(dataset), and call set_epoch."
        return overlap.fault(
            what=f"every rank trains on the whole dataset ({source}, no shards).",
            at=loader.at,
            why=f"{overlap.world_size} processes repeat the work of one.",
            fix=f"{_CUT_STREAM}." if loader.iterable else sampler,
            effect=f"each rank iterates over all {loader.samples} samples" if reads_all else "",
        )
    if reads_all:
        return NotJudged(
            f"each rank iterates over all {loader.samples} samples of its dataset; these steps do not show "
            "whether they are the same samples."
        )
    return overlap.no_fault()


def _fault_of_later_pass(case: Case, name: str) -> Finding | None:
    """The fault in the first pass after the first one in which ranks share samples.

    Only passes that all ranks read to their end, and in which one process reads no sample twice.
    """
    if case.ranks[0].loaders[name].iterable:
        return None
    for number in range(1, len(case.ranks[0].passes)):
        passes = [log.passes.get((name, number)) for log in (case.solo.ranks[0], *case.ranks)]
        epochs = {each.begin.epoch for each in passes[1:] if each}  # see `same_order_each_epoch`
        if len(epochs) > 1 or not all(each and each.ended for each in passes):
            continue
        solo, *of_ranks = [each.ids for each in passes if each]
        seen = Counter(index for ids in of_ranks for index in ids)
        shared = sum(times > 1 for times in seen.values())
        read_once = len(set(solo)) == len(solo) > 0
        if not read_once or not _is_large(shared, len(seen), case.world_size):
            continue
        begin = next(each.begin for each in passes[1:] if each)
        return Finding(
            what="the ranks' shards overlap in a later pass.",
            at=case.ranks[0].loaders[name].at,
            step=begin.steps_done + 1,
            why="the ranks chose the samples of this pass in different ways, such as by the losses of their "
            "own samples: some samples are trained on twice, and others may never be.",
            fix="choose them alike on all ranks: from values of all ranks (all_gather), with the same seed.",
            evidence=f"{shared} of {len(seen)} samples of pass {begin.pass_number + 1} were read by more "
            "than one rank, and no sample twice by one process",
            effect=f"{shared / len(seen):.0%} of the samples are seen by more than one rank",
        )
    return None


def _is_sharded(loader: LoaderSeen, world_size: int) -> bool:
    """Whether a sampler or a subset gives the rank a part of the dataset."""
    if loader.sharding.get("num_replicas", 1) > 1:
        return True
    samples, root = loader.samples, loader.root_samples
    return bool(samples and root and samples * world_size <= root + world_size)


def _reads_a_part(case: Case, name: str) -> bool:
    """Whether each rank's first pass reads only about 1/N of the dataset, as with a custom sampler."""
    whole = case.ranks[0].loaders[name].root_samples
    firsts = [log.passes.get((name, 0)) for log in case.ranks]
    sizes = [len(each.ids) for each in firsts if each and each.ended]
    if whole is None or len(sizes) < case.world_size:
        return False
    return max(sizes) * case.world_size <= (1 + _SLACK) * whole


def _is_read_whole(loader: LoaderSeen) -> bool:
    """Whether a pass over the loader reads its whole dataset, in an order of torch's samplers."""
    samples, batches, size = loader.samples, loader.batches, loader.batch_size
    if samples is None or batches is None or size is None or samples != loader.root_samples:
        return False
    has_torch_sampler = loader.sampler in ("RandomSampler", "SequentialSampler")
    return has_torch_sampler and batches * size > samples - size


def different_datasets(case: Case) -> Judgement:
    """A sampler divides one dataset over the ranks, but it is not one: it differs between ranks or runs."""
    if not all(log.of(SeedSet) for log in case.ranks):
        return NotJudged(
            "not every rank called torch.manual_seed, so each may make samples of its own."
        )
    compared = 0
    random = False
    for name in case.ranks[0].training_loaders:
        loaders = [log.loaders.get(name) for log in case.ranks]
        if not all(loader and loader.sharding.get("num_replicas", 1) > 1 for loader in loaders):
            continue
        samples = [_samples_by_index(log, name) for log in case.ranks]
        if None in samples:
            random = True
            continue
        known = Counter(i for own in samples for i in own or ())
        shared = [i for i, times in known.items() if times > 1]
        differing = [i for i in shared if len({own[i] for own in samples if own and i in own}) > 1]
        compared += len(shared)
        fault = partial(
            Finding,
            at=case.ranks[0].loaders[name].at,
            why="the sampler gives each index to one rank. If the ranks number, select or normalise the "
            "samples in different ways, some samples are never used, or are used with other values.",
        )
        if len(differing) >= _MIN_COMMON:
            return fault(
                what="the ranks have different datasets, which one sampler divides.",
                fix="build the dataset alike on all ranks, with one seed and from all samples; the sampler "
                "then divides it.",
                evidence=f"sample {differing[0]} is not the same on all ranks that read it",
                effect=f"{len(differing)} of {len(shared)} samples that several ranks read differ between "
                "them",
            )
        solo = _samples_by_index(case.solo.ranks[0], name) or {}
        of_ranks = {i: sample for own in samples for i, sample in (own or {}).items()}
        both = solo.keys() & of_ranks.keys()
        changed = [i for i in both if not _close(solo[i].magnitude, of_ranks[i].magnitude)]
        found_again = {each.content for each in solo.values()}.intersection(
            each.content for each in of_ranks.values()
        )
        is_permuted = len(found_again) > _FOUND_AGAIN * len(both)
        if len(changed) > max(len(both) / 2, _MIN_CHANGED) and not is_permuted:
            return fault(
                what="the values of the samples depend on the number of processes.",
                why="the ranks have one dataset, but not that of one process. Often a statistic of the "
                "ranks' parts, such as the deviation of a normaliser, is averaged, or values that the ranks "
                "computed are joined in a wrong order.",
                fix="compute from the whole dataset, or from sums and counts; put gathered parts at the "
                "indices that they were computed from.",
                evidence=f"sample {changed[0]}: the absolute values of its floats sum up to "
                f"{solo[changed[0]].magnitude:.6g} on one process, and to "
                f"{of_ranks[changed[0]].magnitude:.6g} on {case.world_size}",
                effect=f"{len(changed)} of {len(both)} samples have other values",
            )
    if random:
        return NotJudged("samples change at random, so those of the ranks cannot be compared.")
    return NoFault(f"{compared} samples were read by several ranks, and are the same on all.")


class _Sample(NamedTuple):
    content: int  # its digest
    magnitude: float  # see `SamplesLoaded`


def _samples_by_index(log: RankLog, name: str) -> dict[Any, _Sample] | None:
    """Each sample that a rank has read, by its index; None if it is not always the same.

    Samples that were read only once may be random, so they are left out unless others were read again.
    """
    found: dict[Any, _Sample] = {}
    again = False
    for event in log.fetches:
        if event.loader == name and len(event.ids or ()) == len(event.contents):
            magnitudes = event.magnitudes or [0.0] * len(event.contents)
            read = map(_Sample, event.contents, magnitudes)
            for index, sample in zip(event.ids or (), read, strict=True):
                again |= index in found
                if found.setdefault(index, sample) != sample:
                    return None
    return found if again else {}


def _contents(log: RankLog, name: str, kind: str) -> Iterator[tuple[Any, int]]:
    """The index of each sample that a rank has read, with the digest of its content or of its labels."""
    for event in log.fetches:
        digests = event.labels if kind == "labels" else event.contents
        if event.loader == name and len(event.ids or ()) == len(digests):
            yield from zip(event.ids or (), digests, strict=True)


def _is_different_data(samples: list[list[Any]]) -> bool:
    """Whether one index gives different samples on different ranks."""
    known = {key for each in samples for key in each if isinstance(key, tuple)}
    return len({index for index, _ in known}) < len(known)


def _samples_read(log: RankLog, name: str, world_size: int) -> list[Any]:
    """The samples of the first pass, in order: index and content of each, or content alone.

    At most as many as the rank's share of the dataset: a pass may have no end.
    """
    fetches = [event for event in log.fetches if event.loader == name]
    # A random augmentation differs from rank to rank; the label does not.
    kind = "labels" if any(event.drew for event in fetches) else "contents"
    if log.loaders[name].iterable:
        own = [event for event in fetches if event.pass_number == 0]
        first_pass = (event.labels if kind == "labels" else event.contents for event in own)
        return [part for each in first_pass for part in each if part]
    contents = dict(_contents(log, name, kind))
    # A persistent worker does not know its pass; the rank's process does.
    first = log.passes.get((name, 0))
    given = first.ids if first else []
    whole = log.loaders[name].root_samples
    share = None if whole is None else -(-whole // world_size)
    return [(i, contents[i]) for i in given if i in contents][:share]


def _is_resampled(samples: list[Any]) -> bool:
    """Whether new samples follow a repeated one. A stream that begins again has read all before."""
    return len(set(samples)) > len(_up_to_first_repeated(samples))


def _up_to_first_repeated(parts: list[Any]) -> list[Any]:
    """The samples before the first repeated one, where an endless iterable begins again."""
    seen: set[Any] = set()
    for number, part in enumerate(parts):
        if part in seen:
            return parts[:number]
        seen.add(part)
    return parts


def _known_by_few_labels(samples: list[Any]) -> bool:
    """Whether only labels identify the samples, and many samples share one."""
    return not isinstance(samples[0], tuple) and 2 * len(set(samples)) < len(samples)


def _inputs_of_models(case: Case) -> Judgement:
    """Where the loading of samples is not known: compare the rows that the models were given."""
    rows = [_changing_rows(log) for log in case.ranks]
    count = min(map(len, rows))
    if count < _MIN_FORWARDS:
        return NotJudged("without a DataLoader, too few inputs of the model were seen.")
    same = all(each[:count] == rows[0][:count] for each in rows)
    # Compare one pass only: over several shuffled passes, one rank's shards add up to the whole dataset.
    passes = [each[:count] if same else _first_pass(each) for each in rows]
    judged = min(map(len, passes))
    # Sets, because the ranks may read the same batches in a different order.
    sets = [{row for each in own[:judged] for row in each} for own in passes]
    common = set.intersection(*sets)
    shifted = judged >= _MIN_FORWARDS and len(common) >= _WHOLE * max(map(len, sets))
    if (same or shifted) and len(common) > _MIN_COMMON:
        return Finding(
            what="every rank trains on the same samples.",
            at=case.ranks[0].training_forwards[0].at,
            step=1,
            why=f"{case.world_size} processes repeat the work of one.",
            fix="give each rank its own part, such as indices[rank::world_size].",
            evidence=f"{len(common)} of {len(sets[0])} inputs of the model in {judged} forwards were those "
            "of all ranks",
            effect=f"{len(common) / len(sets[0]):.0%} of the samples are seen by all ranks",
        )
    return NoFault(f"the model's inputs differed between ranks in {count} forwards.")


def _changing_rows(log: RankLog) -> list[list[int]]:
    """The inputs of the models whose input changes. Others are given a constant first, such as a grid."""
    of_models: dict[int, set[tuple[int, ...]]] = {}
    for event in log.training_forwards:
        of_models.setdefault(event.model, set()).add(tuple(event.rows or ()))
    return [e.rows for e in log.training_forwards if e.rows and len(of_models[e.model]) > 1]


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
