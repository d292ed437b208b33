"""The subcommand `verify`: whether a script trains the same on any number of processes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.command_line import CommandParser, check_script, positive, positive_count
from paceline.errors import ConfigError, PacelineError
from paceline.exit_codes import ExitCode

HELP = "check that a script trains the same on 1 and on several processes"

_MAX_RANKS = 64


def main(argv: Sequence[str]) -> int:
    """Verify a script. Returns 0 without a fault, 1 with one, 2 for wrong usage, 3 if a run failed."""
    ours = parser()
    own, script_args = ours.split_at_script(argv)
    given = ours.parse_args(own)
    try:
        counts = _counts(given.nproc)
        _check(given)
        if not given.module:
            check_script(given.script)
    except ConfigError as error:
        print(f"paceline verify: {error}", file=sys.stderr)
        return ExitCode.USAGE
    # Imported here, because these modules import torch, and --help must not wait for it.
    from paceline.audit.refusals import Refused
    from paceline.verify.session import VerifyOptions, verify

    options = VerifyOptions(
        script=[*(["-m"] if given.module else []), given.script, *script_args],
        counts=counts,
        steps=given.steps,
        strict=given.strict,
        bitwise=given.bitwise,
        rtol=given.rtol,
        hang_after_s=given.hang_after,
        timeout_s=given.timeout,
        keep=given.keep and Path(given.keep).absolute(),
    )
    try:
        result = verify(options, lambda line: print(f"verify: {line}", file=sys.stderr))
    except Refused as refused:
        _print_refusal(refused, as_json=given.json)
        return ExitCode.NOT_JUDGED
    except ConfigError as error:
        print(f"paceline verify: {error}", file=sys.stderr)
        return ExitCode.USAGE
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    if given.json:
        print(json.dumps(result.facts | {"exit_code": result.exit_code}, indent=1, default=str))
    else:
        print("\n".join(result.lines))
    return result.exit_code


def _print_refusal(refused: PacelineError, *, as_json: bool) -> None:
    if as_json:
        parts = {name: getattr(refused, name) for name in ("what", "where", "why", "fix", "output")}
        print(json.dumps({"kind": "refused", **parts, "exit_code": ExitCode.NOT_JUDGED}, indent=1))
    else:
        for line in refused.output:
            print(f"  | {line}")
        print(f"could not be verified: {refused}")


def _counts(text: str) -> list[int]:
    """The numbers of processes in order; 1 is always first, because the others are compared with it."""
    try:
        counts = sorted({1, *(int(word) for word in text.split(","))})
    except ValueError:
        raise ConfigError(f"--nproc must be numbers such as 1,2,3; got {text!r}.") from None
    if counts[0] < 1 or counts[-1] > _MAX_RANKS or len(counts) < 2:
        raise ConfigError(f"--nproc needs a number from 2 to {_MAX_RANKS}; got {text!r}.")
    return counts


def _check(given: argparse.Namespace) -> None:
    if given.rtol is not None and not 0 < given.rtol < 1:
        raise ConfigError(f"--rtol must lie between 0 and 1, and is {given.rtol}.")
    if given.rtol is not None and given.bitwise:
        raise ConfigError("--rtol has no effect with --bitwise.", fix="give one of them.")


def parser() -> CommandParser:
    """The options of `paceline verify`."""
    ours = CommandParser(
        "paceline verify",
        usage="paceline verify [options] SCRIPT [args ...]",
        description="Run a training script on 1 and on several processes. A script that uses paceline must "
        "train the same on all; any other script is checked for known faults of distributed training.",
        examples={
            "paceline verify train.py --lr 0.1": "1 and 2 processes; --lr is the script's",
            "paceline verify --nproc 1,2,3 --steps 50 train.py": "three runs of 50 steps",
            "paceline verify --bitwise -m package.train": "a module, compared bit for bit",
            "paceline verify --json train.py > report.json": "the result as JSON",
        },
        exit_codes={
            ExitCode.OK: "no check found a fault, and no run failed",
            ExitCode.FAILED: "a fault was found",
            ExitCode.USAGE: "the command line is wrong",
            ExitCode.NOT_JUDGED: "the script itself failed, or cannot be judged",
            ExitCode.INTERRUPTED: "interrupted with Ctrl-C",
        },
        unknown_option="the script's own arguments follow the script: `paceline verify a.py --lr 1`.",
    )
    ours.add_argument("script", metavar="SCRIPT", help="the training script")
    ours.add_argument("script_args", nargs="...", metavar="ARGUMENTS", help="its arguments")
    ours.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module name")
    ours.add_argument("--nproc", default="1,2", metavar="N,N", help="numbers of processes (1,2)")
    ours.add_argument(
        "--steps",
        type=positive_count,
        metavar="N",
        help="optimizer steps to watch (100)",
    )
    ours.add_argument(
        "--bitwise",
        action="store_true",
        help="turn reproducible mode on and compare bitwise (scripts that use paceline)",
    )
    ours.add_argument(
        "--rtol",
        type=positive,
        metavar="X",
        help="allowed relative difference (0.001; scripts that use paceline)",
    )
    ours.add_argument(
        "--hang-after",
        type=positive,
        default=20.0,
        metavar="S",
        help="seconds without progress that count as a hang (20)",
    )
    ours.add_argument(
        "--timeout",
        type=positive,
        default=600.0,
        metavar="S",
        help="longest time for each run, in seconds (600)",
    )
    ours.add_argument("--strict", action="store_true", help="notes count as faults")
    ours.add_argument("--json", action="store_true", help="print the result as JSON")
    ours.add_argument(
        "--keep",
        metavar="FOLDER",
        help="keep what the runs recorded in a new folder, to report or examine a wrong verdict",
    )
    return ours
