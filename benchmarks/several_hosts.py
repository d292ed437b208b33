"""Several hosts: time to the first step beside one host, and a rendezvous of many launchers.

    python benchmarks/several_hosts.py [--rounds 7] [--launchers 256]

**start**: from the command to the end of the first all-reduce on both of two ranks: on one host, and on two
hosts that are network namespaces (root only). The sides take turns in each round; the table shows medians.

**launchers**: so many processes, forked from one that has imported torch, meet at one endpoint as the
launchers of a job do. The time is from the first fork until the last one knows its number.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from links import finish, hosts, start, unused_port
from tables import publish

from paceline.launch.nodes import NodeRendezvous
from paceline.launch.options import read_options

SCRIPT = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
print("first", time.time(), flush=True)
dist.destroy_process_group()
"""


def _first_s(out: str, began: float) -> float:
    return max(float(line.split()[-1]) for line in out.splitlines() if "first" in line) - began


def measure_start(rounds: int) -> list[dict[str, Any]]:
    """Seconds to the first all-reduce on one host and on two."""
    found: dict[str, list[float]] = {"one host, 2 ranks": [], "two hosts, 1 rank each": []}
    one, two = found
    with tempfile.TemporaryDirectory() as folder, hosts(2) as made:
        path = Path(folder)
        (path / "train.py").write_text(SCRIPT)
        for number in range(rounds + 1):
            began = time.time()
            end = finish(start(["run", "--nproc-per-node=2", "train.py"], path))
            times = {one: _first_s(end.out, began)}
            began = time.time()
            ends = made.run(["--nnodes=2", f"--host={made.address(0)}", "train.py"], path)
            times[two] = max(_first_s(end.out, began) for end in ends)
            if number:  # the first round reads the files from disk
                for side, seconds in times.items():
                    found[side].append(seconds)
    base = statistics.median(found[one])
    return [
        {
            "what": f"start: {side}",
            "seconds": statistics.median(times),
            "range_s": [min(times), max(times)],
            "ratio": statistics.median(times) / base,
        }
        for side, times in found.items()
    ]


def _launcher(port: int, launchers: int, number: int) -> None:
    """Meet the others, as `paceline run` does, and end when all have met."""
    words = [f"--nnodes={launchers}", f"--node-rank={number}", "--rdzv-backend=c10d"]
    words += [f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job", __file__]
    rendezvous = NodeRendezvous(read_options(words), lambda text: None)
    found = rendezvous.next_round()
    assert (found.node, found.nodes) == (number, launchers)
    if found.exchange is not None:  # node 0 serves the store
        found.exchange.wait_all_done(300.0, lambda: False)


def measure_launchers(launchers: int) -> dict[str, Any]:
    """Seconds until so many launchers have met."""
    port = unused_port()
    torch.set_num_threads(1)
    began = time.monotonic()
    children = []
    for number in range(launchers):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                _launcher(port, launchers, number)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert not any(codes), codes
    return {"what": f"rendezvous of {launchers} launchers", "seconds": time.monotonic() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--launchers", type=int, default=256)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only-launchers", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only_launchers:
        print(json.dumps(measure_launchers(options.launchers)))
        return
    rows = measure_start(options.rounds)
    # In a network of its own, without a name server: torch looks up each address that connects.
    with hosts(1) as made:
        words = [sys.executable, __file__, "--only-launchers", f"--launchers={options.launchers}"]
        end = finish(made.spawn(0, words, Path.cwd()), 300)
    if end.code:
        raise SystemExit(end.err)
    rows.append(json.loads(end.out))
    publish("several_hosts", rows, as_json=options.json, rounds=options.rounds)


if __name__ == "__main__":
    main()
