"""The subcommand `doctor`: find faults of these hosts before a job runs."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence

from paceline.command_line import CommandParser
from paceline.errors import PacelineError
from paceline.exit_codes import ExitCode

HELP = "check this host, or all hosts of a job, before the job runs"


def main(argv: Sequence[str]) -> int:
    """Exit code 0 if nothing fails, 1 if something fails, 2 if the rendezvous failed."""
    given = parser().parse_args(argv)
    # Torch is imported here and not for --help.
    from paceline.doctor.examine import examine
    from paceline.doctor.findings import judge, render

    try:
        found = examine()
    except PacelineError as error:
        print(f"paceline doctor: {error}", file=sys.stderr)
        return ExitCode.USAGE
    findings = judge(found)
    fails = any(finding.level == "fail" for finding in findings)
    code = ExitCode.FAILED if fails else ExitCode.OK
    if found["prints"] and given.json:
        plain = [dataclasses.asdict(finding) for finding in findings]
        print(json.dumps({"findings": plain, "facts": found, "exit_code": code}, indent=1))
    elif found["prints"]:
        print(render(findings))
    if any("error" in facts for facts in found["reduce"]):
        # A thread may still wait in Gloo, and would abort the shutdown of the interpreter.
        sys.stdout.flush()
        os._exit(code)
    return code


def parser() -> CommandParser:
    """The options of `paceline doctor`."""
    ours = CommandParser(
        "paceline doctor",
        description=HELP[0].upper() + HELP[1:] + ".",
        examples={
            "paceline doctor": "check this host",
            "paceline run --nproc-per-node 2 -m paceline doctor": "as two ranks of a job; start it on all "
            "hosts with the options of the job",
            "paceline doctor --json > doctor.json": "findings and facts as JSON, for a bug report",
        },
        exit_codes={
            ExitCode.OK: "nothing fails; there may be warnings",
            ExitCode.FAILED: "something fails",
            ExitCode.USAGE: "the command line is wrong, or the rendezvous failed",
        },
    )
    ours.add_argument("--json", action="store_true", help="print findings and facts as JSON")
    return ours
