"""A process that outlives the launcher by a moment, to end what a killed launcher leaves behind.

A rank dies with its launcher by itself; its children (loader workers, a script's own processes) do not.
Reads lines `+<group>` and `-<group>` from standard input; at the end of input it kills the process
groups that are left. Started by file name, standard library only.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Guard until the end of input. Collective: none."""
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line.startswith("+"):
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    main()
