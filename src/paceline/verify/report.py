"""The report of `paceline verify`, as text and as JSON.

It has the findings, what was compared, the checks, remarks on the runs, and the verdict.

A check ends as a finding (a fault or a note), "passed" or "not seen" (with the reason). Text and JSON use the
same words. No report calls a script right: the last line says how many checks passed, and how many could not
run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any

from paceline.audit.audit import AuditResult
from paceline.audit.events import (
    CompileCalled,
    Failed,
    ForwardBegun,
    SeedSet,
    TrainingBuilt,
    TrainingContinues,
)
from paceline.audit.evidence import Run
from paceline.audit.rules.rule import Finding, NoFault, NotJudged
from paceline.errors import name_ranks
from paceline.exit_codes import ExitCode


@dataclass(frozen=True)
class VerifyResult:
    """The exit code, the report, and the same as JSON."""

    exit_code: int
    lines: list[str]
    facts: dict[str, Any]


def remarks_on(solo: Run) -> list[str]:
    """What verification changed in the script, and what the script does after the watched steps."""
    log = solo.ranks[0]
    uses_paceline = bool(log.of(TrainingBuilt))
    remarks = []
    compiled = log.first(CompileCalled)
    if compiled is not None:
        remarks.append(
            f"torch.compile was turned off during verification (first call: {compiled.at}); the "
            "compiled code itself is not verified."
        )
    before = takewhile(lambda event: not isinstance(event, ForwardBegun), log.events)
    if not uses_paceline and not any(isinstance(event, SeedSet) for event in before):
        remarks.append(
            "the script calls no torch.manual_seed before its first forward, so verification set a seed: "
            "in the ordinary run a different one on each rank, else one for all."
        )
    if uses_paceline and not solo.plan.bitwise:
        remarks.append("dropout is off during verification; with --bitwise it is on.")
    if log.of(TrainingContinues):
        watched = solo.plan.steps
        remarks.append(
            f"the script trains on after the {watched} steps that were watched, and a fault that comes "
            f"later is not seen. --steps {10 * watched} watches more."
        )
    return remarks


def _failures(runs: Sequence[Run]) -> list[str]:
    """What made runs fail after their watched steps, for the runs that failed."""
    found = []
    for run in runs:
        if run.returncode:
            causes = (log.first(Failed) for log in run.ranks)
            failed = next((each for each in causes if each), Failed(code=run.returncode))
            message = failed.message.strip().splitlines()[:1]
            what = ": ".join([failed.type or f"exit code {failed.code}", *message])
            found.append(
                f"{run.name} failed after the watched steps with {what}"
                + f", at {failed.place}" * bool(failed.place)
                + ". If the script does not fail without verification, the cause is that verification ends "
                "its loaders or its ranks early."
            )
    return found


def report(audits: Sequence[AuditResult], remarks: Sequence[str]) -> VerifyResult:
    """The report: one audit, or comparison, for each number of processes."""
    lines: list[str] = []
    for each in audits:
        if len(audits) > 1:
            lines.append(f"--- {each.case.world_size} processes ---")
        lines += _audit_lines(each)
    failures = _failures([audits[0].case.solo, *(each.case.ordinary for each in audits)])
    # A fault that several numbers of processes have is one fault.
    faults = {name for each in audits for name in each.faults}
    notes = {name for each in audits for name in each.notes} - faults
    passed = sum(len(each.of(NoFault)) for each in audits)
    not_seen = sum(len(each.of(NotJudged)) for each in audits)
    code = ExitCode.NOT_JUDGED if failures else ExitCode.OK
    if faults:
        code = ExitCode.FAILED
    counts = (len(faults), "fault"), (len(notes), "note"), (passed, "check")
    counted = ", ".join(f"{number} {what}{'s' * (number != 1)}" for number, what in counts)
    last = f"{'a run failed; ' * bool(failures)}{counted} passed, {not_seen} not seen"
    steps = audits[0].case.ordinary.plan.steps
    facts = {"kind": "audit", "steps": steps, "audits": [_audit_facts(each) for each in audits]}
    remarks = [*remarks, *failures]
    lines += [*(f"remark: {each}" for each in remarks), last]
    return VerifyResult(code, lines, facts | ({"remarks": remarks} if remarks else {}))


def _audit_lines(audit: AuditResult) -> list[str]:
    lines = []
    for name, finding in (audit.faults | audit.notes).items():
        lines += _finding_lines(name, finding, audit.case.world_size)
    runs = [audit.case.solo, audit.case.ordinary, audit.case.union, audit.case.null]
    names = [f"{run.name} ({run.steps} steps)" for run in runs if run is not None]
    lines.append(f"compared: {', '.join(names)}")
    passed = [f"  {name}: {each.evidence}" for name, each in audit.of(NoFault).items()]
    not_seen = [f"  {name}: {each.why}" for name, each in audit.of(NotJudged).items()]
    for title, section in (("passed", passed), ("not seen", not_seen)):
        lines += [f"{title} ({len(section)}):", *section] if section else []
    return lines


def _finding_lines(rule: str, finding: Finding, world_size: int) -> list[str]:
    ranks = name_ranks(finding.ranks or range(world_size), world_size)
    step = f", step {finding.step}" if finding.step is not None else ""
    return [
        f"{'NOTE ' if finding.is_note else 'FAULT'}  {finding.what}",
        f"  rule:  {rule}",
        f"  where: {finding.at}, {ranks}{step}",
        f"  effect: {finding.effect}",
        f"  why:   {finding.why}",
        f"  shown: {finding.evidence}",
        f"  fix:   {finding.fix}",
        "",
    ]


def _audit_facts(audit: AuditResult) -> dict[str, Any]:
    count = audit.case.world_size
    return {
        "nproc": count,
        "faults": [{"rule": n, **each.facts(count)} for n, each in audit.faults.items()],
        "notes": [{"rule": n, **each.facts(count)} for n, each in audit.notes.items()],
        "passed": [{"rule": n, **asdict(each)} for n, each in audit.of(NoFault).items()],
        "not_seen": [{"rule": n, **asdict(each)} for n, each in audit.of(NotJudged).items()],
    }
