"""`paceline top`: a live view of a run. It only reads the folder of the run, whatever the launcher is."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence

from paceline.command_line import CommandParser
from paceline.errors import ConfigError
from paceline.exit_codes import ExitCode

HELP = "show how far a running training is, and where its time goes"
_EXAMPLES = {
    "paceline top runs/a": "watch the run that reports to runs/a; Ctrl-C ends it",
    "paceline top runs/a --once": "print the state and exit, for logs and scripts",
}
_EXIT_CODES: dict[ExitCode | str, str] = {
    ExitCode.OK: "the state was shown",
    ExitCode.USAGE: "the command line is wrong",
    ExitCode.DATA: "the folder is not that of a run",
}
_INTERVAL_S = 1.0
_PAUSE_FACTOR = 10  # pause by the time of a frame, so that a slow folder does not keep a core busy


def main(argv: Sequence[str]) -> int:
    """Run `paceline top` with these arguments."""
    args = parser().parse_args(argv)
    from rich.console import Console

    from paceline.report import frame

    console = Console(highlight=False)
    try:
        if args.once or not console.is_terminal:
            console.print(frame.read(args.run, time.time()))
            return ExitCode.OK
        _watch(args.run)
    except ConfigError as error:
        print(f"paceline top: {error}", file=sys.stderr)
        return ExitCode.DATA
    return ExitCode.OK


def parser() -> CommandParser:
    """The options of `paceline top`."""
    ours = CommandParser(
        "paceline top",
        description=HELP[0].upper() + HELP[1:] + ".",
        examples=_EXAMPLES,
        exit_codes=_EXIT_CODES,
    )
    ours.add_argument("run", metavar="RUN", help="folder of a run")
    ours.add_argument(
        "--once",
        action="store_true",
        help="print one frame and exit; the default without a terminal",
    )
    return ours


def _watch(folder: str) -> None:
    """Show the frame again and again, until Ctrl-C or SIGTERM, and leave the last one on the terminal."""
    from rich.console import Console
    from rich.live import Live

    from paceline.report import frame

    console = Console(highlight=False)
    newest = frame.read(folder, time.time())
    # An interrupt inside of `Live` could leave its screen on the terminal, so the loop looks for a signal.
    received: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: received.append(number))
    with Live(newest, console=console, screen=True, auto_refresh=False) as live:
        while not received:
            began = time.monotonic()
            newest = frame.read(folder, time.time())
            live.update(newest, refresh=True)
            now = time.monotonic()
            next_frame = now + max(_INTERVAL_S, _PAUSE_FACTOR * (now - began))
            while not received and time.monotonic() < next_frame:
                time.sleep(0.05)
    console.print(newest)
