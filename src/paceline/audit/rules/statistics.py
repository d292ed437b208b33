"""Buffers, such as the statistics of BatchNorm, that differ between ranks where the model is used."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import dropwhile
from typing import NamedTuple

from paceline.audit.events import DDPBuilt, Event, ForwardEnded, RankEnded, TrainingContinues
from paceline.audit.evidence import RankLog
from paceline.audit.rules.rule import Case, Finding, Judgement, NoFault, NotJudged
from paceline.audit.rules.states import differing, first_difference


class Use(NamedTuple):
    """The first use of a model in a step or evaluation."""

    step: int
    evaluation: int  # 0 in training
    model: int


def different_buffers(case: Case) -> Judgement:
    """Buffers differ between ranks in an evaluation of all ranks, else in training.

    If only some ranks evaluate, those of the others are known at their next forward of training or at their
    end.
    """
    log = case.ranks[0]
    unwrapped = not log.of(DDPBuilt) and not log.layouts
    mismatch = case.mismatch if unwrapped else None
    if mismatch is not None and not mismatch.outside:
        return NotJudged("the ranks' weights differ, and with them their statistics.")
    evaluations = [
        _first_uses(e for e in log.of(ForwardEnded) if e.evaluation is not None)
        for log in case.ranks
    ]
    all_evaluate = all(evaluations)
    when = "evaluating" if all_evaluate else "training"
    uses = evaluations
    if not all_evaluate:
        uses = [_first_uses(log.training_forwards) for log in case.ranks]
    if not all(uses):
        return NotJudged("no torch.nn.Module was called in the watched steps.")
    buffers = [{point: event.buffers for point, event in own.items()} for own in uses]
    if not any(names for own in buffers for names in own.values()):
        return NoFault("the models have no buffers.")
    differs = differing(buffers)
    if not all_evaluate:
        differs = _differing_when_evaluated(case, differs, evaluations)
    found = first_difference(differs)
    if found is None:
        return NoFault(f"the buffers were equal on all ranks when {when}.")
    if not any(evaluations) and any(log.of(TrainingContinues) for log in case.ranks):
        return NotJudged(
            "the buffers differ between ranks when training, and no evaluation was seen: they may be made "
            "equal before it.",
            is_open=True,
        )
    point, names = found
    first = uses[0][point]
    devices = {device for log in case.ranks for e in log.of(ForwardEnded) for device in e.devices}
    sync = "" if devices <= {"cpu"} else "use SyncBatchNorm, or "  # torch has it on GPUs only
    return Finding(
        what=f"{names[0]} differs between ranks when {when}.",
        at=first.at,
        step=(first.steps_done + (when == "training")) or None,
        why="each rank updates its buffers from its own samples, so each rank evaluates a different model.",
        fix=f"{sync}make the buffers equal (all_reduce or broadcast them) before the model is used.",
        evidence=f"equal names, different values, after step {first.steps_done}",
        effect=f"{len(names)} of {len(first.buffers)} buffers differ between ranks",
    )


def _differing_when_evaluated(
    case: Case,
    differs: dict[Use, dict[str, bool]],
    evaluations: list[dict[Use, ForwardEnded]],
) -> dict[Use, dict[str, bool]]:
    """Of buffers in training, those at the steps after which some ranks evaluate; all if these are not known.

    They are known if every rank trained after each of these steps, or if all buffers are equal at the end.
    """
    evaluated = {use.step for own in evaluations for use in own if use.step}
    are_known = evaluated <= {use.step for use in differs} or _are_equal_at_end(case, differs)
    if not evaluated or not are_known:
        return differs
    return {use: own for use, own in differs.items() if use.step in evaluated}


def _are_equal_at_end(case: Case, uses: Iterable[Use]) -> bool:
    """Whether the buffers of these models are equal on all ranks at the end of the script."""
    ends = [(log.first(RankEnded) or RankEnded()).buffers for log in case.ranks]
    models = {str(use.model) for use in uses}
    return all(model in end and end[model] == ends[0][model] for model in models for end in ends)


def different_untrained_models(case: Case) -> Judgement:
    """The ranks use a model that is not trained, such as a mean of the weights, with different weights."""
    uses = [
        _first_uses(e for e in _since_training_began(log) if e.params is not None and not e.trains)
        for log in case.ranks
    ]
    differs = differing([{use: event.params or {} for use, event in own.items()} for own in uses])
    random = _models_with_random_weights(differs)
    used = {use: own for use, own in differs.items() if use.evaluation or use.model not in random}
    found = first_difference(used)
    if found is not None:
        if not case.trains_together and case.mismatch is not None:
            return NotJudged(
                "no exchange of gradients was seen, and each rank may train a different model."
            )
        point, names = found
        first = uses[0][point]
        use = "evaluate" if first.evaluation else "train with"
        return Finding(
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
            effect=f"{len(names)} of {len(first.params or ())} parameters differ between ranks",
        )
    if not used:
        return NoFault("all models that were used without gradient are trained.")
    return NoFault("models that were used and are not trained were equal on all ranks.")


def _first_uses(forwards: Iterable[ForwardEnded]) -> dict[Use, ForwardEnded]:
    """The first forward of each model in each step, or in each evaluation."""
    found: dict[Use, ForwardEnded] = {}
    for event in forwards:
        found.setdefault(Use(event.steps_done, event.evaluation or 0, event.model), event)
    return found


def _models_with_random_weights(differs: dict[Use, dict[str, bool]]) -> set[int]:
    """Models whose weights differ at their first use in training, as those of a random augmentation do."""
    firsts: dict[int, Use] = {}
    for use in differs:
        firsts.setdefault(use.model, use)
    return {
        model for model, use in firsts.items() if not use.evaluation and any(differs[use].values())
    }


def _since_training_began(log: RankLog) -> list[ForwardEnded]:
    """The forwards since DDP was built or the first one of training.

    Before, a script may call a model that is not equal on all ranks yet, to find the sizes of its layers.
    """
    events: list[Event] = log.of(DDPBuilt, ForwardEnded)
    begun = dropwhile(lambda e: isinstance(e, ForwardEnded) and not e.trains, events)
    return [event for event in begun if isinstance(event, ForwardEnded)]
