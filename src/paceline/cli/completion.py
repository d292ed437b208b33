"""The subcommand `completion`: shtab writes a static script from the parsers of all commands."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module

from paceline.cli.main import COMMANDS
from paceline.command_line import CommandParser
from paceline.exit_codes import ExitCode

HELP = "print the completion script of a shell"
SHELLS = ("bash", "zsh", "fish")


def main(argv: Sequence[str]) -> int:
    """Run `paceline completion` with these arguments. Returns 0."""
    args = parser().parse_args(argv)
    # shtab takes 20 ms, and the options of `run` need torch, which takes a second or more.
    import shtab

    print(shtab.complete(_all_commands(), args.shell))
    return ExitCode.OK


def _all_commands() -> argparse.ArgumentParser:
    """One parser with the options of all commands. Shells complete files where it names no choices."""
    root = argparse.ArgumentParser(prog="paceline")
    root.add_argument("--version", action="store_true", help="print the version")
    commands = root.add_subparsers(metavar="COMMAND")
    for name in COMMANDS:
        module = import_module(f"paceline.cli.{name}")
        commands.add_parser(name, help=module.HELP, parents=[module.parser()], add_help=False)
    return root


def parser() -> CommandParser:
    """The options of `paceline completion`."""
    ours = CommandParser(
        "paceline completion",
        description="Print the script with which a shell completes the commands, options and files of "
        "paceline. Write it to a file once, and again after an update of paceline or torch.",
        examples={
            "paceline completion bash > ~/.local/share/bash-completion/completions/paceline": "bash, with "
            "the package bash-completion",
            "paceline completion zsh > ~/.zfunc/_paceline": "zsh, with `fpath+=~/.zfunc` before `compinit` "
            "in ~/.zshrc",
            "paceline completion fish > ~/.config/fish/completions/paceline.fish": "fish",
        },
        exit_codes={
            ExitCode.OK: "the script was printed",
            ExitCode.USAGE: "the command line is wrong",
        },
    )
    ours.add_argument("shell", choices=SHELLS, metavar="SHELL", help="bash, zsh or fish")
    return ours
