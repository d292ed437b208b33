"""A process that outlives the launcher by a moment and kills what a killed launcher leaves behind.

Reads lines `+<group>` and `-<group>` from standard input. At the end of input, which the kernel sends however
the launcher ends, it kills the remaining process groups: ranks with their loader workers and children.
Started by file name, standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys


def main() -> None:
    """Guard until the end of input."""
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line.startswith("+"):
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
