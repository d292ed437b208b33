"""The order of passes: whether each pass over a sampler that shuffles has a new order, alike on all ranks."""

from __future__ import annotations

from itertools import pairwise

from paceline.audit.events import LoaderSeen, PassBegun, PassCut
from paceline.audit.evidence import Pass, RankLog
from paceline.audit.rules.rule import Case, Finding, Judgement, NoFault, NotJudged


def order_of_passes(case: Case) -> Judgement:
    """Two passes over one sampler have the same order, or the samplers of the ranks different epochs."""
    log = case.ranks[0]
    judged = one_pass = False
    found: list[Finding] = []
    for name in log.training_loaders:
        loader = log.loaders[name]
        if loader.sharding.get("num_replicas", 1) > 1:
            found += _other_epoch_on_a_rank(case, name)
        has_epoch = "epoch" in loader.sharding or loader.takes_epoch
        if not has_epoch or loader.sharding.get("shuffle") is False or loader.reorders is False:
            continue
        passes = _training_passes(log, name)
        judged |= len(passes) > 1
        one_pass |= len(passes) < 2
        epochs = {each.begin.epoch for each in passes}
        for one, other in pairwise(passes):
            # Equal order with a new epoch is no fault, since the data may not be shuffled. But persistent
            # workers keep the old copy of the dataset, where the new epoch has no effect.
            is_old = one.begin.epoch == other.begin.epoch or loader.persistent
            if is_old and _same_order(one, other):
                # An epoch may have several passes, such as one for each of the models that take turns. A
                # stream of a library has `set_epoch` even if it is not shuffled.
                is_note = (
                    len(epochs) > 1
                    or one.begin.at != other.begin.at
                    or (loader.iterable and loader.of_library)
                )
                found.append(_same_epoch(loader, one.begin, other.begin, is_note=is_note))
    if found:
        return min(found, key=lambda fault: fault.is_note)  # a fault rather than a note
    if judged:
        cut = " The first one was cut short, to see the second." if log.of(PassCut) else ""
        return NoFault(f"the order differed between passes, or the epoch was set.{cut}")
    if one_pass:
        return NotJudged("the script made no two passes with one sampler over its training data.")
    return NoFault("no sampler of the training data needs the epoch.")


def _other_epoch_on_a_rank(case: Case, name: str) -> list[Finding]:
    """The finding for the first pass in which the samplers of the ranks have different epochs."""
    passes = [_training_passes(log, name) if name in log.loaders else [] for log in case.ranks]
    for number, of_ranks in enumerate(zip(*passes, strict=False), 1):
        epochs = [-1 if each.begin.epoch is None else each.begin.epoch for each in of_ranks]
        if len(set(epochs)) == 1:
            continue
        shown = ", ".join("none" if epoch < 0 else str(epoch) for epoch in epochs)
        ranks = [rank for rank, epoch in enumerate(epochs) if epoch != max(epochs)]
        return [
            Finding(
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
        ]
    return []


def _same_epoch(
    loader: LoaderSeen, before: PassBegun, after: PassBegun, *, is_note: bool
) -> Finding:
    of_sampler = "epoch" in loader.sharding
    passes = f"passes {before.pass_number + 1} and {after.pass_number + 1}"
    if before.loader != after.loader:
        passes = "two passes over the sampler"
    return Finding(
        what="every epoch has the same order"
        + (f": the sampler's epoch stays {after.epoch}." if of_sampler else "."),
        at=after.at,
        step=after.steps_done + 1,
        why=f"{loader.sampler if of_sampler else loader.dataset} shuffles by (seed, epoch), and the script "
        "does not set the new epoch.",
        fix=f"call {'sampler' if of_sampler else 'dataset'}.set_epoch(epoch) before each pass over the "
        "loader.",
        evidence=f"{passes} gave the same samples in the same order",
        effect="100 % of the pass is a repetition of the order before",
        is_note=is_note,
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
    loaders = {own for own, each in log.loaders.items() if each.sampler_id == sampler}
    return [
        each
        for (loader, _), each in log.passes.items()
        if loader in loaders and each.trains and (len(each.batches) > 1 or each.ended)
    ]
