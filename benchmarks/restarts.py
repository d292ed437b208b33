"""Inject faults into a training job, and measure the time to recover and whether anything is lost.

    python benchmarks/restarts.py [--kinds kill,raise,exit,stop,node,silent,preempt,moment] [--count 20]
        [--ranks 3]

Each trial runs the training `survivor.py` under `paceline run` with one fault at a random rank, step and
phase. A trial succeeds if the job ends with exit code 0, and its ledger, losses and last checkpoint equal
those of a run without faults. The recovery time is from the fault to the end of the first new step.

    node     SIGKILL ends the second of two nodes; the first continues alone (`--nnodes 1:2`) until the second
             returns
    silent   the same with SIGSTOP instead of SIGKILL
    preempt  the launcher of a training with 50 ms steps gets SIGTERM; all ranks must end after the same step,
             and a second run continues; the time is from the signal to the end of that step on the last rank
    moment   SIGKILL ends a random rank of one job again and again, at random moments of the training, with a
             checkpoint every 1,000 steps; a step that any rank had completed before counts as lost if it is
             trained again
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tables import publish

from paceline.checkpoint.reader import read
from paceline.checkpoint.store import committed, open_store, read_manifest
from paceline.testing import digest

SCRIPT = Path(__file__).with_name("survivor.py")
PHASES = ("data", "forward", "update", "end")
SETTINGS: dict[str, Any] = {
    "faults": [],
    "width": 256,
    "samples": 24 * 15,
    "epochs": 4,
    "save_every": 1,
    "slow_s": 0.05,
    "reproducible": False,
}
# The world size changes during the run, so only reproducible mode gives equal results.
NODE_SETTINGS = SETTINGS | {"epochs": 8, "reproducible": True}
# A checkpoint would be due once; the ranks that are left save the last step of each attempt.
MOMENT_SETTINGS = SETTINGS | {"epochs": 70, "save_every": 1000, "slow_s": 0.003}
_KILLS = 50  # of a job
DEADLINE_S = 180.0


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def newest(folder: Path) -> str:
    """The digest of the newest checkpoint."""
    store = open_store(str(folder / "kept"))
    manifest = read_manifest(store, committed(store)[-1])
    tree, _ = read(store, manifest)
    return digest(tree)


def lost(folder: Path, settings: dict[str, Any], expected: str) -> str:
    """Describe what a finished job lost or repeated. Empty if nothing."""
    losses: dict[int, float] = {}
    for row in rows(folder / "losses"):
        # A restarted job may repeat the step in progress, or the steps after its checkpoint.
        if losses.setdefault(row["step"], row["loss"]) != row["loss"]:
            return f"step {row['step']} has two losses"
    ledger = [row for path in folder.glob("ledger-*") for row in rows(path)]
    attempts: dict[int, int] = {}  # the last one of each step
    for row in ledger:
        attempts[row["step"]] = max(row["attempt"], attempts.get(row["step"], 0))
    seen: Counter[tuple[int, int]] = Counter()
    for row in ledger:
        if attempts[row["step"]] == row["attempt"]:
            seen.update((row["epoch"], number) for number in row["ids"])
    whole = {(e, n) for e in range(settings["epochs"]) for n in range(settings["samples"])}
    if set(seen) != whole or set(seen.values()) != {1}:
        return f"{len(whole - set(seen))} samples are missing; a sample was used {max(seen.values())} times"
    found = newest(folder)
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
def new_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def digest_without_faults(settings: dict[str, Any], nproc: int) -> str:
    """The digest of a run without faults."""
    with new_folder() as folder:
        process = start(folder, settings, [f"--nproc-per-node={nproc}"])
        if process.wait(DEADLINE_S) != 0:
            raise RuntimeError((folder / "log").read_text())
        return newest(folder)


def recovery_s(folder: Path, injected: float) -> float:
    """Seconds from the fault to the end of the first step that was not done before it."""
    losses = rows(folder / "losses")
    done = max((row["step"] for row in losses if row["time"] <= injected), default=0)
    # Rank 0 may have finished the step before the fault hits another rank, so require a later attempt.
    attempt = max((row["attempt"] for row in losses if row["time"] <= injected), default=0)
    return min(r["time"] for r in losses if r["step"] > done and r["attempt"] > attempt) - injected


def trial(kind: str, nproc: int, rng: random.Random, expected: str) -> tuple[str, float]:
    """Run one job with one fault. Return what was lost ("" if nothing) and the recovery time in seconds."""
    fault = {
        "kind": kind,
        "rank": rng.randrange(nproc),
        "step": rng.randrange(40, 58),
        "phase": rng.choice(PHASES),
    }
    settings = SETTINGS | {"faults": [fault]}
    with new_folder() as folder:
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


def moment_trials(count: int, nproc: int, rng: random.Random, expected: str) -> dict[str, Any]:
    """Kill ranks at random moments, `_KILLS` in each job. Returns a row of the table."""
    lost_steps, wrong, done = 0, [], 0
    while done < count:
        kills = min(_KILLS, count - done)
        with new_folder() as folder:
            words = [f"--nproc-per-node={nproc}", f"--max-restarts={kills}"]
            process = start(folder, MOMENT_SETTINGS, words)
            try:
                attempt = 0.0
                for _ in range(kills):
                    attempt = kill_in_attempt_after(attempt, folder, nproc, rng)
                code = process.wait(DEADLINE_S)
            except (TimeoutError, subprocess.TimeoutExpired) as error:
                process.kill()
                wrong.append(f"{error}\n{(folder / 'log').read_text()}")
                break
            steps: dict[float, list[int]] = {}  # of each attempt, those that a rank has completed
            for row in (row for path in folder.glob("done-*") for row in rows(path)):
                steps.setdefault(row["attempt"], []).append(row["step"])
            ends = [(min(steps[key]), max(steps[key])) for key in sorted(steps)]
            lost_steps += sum(
                last + 1 - first for (_, last), (first, _) in itertools.pairwise(ends)
            )
            done += len(ends) - 1
            found = lost(folder, MOMENT_SETTINGS, expected)
            if code != 0 or found or len(ends) != kills + 1:
                wrong.append(f"exit code {code}, {found}, steps {ends}")
    return {"kind": "moment", "kills": done, "completed steps lost": lost_steps, "lost": wrong}


def kill_in_attempt_after(before: float, folder: Path, nproc: int, rng: random.Random) -> float:
    """Kill a rank of the next attempt, up to 0.3 s after all of its ranks have done a step; the attempt."""
    victim = rng.randrange(nproc)
    deadline = time.monotonic() + DEADLINE_S
    while True:
        last = [found[-1] for r in range(nproc) if (found := rows(folder / f"done-{r}"))]
        if len(last) == nproc and min(row["attempt"] for row in last) > before:
            break
        if time.monotonic() > deadline:
            raise TimeoutError("no step after a restart")
        time.sleep(0.01)
    time.sleep(rng.uniform(0, 0.3))
    os.kill(last[victim]["pid"], signal.SIGKILL)
    return float(last[victim]["attempt"])


def preempt_trial(nproc: int, rng: random.Random, expected: str) -> tuple[str, float]:
    """Send SIGTERM to the launcher. Return what was lost and the seconds until the last rank's last step."""
    micro_batches = -(-8 // nproc)
    settings = SETTINGS | {"slow_s": 0.05 / micro_batches, "save_every": 10**6}
    words = [f"--nproc-per-node={nproc}"]
    at = rng.randrange(10, 40)
    with new_folder() as folder:
        process = start(folder, settings, words)
        try:
            wait_for(folder, lambda found: any(row["step"] >= at for row in found))
            time.sleep(rng.uniform(0, 0.1))
            injected = time.time()
            process.send_signal(signal.SIGTERM)
            code = process.wait(DEADLINE_S)
            last = [rows(path)[-1] for path in folder.glob("done-*")]
            again = start(folder, settings, words).wait(DEADLINE_S)
        except (TimeoutError, subprocess.TimeoutExpired) as error:
            process.kill()
            return f"after step {at}: {error}", 0.0
        steps = {row["step"] for row in last}
        if (code, again, len(last), len(steps)) != (75, 0, nproc, 1):
            return f"exit codes {code}, {again}, ends {steps}\n{(folder / 'log').read_text()}", 0.0
        return lost(folder, settings, expected), max(row["time"] for row in last) - injected


def wait_for(folder: Path, condition: Callable[[list[dict[str, Any]]], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition(rows(folder / "losses")):
        if time.monotonic() > deadline:
            raise TimeoutError((folder / "log").read_text())
        time.sleep(0.01)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def signal_node(launcher: int, number: int) -> None:
    """Send a signal to the launcher and all ranks of a node, to simulate the failure of a host."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    for pid in [launcher, *map(int, children)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def node_trial(kind: str, rng: random.Random, expected: str) -> tuple[str, float]:
    """Kill the second of two nodes ("node") or stop it ("silent").

    The first node continues alone. Then the second node returns, and both finish the training.
    """
    words = ["--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}"]
    words += ["--rdzv-id=job", "--nproc-per-node=1", "--max-restarts=3"]
    at = rng.randrange(30, 40)
    with new_folder() as folder:
        nodes = [start(folder, NODE_SETTINGS, words)]
        try:
            # The first node to arrive hosts the rendezvous. The second one is killed or stopped.
            while b"waiting" not in (folder / "log").read_bytes():
                time.sleep(0.01)
            time.sleep(0.3)
            nodes.append(start(folder, NODE_SETTINGS, words))
            wait_for(folder, lambda found: any(row["step"] >= at for row in found))
            injected = time.time()
            signal_node(nodes[1].pid, signal.SIGKILL if kind == "node" else signal.SIGSTOP)
            wait_for(folder, lambda found: found[-1]["world"] == 1 and found[-1]["step"] > at + 3)
            if kind == "node":
                nodes[1].wait()
                nodes[1] = start(folder, NODE_SETTINGS, words)
            else:
                signal_node(nodes[1].pid, signal.SIGCONT)
            wait_for(folder, lambda found: found[-1]["world"] == 2)
            codes = [node.wait(DEADLINE_S) for node in nodes]
        except (TimeoutError, subprocess.TimeoutExpired) as error:
            return f"{kind} after step {at}: {error}", 0.0
        finally:
            for node in nodes:
                if node.poll() is None:
                    signal_node(node.pid, signal.SIGKILL)
        if codes != [0, 0]:
            return f"exit codes {codes}\n{(folder / 'log').read_text()}", 0.0
        return lost(folder, NODE_SETTINGS, expected), recovery_s(folder, injected)


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
    options.add_argument("--json", action="store_true", help="print JSON and write nothing")
    args = options.parse_args()
    rng = random.Random(args.seed)
    kinds = args.kinds.split(",")
    rows = []
    expected: dict[bool, str] = {}
    for kind in kinds:
        if kind == "moment":
            whole = digest_without_faults(MOMENT_SETTINGS, args.ranks)
            rows.append(moment_trials(args.count, args.ranks, rng, whole))
            continue
        nodes = kind in ("node", "silent")
        if nodes not in expected:
            expected[nodes] = (
                digest_without_faults(NODE_SETTINGS, 1)
                if nodes
                else digest_without_faults(SETTINGS, args.ranks)
            )
        trials = [
            node_trial(kind, rng, expected[True])
            if nodes
            else preempt_trial(args.ranks, rng, expected[False])
            if kind == "preempt"
            else trial(kind, args.ranks, rng, expected[False])
            for _ in range(args.count)
        ]
        rows.append({"kind": kind, **summary(trials)})
    name = kinds[0] if kinds in (["preempt"], ["moment"]) else "restarts"
    publish(name, rows, as_json=args.json, ranks=args.ranks)


if __name__ == "__main__":
    main()
