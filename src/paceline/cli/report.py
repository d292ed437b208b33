"""`paceline report`: what a run's folder tells, as one HTML file or as Markdown."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.command_line import CommandParser
from paceline.errors import ConfigError
from paceline.exit_codes import ExitCode

HELP = "write a report about a run"
_EXAMPLES = {
    "paceline report runs/a": "write runs/a/report.html, which needs no network",
    "paceline report runs/a --md": "print the report as Markdown",
}
_EXIT_CODES: dict[ExitCode | str, str] = {
    ExitCode.OK: "the report is written",
    ExitCode.USAGE: "the command line is wrong, or a package is missing",
    ExitCode.DATA: "a folder is not that of a run",
    ExitCode.CANNOT_CREATE: "the file cannot be written",
}


def main(argv: Sequence[str]) -> int:
    """Run `paceline report` with these arguments."""
    args = parser().parse_args(argv)
    from paceline.report.page import to_html, to_markdown
    from paceline.report.run import load
    from paceline.report.sections import sections, title

    try:
        run = load(args.run)
    except ConfigError as error:
        print(f"paceline report: {error}", file=sys.stderr)
        return ExitCode.DATA
    path = args.output or (None if args.md else Path(args.run) / "report.html")
    try:
        text = (to_markdown if args.md else to_html)(title(run), sections(run))
    except ConfigError as error:
        print(f"paceline report: {error}", file=sys.stderr)
        return ExitCode.USAGE
    if path is None:
        print(text, end="")
        return ExitCode.OK
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        print(f"paceline report: {path} cannot be written: {error.strerror}.", file=sys.stderr)
        return ExitCode.CANNOT_CREATE
    print(f"{path} ({len(text.encode()) / 1e6:.1f} MB)")
    return ExitCode.OK


def parser() -> CommandParser:
    """The options of `paceline report`."""
    ours = CommandParser(
        "paceline report",
        description=HELP[0].upper() + HELP[1:] + ".",
        examples=_EXAMPLES,
        exit_codes=_EXIT_CODES,
    )
    ours.add_argument("run", metavar="RUN", help="folder of a run")
    ours.add_argument(
        *("-o", "--output"), type=Path, metavar="FILE", help="default: RUN/report.html"
    )
    ours.add_argument("--md", action="store_true", help="Markdown, to standard output without -o")
    return ours
