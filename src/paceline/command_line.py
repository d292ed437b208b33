"""Parsers of the command line: help with examples and exit codes, and one form of errors."""

from __future__ import annotations

import argparse
import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn, TypeVar

from paceline.errors import ConfigError
from paceline.exit_codes import ExitCode

Number = TypeVar("Number", int, float)

_WIDTH = 80
_SIMILARITY = 0.6  # of difflib; lower values suggest words that have nothing in common


class CommandParser(argparse.ArgumentParser):
    """The parser of one command.

    Args:
        prog: The command, such as "paceline verify".
        examples: Command lines and what each does. A test parses each of them.
        exit_codes: The codes that the command ends with, and what each means. A key may also be a text.
        unknown_option: How to give options that the command does not know; the end of that error.

    Other arguments are those of `argparse.ArgumentParser`.
    """

    def __init__(
        self,
        prog: str,
        *,
        description: str,
        examples: Mapping[str, str],
        exit_codes: Mapping[ExitCode | str, str],
        unknown_option: str = "",
        **options: Any,
    ) -> None:
        super().__init__(
            prog=prog,
            description=textwrap.fill(description, _WIDTH),
            epilog=f"{_examples(examples)}\n\n{_codes(exit_codes)}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **options,
        )
        self.examples = examples
        self.exit_codes = exit_codes
        self._unknown_option = unknown_option

    @property
    def arguments(self) -> list[argparse.Action]:
        """All options and positional arguments, those of `parents` too."""
        return self._actions

    def split_at_script(self, argv: Sequence[str]) -> tuple[list[str], list[str]]:
        """The words up to the first positional argument, which is the script, and those after it.

        argparse would look for abbreviations of this command's options among the script's.
        """
        takes_value = {name: a.nargs != 0 for a in self.arguments for name in a.option_strings}
        position = 0
        while position < len(argv) and (word := argv[position]).startswith("-") and word != "-":
            position += 1
            if word == "--":
                break
            name, equals, _ = word.partition("=")
            if not name.startswith("--"):  # a value may follow at once, such as -r3
                name, equals = word[:2], word[2:]
            found = {takes_value[n] for n in takes_value if n == name} or {
                takes_value[n] for n in takes_value if n.startswith(name)
            }
            if len(found) != 1:
                return list(argv), []  # the parser refuses the word
            position += found.pop() and not equals
        return list(argv[: position + 1]), list(argv[position + 1 :])

    def error(self, message: str) -> NoReturn:
        """Print what is wrong with the command line, and exit with 2."""
        is_unknown = message.startswith("unrecognized arguments")
        self.refuse(f"{message}.", None, self._unknown_option if is_unknown else "")

    def refuse(self, what: str, match: str | None, fix: str = "") -> NoReturn:
        """Print what is wrong and the nearest match, if there is one, and exit with 2."""
        fix = fix or f"see `{self.prog} --help`."
        error = ConfigError(what, fix=f"did you mean {match!r}? Otherwise {fix}" if match else fix)
        self.exit(ExitCode.USAGE, f"{self.prog}: {error}\n")


def nearest_file(path: str) -> str | None:
    """The file whose name is most like that of a file that does not exist, in the same folder."""
    folder, name = os.path.split(path)
    try:
        names = os.listdir(folder or ".")
    except OSError:
        return None
    match = get_close_matches(name, names, n=1, cutoff=_SIMILARITY)
    return os.path.join(folder, match[0]) if match else None


def check_script(script: str) -> None:
    """Refuse a path that cannot be a script, before any rank starts.

    Raises:
        ConfigError: there is no such script, or it is a notebook.
    """
    if not os.path.exists(script):
        match = nearest_file(script)
        raise ConfigError(
            f"there is no script {script!r}.",
            where=f"seen from {os.getcwd()}",
            fix=f"did you mean {match!r}?"
            if match
            else "paceline's options come before the script, its own after it.",
        )
    if os.path.isdir(script) and not os.path.exists(os.path.join(script, "__main__.py")):
        raise ConfigError(
            f"{script!r} is a directory without a __main__.py.", fix="name the script in it."
        )
    if script.endswith(".ipynb"):
        raise ConfigError(
            f"{script!r} is a notebook.", fix="jupyter nbconvert --to script makes a script of it."
        )


def positive(text: str) -> float:
    """The type of an option: a finite number of more than 0."""
    value = _number(text, float)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"must be more than 0, and is {text}")
    return value


def positive_count(text: str) -> int:
    """The type of an option: a whole number of 1 or more."""
    value = _number(text, int)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, and is {text}")
    return value


def not_negative_count(text: str) -> int:
    """The type of an option: a whole number of 0 or more."""
    value = _number(text, int)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be 0 or more, and is {text}")
    return value


def _number(text: str, kind: type[Number]) -> Number:
    try:
        value = kind(text)
    except ValueError as error:
        word = "a whole number" if kind is int else "a number"
        raise argparse.ArgumentTypeError(f"must be {word}, and is {text!r}") from error
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be finite, and is {text}")
    return value


def _examples(examples: Mapping[str, str]) -> str:
    lines = ["examples:"]
    for command, text in examples.items():
        lines += [f"  {command}", f"      {text}"]
    return "\n".join(lines)


def _codes(codes: Mapping[ExitCode | str, str]) -> str:
    names = {key if isinstance(key, str) else str(int(key)): text for key, text in codes.items()}
    width = max(map(len, names))
    lines = ["exit codes:"]
    for name, text in names.items():
        indent = " " * (width + 4)
        body = textwrap.fill(text, _WIDTH, initial_indent=indent, subsequent_indent=indent).strip()
        lines.append(f"  {name:<{width}}  {body}")
    return "\n".join(lines)
