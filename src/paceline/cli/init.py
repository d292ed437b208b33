"""`paceline init`: write a commented starter script."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

HELP = "write a commented script to start from"
_STARTERS = Path(__file__).with_name("starters")
_EXISTS = 73  # EX_CANTCREAT of sysexits.h


def main(argv: Sequence[str]) -> int:
    """Run `paceline init` with these arguments. Returns 0, or 73 if the file cannot be written."""
    args = _parser().parse_args(argv)
    text = (_STARTERS / ("trainer.py" if args.trainer else "parts.py")).read_text()
    file: Path = args.file
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(text.replace("train.py", file.name))
    except OSError as error:
        print(f"paceline init: {file} cannot be written: {error.strerror}.", file=sys.stderr)
        return _EXISTS
    print(f"wrote {file}. Start it with:\n  paceline run --nproc-per-node 2 {file}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="paceline init",
        description="Write a commented script that trains a small classifier, to start from. "
        "A file that exists is not overwritten.",
        epilog="examples:\n"
        "  paceline init                      train.py with a loop of your own\n"
        "  paceline init --trainer fit.py     fit.py with paceline.Trainer\n\n"
        "exit codes: 0, or 73 if the file cannot be written",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", nargs="?", type=Path, default=Path("train.py"))
    parser.add_argument(
        "--trainer", action="store_true", help="use paceline.Trainer instead of a loop"
    )
    return parser
