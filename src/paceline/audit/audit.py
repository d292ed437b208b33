"""The audit of a script that does not use paceline: three to five runs, and a judgement for each rule.

Such a script fixes the batch size of a rank, so runs of 1 and N processes train on different data and cannot
be compared. The reference is therefore a union run: one process that gets the batches of all ranks of an
ordinary run. In a few steps and in evaluations it begins with their weights. The ordinary run itself shows
the script's own shards, order and coverage, and whether its ranks drift apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from paceline.audit.events import JoinEntered, PassCut
from paceline.audit.evidence import Run
from paceline.audit.refusals import refuse, refuse_early_exit, refuse_other_steps
from paceline.audit.rules import RULES, one_process
from paceline.audit.rules.rule import Case, Finding, Judgement, NotJudged, Rule
from paceline.audit.run_plan import RunPlan

Execute = Callable[[RunPlan], Run]
_J = TypeVar("_J")


@dataclass(frozen=True)
class AuditResult:
    """The judgements for one number of processes, by the name of the rule."""

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
    taken = min(solo.steps, solo.plan.steps)
    cut_at = next((event.steps_done for event in solo.ranks[0].of(PassCut)), None)
    plan = replace(solo.plan, mode="ordinary", world_size=world_size, ranks=world_size)
    plan = replace(plan, cut_at=cut_at, kept=(0, 1, taken - 1))
    ordinary = execute(replace(plan, folder=folder / f"ordinary-{world_size}"))
    refuse_early_exit(ordinary)
    case = Case(solo, ordinary)
    if ordinary.hung:
        case = replace(case, why_no_union="the ordinary run hung.")
    else:
        case = _with_union(case, execute, folder)
    result = AuditResult(case, judge(case, strict=strict))
    compared = {rule.name for rule in RULES if rule.compares_numbers}
    if case.union is not None and compared & result.of(Finding).keys():
        case = _with_noise(case, case.union.plan, execute, folder)
        result = AuditResult(case, judge(case, strict=strict))
    if not result.faults:
        refuse(ordinary)
        refuse_other_steps(case)
    return result


def _with_union(case: Case, execute: Execute, folder: Path) -> Case:
    """The case with the run of one process on the samples of the ranks; and why it cannot be judged."""
    ordinary, count = case.ordinary, case.world_size
    of_one, of_rank = map(_batches_of_first_step, (case.solo, ordinary))
    own = replace(ordinary.plan, mode="union", world_size=1, folder=folder / f"union-{count}")
    own = replace(own, source=ordinary.plan.folder, cut_at=None)
    own = replace(own, kept=one_process.kept_steps(ordinary))
    union = execute(replace(own, one_by_one=of_one > of_rank))
    if union.hung or union.out_of_time or not union.steps:
        return replace(case, why_no_union="one process cannot train on the samples of the ranks.")
    why = ""
    if of_one not in (of_rank, of_rank * count):
        why = f"one process takes {of_one} batches for its first step, and a rank {of_rank}."
    return replace(case, union=union, why_no_steps=why)


def _with_noise(case: Case, plan: RunPlan, execute: Execute, folder: Path) -> Case:
    """The case with the runs of one process that tell noise from a difference, and a sum from a mean."""
    count = case.world_size
    null = execute(replace(plan, mode="null", folder=folder / f"null-{count}"))
    if null.hung or null.out_of_time or null.steps < (case.union.steps if case.union else 0):
        why = "one process could not repeat its run, so it is not known what chance changes."
        return replace(case, union=None, why_no_union=why)
    case = replace(case, null=null)
    steps = [] if plan.one_by_one or case.why_no_steps else one_process.steps_of(case)
    if not any(step.ratio and step.is_near(step.ratio, 1 / count) for step in steps):
        return case
    return replace(case, alone=execute(replace(plan, folder=folder / f"alone-{count}", ranks=1)))


def _batches_of_first_step(run: Run) -> int:
    log = run.ranks[0]
    return sum(e.steps_done == 0 for e in log.training_batches)


def judge(case: Case, *, strict: bool = False) -> dict[str, Judgement]:
    """The judgement of each rule; with `strict`, notes become faults."""
    found = {rule.name: _judge(rule, case) for rule in RULES}
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
    return found


def _is_fault(judgement: Judgement | None) -> bool:
    return isinstance(judgement, Finding) and not judgement.is_note


def _judge(rule: Rule, case: Case) -> Judgement:
    if not rule.works_with_join and any(log.first(JoinEntered) for log in case.ranks):
        return NotJudged("ranks without batches repeat the collectives of the others (Join).")
    if case.splits_model and not rule.judges_split_models:
        return NotJudged("the ranks may hold parts of one model, which get equal samples.")
    try:
        return rule.judge(case)
    except Exception as error:
        # A bug of one rule must neither be reported as a fault nor hide the other judgements.
        return NotJudged(
            f"this rule failed on the evidence, which is a bug of paceline: {error!r}."
        )
