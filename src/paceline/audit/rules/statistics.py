"""Buffers, such as the statistics of BatchNorm, that differ between ranks where the model is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.audit.events import DDPBuilt, Digests, Event, ForwardEnded, ModelSeen, RankEnded
from paceline.audit.evidence import RankLog
from paceline.audit.rules.rule import Case, FaultFound, Judgement, NoFault, NotJudged
from paceline.audit.rules.weights import find_mismatch


def different_buffers(case: Case) -> Judgement:
    """Buffers differ between ranks in an evaluation, else in training and at the end."""
    log = case.ranks[0]
    unwrapped = not log.of(DDPBuilt) and not any(event.layout for event in log.of(ModelSeen))
    mismatch = find_mismatch(case) if unwrapped else None
    if mismatch is not None and not mismatch.outside:
        return NotJudged("the ranks' weights differ, and with them their statistics.")
    # DDP makes them equal before each forward, so after the last one they may differ a little.
    ends = [(log.first(RankEnded) or RankEnded()).buffers for log in case.ranks]
    events = [[e for e in log.of(ForwardEnded) if e.evaluation is not None] for log in case.ranks]
    when = "evaluating"
    if not all(events):
        if all(end == ends[0] for end in ends):
            return NoFault("the buffers were equal on all ranks at the end of the training.")
        events = [log.training_forwards for log in case.ranks]
        when = "training"
    # Of each evaluation or step, the first forward.
    each = [
        {e.steps_done if when == "training" else e.evaluation: e for e in reversed(own)}
        for own in events
    ]
    found = _difference(each, lambda event: event.buffers)
    if found is None:
        return NoFault(f"the buffers were equal on all ranks when {when}.")
    first, names = found
    return FaultFound(
        what=f"{names[0]} differs between ranks when {when}.",
        at=first.at,
        step=first.steps_done + (when == "training"),
        why="each rank updates its buffers from its own samples, so each rank evaluates a different model.",
        fix="use SyncBatchNorm, or make the buffers equal (all_reduce or broadcast them) before the model "
        "is used.",
        evidence=f"equal names, other values, after step {first.steps_done}",
        effect=f"{len(names)} of {len(first.buffers)} buffers differ between ranks",
    )


def different_untrained_models(case: Case) -> Judgement:
    """The ranks use a model that is not trained, such as a mean of the weights, with other weights."""
    each = [
        {
            (e.steps_done, e.evaluation or 0, e.model): e
            for e in _since_training_began(log)
            if e.untrained_params is not None
        }
        for log in case.ranks
    ]
    random = _models_with_random_weights(each)
    each = [{use: e for use, e in own.items() if use[1] or use[2] not in random} for own in each]
    found = _difference(each, _untrained_params)
    if found is not None:
        if not case.trains_together and find_mismatch(case) is not None:
            return NotJudged("the ranks exchange no gradients, and each trains another model.")
        first, names = found
        use = "evaluate" if first.evaluation else "train with"
        return FaultFound(
            what=f"the ranks {use} a model with different weights: {names[0]}.",
            at=first.at,
            step=first.steps_done or None,
            why="no optimizer trains this model, so the script has to keep it equal: "
            + (
                "a mean of the weights (EMA) that only one rank updates is not."
                if first.steps_done
                else "a copy from before DDP made the weights equal is not."
            ),
            fix="update it on every rank, or broadcast it before it is used."
            if first.steps_done
            else "copy the model after it is wrapped, or broadcast the copy.",
            evidence=f"the digests of {names[0]} after step {first.steps_done}",
            effect=f"{len(names)} of {len(_untrained_params(first))} parameters differ between ranks",
        )
    if not all(each):
        return NoFault("all models that were used without gradient are trained.")
    return NoFault("models that were used and are not trained were equal on all ranks.")


def _models_with_random_weights(each: list[dict[tuple[int, int, int], ForwardEnded]]) -> set[int]:
    """Models whose weights differ at their first use in training, as those of a random augmentation do."""
    firsts: dict[int, tuple[int, int, int]] = {}
    for use in sorted(each[0]):
        firsts.setdefault(use[2], use)
    return {
        model
        for model, first in firsts.items()
        if not first[1]
        and _difference([{first: own[first]} for own in each if first in own], _untrained_params)
    }


def _since_training_began(log: RankLog) -> list[ForwardEnded]:
    """The forwards since DDP was built or the first one of training.

    Before, a script may call a model that is not equal on all ranks yet, to find the sizes of its layers.
    """
    begins = (e for e in log.events if isinstance(e, DDPBuilt) or _trains(e))
    begin = next(begins, None)
    after = log.events[log.events.index(begin) :] if begin is not None else log.events
    return [event for event in after if isinstance(event, ForwardEnded)]


def _trains(event: Event) -> bool:
    return isinstance(event, ForwardEnded) and event.trains


def _untrained_params(event: ForwardEnded) -> Digests:
    return event.untrained_params or {}


def _difference(
    each: list[dict[Any, ForwardEnded]], digests_of: Callable[[ForwardEnded], Digests]
) -> tuple[ForwardEnded, list[str]] | None:
    """The first event of rank 0 whose digests differ from those of another rank, and their names."""
    for key in sorted(set.intersection(*map(set, each))):
        first, *others = (own[key] for own in each)
        digests = digests_of(first)
        names = [n for n in digests if any(digests_of(e).get(n) != digests[n] for e in others)]
        if names:
            return first, names
    return None
