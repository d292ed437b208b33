"""Help, examples, exit codes and wrong input of every command."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from test_layers import SOURCE

from paceline.cli import main as cli
from paceline.command_line import CommandParser, nearest_file
from paceline.exit_codes import ExitCode

DOCS = Path(__file__).parents[2] / "docs"


def _parsers() -> Iterator[CommandParser]:
    yield cli.parser()
    for name in cli.COMMANDS:
        parser = import_module(f"paceline.cli.{name}").parser()
        yield parser
        for argument in parser.arguments:
            if isinstance(argument.choices, Mapping):
                yield from argument.choices.values()


PARSERS = list(_parsers())
IDS = [parser.prog for parser in PARSERS]


def _parser_of(words: list[str]) -> tuple[CommandParser, list[str]]:
    """The parser of a command line, and its words without those of the script."""
    assert words[0] == "paceline"
    if words[1] == "job" and "--" in words:
        words = words[: words.index("--")]
    return import_module(f"paceline.cli.{words[1]}").parser(), words[2:]


def _commands(line: str) -> Iterator[list[str]]:
    """The commands `paceline` of a shell line, without redirections."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    command: list[str] = []
    is_target = False
    for word in [*lexer, "|"]:
        if set(word) <= set("|;&"):
            if command[0] == "paceline":
                yield command
            command = []
        elif not is_target and not set(word) <= set("<>&"):
            command.append(word)
        is_target = set(word) <= set("<>&")


@pytest.mark.parametrize("parser", PARSERS, ids=IDS)
def test_examples_parse(parser: CommandParser) -> None:
    assert parser.examples
    for line in parser.examples:
        found = list(_commands(line))
        assert found, line
        for words in found:
            assert " ".join(words).startswith(parser.prog) or words[:2] == ["paceline", "run"]
            of_line, rest = _parser_of(words)
            of_line.parse_args(rest)


@pytest.mark.parametrize("command", ["run", "verify", "profile"])
def test_words_after_the_script_are_its_own(command: str) -> None:
    parser = import_module(f"paceline.cli.{command}").parser()
    words = ["--st", "1", "--n", "2", "-m", "-x", "--", "--nproc", "7", "--help", "train.py"]
    own, rest = parser.split_at_script(["--nproc", "2", "a.py", *words])
    assert (own, rest) == (["--nproc", "2", "a.py"], words)


PAGES = [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]


def _commands_of(page: Path) -> Iterator[list[str]]:
    """The commands `paceline` in the shell blocks of a page, also those that srun or docker starts."""
    # Blocks of every language are matched, otherwise the end of one would be the beginning of another.
    blocks = re.findall(r"^ *``` ?([^\n]*)\n(.*?)^ *```$", page.read_text(), re.M | re.S)
    for block in (text for language, text in blocks if language in ("", "bash", "console")):
        for line in block.replace("\\\n", " ").splitlines():
            at = re.search(rf"(?<!\S)paceline (?:{'|'.join(cli.COMMANDS)})(?!\S)", line)
            if at is not None:
                # `#` begins a comment, and the quotes of a comment need no end.
                yield from _commands(re.sub(r"\s#\s.*", "", line[at.start() :]))


def test_commands_of_the_pages_parse() -> None:
    wrong = []
    for page in PAGES:
        for words in _commands_of(page):
            try:
                of_line, rest = _parser_of(words)
                of_line.parse_args(rest)
            except SystemExit as error:
                if error.code:
                    wrong.append((page.name, shlex.join(words)))
    assert not wrong


WRONG = {
    "rnu train.py": ("invalid choice: 'rnu'", "see `paceline --help`"),
    "train.py": ("'train.py' is not a command", "did you mean 'paceline run train.py'"),
    "verify --setps 5 train.py": ("unrecognized arguments: --setps", "follow the script: "),
    "verify --steps": ("--steps: expected one argument", "see `paceline verify --help`"),
    "verify": ("required: SCRIPT", "see `paceline verify --help`"),
    "verify --steps 0 a.py": ("--steps: must be 1 or more, and is 0", "see"),
    "verify --steps x a.py": ("--steps: must be a whole number, and is 'x'", "see"),
    "verify --timeout nan a.py": ("--timeout: must be finite, and is nan", "see"),
    "verify --rtol 2 a.py": ("--rtol must lie between 0 and 1, and is 2", ""),
    "verify --nproc 1 a.py": ("--nproc needs a number from 2 to 64", ""),
    "verify {folder}/trian.py": ("there is no script", "did you mean '{folder}/train.py'"),
    "run --nproc_per_node": ("expected one argument", "see `paceline run --help`"),
    "run --on-hang=ende a.py": ("--on-hang: invalid choice: 'ende'", "see"),
    "run": ("required: SCRIPT", "see `paceline run --help`"),
    "run {folder}/tarin.py": ("there is no script", "did you mean '{folder}/train.py'"),
    "doctor now": ("unrecognized arguments: now", "see `paceline doctor --help`"),
    "explain {folder}/train.lgo": ("cannot be read", "did you mean '{folder}/train.log'"),
    "explain {folder}/x": ("cannot be read", "give the file of a log"),
    "ckpt rm a": ("required: --step", "see `paceline ckpt rm --help`"),
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_input_is_named_with_a_fix(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("train.py", "train.log"):
        (tmp_path / name).touch()
    words = line.format(folder=tmp_path).split()
    if words[0] == "run":  # its `main` would end this process
        words, entry = words[1:], import_module("paceline.launch").run
    else:
        entry = cli.main
    assert _code(entry, words) == ExitCode.USAGE
    printed = capsys.readouterr()
    what, fix = (text.format(folder=tmp_path) for text in WRONG[line])
    assert what in printed.err
    assert fix in printed.err
    assert printed.out == ""


def test_a_starter_script_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "train.py"
    assert cli.main(["init", str(file)]) == ExitCode.OK
    file.write_text("mine")
    assert cli.main(["init", str(file)]) == ExitCode.CANNOT_CREATE
    assert file.read_text() == "mine"
    offered = capsys.readouterr().err.split()[-3:]  # a command that works
    assert offered[:2] == ["paceline", "init"]
    assert cli.main(offered[1:]) == ExitCode.OK


def _code(entry: Any, words: list[str]) -> int:
    try:
        return int(entry(words))
    except SystemExit as error:
        return int(error.code or 0)


def test_the_version_and_the_help_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert _code(cli.main, ["--version"]) == ExitCode.OK
    assert capsys.readouterr().out == f"paceline {version('paceline')}\n"
    assert _code(cli.main, ["--help"]) == ExitCode.OK
    printed = capsys.readouterr()
    assert "exit codes:" in printed.out
    assert printed.err == ""


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == ExitCode.USAGE
    assert capsys.readouterr().out == cli.parser().format_help()


def test_a_reader_that_ends_early_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "paceline", "explain", "--all"],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(SOURCE.parent)},
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (ExitCode.BROKEN_PIPE, "")


def test_an_interrupt_ends_a_command_without_a_traceback() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", "explain"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(SOURCE.parent)},
        # A shell that started the tests with `&` lets its children ignore SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdin is not None
    process.stdin.write(b"line\n" * 100_000)  # more than the pipe holds: the command reads it
    process.stdin.flush()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert (process.returncode, err) == (ExitCode.INTERRUPTED, b"")


@pytest.mark.parametrize(("words", "code"), [("explain --all", 0), ("explain", 1)])
def test_a_command_runs_without_standard_streams(words: str, code: int) -> None:
    command = f"exec {shlex.quote(sys.executable)} -m paceline {words} <&- >&- 2>&-"
    env = os.environ | {"PYTHONPATH": str(SOURCE.parent)}
    assert subprocess.run(command, shell=True, env=env).returncode == code


def test_a_file_that_resembles_nothing_has_no_match(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    assert nearest_file(str(tmp_path / "config.yaml")) is None
    assert nearest_file(str(tmp_path / "none" / "train.py")) is None
