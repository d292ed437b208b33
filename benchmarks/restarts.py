"""Strike a job with faults, and measure how soon it does a new step, and whether anything was lost.

    python benchmarks/restarts.py [--kinds kill,raise,stop,node] [--count 20] [--ranks 3] [--seed 1]
    python benchmarks/restarts.py --mixed-s 900

Each trial is a training (`survivor.py`) under `paceline run` with one fault at a random rank, step and phase.
It counts when the job ends with 0 and its ledger, losses and last checkpoint are those of a run without
faults. Recovery is from the strike to the end of the first step that had not been done before. **node**: the
launcher and the ranks of a second node are killed, and the first goes on alone (`--nnodes 1:2`). **mixed**:
one training, a fault of any kind every 15 s. Prints JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.manifest import parse
from paceline.checkpoint.reader import read
from paceline.checkpoint.store import committed, open_store, read_manifest_text

SCRIPT = Path(__file__).with_name("survivor.py")
PHASES = ("data", "forward", "update", "end")
SETTINGS = {
    "faults": [],
    "width": 256,
    "samples": 24 * 15,
    "epochs": 4,
    "save_every": 1,
    "slow_s": 0.05,
    "reproducible": False,
}
DEADLINE_S = 180.0


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def digest(folder: Path) -> str:
    """One sha256 over all that the newest checkpoint holds."""
    store = open_store(str(folder / "kept"))
    manifest = parse(read_manifest_text(store, committed(store)[-1]), str(folder))
    tree, _ = read(store, manifest)
    total = hashlib.sha256()

    def add(thing: Any) -> None:
        if isinstance(thing, torch.Tensor):
            total.update(f"{thing.dtype}{tuple(thing.shape)}".encode())
            total.update(thing.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(thing, dict):
            for key in sorted(thing, key=str):
                total.update(str(key).encode())
                add(thing[key])
        elif isinstance(thing, list | tuple):
            total.update(b"[")
            for each in thing:
                add(each)
        else:
            total.update(repr(thing).encode())

    add(tree)
    return total.hexdigest()


def lost(folder: Path, settings: dict[str, Any], expected: str) -> str:
    """What a finished job lost or did twice; empty if nothing."""
    losses: dict[int, dict[str, Any]] = {}
    for row in rows(folder / "losses"):
        # A step that was not committed is done again: the same step.
        if row["step"] in losses and losses[row["step"]]["loss"] != row["loss"]:
            return f"step {row['step']} has two losses"
        losses[row["step"]] = row
    steps = settings["epochs"] * settings["samples"] // 24
    if sorted(losses) != list(range(1, steps + 1)):
        return f"steps {sorted(losses)} of {steps}"
    seen: Counter[tuple[int, int]] = Counter()
    for path in folder.glob("ledger-*"):
        for row in rows(path):
            if losses[row["step"]]["attempt"] == row["attempt"]:
                seen.update((row["epoch"], number) for number in row["ids"])
    whole = {(e, n) for e in range(settings["epochs"]) for n in range(settings["samples"])}
    if set(seen) != whole or set(seen.values()) != {1}:
        return f"the ledger has {len(whole - set(seen))} gaps, and {max(seen.values())} of a sample"
    found = digest(folder)
    return "" if found == expected else f"the last checkpoint differs: {found[:8]}"


def start(folder: Path, settings: dict[str, Any], words: list[str]) -> subprocess.Popen[str]:
    environ = {**os.environ, "SURVIVOR": json.dumps(settings), "PYTHONUNBUFFERED": "1"}
    with (folder / "log").open("a") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "paceline", "run", *words, str(SCRIPT)],
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            text=True,
        )


@contextlib.contextmanager
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def straight(settings: dict[str, Any], nproc: int) -> str:
    """The digest of a run without faults."""
    with place() as folder:
        process = start(folder, settings, [f"--nproc-per-node={nproc}"])
        if process.wait(DEADLINE_S) != 0:
            raise RuntimeError((folder / "log").read_text())
        return digest(folder)


def recovery_s(folder: Path, struck: float) -> float:
    """Seconds from the strike to the end of the first step that had not been done before it."""
    losses = rows(folder / "losses")
    done = max((row["step"] for row in losses if row["time"] <= struck), default=0)
    # The rank that logs may have ended the step while another had yet to be struck.
    attempt = max((row["attempt"] for row in losses if row["time"] <= struck), default=0)
    return min(r["time"] for r in losses if r["step"] > done and r["attempt"] > attempt) - struck


def trial(kind: str, nproc: int, rng: random.Random, expected: str) -> tuple[str, float]:
    """One fault in one job: what was lost ("" if nothing), and the recovery in seconds."""
    fault = {
        "kind": kind,
        "rank": rng.randrange(nproc),
        "step": rng.randrange(40, 58),
        "phase": rng.choice(PHASES),
    }
    settings = SETTINGS | {"faults": [fault]}
    with place() as folder:
        words = [f"--nproc-per-node={nproc}", "--max-restarts=2"]
        process = start(folder, settings, words)
        try:
            code = process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return f"{fault}: not finished\n{(folder / 'log').read_text()}", 0.0
        mark = folder / "fault-0"
        if code != 0 or not mark.exists():
            return f"{fault}: exit code {code}\n{(folder / 'log').read_text()}", 0.0
        found = lost(folder, settings, expected)
        return found and f"{fault}: {found}", recovery_s(folder, mark.stat().st_mtime)


def summary(found: list[tuple[str, float]]) -> dict[str, Any]:
    times = sorted(seconds for why, seconds in found if not why)
    return {
        "recovered": f"{len(times)} of {len(found)}",
        "median_s": round(statistics.median(times), 2) if times else None,
        "p90_s": round(times[int(0.9 * (len(times) - 1))], 2) if times else None,
        "max_s": round(times[-1], 2) if times else None,
        "lost": [why for why, _ in found if why],
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--kinds", default="kill,raise,exit,stop")
    for name, count in (("count", 20), ("ranks", 3), ("seed", 1)):
        options.add_argument(f"--{name}", type=int, default=count)
    args = options.parse_args()
    rng = random.Random(args.seed)
    expected = straight(SETTINGS, args.ranks)
    results = {}
    for kind in args.kinds.split(","):
        results[kind] = summary([trial(kind, args.ranks, rng, expected) for _ in range(args.count)])
        print(kind, json.dumps(results[kind]), file=sys.stderr)
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
