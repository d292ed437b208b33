"""Time from the command to the first all-reduce: `paceline run` compared with torchrun.

    python benchmarks/start.py [--ranks 2] [--rounds 9]

Each side runs a short script that is usual for it: with `paceline.join`, or with `init_process_group` and
Gloo. **first** is the time from the start of the command to the end of the first all-reduce on rank 0;
**whole** is the time to the end of the command. The sides take turns in each round. The table shows medians.
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
    """Seconds to the first all-reduce, and to the end of the command."""
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
                if number:  # the first round reads the files from disk
                    found[side].append(times)
    torchrun_s = statistics.median(first for first, _ in found["torchrun"])
    rows = []
    for side, times in found.items():
        first_s, whole_s = (statistics.median(each) for each in zip(*times, strict=True))
        rows.append(
            {
                "side": side,
                "first_s": first_s,
                "whole_s": whole_s,
                "of_torchrun": first_s / torchrun_s,
            }
        )
    publish("start", rows, ranks=options.ranks, rounds=options.rounds)


if __name__ == "__main__":
    main()
