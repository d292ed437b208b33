"""`paceline init`: write a commented starter script."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.command_line import CommandParser
from paceline.exit_codes import ExitCode

HELP = "write a commented script to start from"
_STARTERS = Path(__file__).with_name("starters")


def main(argv: Sequence[str]) -> int:
    """Run `paceline init` with these arguments. Returns 0, or 73 if the file cannot be written."""
    args = parser().parse_args(argv)
    text = (_STARTERS / ("trainer.py" if args.trainer else "parts.py")).read_text()
    file: Path = args.file
    try:
        with file.open("x", encoding="utf-8") as out:
            # Each script has its own folder, so that none resumes from the checkpoints of another.
            out.write(
                text.replace("train.py", file.name).replace("runs/train", f"runs/{file.stem}")
            )
    except FileExistsError:
        print(
            f"paceline init: {file} exists, and is not overwritten. Name another file: "
            f"paceline init {file.with_stem(file.stem + '2')}",
            file=sys.stderr,
        )
        return ExitCode.CANNOT_CREATE
    except OSError as error:
        print(f"paceline init: {file} cannot be written: {error.strerror}.", file=sys.stderr)
        return ExitCode.CANNOT_CREATE
    print(f"wrote {file}. Start it with:\n  paceline run --nproc-per-node 2 {file}")
    return ExitCode.OK


def parser() -> CommandParser:
    """The options of `paceline init`."""
    ours = CommandParser(
        "paceline init",
        description="Write a commented script that trains a small classifier, to start from. "
        "A file that exists is not overwritten.",
        examples={
            "paceline init": "write train.py, with a loop of your own",
            "paceline init --trainer fit.py": "write fit.py, with paceline.Trainer",
        },
        exit_codes={
            ExitCode.OK: "the file was written",
            ExitCode.USAGE: "the command line is wrong",
            ExitCode.CANNOT_CREATE: "the file exists, or cannot be written",
        },
    )
    ours.add_argument("file", nargs="?", type=Path, default=Path("train.py"), metavar="FILE")
    ours.add_argument(
        "--trainer", action="store_true", help="use paceline.Trainer instead of a loop"
    )
    return ours
