"""The subcommand `explain`: known messages in a log, with cause and fix. It needs no torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from paceline.command_line import CommandParser, nearest_file
from paceline.errors import ConfigError, PacelineError, render
from paceline.exit_codes import ExitCode
from paceline.explain.facts import port_owner
from paceline.explain.reading import Found, Reading, causes, read

HELP = "explain known messages in a log: meaning, cause and fix"

_PREFIX = {
    "cause": "",
    "sign": "symptom: ",
    "follower": "follows from another rank: ",
    "note": "harmless: ",
}


def main(argv: Sequence[str]) -> int:
    """Explain a log. Exit code 0: a message is known; 1: none is; 2: the log cannot be read."""
    given = parser().parse_args(argv)
    if given.all:
        print(_markdown(), end="")
        return ExitCode.OK
    try:
        name, reading = _read(given.file)
    except ConfigError as error:
        print(f"paceline explain: {error}", file=sys.stderr)
        return ExitCode.USAGE
    code = ExitCode.OK if reading.found or reading.report else ExitCode.FAILED
    print(_as_text(name, reading))
    return code


def _read(file: str | None) -> tuple[str, Reading]:
    if file in (None, "-"):
        if file is None and sys.stdin.isatty():
            raise ConfigError("no log to read.", fix="give a file, or pipe one in.")
        return "<stdin>", read(sys.stdin.buffer)
    assert file is not None
    try:
        with open(file, "rb") as stream:
            return file, read(stream)
    except OSError as error:
        match = nearest_file(file) if isinstance(error, FileNotFoundError) else None
        raise ConfigError(
            f"{file!r} cannot be read: {error.strerror}.",
            fix=f"did you mean {match!r}?"
            if match
            else "give the file of a log, or pipe a message in: `paceline explain -`.",
        ) from error


def _as_text(name: str, reading: Reading) -> str:
    parts = []
    if reading.report is not None:
        line, text = reading.report
        parts.append(f"Paceline's own report says most; it begins at {name}:{line}: {text}")
    # Only the most useful kind is printed in full: causes, otherwise symptoms, otherwise the rest.
    kinds = [hit.cause.kind for hit in reading.found]
    telling = next((kind for kind in ("cause", "sign") if kind in kinds), None)
    for hit in reading.found:
        if telling in (hit.cause.kind, None):
            parts.append(_full(name, hit))
        else:
            what = f"{_PREFIX[hit.cause.kind]}{hit.cause.what}"
            parts.append(f"{what} ({hit.cause.name}, line {hit.line})")
    if reading.unknown is not None:
        line, text = reading.unknown
        unknown = f"The first Python error that is not in the table: {name}:{line}: {text}"
        # An error of the program says more than symptoms.
        parts.insert(kinds.count("cause") + (reading.report is not None), unknown)
    if not reading.found and not reading.report:
        parts.append(
            render(
                f"No known message in {name} ({reading.lines} lines).",
                fix="to ask for help, send the first error of the rank that failed first with the 50\n"
                "         lines before it, the command line, and the output of `paceline doctor --json`.",
            )
        )
    return "\n\n".join(parts)


def _full(name: str, hit: Found) -> str:
    cause = hit.cause
    now = port_owner(hit.text) if cause.port else ""
    return str(
        PacelineError(
            f"{_PREFIX[cause.kind]}{cause.what} ({cause.name})",
            where=f"{name}:{hit.line}: {hit.text}",
            why=f"{cause.why} {now}".strip(),
            fix=cause.fix,
        )
    )


def _markdown() -> str:
    """The page of known messages, which `make docs` puts into the site."""
    parts = [
        "# Troubleshooting\n\n`paceline explain --all` generates this page from the table that "
        "`paceline explain LOG` and\n`paceline run` use. `*` is any text.\n"
    ]
    headings = {
        "cause": "Causes",
        "sign": "Symptoms: the lines around them show the cause",
        "follower": "Followers: the error is in another rank's log",
        "note": "Harmless",
    }
    for kind, heading in headings.items():
        parts.append(f"\n## {heading}\n")
        for cause in (cause for cause in causes() if cause.kind == kind):
            says = "\n".join(f"    {text}" for text in cause.says)
            parts.append(
                f"\n### {cause.name}: {cause.what}\n\n{says}\n\n"
                f"- **Why:** {cause.why}\n- **Fix:** {cause.fix}\n"
            )
    return "".join(parts)


def parser() -> CommandParser:
    """The options of `paceline explain`."""
    ours = CommandParser(
        "paceline explain",
        description="Explain known messages in a log: meaning, cause and fix. Reads logs of any size and any "
        "launcher.",
        examples={
            "paceline explain train.log": "the known messages of a file",
            "torchrun train.py 2>&1 | paceline explain": "of a command that runs now",
            "paceline explain --all": "all messages that are known",
        },
        exit_codes={
            ExitCode.OK: "a message is known, or is Paceline's own",
            ExitCode.FAILED: "no message is known",
            ExitCode.USAGE: "the command line is wrong, or the file cannot be read",
        },
    )
    ours.add_argument(
        "file", nargs="?", metavar="FILE", help="a log; - or no argument: standard input"
    )
    ours.add_argument("--all", action="store_true", help="print the whole table, as Markdown")
    return ours
