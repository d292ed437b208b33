"""The command `paceline`: calls the subcommand with the remaining arguments.

A subcommand is a module of this package with `HELP`, one line, and `main(argv) -> int`; to add one,
add its name to `COMMANDS`. Only the module of the called subcommand is imported, and `--help` imports no
torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

import paceline

COMMANDS = ("init", "run", "verify", "doctor", "explain", "ckpt")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in COMMANDS:
        code: int = import_module(f"paceline.cli.{words[0]}").main(words[1:])
        return code
    parser = _parser()
    parser.parse_args(words)
    parser.print_help()
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="paceline",
        description="Distributed training for PyTorch: one model on many processes, exact.",
        epilog="`paceline COMMAND --help` says more.",
    )
    parser.add_argument("--version", action="version", version=f"paceline {paceline.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND")
    for name in COMMANDS:
        commands.add_parser(name, help=import_module(f"paceline.cli.{name}").HELP, add_help=False)
    return parser


if __name__ == "__main__":
    sys.exit(main())
