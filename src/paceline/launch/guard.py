"""A process that kills the remaining ranks when the launcher has ended, even if the launcher was killed.

It reads lines `+<group>` and `-<group>` from standard input. The kernel closes this input however the
launcher ends. The guard then kills the remaining process groups: ranks and all processes that they started.
It is started by file name and imports the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys


def main() -> None:
    """Read process groups until the end of input, then kill them."""
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line.startswith("+"):
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        # A group that has changed its user may not be signalled.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
