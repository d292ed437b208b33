"""The subcommand `run`: its options are torchrun's, and some of our own."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from paceline.command_line import CommandParser
from paceline.launch import run as run_launcher

HELP = "run a script on several processes (torchrun's options)"


def main(argv: Sequence[str]) -> NoReturn:
    """Run `paceline run` with these arguments, and end this process.

    Collective: one process of each node.
    """
    code = run_launcher(argv)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Everything is closed. The regular shutdown of torch would take another third of a second.
    os._exit(code)


def parser() -> CommandParser:
    """The options of `paceline run`."""
    from paceline.launch.options import parser as launch_parser

    return launch_parser()
