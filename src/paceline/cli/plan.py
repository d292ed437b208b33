"""`paceline plan`: what a run would give on more nodes, from its own clock.jsonl and a link."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from paceline.command_line import CommandParser, positive_count
from paceline.errors import ConfigError
from paceline.exit_codes import ExitCode

HELP = "estimate what a run would give on more nodes"
_EXAMPLES = {
    "paceline plan runs/a --link 10Gbit,50us": "on 1, 2, 4, 8 and 64 nodes, with the same global batch",
    "paceline plan runs/a --link doctor.json --nodes 2,4 --weak": (
        "with a link that `paceline doctor --json` measured, and the same samples of a rank"
    ),
}
_EXIT_CODES: dict[ExitCode | str, str] = {
    ExitCode.OK: "the plan is printed",
    ExitCode.USAGE: "the command line is wrong, or a package is missing",
    ExitCode.DATA: "the folder does not tell what the plan needs",
    ExitCode.CANNOT_CREATE: "the file cannot be written",
}


def main(argv: Sequence[str]) -> int:
    """Run `paceline plan` with these arguments."""
    args = parser().parse_args(argv)
    from paceline.plan import table
    from paceline.plan.model import estimate, ways
    from paceline.plan.read import read_link, read_step
    from paceline.report.page import to_html
    from paceline.report.run import load

    code = ExitCode.DATA
    try:
        run = read_step(args.run, load(args.run).record)
        code = ExitCode.USAGE
        link = read_link(args.link, run.device)
        found = {
            name: [estimate(run, link, way, nodes, weak=args.weak) for nodes in args.nodes]
            for name, way in ways(run, weak=args.weak).items()
        }
        sections = table.sections(table.describe(args.run, run, link, weak=args.weak), found)
        html = to_html(f"Paceline plan: {args.run}", sections) if args.html else ""
    except ConfigError as error:
        print(f"paceline plan: {error}", file=sys.stderr)
        return code
    if args.json:
        plain = {name: [asdict(each) for each in estimates] for name, estimates in found.items()}
        given = {"run": args.run, "weak": args.weak, "link": asdict(link), "measured": asdict(run)}
        print(json.dumps(given | {"ways": plain}, indent=1))
    else:
        print(table.to_text(sections))
    if args.html is not None:
        try:
            args.html.write_text(html, encoding="utf-8")
        except OSError as error:
            print(
                f"paceline plan: {args.html} cannot be written: {error.strerror}.", file=sys.stderr
            )
            return ExitCode.CANNOT_CREATE
    return ExitCode.OK


def _counts(text: str) -> list[int]:
    return [positive_count(word) for word in text.split(",")]


def parser() -> CommandParser:
    """The options of `paceline plan`."""
    ours = CommandParser(
        "paceline plan",
        description=HELP[0].upper() + HELP[1:] + ", from where the time of its steps went.",
        examples=_EXAMPLES,
        exit_codes=_EXIT_CODES,
    )
    ours.add_argument("run", metavar="RUN", help="folder of a run")
    ours.add_argument(
        "--link",
        required=True,
        metavar="LINK",
        help='of each node, as "10Gbit,50us" (latency: 50us), or a file of `paceline doctor --json`',
    )
    default = [1, 2, 4, 8, 64]
    help_nodes = f"numbers of nodes ({','.join(map(str, default))})"
    ours.add_argument("--nodes", type=_counts, default=default, metavar="N,N", help=help_nodes)
    help_weak = (
        "keep the samples of a rank, so that the global batch grows; otherwise it stays the same"
    )
    ours.add_argument("--weak", action="store_true", help=help_weak)
    ours.add_argument("--json", action="store_true", help="print JSON")
    ours.add_argument("--html", type=Path, metavar="FILE", help="write a page with a chart too")
    return ours
