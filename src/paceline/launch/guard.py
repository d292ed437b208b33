"""A process that outlives the launcher by a moment, to end what a killed launcher leaves behind.

A rank dies with its launcher by itself; its children (loader workers, a script's own processes) do not.
Reads lines `+<group>`, `-<group>` and `=<folder>` from standard input; at the end of input it kills the
process groups that are left, and removes the folder. Started by file name, standard library only.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys


def main() -> None:
    """Guard until the end of input."""
    groups: set[int] = set()
    folder = ""
    for line in sys.stdin:
        if line.startswith("="):
            folder = line[1:].rstrip("\n")
            continue
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
    if folder:
        shutil.rmtree(folder, ignore_errors=True)  # mostly there is none


if __name__ == "__main__":
    main()
