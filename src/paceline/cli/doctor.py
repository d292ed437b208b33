"""The subcommand `doctor`: find faults of these hosts before a job runs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.errors import PacelineError

HELP = "check this host, or all hosts of a job, before the job runs"

_FAIL = 1
_USAGE_ERROR = 2


def main(argv: Sequence[str]) -> int:
    """Exit code 0 if nothing fails, 1 if something fails, 2 if the ranks could not meet."""
    given = _parser().parse_args(argv)
    # Torch is imported here and not for --help.
    from paceline.doctor.findings import Need, judge, render
    from paceline.doctor.session import examine

    try:
        found = examine(given.folder)
    except PacelineError as error:
        print(f"paceline doctor: {error}", file=sys.stderr)
        return _USAGE_ERROR
    need = Need(workers=given.workers, batch_bytes=round(given.batch_mib * (1 << 20)))
    findings = judge(found, need)
    code = _FAIL if any(finding.level == "fail" for finding in findings) else 0
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="paceline doctor",
        description=HELP + ". For all hosts: paceline run [options] -m paceline doctor",
        epilog="exit codes: 0 nothing fails, 1 something fails, 2 the ranks could not meet",
    )
    parser.add_argument("--folder", type=Path, metavar="PATH", help="the run folder: test its disk")
    parser.add_argument(
        "--workers", type=int, default=0, metavar="N", help="loader workers per rank"
    )
    parser.add_argument(
        "--batch-mib", type=float, default=0, metavar="X", help="size of a batch, for /dev/shm"
    )
    parser.add_argument("--json", action="store_true", help="print findings and facts as JSON")
    return parser
