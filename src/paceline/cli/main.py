"""The command `paceline`: calls the subcommand with the remaining arguments.

A subcommand is a module of this package with `HELP`, one line, `parser()` and `main(argv) -> int`; to add
one, add its name to `COMMANDS`. Only the module of the called subcommand is imported, and `--help` imports
no torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

import paceline
from paceline.command_line import CommandParser
from paceline.exit_codes import ExitCode

COMMANDS = (
    "init",
    "run",
    "verify",
    "top",
    "report",
    "profile",
    "plan",
    "doctor",
    "explain",
    "ckpt",
    "job",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    _open_missing_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in COMMANDS:
        try:
            code: int = import_module(f"paceline.cli.{words[0]}").main(words[1:])
            sys.stdout.flush()
        except BrokenPipeError:
            # A reader such as `head` has ended. Python would report this again when it flushes at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return ExitCode.BROKEN_PIPE
        except KeyboardInterrupt:
            return ExitCode.INTERRUPTED
        return code
    ours = parser()
    if words and words[0].endswith(".py"):
        ours.refuse(f"{words[0]!r} is not a command.", f"paceline run {words[0]}")
    ours.parse_args(words)
    ours.print_help()
    return ExitCode.USAGE


def _open_missing_streams() -> None:
    """Open the null device as each standard stream that the caller has closed, as a daemon does."""
    for name in ("stdin", "stdout", "stderr"):  # in this order each gets its own number
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115


def parser() -> CommandParser:
    """The options of `paceline` itself, and its commands without theirs."""
    ours = CommandParser(
        "paceline",
        description="Distributed training for PyTorch: one model on many processes, exact.",
        examples={
            "paceline init": "write a script to start from",
            "paceline run --nproc-per-node 2 train.py": "train on two processes",
            "paceline verify train.py": "check that it trains the same on 1 and on 2 processes",
            "paceline explain train.log": "explain the messages of a job that failed",
        },
        exit_codes={
            ExitCode.OK: "the command succeeded",
            ExitCode.USAGE: "the command line is wrong",
            ExitCode.INTERRUPTED: "it was interrupted (Ctrl-C)",
            ExitCode.BROKEN_PIPE: "the reader of the output ended before the end of the output",
            "other": "listed by `paceline COMMAND --help`",
        },
    )
    ours.add_argument("--version", action="version", version=f"paceline {paceline.__version__}")
    # `main` calls commands by their names, so these parsers only serve the list in the help.
    commands = ours.add_subparsers(
        metavar="COMMAND", parser_class=argparse.ArgumentParser, dest="command"
    )
    for name in COMMANDS:
        commands.add_parser(name, help=import_module(f"paceline.cli.{name}").HELP, add_help=False)
    return ours


if __name__ == "__main__":
    sys.exit(main())
