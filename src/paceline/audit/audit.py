"""The audit of a script that does not use paceline: two to four runs, and a judgement for each rule.

Such a script fixes the batch size of a rank, so runs of 1 and N processes train on different data and cannot
be compared. The reference is therefore a replay, whose ranks get the batches of the run of one process, or
parts of them. An ordinary run shows the script's own shards, order and coverage, and whether its ranks drift
apart. If the batches cannot be replayed, another run gets only the weights of the run of one process, in
evaluations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from paceline.audit.events import (
    JoinEntered,
    OptimizerStepEnded,
    PassCut,
    RankEnded,
    TrainingContinues,
)
from paceline.audit.evidence import Run
from paceline.audit.refusals import refuse, refuse_early_exit, refuse_other_steps
from paceline.audit.rules import RULES
from paceline.audit.rules.rule import Case, Finding, Judgement, NotJudged, Rule
from paceline.audit.run_plan import Mode, RunPlan

Execute = Callable[[RunPlan], Run]
_J = TypeVar("_J")


@dataclass(frozen=True)
class AuditResult:
    """The judgements for one number of processes, by the name of the rule.

    After a fault, rules that are judged last have none.
    """

    case: Case
    judgements: dict[str, Judgement] = field(default_factory=dict)

    def of(self, kind: type[_J]) -> dict[str, _J]:
        """The judgements of one kind, by the name of the rule."""
        return {name: each for name, each in self.judgements.items() if isinstance(each, kind)}

    @property
    def faults(self) -> dict[str, Finding]:
        """The findings that are faults, by the name of the rule."""
        return {name: each for name, each in self.of(Finding).items() if not each.is_note}

    @property
    def notes(self) -> dict[str, Finding]:
        """The findings that are notes, by the name of the rule."""
        return {name: each for name, each in self.of(Finding).items() if each.is_note}


def audit(
    solo: Run, world_size: int, execute: Execute, folder: Path, *, strict: bool = False
) -> AuditResult:
    """Judge a script on `world_size` processes.

    Args:
        solo: The run of one process.
        execute: Runs the script as planned.
        folder: Where the runs write.
        strict: Whether notes are faults.

    Raises:
        Refused: the ordinary run cannot be judged, and no rule found a fault; or a rank called `sys.exit`
            during its training.
    """
    log = solo.ranks[0]
    wanted = (log.first(RankEnded) or RankEnded()).wanted or solo.steps
    taken = min(solo.steps, wanted)
    steps = max(solo.plan.steps, taken)
    # If the script ended by itself, let several ranks do so too: they may take a few steps more or less.
    limit = steps if log.of(TrainingContinues) else max(steps, wanted)
    cut_at = next((event.steps_done for event in solo.ranks[0].of(PassCut)), None)
    plan = replace(solo.plan, world_size=world_size, steps=steps, max_steps=0, cut_at=cut_at)

    def run(mode: Mode) -> Run:
        source = None if mode == "ordinary" else solo.plan.folder
        own = folder / f"{mode}-{world_size}"
        most = limit if mode == "ordinary" else 0
        return execute(replace(plan, mode=mode, folder=own, solo=source, max_steps=most))

    ordinary = run("ordinary")
    refuse_early_exit(ordinary)
    mode, why = _replay_mode(solo, ordinary)
    replay = None
    if mode is not None:
        replay, why = _usable(run(mode), ordinary)
    same_weights = None
    if replay is None and not ordinary.hung and _compares_evaluations(solo, ordinary):
        made = run("same-weights")
        same_weights = None if made.hung or made.out_of_time or made.returncode else made
    case = Case(solo, ordinary, replay, why, same_weights)
    result = AuditResult(case, judge(case, strict=strict))
    if not result.faults:
        refuse(ordinary)
        refuse_other_steps(case)
    return result


def _usable(replay: Run, ordinary: Run) -> tuple[Run | None, str]:
    """The replay; None and the reason if it did not train as the ordinary run."""
    planned = replay.plan.steps
    if replay.hung or replay.out_of_time:
        return None, f"{replay.name} did not end in time."
    if replay.returncode and replay.steps < planned:
        return None, f"{replay.name} failed: the script cannot train on the batches of one process."
    if replay.steps < min(ordinary.steps, planned):
        return None, f"{replay.name} took fewer steps: the script plans its steps itself."
    return replay, ""


def judge(case: Case, *, strict: bool = False) -> dict[str, Judgement]:
    """The judgement of each rule; with `strict`, notes become faults."""
    found = {rule.name: _judge(rule, case) for rule in RULES if not rule.is_last}
    if strict:
        for name, each in found.items():
            if isinstance(each, Finding):
                found[name] = replace(each, is_note=False)
    faults = {name for name, each in found.items() if _is_fault(each)}
    for rule in RULES:
        finding = found.get(rule.name)
        causes = [name for name in rule.consequence_of if name in faults]
        if isinstance(finding, Finding) and causes:
            found[rule.name] = NotJudged(f"it may be a consequence of: {', '.join(causes)}.")
    if not any(map(_is_fault, found.values())):
        found |= {rule.name: _judge(rule, case) for rule in RULES if rule.is_last}
    return found


def _is_fault(judgement: Judgement | None) -> bool:
    return isinstance(judgement, Finding) and not judgement.is_note


def _judge(rule: Rule, case: Case) -> Judgement:
    if not rule.works_with_join and any(log.first(JoinEntered) for log in case.ranks):
        return NotJudged("ranks without batches repeat the collectives of the others (Join).")
    if case.splits_model and not rule.judges_split_models:
        return NotJudged(
            "the ranks may hold parts of one model, which get equal samples.",
            is_open=rule.is_last and rule.compares_weights and not case.exchanges_anything,
        )
    sharded = any(log.layouts for log in case.ranks)
    has_whole = all(any(e.params for e in log.of(OptimizerStepEnded)) for log in case.ranks)
    if sharded and not has_whole and rule.compares_weights:
        return NotJudged("parameters are sharded over the ranks, so each rank holds another part.")
    if rule.compares_weights and case.updates_differ:
        return NotJudged("each rank updates other parameters, so their steps cannot be compared.")
    try:
        return rule.judge(case)
    except Exception as error:
        # A bug of one rule must neither be reported as a fault nor hide the other judgements.
        return NotJudged(
            f"this rule failed on the evidence, which is a bug of paceline: {error!r}.",
            is_open=True,
        )


def _replay_mode(solo: Run, ordinary: Run) -> tuple[Mode | None, str]:
    """The mode of the replay; None and the reason if no replay is possible."""
    if ordinary.hung:
        return None, "the ordinary run hung, so the batches of one process were not replayed."
    batches = [log.training_batches[:1] for log in (solo.ranks[0], *ordinary.ranks)]
    solo_size, *rank_sizes = (own[0].samples if own else None for own in batches)
    if solo_size is None or None in rank_sizes:
        return None, "no DataLoader gave batches that could be given to all ranks."
    unsaved = next((each.unsaved for each in solo.ranks[0].training_batches if each.unsaved), "")
    if unsaved:
        return None, f"a batch could not be saved, to give it to all ranks: {unsaved}."
    if all(size == solo_size for size in rank_sizes):
        # A loss that compares the samples of all ranks must get each sample once.
        is_divided = ordinary.ranks[0].gather_for_loss and not solo_size % len(rank_sizes)
        return "divided" if is_divided else "mirrored", ""
    if sum(size or 0 for size in rank_sizes) == solo_size:
        (batch,) = batches[0]
        if batch.ids and len(batch.ids) != batch.size:
            return None, "the first dimension of a batch is not its samples."
        return "divided", ""
    sizes = ", ".join(map(str, rank_sizes))
    return None, f"one process trains on batches of {solo_size}, the ranks on batches of {sizes}."


def _compares_evaluations(solo: Run, ordinary: Run) -> bool:
    """Whether one process and several exchange results in an evaluation, which could be compared."""
    of_ranks = (run.ranks[0].evaluations.values() for run in (solo, ordinary))
    return all(any(own.metric_calls or own.gathers for own in each) for each in of_ranks)
