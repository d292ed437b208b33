"""Randomness: the order of the epochs, augmentation in workers, dropout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise, product
from typing import Any, NamedTuple

from paceline.audit.events import (
    BatchGiven,
    ForwardEnded,
    LoaderSeen,
    PassBegun,
    PassCut,
    SamplesLoaded,
    SeedSet,
)
from paceline.audit.evidence import Pass, RankLog
from paceline.audit.rules.rule import Case, Finding, Judgement, NoFault, NotJudged
from paceline.errors import name_ranks

# So many forwards with equal noise are a fault. See broken/11_gan_noise.
_FORWARDS = 3
# More numbers than this for each sample of a batch are noise.
# Four times as many change broken/11_noise_before_forward.
_DRAWS_PER_SAMPLE = 2


def same_order_each_epoch(case: Case) -> Judgement:
    """Each epoch has the order of the first: `sampler.set_epoch` was not called."""
    log = case.ranks[0]
    judged = one_pass = False
    found: list[Finding] = []
    for name in log.training_loaders:
        loader = log.loaders[name]
        sampler = loader.sharding
        # Without a sampler that divides one order, the ranks may shuffle parts of their own.
        # See sound/10_reduced_by_hand.
        divides = sampler.get("num_replicas", 1) > 1
        if divides and (fault := _other_epoch_on_a_rank(case, name)) is not None:
            return fault
        has_epoch = "epoch" in sampler and sampler.get("shuffle", True)
        if sampler.get("shuffle") is False or not (has_epoch or loader.takes_epoch):
            continue
        passes = _training_passes(log, name)
        if len(passes) < 2:
            one_pass = True
            continue
        judged = True
        for one, other in pairwise(passes):
            # Equal order with a new epoch is no fault, since the data may not be shuffled. But persistent
            # workers keep the old copy of the dataset, where the new epoch has no effect.
            forgotten = one.begin.epoch == other.begin.epoch or loader.persistent
            if forgotten and _same_order(one, other):
                fault = _same_epoch(loader, one.begin, other.begin, has_epoch=has_epoch)
                # An epoch may have several passes, such as one for each of the models that take turns.
                changes = len({each.begin.epoch for each in passes}) > 1
                found.append(replace(fault, is_note=fault.is_note or changes))
    if found:
        return min(found, key=lambda fault: fault.is_note)  # a fault rather than a note
    if judged:
        cut = " The first one was cut short, to see the second." if log.of(PassCut) else ""
        return NoFault(f"the order differed between passes, or the epoch was set.{cut}")
    if one_pass:
        return NotJudged("the script made no two passes with one sampler over its training data.")
    return NoFault("no sampler of the training data needs the epoch.")


def _other_epoch_on_a_rank(case: Case, name: str) -> Finding | None:
    """In one pass, the samplers of the ranks have different epochs."""
    passes = [_training_passes(log, name) if name in log.loaders else [] for log in case.ranks]
    for number, of_ranks in enumerate(zip(*passes, strict=False), 1):
        epochs = [-1 if e.begin.epoch is None else e.begin.epoch for e in of_ranks]
        shown = ", ".join("none" if epoch < 0 else str(epoch) for epoch in epochs)
        if len(set(epochs)) > 1:
            ranks = [rank for rank, epoch in enumerate(epochs) if epoch != max(epochs)]
            return Finding(
                what=f"in pass {number}, the samplers of the ranks have different epochs: {shown}.",
                at=of_ranks[ranks[0]].begin.at,
                ranks=ranks,
                step=of_ranks[0].begin.steps_done + 1,
                why="the epoch decides the order of the whole dataset, and each rank takes its part of that "
                "order. Parts of different orders overlap.",
                fix="call sampler.set_epoch(epoch) on every rank, outside of branches such as "
                "`if rank == 0`.",
                evidence=f"epochs of the ranks in pass {number}: {shown}",
                effect=f"{len(ranks)} of {case.world_size} ranks take their part of a different order",
            )
    return None


def _same_epoch(
    loader: LoaderSeen, before: PassBegun, after: PassBegun, *, has_epoch: bool
) -> Finding:
    passes = f"passes {before.pass_number + 1} and {after.pass_number + 1}"
    if before.loader != after.loader:
        passes = "two passes over the sampler"
    return Finding(
        what="every epoch has the same order"
        + (f": the sampler's epoch stays {after.epoch}." if has_epoch else "."),
        at=after.at,
        step=after.steps_done + 1,
        why=f"{loader.sampler if has_epoch else loader.dataset} shuffles by (seed, epoch), and the script "
        "does not set the new epoch.",
        fix=f"call {'sampler' if has_epoch else 'dataset'}.set_epoch(epoch) before each pass over the "
        "loader.",
        evidence=f"{passes} gave the same samples in the same order",
        effect="100 % of the pass is a repetition of the order before",
        # Such a stream has `set_epoch` even if it is not shuffled, as one of Hugging Face's datasets.
        is_note=loader.iterable and loader.of_library,
    )


def _same_order(one: Pass, other: Pass) -> bool:
    """Whether two passes began with the same samples in the same order, of two batches at least."""
    a, b = ([e.ids or e.content for e in each.batches] for each in (one, other))
    common = min(len(a), len(b))
    # Data that is not shuffled at all is no fault.
    is_shuffled = not one.ids or one.ids != sorted(one.ids)
    return common > 1 and a[:common] == b[:common] and is_shuffled


def _training_passes(log: RankLog, name: str) -> list[Pass]:
    """The passes with a backward over the loaders of one sampler, except those left after one batch."""
    sampler = log.loaders[name].sampler_id
    return [
        each
        for (loader, _), each in log.passes.items()
        if log.loaders[loader].sampler_id == sampler
        and any(each.backwards)
        and (len(each.batches) > 1 or each.ended)
    ]


def same_augmentation(case: Case) -> Judgement:
    """Workers or ranks draw the same random numbers for their samples."""
    training = set(case.ranks[0].training_loaders)
    firsts: dict[tuple[int, int | None], SamplesLoaded] = {}
    streams = False
    for log in case.ranks:
        for event in log.fetches:
            if event.loader not in training or not event.drew:
                continue
            if log.loaders[event.loader].iterable:
                streams = True  # it may draw the order of samples that are the rank's own
            elif any(map(partial(_augments, event), event.drew)):
                firsts.setdefault((log.rank, event.worker), event)
    if not firsts:
        if not all(log.fetches for log in case.ranks):
            return NotJudged("the loading of the samples was not recorded.")
        if streams:
            return NotJudged("a stream draws random numbers, which may decide its order only.")
        return NoFault("no shared generator gives a number for each sample that is loaded.")
    for (one, first), (other, second) in combinations(firsts.items(), 2):
        same = [
            generator
            for generator, after in first.drew.items()
            if _augments(first, generator)
            and second.drew.get(generator) == after
            and second.random.get(generator) == first.random.get(generator)
        ]
        if same and case.divides_equal_batches:
            return NoFault(
                "the ranks load the same batches, and each trains on its own part of them."
            )
        if same:
            return Finding(
                what=f"{_worker(one)} and {_worker(other)} augment with the same random numbers.",
                at=case.ranks[0].loaders[first.loader].at,
                ranks=sorted({one[0], other[0]}),
                step=1,
                why=f"the generator '{same[0]}' had the same state in both when they made their first "
                "samples.",
                fix="seed by rank and worker: torch.manual_seed(seed + rank) before the loader is built, "
                "and torch.utils.data.get_worker_info().seed for a generator of the dataset.",
                evidence=f"the states of {same[0]} before and after them are equal",
                effect=f"at least 2 of {len(firsts)} sources of samples draw the same numbers",
            )
    return NoFault(f"workers that drew from different random states: {len(firsts)}.")


def _augments(event: SamplesLoaded, generator: str) -> bool:
    """Whether a generator gave a number for each sample; fewer may be a choice for the batch.

    See sound/12_one_crop_for_a_batch.
    """
    count = event.draws.get(generator)
    return generator in event.drew and (count is None or count >= len(event.contents))


def _worker(which: tuple[int, int | None]) -> str:
    rank, worker = which
    return f"rank {rank}" if worker is None else f"worker {worker} of rank {rank}"


def _state_after_noise(forward: ForwardEnded) -> Any:
    """The state of torch's generator before the forward, if noise was drawn since the batch."""
    # Fewer numbers may be a choice that all ranks share, or a permutation of the batch.
    is_noise = (forward.draws or 0) > _DRAWS_PER_SAMPLE * (forward.samples or 1)
    return forward.random["torch"] if is_noise else None


def _inputs(forward: ForwardEnded) -> Any:
    # A single row may be computed, such as the time of a schedule.
    return tuple(forward.rows) if forward.rows and len(forward.rows) > 1 else None


def _masks(generator: str) -> Callable[[ForwardEnded], Any]:
    # Dropout draws from torch. Python's `random` decides what must be alike on all ranks, such as LayerDrop.
    return lambda forward: forward.random.get(generator) if generator in forward.drew else None


_SEED = "seed by rank after the model is built: torch.manual_seed(seed + rank)."


class _Noise(NamedTuple):
    """A kind of noise that two ranks may draw alike, and its report."""

    key: Callable[[ForwardEnded], Any]  # what decides the noise of a forward; None if it has none
    what: str
    why: str
    fix: str
    is_input: bool = False  # whether the key is the inputs, which must be new in each forward
    may_be_note: bool = False  # whether it is a note if a library has set the seed


_NOISES = (
    _Noise(
        _state_after_noise,
        "draw the same random numbers for their batches",
        "the script draws from torch's generator between the batch and the forward, and its state is the "
        "same on both",
        _SEED,
    ),
    _Noise(
        _inputs,
        "give a model the same random inputs",
        "their batches differ, and these inputs do not: they come from generators with one seed",
        "seed the generator by rank: torch.Generator().manual_seed(seed + rank).",
        is_input=True,
    ),
    *(
        _Noise(
            _masks(generator),
            "draw the same random numbers in their forwards, such as dropout masks",
            f"the generator '{generator}' has the same state on both before the forward",
            f"{_SEED} What must be alike, such as layers to leave out, can come from Python's `random`.",
            may_be_note=True,
        )
        for generator in ("torch", "cuda")
    ),
)


def same_noise(case: Case) -> Judgement:
    """Two ranks draw the same noise, such as dropout masks, in their forwards or before them.

    Equal dropout masks are a note if a library seeds all ranks alike, as `set_seed` of transformers does.
    """
    if not all(log.training_forwards for log in case.ranks):
        return NotJudged("not every rank called a torch.nn.Module in training.")
    if not case.trains_together:
        return NotJudged("no exchange of gradients was seen, so their noise may not be averaged.")
    models = sorted({event.model for event in case.ranks[0].training_forwards})
    is_drawn = False
    for noise, model, one in product(_NOISES, models, case.ranks[:-1]):
        alike: dict[int, tuple[list[ForwardEnded], int]] = {}
        for other in case.ranks[one.rank + 1 :]:
            same, count = _with_same_noise(noise, model, one, other)
            is_drawn |= count > 0 and not noise.is_input
            # What all ranks draw once or twice may be a constant of the training.
            if len(same) >= _FORWARDS:
                alike[other.rank] = same, count
        if not alike:
            continue
        ranks, (same, count) = [one.rank, *alike], next(iter(alike.values()))
        fix = noise.fix
        if len(same) < count:
            fix = "do not give all ranks one seed, or the random state of one rank, during the training."
        return Finding(
            what=f"{name_ranks(ranks, case.world_size)} {noise.what}.",
            at=same[0].at,
            ranks=ranks,
            step=same[0].steps_done + 1,
            why=f"{noise.why}, so the noise does not average out over the ranks.",
            fix=fix,
            evidence=f"it is equal in {len(same)} of {count} forwards",
            effect=f"the noise of {len(ranks)} of {case.world_size} ranks is equal",
            is_note=noise.may_be_note and _seeded_by_library(one, same[0]),
        )
    figure = "draws no noise" if not is_drawn else "draws no equal noise on two ranks"
    return NoFault(f"the training {figure} from torch's global generators for its forwards.")


def _with_same_noise(
    noise: _Noise, model: int, one: RankLog, other: RankLog
) -> tuple[list[ForwardEnded], int]:
    """The forwards of a model that have the same noise on both ranks, and how many have any."""
    both = ([e for e in log.training_forwards if e.model == model] for log in (one, other))
    keys = [(a, noise.key(a), noise.key(b)) for a, b in zip(*both, strict=False)]
    keys = [each for each in keys if each[1] is not None]
    same = [(a, key) for a, key, of_other in keys if key == of_other]
    if noise.is_input:  # equal in all forwards, and in none of the batches
        is_new = len({key for _, key in same}) == len(keys)
        same = same if is_new and _batches_differ(one, other) else []
    return [a for a, _ in same], len(keys)


def _seeded_by_library(log: RankLog, forward: ForwardEnded) -> bool:
    """Whether the latest seed before a forward was set by a library, such as Accelerate's `set_seed`."""
    before = log.events[: log.events.index(forward)]
    seeds = [event for event in before if isinstance(event, SeedSet)]
    return bool(seeds) and not seeds[-1].at


def _batches_differ(one: RankLog, other: RankLog) -> bool:
    own, others = ([(e.ids, e.content) for e in log.of(BatchGiven)] for log in (one, other))
    return own != others
