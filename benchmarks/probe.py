"""Overhead of the launcher's probe and flight recorder: `paceline run` with and without them.

    python benchmarks/probe.py [--rounds 9] [--ranks 2]

The two sides take turns. Each run reports its median step time. The table shows, for a tiny model and for one
that mostly communicates, the ratio to steps without them. It also shows the share of a core that the probe's
threads used, which is exact even if other programs use the machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tables import publish, ratio_row

SCRIPT = """
import statistics, sys, threading, time
began_at = time.monotonic()
import torch, torch.distributed as dist
width, steps = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(width, width))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
times = []
for step in range(steps):
    began = time.perf_counter()
    model(torch.ones(2, width)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    times.append(time.perf_counter() - began)
if dist.get_rank() == 0:
    names = ("paceline-probe", "paceline-control")  # the second thread answers the launcher
    probes = [t.native_id for t in threading.enumerate() if t.name in names]
    used = sum(int(open(f"/proc/self/task/{p}/schedstat").read().split()[0]) for p in probes)
    share = used / 1e9 / (time.monotonic() - began_at)
    print("median", statistics.median(times[steps // 5:]), share)
"""
WORKLOADS = {"tiny": (8, 4000), "comm": (1500, 250)}


def measure(script: Path, ranks: int, words: list[str], probe: str) -> list[float]:
    command = [sys.executable, "-m", "paceline", "run", f"--nproc-per-node={ranks}", str(script)]
    environment = os.environ | {"PACELINE_PROBE": probe}
    done = subprocess.run(
        [*command, *words], env=environment, capture_output=True, text=True, check=True
    )
    return [float(word) for word in done.stdout.partition("median ")[2].split()[:2]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "steps.py")
        script.write_text(SCRIPT)
        for name, (width, steps) in WORKLOADS.items():
            sides: dict[str, list[float]] = {"1": [], "0": []}
            shares = []
            for number in range(args.rounds):
                for probe in ("1", "0") if number % 2 else ("0", "1"):
                    words = [str(width), str(steps)]
                    step_s, share = measure(script, args.ranks, words, probe)
                    sides[probe].append(step_s)
                    shares += [share] if probe == "1" else []
            row = {
                "workload": name,
                "step_us": statistics.median(sides["0"]) * 1e6,
                **ratio_row(sides["1"], sides["0"]),
                "probe_share": statistics.median(shares),
            }
            rows.append(row)
    publish("probe", rows, ranks=args.ranks)


if __name__ == "__main__":
    main()
