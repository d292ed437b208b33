"""Weights and states of optimizers that must be equal on all ranks: where they first differ, and why."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from paceline.audit.events import (
    Clipped,
    CollectiveBegun,
    Event,
    ForwardEnded,
    ModelSeen,
    NotReduced,
    OptimizerStepBegun,
    OptimizerStepEnded,
    ScalerStepped,
    StateLoaded,
    TrainingContinues,
    Unscaled,
    full_name,
)
from paceline.audit.evidence import RankLog, Update
from paceline.audit.rules.rule import Case, Finding, Judgement, NoFault, NotJudged, outliers
from paceline.audit.rules.states import Mismatch, differing, first_difference, weights_of
from paceline.errors import name_ranks

_WORDS: dict[type[Event], str] = {
    Clipped: "clipped",
    Unscaled: "unscaled",
    ScalerStepped: "used the scaler",
    OptimizerStepBegun: "updated",
}


def equal_weights(case: Case) -> Judgement:
    """All ranks use equal weights in each step."""
    if case.updates_differ:
        return NotJudged("each rank updates other parameters, so their steps cannot be compared.")
    has_whole = all(any(e.params for e in log.of(OptimizerStepEnded)) for log in case.ranks)
    if any(log.layouts for log in case.ranks) and not has_whole:
        return NotJudged("parameters are sharded over the ranks, so each rank holds another part.")
    mismatch = case.mismatch
    if mismatch is None:
        return _without_mismatch(case)
    if mismatch.is_restored and not mismatch.outside:
        return NotJudged(
            f"the ranks' weights differ after step {mismatch.step} and are equal again some steps later: the "
            "script averages them at intervals (local SGD)."
        )
    loaded = _loaded_by_some(case, mismatch)
    if not mismatch.outside:
        return loaded or _drift(case, mismatch)
    return loaded or _start(case, mismatch) or _changed_outside(case, mismatch)


def _without_mismatch(case: Case) -> Judgement:
    """What is known if the ranks were not seen to use different weights."""
    weights = [weights_of(log) for log in case.ranks]
    if any(point.phase % 2 for point in weights[0]):
        return NoFault("the ranks' weights were equal in each step.")
    why = "no model was trained on several batches, so the weights were seen after optimizer steps only."
    found = first_difference(differing(weights))
    if found is None:
        return NotJudged(why)
    point, names = found
    return Finding(
        what=f"the ranks' weights differ after step {point.step}: {names[0]}.",
        at=next((e.at for e in case.ranks[0].optimizer_steps(point.step)), ""),
        step=point.step,
        why="the script may make them equal after each step, or each rank trains a model of its own.",
        fix="if the ranks train one model, all_reduce each gradient before the step.",
        evidence=f"the digests of {names[0]} on the ranks; {why}",
        effect=f"{len(names)} parameters differ between ranks after step {point.step}",
        is_note=True,
    )


def _finding(
    mismatch: Mismatch,
    what: str,
    *,
    at: str,
    why: str,
    fix: str,
    ranks: Sequence[int] = (),
    is_note: bool = False,
) -> Finding:
    name, step, last = mismatch.names[0], mismatch.step, mismatch.last_seen
    evidence = f"the digests of {name} on the ranks differ after step {step}"
    if mismatch.outside:
        before = (
            f"equal on all ranks after step {last.step}, "
            if last
            else f"the digests of {name} are "
        )
        evidence = f"{before}different before step {step}"
    return Finding(
        what=what,
        at=at,
        step=step,
        ranks=ranks,
        why=why,
        fix=fix,
        evidence=evidence,
        effect=f"{len(mismatch.names)} parameters differ between ranks from step {step} on",
        is_note=is_note,
    )


def _loaded_by_some(case: Case, mismatch: Mismatch) -> Finding | None:
    """A state was loaded on some ranks only, and their weights, or states of optimizers, differ since."""
    states = [[event.state for event in log.optimizer_steps(mismatch.step)] for log in case.ranks]
    if not mismatch.outside and all(own == states[0] for own in states):
        return None
    what = "model" if mismatch.outside else "optimizer"
    loads = []
    for log in case.ranks:
        before = takewhile(
            lambda e: not isinstance(e, OptimizerStepEnded) or e.step < mismatch.step, log.events
        )
        loads.append([e for e in before if isinstance(e, StateLoaded) and e.what == what])
    most = max(map(len, loads))
    ranks = [rank for rank, own in enumerate(loads) if len(own) == most]
    if len(ranks) == case.world_size:
        return None
    why = "DDP makes weights equal only when it is built; the other ranks go on with different values."
    if what == "optimizer":
        why = "DDP makes the weights equal, and not the states of optimizers: from equal gradients, the "
        why += "ranks compute different updates."
    return _finding(
        mismatch,
        f"the {what}'s state was loaded on {name_ranks(ranks, case.world_size)} only.",
        at=loads[ranks[0]][-1].at,
        ranks=ranks,
        why=why,
        fix="load on every rank (map_location its own device).",
    )


def _start(case: Case, mismatch: Mismatch) -> Finding | None:
    """The weights differ before their first step, and no DDP makes them equal."""
    name = mismatch.names[0]
    forwards = _forwards_with(case.ranks[0], name)
    outside = {each for e in case.ranks[0].of(ModelSeen) for each in e.outside_ddp}
    is_wrapped = any(e.sync is not None or e.bypasses_ddp for e in forwards)
    if mismatch.last_seen or (is_wrapped and not outside.issuperset(mismatch.names)):
        return None
    grads = [[e.grads[name] for e in _steps_with(log, name, mismatch.step)] for log in case.ranks]
    why = "the script does not make them equal."
    is_own = not grads[0] or any(own != grads[0] for own in grads)
    if is_own:
        why = f"{why} Their gradients differ too: each rank may train a model of its own."
    return _finding(
        mismatch,
        "the ranks start with different weights.",
        at=forwards[0].at,
        why=why,
        fix="broadcast the weights from rank 0, or wrap the model in DDP.",
        # With a sampler that divides the samples, the ranks have one model to train.
        is_note=is_own and (case.trains_together or not case.has_dividing_sampler),
    )


def _changed_outside(case: Case, mismatch: Mismatch) -> Finding:
    """The weights differ since the last step, and no optimizer made them differ."""
    name, done = mismatch.names[0], mismatch.step - 1
    digests = zip(mismatch.digests_before, mismatch.digests_at, strict=False)
    ranks = [rank for rank, (then, now) in enumerate(digests) if then != now]
    if not 0 < len(ranks) < case.world_size:  # all ranks or none seem to have changed it
        ranks = outliers(mismatch.digests_at)
    log = case.ranks[ranks[0]]
    uses = [e.at for e in _forwards_with(log, name) if e.steps_done == done]
    return _finding(
        mismatch,
        f"{name} was changed outside the optimizer on {name_ranks(ranks, case.world_size)}."
        if mismatch.last_seen
        else f"{name} differs between the ranks since its first use.",
        at=next(iter(uses), ""),
        ranks=ranks,
        why="DDP makes weights equal only when it is built. A later change on one rank, or a parameter that "
        "is added later, stays on that rank. The change is before this line, which is that of the next use.",
        fix="make the same change on every rank, or broadcast the weights after it.",
    )


def _drift(case: Case, mismatch: Mismatch) -> Finding:
    """The weights differ after an update: the line that makes them differ, the reason and the fix."""
    name, log = mismatch.names[0], case.ranks[0]
    steps = [e for own in case.ranks for e in _steps_with(own, name, mismatch.step)]
    at = steps[0].at if steps else ""
    grads = {step.grads[name] for step in steps}
    not_reduced = [e for own in case.ranks for e in own.of(NotReduced) if e.name == name]
    updates = [
        each
        for each in zip(*(own.updates for own in case.ranks), strict=False)
        if min(update.step for update in each) == mismatch.step
        and len({tuple(map(type, update.calls)) for update in each}) > 1
    ]
    is_local = not case.trains_together and log.first(TrainingContinues) and _sends_first(log)
    if updates:
        at, why = _different_calls(updates[0])
        fix = "clip, unscale and step on every rank; decide on values that are equal on all ranks."
    elif len(grads) == 1 and len({tuple(step.lrs) for step in steps}) > 1:
        why, fix = "the learning rates differ between ranks.", "use one learning rate on all ranks."
    elif len(grads) == 1:
        why = "its gradient is equal on all ranks; the states of the optimizers are not."
        fix = "build, load and step the optimizer in the same way on all ranks."
    elif not_reduced:
        at = not_reduced[0].at
        why = "the parameter was added to the model after DDP had wrapped it, so DDP does not reduce it."
        fix = "build the whole model first, then wrap it."
        if not_reduced[0].frozen:
            why = "the parameter was frozen when DDP was built, and is trained now: DDP does not reduce it."
            fix = "wrap the model again after unfreezing it."
    elif is_local:
        why = "no exchange of gradients was seen: the script averages the weights after the watched steps "
        why += "(local SGD), or the reduction was forgotten."
        fix = "to watch what follows, give more --steps."
    else:
        at, why, fix = _without_reduction(log, mismatch, at)
    return _finding(
        mismatch,
        f"the ranks' weights differ after step {mismatch.step}: {name}.",
        at=at,
        why=why,
        fix=fix,
        is_note=bool(is_local),
    )


def _different_calls(updates: Sequence[Update]) -> tuple[str, str]:
    """What each rank did after its backward, and the line of the first call that not all ranks made."""
    kinds = [[type(call) for call in update.calls] for update in updates]
    calls = [call for update in updates for call in update.calls]
    some = [call for call in calls if not all(type(call) in own for own in kinds)]
    did = "; ".join(
        f"rank {rank} {', '.join(_WORDS[kind] for kind in own) or 'did nothing'}"
        for rank, own in enumerate(kinds)
    )
    return (some or calls)[0].at, f"the ranks did different things after the backward: {did}."


def _without_reduction(log: RankLog, mismatch: Mismatch, at: str) -> tuple[str, str, str]:
    """The line, the reason and the fix for a gradient that differs between ranks; `at`: of the step."""
    forwards = _forwards_with(log, mismatch.names[0])
    bypassing = [e for e in forwards if e.bypasses_ddp and e.steps_done < mismatch.step]
    why = "it was not reduced"
    fix = "wrap the model in DDP, or all_reduce each gradient before the step."
    if "data" in log.layouts:
        fix = "apply fully_shard to the whole model too: it reduces only the modules that it was given."
    elif bypassing:
        at = bypassing[-1].at
        why = "the model was called without its DDP wrapper, so DDP did not reduce it"
        fix = "call the wrapped model, not `model.module` or a method of it."
    elif any(event.sync is not None for event in forwards):
        why = "DDP did not reduce it"
        fix = "before each step, run a forward and a backward of the wrapped model outside of `no_sync`."
    return at, f"its gradient differs between ranks too: {why}.", fix


def _sends_first(log: RankLog) -> bool:
    """Whether the script itself makes weights equal before the training, as without DDP."""
    calls = (event for event in log.before_backward if isinstance(event, CollectiveBegun))
    return any(call.op == "broadcast" for call in calls)


def _steps_with(log: RankLog, parameter: str, step: int) -> list[OptimizerStepBegun]:
    """The events of this step whose optimizer has the parameter."""
    return [event for event in log.optimizer_steps(step) if parameter in event.grads]


def _forwards_with(log: RankLog, parameter: str) -> list[ForwardEnded]:
    """The forwards of training of the models that have a parameter of this name."""
    models = {
        event.model
        for event in log.training_forwards
        if parameter in (full_name(event.model, name) for name in event.params or ())
    }
    return [event for event in log.training_forwards if event.model in models]
