"""Parsers of the command line: help with examples and exit codes, and errors that name the nearest match."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn, TypeVar

from paceline.errors import ConfigError
from paceline.exit_codes import ExitCode

Number = TypeVar("Number", int, float)

_WIDTH = 80
_SIMILARITY = 0.6  # of difflib; lower values suggest words that have nothing in common

# What is put in place of messages of argparse.
_CLEARER = {
    r"^argument ([^/:]*).*?: must be": r"\1 must be",
    r"^argument ([^/:]*).*?: expected one argument": r"\1 needs a value",
    r"^argument ([^/:]*).*?: invalid float value: (.*)": r"\1 must be a number, and is \2",
    r"^argument ([^/:]*).*?: invalid int value: (.*)": r"\1 must be a whole number, and is \2",
}


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
        self._words: list[str] = []

    @property
    def arguments(self) -> list[argparse.Action]:
        """All options and positional arguments, those of `parents` too."""
        return self._actions

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """As in argparse, with an error for the first word that is not known.

        argparse calls this for each command of a parser too, so the error is that of the command.
        """
        self._words = list(sys.argv[1:] if args is None else args)
        known, unknown = super().parse_known_args(self._words, namespace)
        if unknown:
            self._refuse_unknown(unknown[0])
        return known, []

    def error(self, message: str) -> NoReturn:
        """Print what is wrong with the command line, and exit with 2."""
        if ambiguous := re.fullmatch(r"ambiguous option: (\S+) could match (.*)", message):
            word, names = ambiguous[1].partition("=")[0], ambiguous[2].split(", ")
            self.refuse(f"{word!r} is not the full name of an option.", names[0])
        if choice := re.search(r"^argument (.*): invalid choice: '?(.*?)'? \(", message):
            self._refuse_choice(choice[1], choice[2])
        if message.startswith("the following arguments are required"):
            names = self._names()
            for word in self._words:
                name = word.partition("=")[0]
                if name.startswith("--") and not any(known.startswith(name) for known in names):
                    self._refuse_unknown(word)
            message = f"missing: {message.partition(': ')[2]}"
        for pattern, text in _CLEARER.items():
            message = re.sub(pattern, text, message)
        self.refuse(f"{message.rstrip('.')}.", None)

    def _names(self) -> list[str]:
        names = (name for action in self.arguments for name in action.option_strings)
        return [name for name in names if name.startswith("--")]

    def _refuse_choice(self, argument: str, word: str) -> NoReturn:
        for action in self.arguments:
            names = (*action.option_strings, action.metavar, action.dest)
            if action.choices is not None and argument in ("/".join(action.option_strings), *names):
                choices = [str(choice) for choice in action.choices]
                what = f"{word!r} is not a valid {argument}; use one of: {', '.join(choices)}."
                self.refuse(what, nearest(word, choices))
        self.refuse(f"{word!r} is not a valid {argument}.", None)

    def _refuse_unknown(self, word: str) -> NoReturn:
        name = word.partition("=")[0]
        if name.startswith("-"):
            match = nearest(name, self._names())
            self.refuse(f"there is no option {name!r}.", match, self._unknown_option)
        self.refuse(f"unexpected argument {word!r}.", None, self._unknown_option)

    def refuse(self, what: str, match: str | None, fix: str = "") -> NoReturn:
        """Print what is wrong and the nearest match, if there is one, and exit with 2."""
        fix = fix or f"see `{self.prog} --help`."
        error = ConfigError(what, fix=f"did you mean {match!r}? Otherwise {fix}" if match else fix)
        self.exit(ExitCode.USAGE, f"{self.prog}: {error}\n")


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that is most like this one; None if none is."""
    return next(iter(get_close_matches(word, list(known), n=1, cutoff=_SIMILARITY)), None)


def nearest_file(path: str) -> str | None:
    """The file whose name is most like that of a file that does not exist, in the same folder."""
    folder, name = os.path.split(path)
    try:
        names = os.listdir(folder or ".")
    except OSError:
        return None
    match = nearest(name, names)
    return os.path.join(folder, match) if match else None


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
