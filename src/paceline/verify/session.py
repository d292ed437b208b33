"""One verification from its first run to its verdict."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.audit import refusals
from paceline.audit.audit import Audit, audit
from paceline.audit.evidence import Run, RunPlan
from paceline.verify import compare
from paceline.verify.runs import execute

SOUND, FAULT, FAILED = 0, 1, 3


@dataclass(frozen=True)
class Options:
    """What is to be verified, and how.

    Attributes:
        script: The script and its arguments; "-m", a module and its arguments.
        counts: Numbers of processes; the first is 1.
        steps: Optimizer steps to watch.
        bitwise: Whether paceline's reproducible mode is turned on and bits are compared.
        rtol: Relative difference that is allowed otherwise; None for compare's own.
    """

    script: Sequence[str]
    counts: Sequence[int]
    steps: int
    bitwise: bool
    rtol: float | None
    hang_after_s: float
    timeout_s: float


@dataclass(frozen=True)
class Verdict:
    """What was found: the exit code, the report, and the same as facts."""

    code: int
    words: list[str]
    facts: dict[str, Any]


def verify(options: Options, say: Callable[[str], None]) -> Verdict:
    """Run the script at every count, and judge. `say` is told about each run as it begins.

    Raises:
        refusals.Refused: the script itself failed.

    Collective: none; it starts processes of its own.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-verify-") as name:
        folder = Path(name)

        def run(plan: RunPlan) -> Run:
            say(f"{plan.mode}, {plan.world_size} process{'es' if plan.world_size > 1 else ''} ...")
            return execute(
                plan,
                options.script,
                hang_after_s=options.hang_after_s,
                timeout_s=options.timeout_s,
            )

        solo = run(RunPlan(folder / "solo", "solo", 1, options.steps, bitwise=options.bitwise))
        refusals.refuse_early_exit(solo)
        refusals.refuse(solo)
        if solo.ranks[0].of("training"):
            verdict = _compare(options, solo, run, folder)
        else:
            counts = [count for count in options.counts if count > 1]
            audits = [audit(solo, count, run, folder, options.steps) for count in counts]
            verdict = _of_audits(options, audits)
        return _with_notes(verdict, solo)


def _with_notes(verdict: Verdict, solo: Run) -> Verdict:
    """Add what was changed in the script's behaviour, before the last line of the report."""
    compiled = solo.ranks[0].first("compile")
    if compiled is None:
        return verdict
    note = (
        f"torch.compile was turned off during verification (first call: {compiled['at']}); the "
        "compiled code itself is not verified."
    )
    *words, last = verdict.words
    return replace(
        verdict, words=[*words, f"note: {note}", last], facts=verdict.facts | {"notes": [note]}
    )


def _compare(options: Options, solo: Run, run: Callable[[RunPlan], Run], folder: Path) -> Verdict:
    """The verdict on a script that uses paceline: the same training at every count."""
    runs = [solo]
    for count in options.counts:
        if count == 1:
            continue
        plan = RunPlan(
            folder / f"ordinary-{count}", "ordinary", count, options.steps, bitwise=options.bitwise
        )
        runs.append(run(plan))
        refusals.refuse(runs[-1])
    comparison = compare.compare(runs, rtol=options.rtol, bitwise=options.bitwise)
    code = {"sound": SOUND, "fault": FAULT, "refused": FAILED}[comparison.verdict]
    return Verdict(code, comparison.words(), {"kind": "paceline", **comparison.facts()})


def _of_audits(options: Options, audits: list[Audit]) -> Verdict:
    """The verdict on a script for torchrun: the faults at any count."""
    words: list[str] = []
    faults: set[str] = set()
    for each in audits:
        if len(audits) > 1:
            words.append(f"--- {each.case.world_size} processes ---")
        words += each.words()
        faults |= each.faults.keys()
    unknown = {n for each in audits for n in each.unknown()} - faults
    if faults:
        last = f"{len(faults)} fault{'s' if len(faults) > 1 else ''} found: {', '.join(sorted(faults))}"
    else:
        last = "sound: no fault found" + (
            f"; {len(unknown)} rules could not judge" if unknown else ""
        )
    facts = {"kind": "audit", "steps": options.steps, "audits": [each.facts() for each in audits]}
    return Verdict(FAULT if faults else SOUND, [*words, last], facts)
