"""The subcommand `completion`: shtab writes a static script from the parsers of all commands."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from paceline.cli.main import COMMANDS
from paceline.command_line import CommandParser
from paceline.exit_codes import ExitCode

HELP = "print the completion script of a shell"
SHELLS = ("bash", "zsh", "fish")
_FILES = ("SCRIPT", "FILE", "FOLDER", "PATH", "RUN", "LOG_DIR")


def main(argv: Sequence[str]) -> int:
    """Run `paceline completion` with these arguments. Returns 0."""
    args = parser().parse_args(argv)
    # shtab takes 20 ms, and the options of `run` need torch, which takes a second or more.
    import shtab

    print(shtab.complete(_all_commands(shtab.FILE), args.shell))
    return ExitCode.OK


def _all_commands(file: Any) -> argparse.ArgumentParser:
    """One parser with the options of all commands. `file` marks arguments that are files, for shtab."""
    root = argparse.ArgumentParser(prog="paceline")
    root.add_argument("--version", action="store_true", help="print the version")
    commands = root.add_subparsers(metavar="COMMAND")
    for name in COMMANDS:
        module = import_module(f"paceline.cli.{name}")
        command: CommandParser = module.parser()
        _mark_files(command, file)
        commands.add_parser(name, help=module.HELP, parents=[command], add_help=False)
    return root


def _mark_files(command: CommandParser, file: Any) -> None:
    for argument in command.arguments:
        if isinstance(argument.choices, Mapping):  # the actions of the command
            for action in argument.choices.values():
                _mark_files(action, file)
        elif argument.type is Path or (argument.metavar or argument.dest.upper()) in _FILES:
            argument.complete = file  # type: ignore[attr-defined]


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
