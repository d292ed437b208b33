"""`paceline profile`: run a script as `paceline run` does, with some steps under torch's profiler."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from paceline.command_line import CommandParser, positive_count
from paceline.errors import ConfigError
from paceline.exit_codes import ExitCode

HELP = "record some steps of a script on all ranks with torch's profiler"
_EXAMPLES = {
    "paceline profile --nproc-per-node 2 train.py": "steps 11 to 15, into profile.json.gz",
    "paceline profile --skip 100 --steps 3 -o a.json.gz --nproc-per-node 2 train.py --lr 1e-3": (
        "other steps, and arguments of the script"
    ),
}
_EXIT_CODES: dict[ExitCode | str, str] = {
    ExitCode.OK: "the profile is written",
    ExitCode.USAGE: "the command line is wrong",
    ExitCode.DATA: "no step was recorded",
    ExitCode.CANNOT_CREATE: "the trace cannot be written",
    "other": "that of `paceline run`, if the script failed",
}


def main(argv: Sequence[str]) -> int:
    """Run `paceline profile` with these arguments.

    Collective: one process, on one node.
    """
    ours = parser()
    own, script_args = ours.split_at_script(argv)
    args = ours.parse_args(own)
    words = ["--nproc-per-node", args.nproc_per_node, args.script, *script_args]
    from paceline.launch import run as run_launcher
    from paceline.profile import harness
    from paceline.profile.merge import merge, read_profiles, summary, write_trace

    folder = Path(tempfile.mkdtemp(prefix="paceline-profile-"))
    code = 0
    try:
        os.environ.update(harness.environment(folder, args.skip, args.steps))
        code = run_launcher(words)
        ranks = read_profiles(folder)
        print("\n".join(summary(ranks)))
        write_trace(merge(ranks), args.output)
        print(f"{args.output}: open it at https://ui.perfetto.dev or chrome://tracing")
    except ConfigError as error:
        print(f"paceline profile: {error}", file=sys.stderr)
        return code or ExitCode.DATA
    except OSError as error:
        print(f"paceline profile: {args.output} cannot be written: {error}", file=sys.stderr)
        return ExitCode.CANNOT_CREATE
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return code


def parser() -> CommandParser:
    """The options of `paceline profile`."""
    ours = CommandParser(
        "paceline profile",
        description=HELP[0].upper() + HELP[1:] + ".",
        examples=_EXAMPLES,
        exit_codes=_EXIT_CODES,
    )
    ours.add_argument(
        "--skip",
        type=positive_count,
        default=10,
        metavar="N",
        help="steps before the first (10)",
    )
    ours.add_argument(
        "--steps", type=positive_count, default=5, metavar="N", help="steps to record (5)"
    )
    ours.add_argument(
        "--nproc-per-node", default="2", metavar="N", help="ranks, as for `paceline run` (2)"
    )
    ours.add_argument(
        *("-o", "--output"),
        type=Path,
        default=Path("profile.json.gz"),
        metavar="FILE",
        help="the trace (profile.json.gz)",
    )
    ours.add_argument("script", metavar="SCRIPT", help="the training script")
    ours.add_argument("script_args", nargs="...", metavar="ARGUMENTS", help="its arguments")
    return ours
