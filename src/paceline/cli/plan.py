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
        link, gloo = read_link(args.link, run.device), read_link(args.link)
        found = {}
        for name, way in ways(run, weak=args.weak).items():
            used = gloo if way.kind == "DiLoCo" else link
            found[name] = [estimate(run, used, way, n, weak=args.weak) for n in args.nodes]
        sections = table.sections(table.describe(args.run, run, link, weak=args.weak), found)
        if args.html is not None:
            html = to_html(f"Paceline plan: {args.run}", sections)
            code = ExitCode.CANNOT_CREATE
            args.html.write_text(html, encoding="utf-8")
    except (ConfigError, OSError) as error:
        print(f"paceline plan: {error}", file=sys.stderr)
        return code
    if args.json:
        plain = {name: [asdict(each) for each in estimates] for name, estimates in found.items()}
        given = {"run": args.run, "weak": args.weak, "link": asdict(link), "measured": asdict(run)}
        print(json.dumps(given | {"ways": plain}, indent=1))
    else:
        print(table.to_text(sections))
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
    nodes, default = "numbers of nodes, each with as many ranks as in the run", "1,2,4,8,64"
    help_nodes = f"{nodes} ({default})"
    ours.add_argument("--nodes", type=_counts, default=default, metavar="N,N", help=help_nodes)
    help_weak = "keep the samples of a rank; otherwise the global batch stays the same"
    ours.add_argument("--weak", action="store_true", help=help_weak)
    ours.add_argument("--json", action="store_true", help="print JSON")
    ours.add_argument("--html", type=Path, metavar="FILE", help="write a page with a chart too")
    return ours
