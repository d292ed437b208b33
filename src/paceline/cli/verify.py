"""The subcommand `verify`: the same training on any number of processes, or where it differs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from paceline.errors import ConfigError, PacelineError
from paceline.launch.prescan import ScriptError, check_script

HELP = "run a script at several process counts and say whether it trains the same"

_USAGE_ERROR = 2
_MAX_RANKS = 64


def main(argv: Sequence[str]) -> int:
    """Verify a script: 0 it is sound, 1 a fault was found, 2 wrong usage, 3 the script itself failed.

    Collective: none; it starts processes of its own.
    """
    words = list(argv)
    own, script = (
        (words[: words.index("--")], words[words.index("--") + 1 :])
        if "--" in words
        else (words, [])
    )
    given = _parser().parse_args(own)
    try:
        counts = _counts(given.nproc)
        _check(given)
        check_script(given.script, module=given.module)
    except (ConfigError, ScriptError) as error:
        print(f"paceline verify: {error}", file=sys.stderr)
        return _USAGE_ERROR
    # Torch is imported here and not for --help.
    from paceline.audit.refusals import Refused
    from paceline.verify import session

    command = ["-m", given.script, *script] if given.module else [given.script, *script]
    options = session.Options(
        script=command,
        counts=counts,
        steps=given.steps,
        bitwise=given.bitwise,
        rtol=given.rtol,
        hang_after_s=given.hang_after,
        timeout_s=given.timeout,
    )
    try:
        verdict = session.verify(options, lambda line: print(f"verify: {line}", file=sys.stderr))
    except Refused as refused:
        return _refuse(refused, as_json=given.json)
    except KeyboardInterrupt:
        return 130
    if given.json:
        print(json.dumps(verdict.facts | {"exit_code": verdict.code}, indent=1, default=str))
    else:
        print("\n".join(verdict.words))
    return verdict.code


def _refuse(refused: PacelineError, *, as_json: bool) -> int:
    if as_json:
        parts = {name: getattr(refused, name) for name in ("what", "where", "why", "fix", "output")}
        print(json.dumps({"kind": "refused", **parts, "exit_code": 3}, indent=1))
    else:
        for line in refused.output:
            print(f"  | {line}")
        print(f"could not be verified: {refused}")
    return 3


def _counts(text: str) -> list[int]:
    """The numbers of processes, 1 first: all are compared with one process."""
    try:
        counts = sorted({1, *(int(word) for word in text.split(","))})
    except ValueError:
        raise ConfigError(f"--nproc must be numbers such as 1,2,3; got {text!r}.") from None
    if counts[0] < 1 or counts[-1] > _MAX_RANKS or len(counts) < 2:
        raise ConfigError(f"--nproc needs a number from 2 to {_MAX_RANKS}; got {text!r}.")
    return counts


def _check(given: argparse.Namespace) -> None:
    for name in ("steps", "hang_after", "timeout"):
        if getattr(given, name) <= 0:
            raise ConfigError(
                f"--{name.replace('_', '-')} must be more than 0, got {getattr(given, name)}."
            )
    if given.rtol is not None and not 0 < given.rtol < 1:
        raise ConfigError(f"--rtol must lie between 0 and 1, got {given.rtol}.")
    if given.rtol is not None and given.bitwise:
        raise ConfigError("--rtol has no effect with --bitwise.", fix="give one of them.")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="paceline verify",
        usage="paceline verify [options] SCRIPT [-- ARGUMENTS]",
        description="Run a training script at several process counts and compare: a script that uses "
        "paceline must train the same, any other script for torchrun is audited for 20 known faults.",
        epilog="exit codes: 0 sound, 1 a fault was found, 2 usage, 3 the script itself failed",
    )
    parser.add_argument("script", metavar="SCRIPT", help="what `torchrun SCRIPT` would run")
    parser.add_argument(
        "-m", "--module", action="store_true", help="SCRIPT is the name of a module"
    )
    parser.add_argument("--nproc", default="1,2", metavar="N,N", help="process counts (1,2)")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="optimizer steps (20)")
    parser.add_argument(
        "--bitwise", action="store_true", help="reproducible mode on, and compare to the last bit"
    )
    parser.add_argument(
        "--rtol", type=float, metavar="X", help="relative difference that is allowed"
    )
    parser.add_argument(
        "--hang-after", type=float, default=20.0, metavar="S", help="seconds without a move (20)"
    )
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="seconds for each run (600)"
    )
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    return parser
