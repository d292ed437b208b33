"""The report of `paceline verify`, as text and as JSON.

It has the findings, what was compared, the quantities or rules that were judged, remarks on the runs, and
the verdict.

A judgement of a rule is a finding (a fault or a note), "no fault" or "not judged"; the verdict on a script is
"sound", "fault" or "not judged". Text and JSON use the same words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any

from paceline.audit.audit import AuditResult
from paceline.audit.events import (
    CompileCalled,
    EndedByVerify,
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

_CODES = {"sound": ExitCode.OK, "fault": ExitCode.FAILED, "not judged": ExitCode.NOT_JUDGED}


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
        watched = solo.plan.steps if uses_paceline else solo.steps
        remarks.append(
            f"the script trains on after the {watched} steps that were watched, and a fault that comes "
            f"later is not seen. --steps {10 * watched} watches more."
        )
    failed = log.first(Failed)
    if failed is not None and not log.of(EndedByVerify):
        what = f"{failed.type}: {failed.message.splitlines()[0]}" if failed.message else failed.type
        remarks.append(
            f"after the watched steps the script failed with {what or f'exit code {failed.code}'}, at "
            f"{failed.place}. Verification had ended its loaders, which may be the reason."
        )
    return remarks


def report_comparison(found: Comparison, remarks: Sequence[str]) -> VerifyResult:
    """The report of a script that uses paceline."""
    findings, last = [], ""
    if found.difference is not None:
        findings = _difference(found.difference, found)
    elif found.verdict == "not judged":
        findings = _finding(f"could not be verified: {found.why}", where=found.at)
        last = "not judged: losses, gradients and evaluations" if found.not_judged else ""
    else:
        last = "sound: the same training on every number of processes"
        last += "" if found.evaluations else "; no evaluation by Paceline was reached"
        last += "; evaluations were not judged" if found.not_judged else ""
    lines = [*findings, f"compared: {found.compared}"]
    lines += _section("equal", found.equal) + _section("not judged", found.not_judged)
    facts = {"kind": "paceline", **asdict(found)}
    return _result(_CODES[found.verdict], lines, remarks, last, facts)


def _difference(found: Difference, comparison: Comparison) -> list[str]:
    one, other = found.counts
    what = f"{found.quantity} {found.name}".strip()
    a, b = (
        ", ".join(map(str, v)) or "none" if isinstance(v, list) else repr(v) for v in found.values
    )
    if found.quantity == "parameter of ranks":
        what = f"parameter {found.name} differs between rank {one} and rank {other}."
        shown = f"{a} on rank {one}, {b} on rank {other}"
    else:
        verb = "differ" if found.quantity == "samples" else "differs"
        what = f"{what} {verb} between {one} and {other} processes."
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
    faults = {name for each in audits for name in each.faults}
    notes = {name for each in audits for name in each.notes}
    not_judged = [judged for each in audits for judged in each.of(NotJudged).items()]
    names = {name for name, _ in not_judged}
    open_ = {name for name, why in not_judged if why.is_open}
    if faults:
        code = ExitCode.FAILED
        last = f"{len(faults)} fault{'s' * (len(faults) > 1)} found: {', '.join(sorted(faults))}"
    elif open_:
        code = ExitCode.NOT_JUDGED
        last = f"not judged: may be right or wrong: {', '.join(sorted(open_))}"
    else:
        code = ExitCode.OK
        last = "sound: no fault found"
        last += f"; notes: {', '.join(sorted(notes))}" if notes else ""
        rules = "rule" if len(names) == 1 else "rules"
        last += f"; {len(names)} {rules} not judged" if names else ""
    steps = max(each.case.ordinary.plan.steps for each in audits)
    facts = {"kind": "audit", "steps": steps, "audits": [_audit_facts(each) for each in audits]}
    return _result(code, lines, remarks, last, facts)


def _audit_lines(audit: AuditResult) -> list[str]:
    lines = []
    for name, finding in (audit.faults | audit.notes).items():
        lines += _lines_of(name, finding, audit.case.world_size)
    runs = [audit.case.solo, audit.case.ordinary, audit.case.with_solo_weights]
    names = [f"{run.name} ({run.steps} steps)" for run in runs if run is not None]
    lines.append(f"compared: {', '.join(names)}")
    no_fault = [f"{name}: {each.evidence}" for name, each in audit.of(NoFault).items()]
    not_judged = [f"{name}: {each.why}" for name, each in audit.of(NotJudged).items()]
    return lines + _section("no fault", no_fault) + _section("not judged", not_judged)


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
        "no_fault": [{"rule": n, **asdict(each)} for n, each in audit.of(NoFault).items()],
        "not_judged": [{"rule": n, **asdict(each)} for n, each in audit.of(NotJudged).items()],
    }


def _finding(first: str, **parts: str) -> list[str]:
    return [first, *(f"  {name + ':':6} {text}" for name, text in parts.items()), ""]


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return [f"{title} ({len(lines)}):", *(f"  {line}" for line in lines)] if lines else []


def _result(
    code: int, lines: list[str], remarks: Sequence[str], last: str, facts: dict[str, Any]
) -> VerifyResult:
    lines = [*lines, *(f"remark: {each}" for each in remarks), *([last] if last else [])]
    return VerifyResult(code, lines, facts | ({"remarks": list(remarks)} if remarks else {}))
