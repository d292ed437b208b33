"""Weights and states of optimizers that must be equal on all ranks: where they first differ, and why."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from paceline.audit.events import (
    DDPBuilt,
    Digests,
    ForwardEnded,
    ModelSeen,
    OptimizerStepEnded,
    StateLoaded,
    WeightsChanged,
)
from paceline.audit.evidence import RankLog
from paceline.audit.models import full_name
from paceline.audit.rules.rule import Case, FaultFound, Judgement, NoFault, NotJudged, outliers
from paceline.errors import name_ranks

DigestsByStep = dict[int, Digests]


@dataclass(frozen=True)
class Mismatch:
    """The first difference between the weights of the ranks."""

    step: int  # the first step with different weights, from 1
    # Whether the weights differed before the update of that step, so that no optimizer made them differ.
    outside: bool
    names: list[str]  # the parameters
    is_restored: bool  # whether these parameters are equal again at some later step
    # By rank, the last load of a state before, if other ranks loaded less often: the cause.
    loads: dict[int, StateLoaded]

    def fault(self, **facts: Any) -> FaultFound:
        """The fault with these facts."""
        effect = f"{len(self.names)} parameters differ between ranks from step {self.step} on"
        return FaultFound(step=self.step, effect=effect, **facts)


def find_mismatch(case: Case) -> Mismatch | None:
    """The first point at which the ranks hold different weights; None if there is none."""
    afters = [_after_step(log) for log in case.ranks]
    used, updated = _differing([_before_step(log) for log in case.ranks]), _differing(afters)
    last = min((max(each, default=0) for each in afters), default=0)
    for step in range(last + 1):
        # Optimizers that exchange updated weights are equal again when the model is used.
        by_update = [name for name in updated.get(step, ()) if name in used.get(step, ())]
        names = by_update or used.get(step, [])
        if names:
            outside = not by_update
            is_restored = any(s > step and not set(names) & set(used[s]) for s in used)
            loads = _uneven_loads(case, step + outside, outside=outside)
            return Mismatch(step + outside, outside, names, is_restored, loads)
    return None


def _before_step(log: RankLog) -> DigestsByStep:
    """Each parameter's digest in the first forward after its last update of step s."""
    found: DigestsByStep = {}
    for event in log.of(ForwardEnded):
        for name, each in (event.params or {}).items():
            found.setdefault(event.steps_done, {})[full_name(event.model, name)] = each
    return found


def _after_step(log: RankLog) -> DigestsByStep:
    found: DigestsByStep = {}
    for event in log.of(OptimizerStepEnded):
        found.setdefault(event.step, {}).update(event.params)
    return found


def _differing(each: list[DigestsByStep]) -> dict[int, list[str]]:
    """By step that all ranks know, the parameters that all ranks know and that differ."""
    found = {}
    for step in sorted(set[int].intersection(*map(set, each))):
        first, *others = (own[step] for own in each)
        shared = [name for name in first if all(name in own for own in others)]
        found[step] = [name for name in shared if any(own[name] != first[name] for own in others)]
    return found


def _uneven_loads(case: Case, step: int, *, outside: bool) -> dict[int, StateLoaded]:
    """By rank, the last load before a mismatch, if some ranks loaded more often than others."""
    states = {event.state for log in case.ranks for event in log.optimizer_steps(step)}
    if not outside and len(states) == 1:
        return {}
    each = []
    for log in case.ranks:
        before = takewhile(
            lambda e: not isinstance(e, OptimizerStepEnded) or e.step < step, log.events
        )
        what = "model" if outside else "optimizer"
        each.append([e for e in before if isinstance(e, StateLoaded) and e.what == what])
    most = max(map(len, each))
    if min(map(len, each)) == most:
        return {}
    return {rank: loads[-1] for rank, loads in enumerate(each) if len(loads) == most}


def loaded_on_one_rank(case: Case) -> Judgement:
    """A checkpoint was loaded on some ranks only, and their weights or states differ since."""
    mismatch = find_mismatch(case)
    if mismatch is None or not mismatch.loads:
        return NoFault(
            "no state was loaded on some ranks only, and made the weights of the ranks differ."
        )
    ranks = list(mismatch.loads)
    what, when = ("model", "before") if mismatch.outside else ("optimizer", "after")
    why = "DDP makes weights equal only when it is built; the other ranks go on with other values."
    fix = "load on every rank (map_location its own device), or before DDP is built."
    if not mismatch.outside:
        why = "DDP makes the weights equal, and not the states of optimizers: from equal gradients, the "
        why += "ranks compute different updates."
        fix = "load on every rank (map_location its own device)."
    return mismatch.fault(
        what=f"the {what}'s state was loaded on {name_ranks(ranks, case.world_size)} only.",
        at=mismatch.loads[ranks[0]].at,
        ranks=ranks,
        why=why,
        fix=fix,
        evidence=f"{mismatch.names[0]} differs between ranks {when} step {mismatch.step}",
    )


def changed_outside(case: Case) -> Judgement:
    """The ranks' weights differ, and no optimizer step made them differ."""
    mismatch = find_mismatch(case)
    if mismatch is None or not mismatch.outside or mismatch.loads:
        return NoFault(
            "between optimizer steps, all ranks made the same changes of weights or none."
        )
    name, done = mismatch.names[0], mismatch.step - 1
    if not done and not any(log.of(DDPBuilt) for log in case.ranks):
        if not case.trains_together:
            return NotJudged(
                "the ranks start with different weights and exchange no gradients: each may train a model of "
                "its own, or the reduction was forgotten.",
                is_open=True,
            )
        return mismatch.fault(
            what="the ranks start with different weights.",
            at=next((e.at for e in case.ranks[0].of(ForwardEnded)), ""),
            why=f"{name} differs before the first step, and the script does not make it equal.",
            fix="broadcast the weights from rank 0, or wrap the model in DDP, which does.",
            evidence="the digests of the weights before step 1",
        )
    ranks = _ranks_that_changed(case, name, done)
    log = case.ranks[ranks[0]]
    changes = [e.at for e in log.of(WeightsChanged) if e.steps_done == done]
    uses = [e.at for e in log.of(ForwardEnded) if e.steps_done == done]
    return mismatch.fault(
        what=f"{name} was changed outside the optimizer on {name_ranks(ranks, case.world_size)}.",
        at=(changes or uses[-1:])[0],
        ranks=ranks,
        why="DDP reduces gradients, not weights: a change on one rank stays on that rank.",
        fix="make the same change on every rank, or broadcast the weights after it.",
        evidence=f"equal on all ranks after step {done}, different before step {mismatch.step}"
        if done
        else "the weights differ before step 1, although DDP made them equal",
    )


def _ranks_that_changed(case: Case, name: str, step: int) -> list[int]:
    """The ranks that changed a parameter after a step; the minority if all ranks or none seem to have."""
    used = [_before_step(log)[step][name] for log in case.ranks]
    updated = [_after_step(log).get(step, {}).get(name) for log in case.ranks]
    changed = [
        rank for rank, after in enumerate(updated) if after is not None and after != used[rank]
    ] or [
        log.rank for log in case.ranks if any(e.steps_done == step for e in log.of(WeightsChanged))
    ]
    return changed if 0 < len(changed) < case.world_size else outliers(used)


def drifting_weights(case: Case) -> Judgement:
    """The weights differ after an optimizer step, and no other rule knows why."""
    mismatch = find_mismatch(case)
    if mismatch is None or mismatch.outside:
        return NoFault("after each optimizer step the ranks' weights were equal.")
    if mismatch.is_restored:
        return NotJudged(
            f"the ranks' weights differ after step {mismatch.step} and are equal again some steps later: the "
            "script averages them at intervals (local SGD)."
        )
    name = mismatch.names[0]
    steps = [
        next((e for e in own if name in e.grads), own[0])
        for own in (log.optimizer_steps(mismatch.step) for log in case.ranks)
    ]
    at = steps[0].at
    forwards = _forwards_with(case.ranks[0], name)
    bypassing = [e for e in forwards if e.bypasses_ddp and e.steps_done < mismatch.step]
    if len({step.grads.get(name) for step in steps}) > 1:
        why = "its gradient differs between ranks too: it was not reduced."
        fix = "wrap the model in DDP, or all_reduce each gradient before the step."
        if any(event.layout == "data" for event in case.ranks[0].of(ModelSeen)):
            fix = "apply fully_shard to the whole model too: it reduces only the modules that it was given."
        elif bypassing:
            at = bypassing[-1].at
            why = "its gradient differs between ranks too: the model was called without its DDP wrapper, so "
            why += "DDP did not reduce the gradients."
            fix = "call the wrapped model, not `model.module` or a method of it."
        elif any(event.sync is not None for event in forwards):
            why = "its gradient differs between ranks too: DDP did not reduce it."
            fix = "before each step, run a forward and a backward of the wrapped model outside of `no_sync`."
    elif len({tuple(step.lrs) for step in steps}) > 1:
        why, fix = "the learning rates differ between ranks.", "use one learning rate on all ranks."
    else:
        why = "its gradient is equal on all ranks; the states of the optimizers are not."
        fix = "build, load and step the optimizer in the same way on all ranks."
    return mismatch.fault(
        what=f"the ranks' weights differ after step {mismatch.step}: {name}.",
        at=at,
        why=why,
        fix=fix,
        evidence=f"the digests of the weights after step {mismatch.step}",
    )


def _forwards_with(log: RankLog, parameter: str) -> list[ForwardEnded]:
    """The forwards of training of the models that have a parameter of this name."""
    models = {
        event.model
        for event in log.training_forwards
        if parameter in (full_name(event.model, name) for name in event.params or ())
    }
    return [event for event in log.training_forwards if event.model in models]
