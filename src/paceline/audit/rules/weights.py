"""Weights and optimizer states that must be equal on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

from paceline.audit.events import (
    DDPBuilt,
    Digests,
    ForwardEnded,
    OptimizerStepEnded,
    StateLoaded,
    WeightsChanged,
)
from paceline.audit.evidence import RankLog
from paceline.audit.models import full_name
from paceline.audit.rules.rule import (
    Case,
    FaultFound,
    Judgement,
    NoFault,
    NotJudged,
    outliers,
)
from paceline.errors import name_ranks

DigestsByStep = dict[int, Digests]


@dataclass(frozen=True)
class Mismatch:
    """Where the ranks' weights first differ.

    Attributes:
        step: The last step before the difference was seen; 0 before the first.
        outside: Whether the weights were equal after the update of that step, so that no optimizer made
            them differ.
        names: The parameters.
        ranks: The ranks that changed them, else those in the minority.
        is_restored: Whether these parameters are equal again at some later step.
    """

    step: int
    outside: bool
    names: list[str]
    ranks: list[int]
    is_restored: bool

    @property
    def effect(self) -> str:
        """The size of the difference."""
        return f"{len(self.names)} parameters differ between ranks from step {self.step + self.outside} on"


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


def find_mismatch(case: Case) -> Mismatch | None:
    """The first point at which the ranks hold different weights; None if there is none."""
    befores = [_before_step(log) for log in case.ranks]
    afters = [_after_step(log) for log in case.ranks]
    used, updated = _differing(befores), _differing(afters)
    last = min((max(each, default=0) for each in afters), default=0)
    for step in range(last + 1):
        # Optimizers that exchange updated weights are equal again when the model is used.
        by_update = [name for name in updated.get(step, ()) if name in used.get(step, ())]
        names = by_update or used.get(step, [])
        if not names:
            continue
        is_restored = any(s > step and not set(names) & set(used[s]) for s in used)
        if by_update:
            ranks = outliers([each[step].get(names[0]) for each in afters])
        else:
            pairs = [
                (after.get(step, {}).get(names[0]), before[step][names[0]])
                for after, before in zip(afters, befores, strict=True)
            ]
            ranks = _ranks_that_changed(case, step, pairs)
        return Mismatch(step, not by_update, names, ranks, is_restored)
    return None


def _differing(each: list[DigestsByStep]) -> dict[int, list[str]]:
    """By step that all ranks know, the parameters that all ranks know and that differ."""
    found = {}
    for step in sorted(set[int].intersection(*map(set, each))):
        first, *others = (own[step] for own in each)
        shared = [name for name in first if all(name in own for own in others)]
        found[step] = [name for name in shared if any(own[name] != first[name] for own in others)]
    return found


def _ranks_that_changed(case: Case, step: int, pairs: list[tuple[int | None, int]]) -> list[int]:
    """The ranks that changed a parameter after a step; the minority if all ranks or none seem to have.

    Args:
        pairs: The digests on each rank after the update, None if unknown, and at the next use.
    """
    changed = [rank for rank, (after, used) in enumerate(pairs) if after not in (None, used)]
    if not changed:
        changed = [
            log.rank
            for log in case.ranks
            if any(e.steps_done == step for e in log.of(WeightsChanged))
        ]
    if 0 < len(changed) < case.world_size:
        return changed
    return outliers([used for _, used in pairs])


def _uneven_loads(case: Case, what: str, mismatch: Mismatch) -> list[tuple[int, StateLoaded]]:
    """The ranks that loaded more often than others before a mismatch, and the last load of each."""
    each = []
    for log in case.ranks:
        before = takewhile(
            lambda e: not isinstance(e, OptimizerStepEnded) or e.step <= mismatch.step, log.events
        )
        each.append([e for e in before if isinstance(e, StateLoaded) and e.what == what])
    if len({len(loads) for loads in each}) == 1:
        return []
    most = max(map(len, each))
    return [(rank, loads[-1]) for rank, loads in enumerate(each) if len(loads) == most]


def loaded_on_one_rank(case: Case) -> Judgement:
    """A checkpoint was loaded on some ranks only, and their weights or states differ since."""
    mismatch = find_mismatch(case)
    if mismatch is None:
        return NoFault("the ranks' weights stayed equal.")
    what = "model" if mismatch.outside else "optimizer"
    states = {e.state for log in case.ranks for e in log.optimizer_steps(mismatch.step)}
    loads = _uneven_loads(case, what, mismatch) if mismatch.outside or len(states) > 1 else []
    if not loads:
        return NoFault("the ranks' weights differ, but not because of a loaded state.")
    ranks = [rank for rank, _ in loads]
    step = mismatch.step + 1 if mismatch.outside else max(mismatch.step, 1)
    return FaultFound(
        what=f"the {what}'s state was loaded on {name_ranks(ranks, case.world_size)} only.",
        at=loads[0][1].at,
        ranks=ranks,
        step=step,
        why="DDP makes weights equal only when it is built; the other ranks continue with other values."
        if mismatch.outside
        else "DDP makes the weights equal, and not the states of optimizers: from equal gradients, the "
        "ranks compute different updates.",
        fix="load on every rank (map_location its own device)"
        + (", or before DDP is built." if mismatch.outside else "."),
        evidence=f"{mismatch.names[0]} differs between ranks {'before' if mismatch.outside else 'after'} "
        f"step {mismatch.step + mismatch.outside}",
        effect=mismatch.effect,
    )


def changed_outside(case: Case) -> Judgement:
    """The ranks' weights differ, and no optimizer step made them differ."""
    mismatch = find_mismatch(case)
    if mismatch is None or not mismatch.outside:
        return NoFault(
            "between optimizer steps, all ranks made the same changes of weights or none."
        )
    if _uneven_loads(case, "model", mismatch):
        return NoFault("the ranks' weights differ because of a loaded state.")
    log = case.ranks[mismatch.ranks[0] if mismatch.ranks else 0]
    lines = [e.at for e in log.optimizer_steps(mismatch.step)]
    lines += [e.at for e in log.of(ForwardEnded) if e.steps_done == mismatch.step]
    if mismatch.step == 0 and not any(log.of(DDPBuilt) for log in case.ranks):
        return FaultFound(
            what="the ranks start with different weights.",
            at=lines[0] if lines else "",
            step=1,
            why=f"{mismatch.names[0]} differs before the first step, and the script does not make it equal.",
            fix="broadcast the weights from rank 0, or wrap the model in DDP, which does.",
            evidence="the digests of the weights before step 1",
            effect=mismatch.effect,
        )
    changes = [e.at for e in log.of(WeightsChanged) if e.steps_done == mismatch.step]
    return FaultFound(
        what=f"{mismatch.names[0]} was changed outside the optimizer on "
        f"{name_ranks(mismatch.ranks, case.world_size)}.",
        at=(changes or lines[-1:] or [""])[0],
        ranks=mismatch.ranks,
        step=mismatch.step + 1,
        why="DDP reduces gradients, not weights: a change on one rank stays on that rank.",
        fix="make the same change on every rank, or broadcast the weights after it.",
        evidence=f"equal on all ranks after step {mismatch.step}, different before step {mismatch.step + 1}"
        if mismatch.step
        else "the weights differ before step 1, although DDP made them equal",
        effect=mismatch.effect,
    )


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
    steps = [
        next((e for e in own if mismatch.names[0] in e.grads), own[0])
        for own in (log.optimizer_steps(mismatch.step) for log in case.ranks)
    ]
    gradients = {step.grads.get(mismatch.names[0]) for step in steps}
    at = steps[0].at
    forwards = _forwards_with(case.ranks[0], mismatch.names[0])
    bypassing = [e for e in forwards if e.bypasses_ddp and e.steps_done < mismatch.step]
    if len(gradients) > 1 and bypassing:
        at = bypassing[-1].at
        why = "its gradient differs between ranks too: the model was called without its DDP wrapper, so "
        why += "DDP did not reduce the gradients."
        fix = "call the wrapped model, not `model.module` or a method of it."
    elif len(gradients) > 1 and any(event.sync is not None for event in forwards):
        why = "its gradient differs between ranks too: DDP did not reduce it."
        fix = "before each step, run a forward and a backward of the wrapped model outside of `no_sync`."
    elif len(gradients) > 1:
        why = "its gradient differs between ranks too: it was not reduced."
        fix = "wrap the model in DDP, or all_reduce each gradient before the step."
    elif len({tuple(step.lrs) for step in steps}) > 1:
        why, fix = "the learning rates differ between ranks.", "use one learning rate on all ranks."
    else:
        why = "its gradient is equal on all ranks; the states of the optimizers are not."
        fix = "build, load and step the optimizer in the same way on all ranks."
    return FaultFound(
        what=f"the ranks' weights differ after step {mismatch.step}: {mismatch.names[0]}.",
        at=at,
        step=mismatch.step,
        why=why,
        fix=fix,
        evidence=f"the digests of the weights after step {mismatch.step}",
        effect=mismatch.effect,
    )


def _forwards_with(log: RankLog, parameter: str) -> list[ForwardEnded]:
    """The forwards of training of the models that have a parameter of this name."""
    models = {
        event.model
        for event in log.training_forwards
        if parameter in (full_name(event.model, name) for name in event.params or ())
    }
    return [event for event in log.training_forwards if event.model in models]
