"""Unscaling, clipping and stepping, in the right order and on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from paceline.audit.events import (
    BackwardBegun,
    Clipped,
    CollectiveBegun,
    DDPBuilt,
    Event,
    OptimizerStepBegun,
    ScalerStepped,
    Unscaled,
)
from paceline.audit.evidence import RankLog, Update, UpdateCall
from paceline.audit.rules.rule import Case, Finding, Judgement, NoFault, NotJudged, outliers
from paceline.errors import name_ranks

# A bound of at least this part of the loss scale is one for gradients with the scale.
# See sound/97_clipped_samples and broken/14_clip_before_unscale.
_SCALED_BOUND = 0.01
_WORDS: dict[type[Event], tuple[str, str]] = {
    Clipped: ("clipped", "did not clip"),
    Unscaled: ("unscaled", "did not unscale"),
    ScalerStepped: ("used the scaler", "did not use the scaler"),
    OptimizerStepBegun: ("updated", "did not update"),
}


def _clips(log: RankLog) -> list[tuple[Update, Clipped]]:
    """The clips, each with its update."""
    return [
        (update, call)
        for update in log.updates
        for call in update.calls
        if isinstance(call, Clipped)
    ]


def clip_before_unscale(case: Case) -> Judgement:
    """Gradients are clipped while they still contain the loss scale."""
    logs = [log for run in (case.ordinary, case.solo) for log in run.ranks]
    for update, event in chain.from_iterable(map(_clips_with_scale, logs)):
        scale, norm = event.scale, event.norm
        return Finding(
            what="gradients are clipped before they are unscaled.",
            at=event.at,
            step=update.step,
            why=f"they are still {scale:g} times too large for the bound.",
            fix="call scaler.unscale_(optimizer) before clipping.",
            evidence=f"the scale at the clip was {scale:g}"
            + (f", and the norm with it {norm:.4g}" if norm is not None else ""),
            effect=f"gradients are clipped at a norm {scale:g} times too small",
        )
    clips = sum(len(_clips(log)) for log in logs)
    if not clips:
        return NoFault("torch's clipping was not called.")
    return NoFault(f"{clips} calls of torch's clipping, each to a bound of the gradients' scale.")


def _clips_with_scale(log: RankLog) -> Iterator[tuple[Update, Clipped]]:
    """The clips of gradients that have the loss scale, to a bound that has not, each with its update.

    Another optimizer than the scaler's has gradients without it.
    """
    unscaled: set[str] = set()
    for update in log.updates:
        steps = [call.names for call in update.calls if isinstance(call, ScalerStepped)]
        scaled = set(chain.from_iterable(steps))
        for call in update.calls:
            if isinstance(call, Unscaled):
                unscaled.update(call.names)
            elif isinstance(call, ScalerStepped):
                unscaled.difference_update(call.names)
            elif isinstance(call, Clipped):
                bound = call.max_norm or 0.0
                is_scaled = call.scale != 1 and scaled & {*call.names} - unscaled
                if is_scaled and bound < _SCALED_BOUND * call.scale:
                    yield update, call


def update_on_one_rank(case: Case) -> Judgement:
    """One rank clips, unscales or steps and the others do not."""
    if case.updates_differ:
        return NotJudged("not every rank updates the same parameters.")
    updates_of_ranks = [_updates_after_reduced_backwards(log) for log in case.ranks]
    if not any(updates_of_ranks):
        return NotJudged("no update was seen after a reduction of the gradients.")
    for number, updates in enumerate(zip(*updates_of_ranks, strict=False), 1):
        kinds = [tuple(type(call) for call in update.calls) for update in updates]
        minority = outliers(kinds)
        if not minority or number == min(map(len, updates_of_ranks)):
            continue  # equal, or the last one, which the end of the run may have cut
        if len({log.steps for log in case.ranks}) == 1 and case.mismatch is None:
            return NoFault("the ranks did different things, and their weights stayed equal.")
        if case.mismatch is not None and case.mismatch.step < min(each.step for each in updates):
            return NotJudged("the ranks' weights differed before they did different things.")
        what, ranks, kind = _difference(kinds)
        calls = [call for update in updates for call in update.calls]
        step = min(update.step for update in updates)
        return Finding(
            what=f"in step {step} the ranks do different things: {what}.",
            at=next(call.at for call in calls if kind in (type(call), None)),
            ranks=ranks or minority,
            step=step,
            why="after the reduction all ranks have the same gradient. A rank that changes it alone gets "
            "different weights.",
            fix="clip, unscale and step on every rank; decide on values that are equal on all ranks.",
            evidence="; ".join(
                f"rank {rank} {', '.join(_WORDS[kind][0] for kind in own) or 'did nothing'}"
                for rank, own in enumerate(kinds)
            ),
            effect=f"{len(minority)} of {case.world_size} ranks update differently",
        )
    return NoFault("all ranks unscaled, clipped and stepped in the same way.")


def _updates_after_reduced_backwards(log: RankLog) -> list[Update]:
    """For each backward whose gradients are reduced over the ranks: the calls up to the next one."""
    found: list[Update] = []
    # A model without DDP beside one with DDP may belong to one rank alone.
    wrapped = log.first(DDPBuilt) is not None
    is_reduced: dict[BackwardBegun, bool] = {}
    for event in log.events:
        if isinstance(event, BackwardBegun) and (not wrapped or event in log.reducing_backwards):
            found.append(Update([event]))
            is_reduced[event] = bool(log.layouts) or event in log.reducing_backwards
        elif isinstance(event, CollectiveBegun) and found and not found[-1].calls:
            is_reduced[found[-1].backwards[0]] = True
        elif isinstance(event, UpdateCall) and found:
            found[-1].calls.append(event)
    return [update for update in found if is_reduced[update.backwards[0]]]


def _difference(
    kinds: list[tuple[type[Event], ...]],
) -> tuple[str, list[int], type[Event] | None]:
    """What some ranks did and others did not, which ranks are wrong, and the kind of call."""
    for kind, (done, not_done) in _WORDS.items():
        having = [rank for rank, own in enumerate(kinds) if kind in own]
        lacking = [rank for rank, own in enumerate(kinds) if kind not in own]
        if having and lacking:
            # A rank that updates without the scaler or not at all is wrong, even if most ranks do so.
            if len(having) <= len(lacking) and kind not in (ScalerStepped, OptimizerStepBegun):
                return f"only {name_ranks(having)} {done}", having, kind
            return f"only {name_ranks(lacking)} {not_done}", lacking, kind
    return "in a different order or number", [], None
