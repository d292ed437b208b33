"""The report of `paceline verify`, as text and as JSON.

It has the findings, what was compared, the checks, remarks on the runs, and the verdict.

A check ends as a finding (a fault or a note), "passed" or "not seen" (with the reason). Text and JSON use the
same words. No report calls a script right: the last line says how many checks passed, and how many could not
run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
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
from paceline.verify.compare import Comparison, Difference, processes

_CODES = {"passed": ExitCode.OK, "fault": ExitCode.FAILED, "not seen": ExitCode.NOT_JUDGED}


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


def _last_line(verdict: str, faults: int, notes: int, passed: int, not_seen: int) -> str:
    counts = [
        f"{number} {what}{'s' * (number != 1)}"
        for number, what in ((faults, "fault"), (notes, "note"), (passed, "check"))
    ]
    return f"{verdict}{', '.join(counts)} passed, {not_seen} not seen"


def report_comparison(
    found: Comparison, remarks: Sequence[str], runs: Sequence[Run] = ()
) -> VerifyResult:
    """The report of a script that uses paceline, of these runs."""
    failures = _failures(runs)
    findings: list[str] = []
    if found.difference is not None:
        findings = _difference(found.difference, found)
    elif found.verdict == "not seen":
        findings = _finding(f"could not be verified: {found.why}", where=found.at)
    elif failures:
        found = replace(found, verdict="not seen", why=failures[0])
    lines = [*findings, f"compared: {found.compared}"]
    lines += _section("passed", found.equal) + _section("not seen", found.not_seen)
    faults = int(found.difference is not None)
    last = _last_line(
        "a run failed; " * bool(failures), faults, 0, len(found.equal), len(found.not_seen)
    )
    if not found.evaluations:
        last += "; no evaluation by Paceline was reached"
    facts = {"kind": "paceline", **asdict(found)}
    return _result(_CODES[found.verdict], lines, [*remarks, *failures], last, facts)


def _difference(found: Difference, comparison: Comparison) -> list[str]:
    one, other = found.counts
    a, b = (
        ", ".join(map(str, v[:5])) + ", ..." * (len(v) > 5) or "none"
        if isinstance(v, list)
        else repr(v)
        for v in found.values
    )
    if found.quantity == "parameter of ranks":
        what = f"parameter {found.name} differs between rank {one} and rank {other}."
        shown = f"{a} on rank {one}, {b} on rank {other}"
    else:
        verb = "differ" if found.quantity == "samples" else "differs"
        name = f"{found.quantity} {found.name}".strip()
        what = f"{name} {verb} between {one} and {other} processes."
        shown = f"{a} on {processes(one)}, {b} on {other}"
    if found.relative is not None:
        shown += f"; relative difference {found.relative:.3g}"
    is_evaluation = "evaluation" in found.quantity
    when = f"{'after' if is_evaluation else 'in'} step {found.step}"
    return _finding(
        f"FAULT  {when if found.step else 'before the first step'}, {what}",
        where=f"the {'evaluation' if is_evaluation else 'training built'} at {comparison.at}",
        why=comparison.why,
        shown=shown,
    )


def report_audits(audits: Sequence[AuditResult], remarks: Sequence[str]) -> VerifyResult:
    """The report of a script that does not use paceline: one audit for each number of processes."""
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
    code = ExitCode.OK
    if failures:
        code = ExitCode.NOT_JUDGED
    if faults:
        code = ExitCode.FAILED
    last = _last_line("a run failed; " * bool(failures), len(faults), len(notes), passed, not_seen)
    steps = audits[0].case.ordinary.plan.steps
    facts = {"kind": "audit", "steps": steps, "audits": [_audit_facts(each) for each in audits]}
    return _result(code, lines, [*remarks, *failures], last, facts)


def _audit_lines(audit: AuditResult) -> list[str]:
    lines = []
    for name, finding in (audit.faults | audit.notes).items():
        lines += _lines_of(name, finding, audit.case.world_size)
    runs = [audit.case.solo, audit.case.ordinary, audit.case.union, audit.case.null]
    names = [f"{run.name} ({run.steps} steps)" for run in runs if run is not None]
    lines.append(f"compared: {', '.join(names)}")
    passed = [f"{name}: {each.evidence}" for name, each in audit.of(NoFault).items()]
    not_seen = [f"{name}: {each.why}" for name, each in audit.of(NotJudged).items()]
    return lines + _section("passed", passed) + _section("not seen", not_seen)


def _lines_of(rule: str, finding: Finding, world_size: int) -> list[str]:
    ranks = name_ranks(finding.ranks or range(world_size), world_size)
    step = f", step {finding.step}" if finding.step is not None else ""
    return _finding(
        f"{'NOTE ' if finding.is_note else 'FAULT'}  {finding.what}",
        rule=rule,
        where=f"{finding.at}, {ranks}{step}",
        effect=finding.effect,
        why=finding.why,
        shown=finding.evidence,
        fix=finding.fix,
    )


def _audit_facts(audit: AuditResult) -> dict[str, Any]:
    count = audit.case.world_size
    return {
        "nproc": count,
        "faults": [{"rule": n, **each.facts(count)} for n, each in audit.faults.items()],
        "notes": [{"rule": n, **each.facts(count)} for n, each in audit.notes.items()],
        "passed": [{"rule": n, **asdict(each)} for n, each in audit.of(NoFault).items()],
        "not_seen": [{"rule": n, **asdict(each)} for n, each in audit.of(NotJudged).items()],
    }


def _finding(first: str, **parts: str) -> list[str]:
    return [first, *(f"  {name + ':':6} {text}" for name, text in parts.items()), ""]


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return [f"{title} ({len(lines)}):", *(f"  {line}" for line in lines)] if lines else []


def _result(
    code: int, lines: list[str], remarks: Sequence[str], last: str, facts: dict[str, Any]
) -> VerifyResult:
    lines = [*lines, *(f"remark: {each}" for each in remarks), last]
    return VerifyResult(code, lines, facts | ({"remarks": list(remarks)} if remarks else {}))
