"""From the command to the first all-reduce: `paceline run` against torchrun.

    python benchmarks/start.py [--ranks 2] [--rounds 9]

Each side runs a few lines as one would write them for it: `paceline.join`; `init_process_group` with Gloo.
Rank 0 prints when its first all-reduce is over. **first** is from the start of the command until then,
**whole** until the command has ended. The sides take turns, round after round; the table has medians.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tables import publish

PACELINE = """
import time
import paceline, torch, torch.distributed as dist
with paceline.join() as job:
    dist.all_reduce(torch.ones(1), group=job.group)
    if job.rank == 0:
        print("first", time.time(), flush=True)
"""
TORCHRUN = """
import time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 0:
    print("first", time.time(), flush=True)
dist.destroy_process_group()
"""


def measure(command: list[str]) -> tuple[float, float]:
    """Seconds to the first all-reduce, and to the end."""
    began = time.time()
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    whole_s = time.time() - began
    line = next(line for line in output.splitlines() if "first" in line)
    return float(line.split()[-1]) - began, whole_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    programs = Path(sys.executable).parent
    found: dict[str, list[tuple[float, float]]] = {"paceline run": [], "torchrun": []}
    with tempfile.TemporaryDirectory() as folder:
        scripts = {"paceline run": PACELINE, "torchrun": TORCHRUN}
        for number in range(options.rounds + 1):
            for side, script in scripts.items():
                program, *rest = side.split()
                path = Path(folder) / f"by_{program}.py"
                path.write_text(script)
                ranks = ["--nproc-per-node", str(options.ranks)]
                times = measure([str(programs / program), *rest, *ranks, str(path)])
                if number:  # the first round reads the disk
                    found[side].append(times)
    by_hand = statistics.median(first for first, _ in found["torchrun"])
    rows = []
    for side, times in found.items():
        first_s, whole_s = (statistics.median(each) for each in zip(*times, strict=True))
        rows.append(
            {"side": side, "first_s": first_s, "whole_s": whole_s, "of_torchrun": first_s / by_hand}
        )
    publish("start", rows, ranks=options.ranks, rounds=options.rounds)


if __name__ == "__main__":
    main()
