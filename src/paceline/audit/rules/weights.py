"""Weights and states of optimizers that must be equal on all ranks: where they first differ, and why."""

from __future__ import annotations

from typing import Any

from paceline.audit.events import (
    CollectiveBegun,
    ForwardEnded,
    TrainingContinues,
    WeightsChanged,
    full_name,
)
from paceline.audit.evidence import RankLog
from paceline.audit.rules.rule import Case, Finding, Judgement, NoFault, NotJudged, outliers
from paceline.audit.rules.states import Mismatch, weights_of
from paceline.errors import name_ranks


def _fault(mismatch: Mismatch, *, remark: str = "", **facts: Any) -> Finding:
    """The fault with these facts; `remark` ends its evidence."""
    name, step, last = mismatch.names[0], mismatch.step, mismatch.last_seen
    when = "before" if mismatch.outside else "after"
    evidence = f"the digests of {name} on the ranks differ {when} step {step}"
    if mismatch.outside and last:
        evidence = f"equal on all ranks after step {last.step}, different before step {step}"
    effect = f"{len(mismatch.names)} parameters differ between ranks from step {step} on"
    return Finding(step=step, evidence=evidence + remark, effect=effect, **facts)


def loaded_on_one_rank(case: Case) -> Judgement:
    """A checkpoint was loaded on some ranks only, and their weights or states differ since."""
    mismatch = case.mismatch
    if mismatch is None or not mismatch.loads:
        return NoFault("no weights differ because a state was loaded on some ranks only.")
    ranks = list(mismatch.loads)
    what = "model" if mismatch.outside else "optimizer"
    why = "DDP makes weights equal only when it is built; the other ranks go on with different values."
    fix = "load on every rank (map_location its own device), or before DDP is built."
    if not mismatch.outside:
        why = "DDP makes the weights equal, and not the states of optimizers: from equal gradients, the "
        why += "ranks compute different updates."
        fix = "load on every rank (map_location its own device)."
    return _fault(
        mismatch,
        what=f"the {what}'s state was loaded on {name_ranks(ranks, case.world_size)} only.",
        at=mismatch.loads[ranks[0]].at,
        ranks=ranks,
        why=why,
        fix=fix,
    )


def changed_outside(case: Case) -> Judgement:
    """The ranks' weights differ, and no optimizer step made them differ."""
    mismatch = case.mismatch
    if not _shows_weights(case.ranks[0]):
        return NotJudged("no model was trained on several batches, which shows its weights.")
    if mismatch is None or not mismatch.outside or mismatch.loads:
        return NoFault("between optimizer steps, all ranks made the same changes or none.")
    name, last, done = mismatch.names[0], mismatch.last_seen, mismatch.step - 1
    forwards = _forwards_with(case.ranks[0], name)
    if last is None and all(e.sync is None and not e.bypasses_ddp for e in forwards):
        what = "the ranks start with different weights"
        fix = "broadcast the weights from rank 0, or wrap"
        if not case.trains_together:
            what, fix = f"{what}, and no exchange of gradients was seen", "wrap"
        if _trains_alone(case, name) or not (case.trains_together or case.has_dividing_sampler):
            return NotJudged(
                f"{what}: each may train a model of its own, or the reduction was forgotten.",
                is_open=True,
            )
        return _fault(
            mismatch,
            what=f"{what}.",
            at=forwards[0].at,
            why=f"{name} differs before its first step, and the script does not make it equal.",
            fix=f"{fix} the model in DDP, which makes the weights equal.",
        )
    since = last.step if last else 0
    changes = {
        log.rank: [e.at for e in log.of(WeightsChanged) if since <= e.steps_done <= done]
        for log in case.ranks
    }
    digests = zip(mismatch.digests_before, mismatch.digests_at, strict=False)
    ranks = [rank for rank, (then, now) in enumerate(digests) if then != now]
    ranks = ranks or [rank for rank, lines in changes.items() if lines]
    if not 0 < len(ranks) < case.world_size:  # all ranks or none seem to have changed it
        ranks = outliers(mismatch.digests_at)
    log = case.ranks[ranks[0]]
    uses = [e.at for e in _forwards_with(log, name) if e.steps_done == done]
    uses += [e.at for e in log.optimizer_steps(mismatch.step) if name in e.outside_models]
    remark = "the line is that of the next forward or step, because the change itself was not seen"
    return _fault(
        mismatch,
        remark="" if changes[log.rank] else f"; {remark}",
        what=f"{name} was changed outside the optimizer on {name_ranks(ranks, case.world_size)}.",
        at=(changes[log.rank] or uses)[0],
        ranks=ranks,
        why="DDP reduces gradients, not weights: a change on one rank stays on that rank.",
        fix="make the same change on every rank, or broadcast the weights after it.",
    )


def drifting_weights(case: Case) -> Judgement:
    """The weights differ after an optimizer step, and no other rule knows why."""
    mismatch = case.mismatch
    log = case.ranks[0]
    if not _shows_weights(log):
        updated = [weights_of(log) for log in case.ranks]
        return NotJudged(
            "no model was trained on several batches, so the weights were seen after optimizer steps only.",
            is_open=any(params != updated[0] for params in updated),
        )
    if mismatch is None or mismatch.outside:
        return NoFault("after each optimizer step the ranks' weights were equal.")
    if mismatch.is_restored:
        return NotJudged(
            f"the ranks' weights differ after step {mismatch.step} and are equal again some steps later: the "
            "script averages them at intervals (local SGD)."
        )
    if not case.trains_together and log.first(TrainingContinues) and _sends_first(log):
        return NotJudged(
            f"no exchange of gradients was seen, and the ranks' weights differ after step {mismatch.step}: "
            "the script averages them after the watched steps (local SGD), or the reduction was forgotten. "
            "To watch what follows, give more --steps.",
            is_open=True,
        )
    at, why, fix = _cause_of_drift(case, mismatch)
    return _fault(
        mismatch,
        what=f"the ranks' weights differ after step {mismatch.step}: {mismatch.names[0]}.",
        at=at,
        why=why,
        fix=fix,
    )


def _cause_of_drift(case: Case, mismatch: Mismatch) -> tuple[str, str, str]:
    """The line that makes the weights differ (a step, or a forward before it), the reason and the fix."""
    name, log = mismatch.names[0], case.ranks[0]
    steps = [
        next((e for e in own if name in e.grads), own[0])
        for own in (log.optimizer_steps(mismatch.step) for log in case.ranks)
    ]
    at = steps[0].at
    if len({step.grads.get(name) for step in steps}) == 1:
        if len({tuple(step.lrs) for step in steps}) > 1:
            return (
                at,
                "the learning rates differ between ranks.",
                "use one learning rate on all ranks.",
            )
        why = "its gradient is equal on all ranks; the states of the optimizers are not."
        return at, why, "build, load and step the optimizer in the same way on all ranks."
    forwards = _forwards_with(log, name)
    bypassing = [e for e in forwards if e.bypasses_ddp and e.steps_done < mismatch.step]
    why = "it was not reduced"
    fix = "wrap the model in DDP, or all_reduce each gradient before the step."
    if "data" in log.layouts:
        fix = "apply fully_shard to the whole model too: it reduces only the modules that it was given."
    elif not forwards:
        why = "no DDP has this parameter"
        fix = "make it a parameter of the model that DDP wraps, directly or in a module or ModuleList, "
        fix += "or all_reduce its gradient before each step."
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


def _trains_alone(case: Case, parameter: str) -> bool:
    """Whether each rank trains the parameter's model on the same samples, and keeps its own gradient."""
    step = _forwards_with(case.ranks[0], parameter)[0].steps_done
    rows = [
        [e.rows for e in _forwards_with(log, parameter) if e.steps_done == step]
        for log in case.ranks
    ]
    grads = [[e.grads.get(parameter) for e in log.optimizer_steps(step + 1)] for log in case.ranks]
    return (
        all(rows[0])
        and all(own == rows[0] for own in rows)
        and any(own != grads[0] for own in grads)
    )


def _shows_weights(log: RankLog) -> bool:
    """Whether the weights were seen between optimizer steps."""
    return any(point.phase % 2 for point in weights_of(log))


def _forwards_with(log: RankLog, parameter: str) -> list[ForwardEnded]:
    """The forwards of training of the models that have a parameter of this name."""
    models = {
        event.model
        for event in log.training_forwards
        if parameter in (full_name(event.model, name) for name in event.params or ())
    }
    return [event for event in log.training_forwards if event.model in models]
