"""Buffers, and models that no optimizer trains, which must be equal on all ranks where they are used."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import dropwhile
from typing import NamedTuple

from paceline.audit.events import DDPBuilt, Event, ForwardEnded, RankEnded
from paceline.audit.evidence import RankLog
from paceline.audit.rules.rule import Case, Finding, Judgement, NoFault, NotJudged
from paceline.audit.rules.states import differing, first_difference


class Use(NamedTuple):
    """The first use of a model in a step or evaluation."""

    step: int
    evaluation: int  # 0 in training
    model: int


def equal_buffers(case: Case) -> Judgement:
    """Models that are not trained, and the buffers of all models, are equal on all ranks when used."""
    if case.mismatch is not None or case.updates_differ:
        return NotJudged("the ranks' weights differ, and with them their buffers.")
    return _different_untrained_models(case) or _buffers(case)


def _different_untrained_models(case: Case) -> Finding | None:
    """The ranks use a model that is not trained, such as a mean of the weights, with different weights."""
    uses = [
        _first_uses(e for e in _since_training_began(log) if e.params is not None and not e.trains)
        for log in case.ranks
    ]
    differs = differing([{use: event.params or {} for use, event in own.items()} for own in uses])
    firsts: dict[int, Use] = {}
    for use in differs:
        firsts.setdefault(use.model, use)
    # Those of a random augmentation differ at their first use, which is in training.
    found = first_difference(
        {
            use: own
            for use, own in differs.items()
            if use.evaluation or not any(differs[firsts[use.model]].values())
        }
    )
    if found is None:
        return None
    point, names = found
    first = uses[0][point]
    why = "no optimizer trains this model, so the script has to keep it equal: a copy from before DDP made "
    why += "the weights equal is not."
    fix = "copy the model after it is wrapped, or broadcast the copy."
    if first.steps_done:
        why = "no optimizer trains this model, so the script has to keep it equal: a mean of the weights "
        why += "(EMA) that only one rank updates is not."
        fix = "update it on every rank, or broadcast it before it is used."
    return Finding(
        what=f"the ranks {'evaluate' if first.evaluation else 'train with'} a model with different weights: "
        f"{names[0]}.",
        at=first.at,
        step=first.steps_done or None,
        why=why,
        fix=fix,
        evidence=f"the digests of {names[0]} after step {first.steps_done}",
        effect=f"{len(names)} of {len(first.params or ())} parameters differ between ranks",
    )


def _buffers(case: Case) -> Judgement:
    """Buffers differ in an evaluation of all ranks; as a note, in training and at the end of the script."""
    evaluations = [
        _first_uses(e for e in log.of(ForwardEnded) if e.evaluation is not None)
        for log in case.ranks
    ]
    uses, when = evaluations, "evaluating"
    if not all(evaluations):
        uses, when = [_first_uses(log.training_forwards) for log in case.ranks], "training"
    buffers = [{use: event.buffers for use, event in own.items()} for own in uses]
    if not all(uses):
        return NotJudged("no torch.nn.Module was called in the watched steps.")
    found = first_difference(differing(buffers))
    if found is None:
        equal = "models that are not trained were equal on all ranks"
        if not any(names for own in buffers for names in own.values()):
            return NoFault(f"{equal}; the models with parameters have no buffers.")
        return NoFault(f"{equal}, and so were buffers when {when}.")
    ends = [(log.first(RankEnded) or RankEnded()).buffers for log in case.ranks]
    if when == "training" and ends[0] and all(end == ends[0] for end in ends):
        return NoFault("buffers that differ between ranks when training are equal at the end.")
    use, names = found
    first = uses[0][use]
    return Finding(
        what=f"{names[0]} differs between ranks when {when}.",
        at=first.at,
        step=(first.steps_done + (when == "training")) or None,
        why="each rank updates its buffers from its own samples, so each rank has a different model.",
        fix="use SyncBatchNorm on GPUs, or make the buffers equal (all_reduce or broadcast them) before the "
        "model is evaluated or saved.",
        evidence=f"equal names, different values, after step {first.steps_done}",
        effect=f"{len(names)} of {len(first.buffers)} buffers differ between ranks",
        is_note=when == "training",  # they may be made equal before they are used
    )


def _first_uses(forwards: Iterable[ForwardEnded]) -> dict[Use, ForwardEnded]:
    """The first forward of each model in each step, or in each evaluation."""
    found: dict[Use, ForwardEnded] = {}
    for event in forwards:
        found.setdefault(Use(event.steps_done, event.evaluation or 0, event.model), event)
    return found


def _since_training_began(log: RankLog) -> list[ForwardEnded]:
    """The forwards since DDP was built or the first one of training.

    Before, a script may call a model that is not equal on all ranks yet, to find the sizes of its layers.
    """
    events: list[Event] = log.of(DDPBuilt, ForwardEnded)
    begun = dropwhile(lambda e: isinstance(e, ForwardEnded) and not e.trains, events)
    return [event for event in begun if isinstance(event, ForwardEnded)]
