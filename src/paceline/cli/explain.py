"""The subcommand `explain`: known messages in a log, with cause and fix. It needs no torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from paceline.command_line import CommandParser, nearest_file
from paceline.errors import ConfigError, PacelineError, render
from paceline.exit_codes import ExitCode
from paceline.explain.facts import facts
from paceline.explain.reading import KINDS, Found, Reading, causes, read

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
    code = ExitCode.OK if reading.found or reading.reports else ExitCode.FAILED
    print(_as_json(name, reading, code) if given.json else _as_text(name, reading))
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
    # Only the most useful kind is printed in full: causes, to which errors of Paceline belong, otherwise
    # symptoms, otherwise the rest.
    by_kind = {kind: [hit for hit in reading.found if hit.cause.kind == kind] for kind in KINDS}
    telling = by_kind["cause"]
    if not telling and not reading.reports:
        telling = by_kind["sign"] or list(reading.found)
    parts = [f"{name}:{report.line}: {report.text}" for report in reading.reports]
    unknown = []
    if reading.unknown is not None:
        line, text = reading.unknown
        unknown = [f"The first Python error that is not in the table: {name}:{line}: {text}"]
    if not by_kind["cause"]:
        parts, unknown = parts + unknown, []
    for hit in reading.found:
        if hit in telling:
            parts.append(_full(name, hit))
        else:
            parts.append(
                f"{_PREFIX[hit.cause.kind]}{hit.cause.what} ({hit.cause.name}, line {hit.line})"
            )
        if telling and hit is telling[-1]:
            parts += unknown
    if not reading.found and not reading.reports:
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
    now = facts(cause.facts, hit.text)
    return str(
        PacelineError(
            f"{_PREFIX[cause.kind]}{cause.what} ({cause.name})",
            where=f"{name}:{hit.line}: {hit.text}",
            why=f"{cause.why} {now}".strip(),
            fix=cause.fix,
        )
    )


def _as_json(name: str, reading: Reading, code: int) -> str:
    found = [
        {
            **{key: getattr(hit.cause, key) for key in ("name", "kind", "what", "why", "fix")},
            "facts": facts(hit.cause.facts, hit.text),
            "line": hit.line,
            "text": hit.text,
        }
        for hit in reading.found
    ]
    reports = [{"line": report.line, "text": report.text} for report in reading.reports]
    unknown = reading.unknown and {"line": reading.unknown[0], "text": reading.unknown[1]}
    whole = {"file": name, "lines": reading.lines, "reports": reports, "found": found}
    whole["unknown_error"] = unknown
    return json.dumps(whole | {"exit_code": code}, indent=1)


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
            "paceline explain --json train.log": "the result as JSON",
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
    ours.add_argument("--json", action="store_true", help="print the result as JSON")
    ours.add_argument("--all", action="store_true", help="print the whole table, as Markdown")
    return ours
