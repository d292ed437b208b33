"""The exit codes of the command `paceline` and of the ranks that it starts."""

from __future__ import annotations

import signal
from enum import IntEnum


class ExitCode(IntEnum):
    """An exit code. Those from 64 to 78 have the meaning of sysexits.h."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_JUDGED = 3  # `paceline verify`: the script failed or cannot be judged
    DATA = 65  # EX_DATAERR
    UNAVAILABLE = 69  # EX_UNAVAILABLE: the rendezvous was lost
    RANKS_DIFFER = 70  # EX_SOFTWARE
    CANNOT_CREATE = 73  # EX_CANTCREAT
    SAVE_FAILED = 74  # EX_IOERR
    PREEMPTED = 75  # EX_TEMPFAIL: start the job again
    INTERRUPTED = 130  # 128 + SIGINT, as in a shell
    BROKEN_PIPE = 141  # 128 + SIGPIPE


def signal_name(number: int) -> str:
    """The name of a signal, also of one that Python does not know, such as SIGRTMIN + 1."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
